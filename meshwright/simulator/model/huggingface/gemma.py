"""Gemma: wide heads, scaled embeddings; from Gemma 2 on sliding windows, pre- and post-norms."""

from meshwright.simulator.model.huggingface.llama import gated_decoder, tied_outside, windows
from meshwright.simulator.model.huggingface.reader import Architecture, Reader

# Defaults of the configuration classes; multimodal files omit most keys of their text model.
HEAD_DIM = {"head_dim": 256}
GEMMA2_WINDOW, GEMMA2_PATTERN = 4096, "WF"
GEMMA2_ATTENTION_CAP, GEMMA2_LOGIT_CAP = 50.0, 30.0
GEMMA3_DEFAULTS = {
    **HEAD_DIM,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "vocab_size": 262_208,
}


def _read_gemma(reader: Reader) -> dict[str, object]:
    has_bias = reader.switch("attention_bias", default=False)
    return {
        **gated_decoder(reader),
        "num_kv_heads": reader.size("num_key_value_heads"),
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "scaled_embeddings": True,
        "spelling": "gemma",
    }


def _read_gemma2(reader: Reader) -> dict[str, object]:
    window = reader.optional_size("sliding_window") or GEMMA2_WINDOW
    return {
        **_read_gemma(reader),
        **windows(window, reader.layer_pattern(usual=GEMMA2_PATTERN)),
        "norm_places": "both",
        "attention_softcap": reader.number("attn_logit_softcapping", default=GEMMA2_ATTENTION_CAP),
        "logit_softcap": reader.number("final_logit_softcapping", default=GEMMA2_LOGIT_CAP),
    }


def _read_gemma3_text(reader: Reader) -> dict[str, object]:
    period = reader.size("sliding_window_pattern", "_sliding_window_pattern")
    pattern = reader.layer_pattern(usual="W" * (period - 1) + "F")
    return {
        **_read_gemma(reader),
        **windows(reader.size("sliding_window"), pattern),
        "norm_places": "both",
        "qk_norm": "head",
        "attention_softcap": reader.number("attn_logit_softcapping", default=0.0),
        "logit_softcap": reader.number("final_logit_softcapping", default=0.0),
    }


def _read_gemma3(reader: Reader) -> dict[str, object]:
    """Return the fields of a multimodal model's language model; images are not modelled."""
    inner = reader.nested("text_config", GEMMA_FAMILIES["gemma3_text"])
    return {**_read_gemma3_text(inner), **tied_outside(reader)}


_GEMMA_KEYS = """
    attention_bias attention_dropout head_dim hidden_act hidden_activation hidden_size
    intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
    num_key_value_heads rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size
    """
_GEMMA2_KEYS = f"""
    {_GEMMA_KEYS} attn_logit_softcapping cache_implementation final_logit_softcapping layer_types
    query_pre_attn_scalar sliding_window
    """
_GEMMA3_TEXT_KEYS = f"{_GEMMA2_KEYS} rope_local_base_freq sliding_window_pattern"
_GEMMA3_KEYS = """
    boi_token_index eoi_token_index image_token_index mm_tokens_per_image text_config
    tie_word_embeddings vision_config
    """
GEMMA_FAMILIES = {
    "gemma": Architecture(_read_gemma, frozenset(_GEMMA_KEYS.split()), HEAD_DIM),
    "gemma2": Architecture(_read_gemma2, frozenset(_GEMMA2_KEYS.split()), HEAD_DIM),
    "gemma3": Architecture(_read_gemma3, frozenset(_GEMMA3_KEYS.split())),
    "gemma3_text": Architecture(
        _read_gemma3_text, frozenset(_GEMMA3_TEXT_KEYS.split()), GEMMA3_DEFAULTS
    ),
}
