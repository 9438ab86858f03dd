"""MoE families with known layers and their own configuration keys for experts.

ERNIE 4.5, Hunyuan-A13B, MiniMax-M2, OLMoE, Granite with experts, dots.llm1 and GLM-4.7-Flash.
"""

from meshwright.simulator.model.huggingface.dense import (
    GRANITE_KEYS,
    HUNYUAN_KEYS,
    read_granite,
    read_hunyuan,
)
from meshwright.simulator.model.huggingface.experts import (
    DEEPSEEK_KEYS,
    ROUTING_KEYS,
    plain_experts,
    read_deepseek_v3,
    sigmoid_experts,
)
from meshwright.simulator.model.huggingface.llama import LLAMA_KEYS, gated_decoder, windows
from meshwright.simulator.model.huggingface.reader import Architecture, Reader, same_size

Fields = dict[str, object]


def _read_ernie_moe(reader: Reader) -> Fields:
    """Return the fields of ERNIE 4.5 with experts, after dense layers."""
    if reader.switch("use_bias", default=False):
        reader.refuse("use_bias", "is not supported; it must be false")
    last = reader.size("num_hidden_layers") - 1
    if reader.value("moe_layer_end_index") not in {None, -1, last}:
        reader.refuse("moe_layer_end_index", f"is not supported; it must be -1 or {last}")
    width = reader.size("moe_intermediate_size")
    return {
        **gated_decoder(reader),
        "num_kv_heads": reader.optional_size("num_key_value_heads"),
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
        "experts": {
            "num_experts": reader.size("moe_num_experts", "num_experts"),
            "experts_per_token": reader.size("moe_k", "num_experts_per_tok"),
            "hidden_size": width,
            "shared_hidden_size": width * reader.count("moe_num_shared_experts", default=2),
            "routing_bias": True,
            "first_dense_layers": reader.count("moe_layer_start_index", default=1),
            "layer_step": reader.optional_size("moe_layer_interval") or 1,
        },
    }


def _read_hunyuan_moe(reader: Reader) -> Fields:
    """Return the fields of Hunyuan-A13B: a shared expert as wide as each of the others.

    Its authors' code takes a width, a number of experts and of shared ones for each layer;
    transformers reads ``intermediate_size`` and has one shared expert.
    """
    width = reader.size("intermediate_size")
    for key, wanted in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if reader.has(key) and same_size(reader, key) != wanted:
            reader.refuse(key, f"is not supported; it must be {wanted}")
    return {
        **read_hunyuan(reader),
        "ffn_hidden_size": width,
        "experts": {
            "num_experts": same_size(reader, "num_experts"),
            "experts_per_token": same_size(reader, "moe_topk"),
            "hidden_size": width,
            "shared_hidden_size": width,
        },
    }


def _read_minimax_m2(reader: Reader) -> Fields:
    """Return the fields of MiniMax-M2: query and key norms over all heads, partial RoPE."""
    for key, wanted in (("use_qk_norm", True), ("use_routing_bias", True)):
        if not reader.switch(key, default=True):
            reader.refuse(key, f"is not supported; it must be {str(wanted).lower()}")
    for key, word in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")):
        if reader.text(key, default=word) != word:
            reader.refuse(key, f"is not supported; it must be {word!r}")
    if reader.count("shared_intermediate_size", default=0):
        reader.refuse("shared_intermediate_size", "is not supported; it must be 0")
    head_dim = reader.size("head_dim")
    rotary_dim = reader.optional_size("rotary_dim")
    return {
        **gated_decoder(reader),
        "num_kv_heads": reader.size("num_key_value_heads"),
        "qk_norm": "width",
        "rotary_fraction": rotary_dim / head_dim if rotary_dim else reader.rotary_fraction(),
        "experts": {
            **plain_experts(reader, "num_local_experts", "num_experts"),
            "scores": "sigmoid",
            "routing_bias": True,
        },
    }


def _read_olmoe(reader: Reader) -> Fields:
    has_bias = reader.switch("attention_bias", default=False)
    if reader.has("clip_qkv"):
        reader.refuse("clip_qkv", "is not supported; it must be null")
    return {
        **gated_decoder(reader),
        "num_kv_heads": reader.optional_size("num_key_value_heads"),
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "qk_norm": "width",
        "experts": {
            **plain_experts(reader, "num_experts", "num_local_experts"),
            "casts_shares": True,
        },
    }


def _read_granite_moe(reader: Reader) -> Fields:
    return {
        **read_granite(reader),
        "experts": {
            **plain_experts(reader, "num_local_experts", "num_experts"),
            "scores": "softmax of chosen",
            "casts_shares": True,
        },
    }


