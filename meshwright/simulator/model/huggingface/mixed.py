"""MoE families that alternate two kinds of attention: gpt-oss and Llama 4."""

from meshwright.simulator.model.huggingface.llama import gated_decoder, windows
from meshwright.simulator.model.huggingface.reader import Architecture, Reader, numbers, period

# Defaults of the configuration classes.
GPT_OSS_PATTERN = "WF"
GPT_OSS_ROTARY = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
LLAMA4_INTERVAL = 4


def _read_gpt_oss(reader: Reader) -> dict[str, object]:
    """Return the fields of gpt-oss: attention sinks, and experts with biases in all layers."""
    has_bias, width = (
        reader.switch("attention_bias", default=True),
        reader.size("intermediate_size"),
    )
    pattern = reader.layer_pattern(usual=GPT_OSS_PATTERN)
    key = "rope_scaling" if reader.has("rope_scaling") else "rope_parameters"
    return {
        **gated_decoder(reader),
        **windows(reader.optional_size("sliding_window"), pattern),
        "num_kv_heads": reader.size("num_key_value_heads"),
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "scaled_angles": reader.inside(key).text("rope_type", default="yarn") == "yarn",
        "attention_sinks": True,
        "spelling": "gpt_oss",
        "experts": {
            "num_experts": reader.size("num_local_experts", "num_experts"),
            "experts_per_token": reader.size("num_experts_per_tok", "experts_per_token"),
            "hidden_size": width,
            "scores": "softmax of chosen",
            "bias": True,
            "activation": "clamped",
            "casts_shares": True,
        },
    }


def _read_llama4_text(reader: Reader) -> dict[str, object]:
    """Return the fields of Llama 4: chunked attention, layers without RoPE, top-1 experts.

    The scale of queries in layers without RoPE is 1 up to ``floor_scale`` tokens.
    """
    width, chunk = reader.size("intermediate_size"), reader.size("attention_chunk_size")
    decoder = gated_decoder(reader)
    pattern = _llama4_pattern(reader)
    seq_len = reader.original_positions() or reader.size("max_position_embeddings")
    has_bias = reader.switch("attention_bias", default=False)
    return {
        **decoder,
        **windows(chunk, pattern),
        "chunked_window": "W" in pattern,
        "rotary_layers": "windowed" if "F" in pattern else "all",
        "seq_len": min(chunk, seq_len),
        "num_kv_heads": reader.size("num_key_value_heads"),
        "ffn_hidden_size": reader.size("intermediate_size_mlp"),
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "qk_norm": "unweighted" if reader.switch("use_qk_norm", default=True) else "none",
        "spelling": "llama4",
        "experts": {
            "num_experts": reader.size("num_local_experts"),
            "experts_per_token": reader.size("num_experts_per_tok"),
            "hidden_size": width,
            "shared_hidden_size": width,
            "scores": "sigmoid",
            "weighs_inputs": True,
            "layer_step": _llama4_step(reader),
        },
    }


def _llama4_pattern(reader: Reader) -> str:
    """Return the pattern of layers with chunked attention and RoPE (W), by default 3 of 4."""
    interval = reader.optional_size("no_rope_layer_interval") or LLAMA4_INTERVAL
    usual = "W" * (interval - 1) + "F"
    has_rope = numbers(reader, "no_rope_layers")  # despite its name 1 is a layer with RoPE
    if has_rope:
        usual = period(reader, "no_rope_layers", ["FW"[each != 0] for each in has_rope])
    pattern = reader.layer_pattern(usual=usual, windowed="chunked_attention")
    if pattern != usual:
        reader.refuse("layer_types", "is not supported; layers with positions attend in chunks")
    return pattern


def _llama4_step(reader: Reader) -> int:
    """Return the interval of layers with experts."""
    step, layers = (
        reader.optional_size("interleave_moe_layer_step") or 1,
        numbers(reader, "moe_layers"),
    )
    if layers:
        # `moe_layers` lists indices from 0: the last layer of each interval has the experts.
        step = layers[0] + 1
        if layers != [*range(layers[0], reader.size("num_hidden_layers"), step)]:
            reader.refuse("moe_layers", "is not supported; it must be every so many layers")
    return step


def _read_llama4(reader: Reader) -> dict[str, object]:
    """Return the fields of a multimodal model's language model; images are not modelled."""
    return _read_llama4_text(reader.nested("text_config", MIXED_FAMILIES["llama4_text"]))


_GPT_OSS_KEYS = """
    attention_bias attention_dropout experts_per_token head_dim hidden_act hidden_size
    initial_context_length intermediate_size layer_types max_position_embeddings
    num_attention_heads num_experts num_experts_per_tok num_hidden_layers num_key_value_heads
    num_local_experts output_router_logits quantization_config rope_parameters rope_scaling
    rope_theta router_aux_loss_coef sliding_window swiglu_alpha swiglu_limit tie_word_embeddings
    vocab_size
    """
_LLAMA4_TEXT_KEYS = """
    attention_bias attention_chunk_size attention_dropout attn_scale attn_temperature_tuning
    floor_scale head_dim hidden_act hidden_size interleave_moe_layer_step intermediate_size
    intermediate_size_mlp layer_types max_position_embeddings moe_layers no_rope_layer_interval
    no_rope_layers num_attention_heads num_experts_per_tok num_hidden_layers num_key_value_heads
    num_local_experts output_router_logits rope_parameters rope_scaling rope_theta
    router_aux_loss_coef router_jitter_noise tie_word_embeddings use_qk_norm vocab_size
    """
_LLAMA4_KEYS = """
    boi_token_index eoi_token_index image_token_index text_config tie_word_embeddings vision_config
    """
MIXED_FAMILIES = {
    "gpt_oss": Architecture(
        _read_gpt_oss,
        frozenset(_GPT_OSS_KEYS.split()),
        {"head_dim": 64, "sliding_window": 128, "rope_parameters": GPT_OSS_ROTARY},
    ),
    "llama4": Architecture(_read_llama4, frozenset(_LLAMA4_KEYS.split())),
    "llama4_text": Architecture(
        _read_llama4_text,
        frozenset(_LLAMA4_TEXT_KEYS.split()),
        {"head_dim": 128, "attn_temperature_tuning": True},
    ),
}
