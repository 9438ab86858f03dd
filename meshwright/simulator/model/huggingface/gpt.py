"""Families without RoPE: GPT-2, BLOOM, OPT and BERT."""

from meshwright.simulator.model.huggingface.reader import Architecture, Reader

# BLOOM models were trained on sequences of this length (arXiv 2211.05100, Table 3).
BLOOM_SEQ_LEN = 2048
# OPT's learned positions start at this index, so that the embedding has as many rows more
# (OPTLearnedPositionalEmbedding).
OPT_POSITION_OFFSET = 2


def _read_gpt2(reader: Reader) -> dict[str, object]:
    return {
        "num_layers": reader.size("n_layer", "num_hidden_layers"),
        "hidden_size": reader.size("n_embd", "hidden_size"),
        "num_heads": reader.size("n_head", "num_attention_heads"),
        "ffn_hidden_size": reader.optional_size("n_inner"),
        "vocab_size": reader.size("vocab_size"),
        "seq_len": reader.size("n_positions", "max_position_embeddings"),
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
        "dropout": reader.dropout("resid_pdrop", "embd_pdrop", "attn_pdrop", default=0.1),
    }


def _read_bloom(reader: Reader) -> dict[str, object]:
    return {
        "num_layers": reader.size("n_layer", "num_hidden_layers"),
        "hidden_size": reader.size("n_embed", "hidden_size"),
        "num_heads": reader.size("n_head", "num_attention_heads"),
        "ffn_hidden_size": reader.optional_size("n_inner"),
        "vocab_size": reader.size("vocab_size"),
        "seq_len": reader.optional_size("seq_length") or BLOOM_SEQ_LEN,
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
        "positions": "alibi",
        "embedding_norm": True,
        "dropout": reader.dropout("hidden_dropout", "attention_dropout", default=0.0),
    }


def _read_opt(reader: Reader) -> dict[str, object]:
    hidden_size = reader.size("hidden_size")
    # OPT-350m alone projects embeddings of another width, and has norms behind its layers.
    if reader.optional_size("word_embed_proj_dim") not in {None, hidden_size}:
        reader.refuse("word_embed_proj_dim", f"must equal hidden_size={hidden_size}")
    for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if not reader.switch(key, default=True):
            reader.refuse(key, "is not supported; it must be true")
    if reader.switch("_remove_final_layer_norm", default=False):
        reader.refuse("_remove_final_layer_norm", "is not supported; it must be false")
    if reader.dropout("layerdrop", default=0.0):
        reader.refuse("layerdrop", "is not supported; it must be 0")
    seq_len = reader.size("max_position_embeddings")
    has_bias = reader.switch("enable_bias", default=True)
    return {
        "num_layers": reader.size("num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_heads": reader.size("num_attention_heads"),
        "ffn_hidden_size": reader.size("ffn_dim"),
        "vocab_size": reader.size("vocab_size"),
        "seq_len": seq_len,
        "max_positions": seq_len + OPT_POSITION_OFFSET,
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
        "fused_qkv": False,
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": has_bias,
        "dropout": reader.dropout("dropout", default=0.1)
        or reader.dropout("attention_dropout", "activation_dropout", default=0.0),
    }


def _read_bert(reader: Reader) -> dict[str, object]:
    if reader.switch("is_decoder", default=False):
        reader.refuse("is_decoder", "is not supported for BERT; it must be false")
    if reader.text("position_embedding_type", default="absolute") != "absolute":
        reader.refuse("position_embedding_type", "is not supported; it must be 'absolute'")
    return {
        "num_layers": reader.size("num_hidden_layers"),
        "hidden_size": reader.size("hidden_size"),
        "num_heads": reader.size("num_attention_heads"),
        "ffn_hidden_size": reader.size("intermediate_size"),
        "vocab_size": reader.size("vocab_size"),
        "seq_len": reader.size("max_position_embeddings"),
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
        "embedding_norm": True,
        "causal": False,
        "token_types": reader.size("type_vocab_size"),
        "mlm_head": True,
        "dropout": reader.dropout(
            "hidden_dropout_prob", "attention_probs_dropout_prob", default=0.1
        ),
    }


_GPT2_KEYS = """
    activation_function attn_pdrop embd_pdrop hidden_size max_position_embeddings n_ctx n_embd
    n_head n_inner n_layer n_positions num_attention_heads num_hidden_layers
    reorder_and_upcast_attn resid_pdrop scale_attn_by_inverse_layer_idx scale_attn_weights
    summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj tie_word_embeddings vocab_size
    """
_BLOOM_KEYS = """
    attention_dropout attention_softmax_in_fp32 bias_dropout_fusion hidden_dropout hidden_size
    masked_softmax_fusion n_embed n_head n_inner n_layer num_attention_heads num_hidden_layers
    offset_alibi pretraining_tp seq_length skip_bias_add skip_bias_add_qkv slow_but_exact
    tie_word_embeddings vocab_size
    """
_OPT_KEYS = """
    activation_dropout activation_function attention_dropout do_layer_norm_before dropout
    enable_bias ffn_dim hidden_size init_std layer_norm_elementwise_affine layerdrop
    max_position_embeddings num_attention_heads num_hidden_layers tie_word_embeddings vocab_size
    word_embed_proj_dim
    """
_BERT_KEYS = """
    attention_probs_dropout_prob classifier_dropout directionality hidden_act hidden_dropout_prob
    hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
    pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
    pooler_type position_embedding_type tie_word_embeddings type_vocab_size vocab_size
    """

GPT_FAMILIES = {
    "bert": Architecture(_read_bert, frozenset(_BERT_KEYS.split())),
    "bloom": Architecture(_read_bloom, frozenset(_BLOOM_KEYS.split())),
    "gpt2": Architecture(_read_gpt2, frozenset(_GPT2_KEYS.split())),
    "opt": Architecture(_read_opt, frozenset(_OPT_KEYS.split())),
}