def _read_dots1(reader: Reader) -> Fields:
    """Return the fields of dots.llm1: query and key norms, experts as DeepSeek-V3's."""
    has_bias = reader.switch("attention_bias", default=False)
    layers = reader.size("num_hidden_layers")
    first = reader.count("max_window_layers", default=layers)
    usual = "F" * min(first, layers) + "W" * max(layers - first, 0)
    pattern = reader.layer_pattern(usual=usual)
    return {
        **gated_decoder(reader),
        **windows(reader.optional_size("sliding_window"), pattern),
        "num_kv_heads": reader.optional_size("num_key_value_heads"),
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "qk_norm": "head",
        "experts": sigmoid_experts(reader, first_dense_layers=0),
    }


def _read_glm4_moe_lite(reader: Reader) -> Fields:
    """Return the fields of GLM-4.7-Flash: DeepSeek-V3's layers, the first with an MLP.

    Its class reads only ``mlp_layer_types``, and ``head_dim`` as the width of the RoPE part.
    """
    kinds = reader.value("mlp_layer_types")
    layers = reader.size("num_hidden_layers")
    reader.size("qk_rope_head_dim", "head_dim")
    first = 1
    if kinds is not None:
        first = kinds.count("dense") if isinstance(kinds, list) else 0
        if kinds != ["dense"] * first + ["sparse"] * (layers - first):
            reader.refuse("mlp_layer_types", "is not supported; dense layers must come first")
    if reader.count("first_k_dense_replace", default=first) != first:
        reader.refuse("first_k_dense_replace", f"disagrees with mlp_layer_types, which has {first}")
    fields = read_deepseek_v3(reader)
    experts = fields["experts"]
    assert isinstance(experts, dict)
    return {**fields, "experts": {**experts, "first_dense_layers": first}}


# Keys that transformers reads, and those of released files that it ignores.
_ERNIE_MOE_KEYS = f"""
    {ROUTING_KEYS} auto_map head_dim hidden_act hidden_size intermediate_size
    max_position_embeddings moe_capacity moe_gate moe_intermediate_size moe_k moe_layer_end_index
    moe_layer_interval moe_layer_start_index moe_norm_min moe_num_experts moe_num_shared_experts
    moe_use_aux_free num_attention_heads num_experts num_hidden_layers num_key_value_heads
    num_nextn_predict_layers rope_parameters rope_scaling rope_theta tie_word_embeddings use_bias
    vocab_size
    """
_HUNYUAN_MOE_KEYS = f"""
    {HUNYUAN_KEYS} {ROUTING_KEYS} moe_drop_tokens moe_intermediate_size moe_layer_num_skipped
    moe_random_routing_dropped_token moe_topk num_experts num_local_experts num_shared_expert
    use_mixed_mlp_moe
    """
_MINIMAX_KEYS = f"""
    {ROUTING_KEYS} attention_dropout attn_type_list auto_map head_dim hidden_act hidden_size
    intermediate_size max_position_embeddings mtp_transformer_layers num_attention_heads
    num_experts num_hidden_layers num_key_value_heads num_local_experts num_mtp_modules
    partial_rotary_factor qk_norm_type quantization_config rope_parameters rope_scaling rope_theta
    rotary_dim router_jitter_noise scoring_func shared_intermediate_size tie_word_embeddings
    use_mtp use_qk_norm use_routing_bias vocab_size
    """
_OLMOE_KEYS = f"{LLAMA_KEYS} {ROUTING_KEYS} clip_qkv num_experts num_local_experts"
_GRANITE_MOE_KEYS = f"{GRANITE_KEYS} {ROUTING_KEYS} num_experts num_local_experts"
_DOTS1_KEYS = f"""
    {LLAMA_KEYS} {ROUTING_KEYS} first_k_dense_replace layer_types max_window_layers
    moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts num_experts
    num_local_experts routed_scaling_factor scoring_func sliding_window topk_group topk_method
    """
_GLM4_LITE_KEYS = f"{DEEPSEEK_KEYS} mlp_layer_types partial_rotary_factor"

ROUTED_FAMILIES = {
    "dots1": Architecture(
        _read_dots1,
        frozenset(_DOTS1_KEYS.split()),
        {"max_window_layers": 62, "num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "ernie4_5_moe": Architecture(
        _read_ernie_moe, frozenset(_ERNIE_MOE_KEYS.split()), {"num_key_value_heads": 4}
    ),
    "glm4_moe_lite": Architecture(
        _read_glm4_moe_lite,
        frozenset(_GLM4_LITE_KEYS.split()),
        {"n_shared_experts": 1, "num_key_value_heads": 20, "q_lora_rank": 768},
    ),
    "granitemoe": Architecture(_read_granite_moe, frozenset(_GRANITE_MOE_KEYS.split())),
    "hunyuan_v1_moe": Architecture(_read_hunyuan_moe, frozenset(_HUNYUAN_MOE_KEYS.split())),
    "minimax_m2": Architecture(_read_minimax_m2, frozenset(_MINIMAX_KEYS.split())),
    "olmoe": Architecture(_read_olmoe, frozenset(_OLMOE_KEYS.split())),
}
