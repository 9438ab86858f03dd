"""Llama and its successors: RoPE, RMSNorm, a gated MLP."""

from meshwright.simulator.model.huggingface.reader import Architecture, Reader


def _read_whole_llama(reader: Reader) -> dict[str, object]:
    check_whole_heads(reader)
    return read_llama(reader)


def check_whole_heads(reader: Reader) -> None:
    """Raise PlanError if ``head_dim`` is absent and heads do not divide ``hidden_size``."""
    width, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    if width % heads and not reader.has("head_dim"):
        reader.refuse("num_attention_heads", f"does not divide hidden_size={width}")


def read_llama(reader: Reader) -> dict[str, object]:
    """Return the fields of Llama's layers."""
    attention_bias = reader.switch("attention_bias", default=False)
    return {
        **gated_decoder(reader),
        "num_kv_heads": reader.optional_size("num_key_value_heads"),
        "attention_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": reader.switch("mlp_bias", default=False),
    }


def read_mistral(reader: Reader) -> dict[str, object]:
    """Return the fields of Mistral's layers: sliding windows in all of them, or in none."""
    decoder = gated_decoder(reader)
    max_positions = reader.size("max_position_embeddings")
    window = reader.optional_size("sliding_window")
    return {
        **decoder,
        "num_kv_heads": reader.size("num_key_value_heads"),
        "seq_len": min(window or max_positions, max_positions),
        "window": window,
    }


def read_qwen2(reader: Reader) -> dict[str, object]:
    """Return the fields of Qwen2's layers."""
    return {
        **gated_decoder(reader),
        **_chosen_window(reader),
        "num_kv_heads": reader.size("num_key_value_heads"),
        "attention_bias": True,
    }


def read_qwen3(reader: Reader) -> dict[str, object]:
    """Return the fields of Qwen3's layers: heads of any width, with norms."""
    has_bias = reader.switch("attention_bias", default=False)
    return {
        **gated_decoder(reader),
        **_chosen_window(reader),
        "num_kv_heads": reader.size("num_key_value_heads"),
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "qk_norm": "head",
    }


def _chosen_window(reader: Reader) -> dict[str, object]:
    """Return the sliding window of Qwen's layers from ``max_window_layers`` on, if switched on."""
    if not reader.switch("use_sliding_window", default=False):
        if reader.layer_pattern(usual="F") != "F":
            reader.refuse("layer_types", "is not supported; each must be 'full_attention'")
        return {}
    layers, first = (
        reader.size("num_hidden_layers"),
        reader.count("max_window_layers", default=28),
    )
    pattern = "F" * min(first, layers) + "W" * max(layers - first, 0)
    pattern = reader.layer_pattern(usual=pattern)
    return windows(reader.size("sliding_window"), pattern)


def windows(window: int | None, pattern: str) -> dict[str, object]:
    """Return the fields of a window in the layers of *pattern*; empty without a window."""
    return {"window": window, "layer_pattern": pattern} if window and "W" in pattern else {}


def read_olmo2(reader: Reader) -> dict[str, object]:
    """Return the fields of OLMo 2's layers: norms after attention and MLP, and over all heads."""
    has_bias = reader.switch("attention_bias", default=False)
    return {
        **gated_decoder(reader),
        "num_kv_heads": reader.optional_size("num_key_value_heads"),
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "qk_norm": "width",
        "norm_places": "after",
        "spelling": "olmo2",
    }


def _read_glm4(reader: Reader) -> dict[str, object]:
    return {
        **gated_decoder(reader),
        "num_kv_heads": reader.size("num_key_value_heads"),
        "attention_bias": reader.switch("attention_bias", default=True),
        "norm_places": "both",
        "rotary_fraction": reader.rotary_fraction(default=0.5),
        "spelling": "glm4",
    }


def _read_phi3(reader: Reader) -> dict[str, object]:
    window = reader.optional_size("sliding_window")
    return {
        **gated_decoder(reader),
        "num_kv_heads": reader.optional_size("num_key_value_heads"),
        "seq_len": reader.optional_size("original_max_position_embeddings")
        or reader.size("max_position_embeddings"),
        "rotary_fraction": reader.rotary_fraction(),
        "window": window,
        "spelling": "phi3",
        "dropout": reader.dropout("attention_dropout", "embd_pdrop", "resid_pdrop", default=0.0),
    }


def gated_decoder(reader: Reader) -> dict[str, object]:
    """Return the fields that Llama and its successors share: RoPE, RMSNorm, a gated MLP."""
    max_positions = reader.size("max_position_embeddings")
    width, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    return {
        "num_layers": reader.size("num_hidden_layers"),
        "hidden_size": width,
        "num_heads": heads,
        "head_dim": reader.optional_size("head_dim") or width // heads,  # the remainder is not used
        "ffn_hidden_size": reader.size("intermediate_size"),
        "vocab_size": reader.size("vocab_size"),
        "seq_len": reader.original_positions() or max_positions,
        "max_positions": max_positions,
        "gated_mlp": True,
        "tied_embeddings": reader.switch("tie_word_embeddings", default=False),
        "positions": "rotary",
        "norm": "rmsnorm",
        "attention_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "dropout": reader.dropout("attention_dropout", default=0.0),
    }


def tied_outside(reader: Reader) -> dict[str, object]:
    """Return ``tied_embeddings`` of a configuration around a ``text_config``, if it is given."""
    if not reader.has("tie_word_embeddings"):
        return {}
    return {"tied_embeddings": reader.switch("tie_word_embeddings", default=True)}


LLAMA_KEYS = """
    attention_bias attention_dropout head_dim hidden_act hidden_size intermediate_size
    max_position_embeddings mlp_bias num_attention_heads num_hidden_layers num_key_value_heads
    pretraining_tp rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size
    """

MISTRAL_KEYS = """
    attention_dropout head_dim hidden_act hidden_size intermediate_size max_position_embeddings
    num_attention_heads num_hidden_layers num_key_value_heads rope_parameters rope_theta
    sliding_window tie_word_embeddings vocab_size
    """
QWEN2_KEYS = f"""
    {MISTRAL_KEYS} layer_types max_window_layers rope_scaling use_sliding_window
    """
OLMO2_KEYS = """
    attention_bias attention_dropout hidden_act hidden_size intermediate_size
    max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads
    rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size
    """
_GLM4_KEYS = f"{OLMO2_KEYS} head_dim partial_rotary_factor"
_PHI3_KEYS = """
    attention_bias attention_dropout auto_map embd_pdrop hidden_act hidden_size intermediate_size
    max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads
    original_max_position_embeddings partial_rotary_factor resid_pdrop rope_parameters
    rope_scaling rope_theta sliding_window tie_word_embeddings vocab_size
    """

LLAMA_FAMILIES = {
    "glm4": Architecture(_read_glm4, frozenset(_GLM4_KEYS.split()), {"head_dim": 128}),
    "llama": Architecture(_read_whole_llama, frozenset(LLAMA_KEYS.split())),
    "mistral": Architecture(
        read_mistral, frozenset(MISTRAL_KEYS.split()), {"sliding_window": 4096}
    ),
    "olmo2": Architecture(read_olmo2, frozenset(OLMO2_KEYS.split())),
    "phi3": Architecture(
        _read_phi3, frozenset(_PHI3_KEYS.split()), {"original_max_position_embeddings": 4096}
    ),
    "qwen2": Architecture(read_qwen2, frozenset(QWEN2_KEYS.split())),
    "qwen3": Architecture(
        read_qwen3, frozenset(f"{QWEN2_KEYS} attention_bias".split()), {"head_dim": 128}
    ),
}
