"""Families with parallel attention and MLP (parallel residual): GPT-NeoX and Falcon."""

from meshwright.simulator.model.huggingface.reader import Architecture, Reader

# Defaults of the configuration classes.
NEOX_ROTARY_FRACTION = 0.25
FALCON_POSITIONS = 2048


def _read_gpt_neox(reader: Reader) -> dict[str, object]:
    has_bias = reader.switch("attention_bias", default=True)
    is_parallel = reader.switch("use_parallel_residual", default=True)
    return {
        "num_layers": reader.size("num_hidden_layers"),
        "hidden_size": reader.size("hidden_size"),
        "num_heads": reader.size("num_attention_heads"),
        "ffn_hidden_size": reader.size("intermediate_size"),
        "vocab_size": reader.size("vocab_size"),
        "seq_len": reader.size("max_position_embeddings"),
        "tied_embeddings": reader.switch("tie_word_embeddings", default=False),
        "positions": "rotary",
        "rotary_fraction": reader.rotary_fraction("rotary_pct", default=NEOX_ROTARY_FRACTION),
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "parallel_mlp": "two norms" if is_parallel else "no",
        "activation": reader.activation("hidden_act"),
        "spelling": "gpt_neox",
        "dropout": reader.dropout("attention_dropout", "hidden_dropout", default=0.0),
    }


def _read_falcon(reader: Reader) -> dict[str, object]:
    num_heads = reader.size("num_attention_heads", "n_head")
    is_new = reader.switch("new_decoder_architecture", default=False)
    is_parallel = is_new or reader.switch("parallel_attn", default=True)
    num_norms = reader.optional_size("num_ln_in_parallel_attn") or (2 if is_new else 1)
    num_kv_heads = reader.optional_size("num_kv_heads", "n_head_kv") or num_heads
    if not is_new:
        # The first architecture has one key-value head (multi-query), or one for each query head.
        num_kv_heads = 1 if reader.switch("multi_query", default=True) else num_heads
    has_bias = reader.switch("bias", default=False)
    parallel = "two norms" if is_new and num_norms > 1 else "one norm"
    return {
        "num_layers": reader.size("num_hidden_layers", "n_layer"),
        "hidden_size": reader.size("hidden_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "ffn_hidden_size": reader.optional_size("ffn_hidden_size"),
        "vocab_size": reader.size("vocab_size"),
        "seq_len": reader.optional_size("max_position_embeddings") or FALCON_POSITIONS,
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
        "positions": "alibi" if reader.switch("alibi", default=False) else "rotary",
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": has_bias,
        "parallel_mlp": parallel if is_parallel else "no",
        "activation": reader.activation("activation"),
        "spelling": "falcon-groups" if is_new else "falcon",
        "dropout": reader.dropout("attention_dropout", "hidden_dropout", default=0.0),
    }


_GPT_NEOX_KEYS = """
    attention_bias attention_dropout classifier_dropout hidden_act hidden_dropout hidden_size
    intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
    partial_rotary_factor rope_parameters rope_scaling rope_theta rotary_emb_base rotary_pct
    tie_word_embeddings use_parallel_residual vocab_size
    """
_FALCON_KEYS = """
    activation alibi attention_dropout auto_map bias ffn_hidden_size hidden_dropout hidden_size
    max_position_embeddings multi_query n_head n_head_kv n_layer new_decoder_architecture
    num_attention_heads num_hidden_layers num_kv_heads num_ln_in_parallel_attn parallel_attn
    rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size
    """
PARALLEL_FAMILIES = {
    "falcon": Architecture(_read_falcon, frozenset(_FALCON_KEYS.split())),
    "gpt_neox": Architecture(_read_gpt_neox, frozenset(_GPT_NEOX_KEYS.split())),
}
