"""Families with routed experts (MoE) and latent attention (MLA).

Coefficients of balancing losses, scaling and normalisation of scores, and jitter change no size.
"""

from meshwright.simulator.model.huggingface.llama import (
    MISTRAL_KEYS,
    QWEN2_KEYS,
    gated_decoder,
    read_mistral,
    read_qwen2,
    read_qwen3,
)
from meshwright.simulator.model.huggingface.reader import Architecture, Reader

Fields = dict[str, object]


def _read_mixtral(reader: Reader) -> Fields:
    """Return the fields of Mixtral's layers: experts instead of every MLP."""
    return {
        **read_mistral(reader),
        "ffn_hidden_size": reader.size("intermediate_size"),
        "experts": plain_experts(reader, "num_local_experts", "num_experts"),
    }


def plain_experts(reader: Reader, *number_keys: str) -> Fields:
    """Return experts as wide as an MLP, their number under one of *number_keys*."""
    return {
        "num_experts": reader.size(*number_keys),
        "experts_per_token": reader.size("num_experts_per_tok"),
        "hidden_size": reader.size("intermediate_size"),
    }


def _read_qwen2_moe(reader: Reader) -> Fields:
    """Return the fields of Qwen2-MoE's layers: every n-th has experts, and a gated shared one."""
    if not reader.switch("qkv_bias", default=True):
        reader.refuse("qkv_bias", "is not supported; it must be true")
    if reader.switch("use_sliding_window", default=False):
        reader.refuse("use_sliding_window", "is not supported; it must be false")
    reader.refuse_listed("mlp_only_layers")
    return {
        **read_qwen2(reader),
        "experts": {
            "num_experts": reader.size("num_experts"),
            "experts_per_token": reader.size("num_experts_per_tok"),
            "hidden_size": reader.size("moe_intermediate_size"),
            "shared_hidden_size": reader.size("shared_expert_intermediate_size"),
            "shared_gate": True,
            "casts_shares": True,
            "layer_step": reader.optional_size("decoder_sparse_step") or 1,
        },
    }


def _read_qwen3_moe(reader: Reader) -> Fields:
    """Return the fields of Qwen3-MoE's layers: every n-th has experts, and none is shared."""
    if reader.switch("use_sliding_window", default=False):
        reader.refuse("use_sliding_window", "is not supported; it must be false")
    reader.refuse_listed("mlp_only_layers")
    return {
        **read_qwen3(reader),
        "experts": {
            "num_experts": reader.size("num_experts", "num_local_experts"),
            "experts_per_token": reader.size("num_experts_per_tok"),
            "hidden_size": reader.size("moe_intermediate_size"),
            "casts_shares": True,
            "layer_step": reader.optional_size("decoder_sparse_step") or 1,
        },
    }


def _read_glm4_moe(reader: Reader) -> Fields:
    """Return the fields of GLM-4.5's layers: experts after dense layers, partial RoPE."""
    return {
        **gated_decoder(reader),
        "num_kv_heads": reader.size("num_key_value_heads"),
        "attention_bias": reader.switch("attention_bias", default=False),
        "qk_norm": "head" if reader.switch("use_qk_norm", default=False) else "none",
        "rotary_fraction": reader.rotary_fraction(default=0.5),
        "spelling": "glm4_moe",
        "experts": sigmoid_experts(reader, first_dense_layers=1),
    }


def sigmoid_experts(reader: Reader, *, first_dense_layers: int) -> Fields:
    """Return experts with sigmoid scores and a routing bias, as those of DeepSeek-V3.

    Args:
        reader: The configuration.
        first_dense_layers: Default number of layers with an MLP.
    """
    width = reader.size("moe_intermediate_size")
    return {
        "num_experts": reader.size("n_routed_experts", "num_local_experts", "num_experts"),
        "experts_per_token": reader.size("num_experts_per_tok"),
        "hidden_size": width,
        "shared_hidden_size": width * (reader.optional_size("n_shared_experts") or 0),
        "scores": "sigmoid",
        "routing_bias": True,
        "num_groups": reader.optional_size("n_group") or 1,
        "groups_per_token": reader.optional_size("topk_group") or 1,
        "first_dense_layers": reader.count("first_k_dense_replace", default=first_dense_layers),
    }


def _read_deepseek_v2(reader: Reader) -> Fields:
    """Return the fields of DeepSeek's layers: latent attention, and experts after dense layers.

    MTP layers (num_nextn_predict_layers) are left out, as in transformers.
    """
    if reader.optional_size("moe_layer_freq") not in {None, 1}:
        reader.refuse("moe_layer_freq", "is not supported; it must be 1")
    for key in ("attention_bias", "mlp_bias"):
        if reader.switch(key, default=False):
            reader.refuse(key, "is not supported; it must be false")
    width, heads = reader.size("moe_intermediate_size"), reader.size("num_attention_heads")
    if reader.optional_size("num_key_value_heads") not in {None, heads}:
        reader.refuse("num_key_value_heads", f"must equal num_attention_heads={heads}")
    method = reader.text("topk_method", default="")
    if method not in {"", "greedy", "group_limited_greedy", "noaux_tc"}:
        reader.refuse("topk_method", "is not supported")
    # Greedy top-k ignores the groups, whatever the configuration says of them.
    has_groups = method != "greedy"
    return {
        **gated_decoder(reader),
        "head_dim": None,  # DeepSeek's key, where given, is the width of the RoPE part alone
        "num_kv_heads": heads,
        "latent": {
            "query_rank": reader.optional_size("q_lora_rank") or 0,
            "kv_rank": reader.size("kv_lora_rank"),
            "plain_head_dim": reader.size("qk_nope_head_dim"),
            "rotary_head_dim": reader.size("qk_rope_head_dim"),
            "value_head_dim": reader.size("v_head_dim"),
        },
        "experts": {
            "num_experts": reader.size("n_routed_experts", "num_local_experts", "num_experts"),
            "experts_per_token": reader.size("num_experts_per_tok"),
            "hidden_size": width,
            "shared_hidden_size": width * (reader.optional_size("n_shared_experts") or 0),
            "num_groups": (reader.optional_size("n_group") or 1) if has_groups else 1,
            "groups_per_token": (reader.optional_size("topk_group") or 1) if has_groups else 1,
            "first_dense_layers": reader.count("first_k_dense_replace", default=0),
        },
    }


def read_deepseek_v3(reader: Reader) -> Fields:
    """Return the fields of DeepSeek-V3's layers: sigmoid scores, with a routing bias."""
    if reader.text("scoring_func", default="sigmoid") != "sigmoid":
        reader.refuse("scoring_func", "is not supported; it must be 'sigmoid'")
    if reader.text("topk_method", default="noaux_tc") != "noaux_tc":
        reader.refuse("topk_method", "is not supported; it must be 'noaux_tc'")
    fields = _read_deepseek_v2(reader)
    experts = fields["experts"]
    assert isinstance(experts, dict)
    return {**fields, "experts": {**experts, "scores": "sigmoid", "routing_bias": True}}


ROUTING_KEYS = "norm_topk_prob num_experts_per_tok output_router_logits router_aux_loss_coef"
_MIXTRAL_KEYS = (
    f"{MISTRAL_KEYS} {ROUTING_KEYS} num_experts num_local_experts router_jitter_noise rope_scaling"
)
_QWEN2_MOE_KEYS = f"""
    {QWEN2_KEYS} {ROUTING_KEYS} decoder_sparse_step mlp_only_layers moe_intermediate_size
    num_experts qkv_bias shared_expert_intermediate_size
    """
_QWEN3_MOE_KEYS = f"""
    {QWEN2_KEYS} {ROUTING_KEYS} attention_bias decoder_sparse_step mlp_only_layers
    moe_intermediate_size num_experts num_local_experts
    """
_GLM4_MOE_KEYS = f"""
    {ROUTING_KEYS} attention_bias attention_dropout first_k_dense_replace head_dim hidden_act
    hidden_size intermediate_size max_position_embeddings moe_intermediate_size n_group
    n_routed_experts n_shared_experts num_attention_heads num_experts num_hidden_layers
    num_key_value_heads num_local_experts num_nextn_predict_layers partial_rotary_factor
    rope_parameters rope_scaling rope_theta routed_scaling_factor tie_word_embeddings topk_group
    use_qk_norm vocab_size
    """
DEEPSEEK_KEYS = f"""
    {ROUTING_KEYS} attention_bias attention_dropout aux_loss_alpha auto_map ep_size
    first_k_dense_replace head_dim hidden_act hidden_size intermediate_size kv_lora_rank
    max_position_embeddings mlp_bias moe_intermediate_size moe_layer_freq n_group n_routed_experts
    n_shared_experts num_attention_heads num_experts num_hidden_layers num_key_value_heads
    num_local_experts num_mtp_layers num_nextn_predict_layers pretraining_tp q_lora_rank
    qk_head_dim qk_nope_head_dim qk_rope_head_dim quantization_config rope_interleave
    rope_parameters rope_scaling rope_theta routed_scaling_factor scoring_func seq_aux
    tie_word_embeddings topk_group topk_method v_head_dim vocab_size
    """

_DEEPSEEK_V3 = Architecture(
    read_deepseek_v3,
    frozenset(DEEPSEEK_KEYS.split()),
    {
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_shared_experts": 1,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "topk_group": 4,
    },
)
EXPERT_FAMILIES = {
    "deepseek_v2": Architecture(
        _read_deepseek_v2,
        frozenset(DEEPSEEK_KEYS.split()),
        {"n_shared_experts": 2, "q_lora_rank": 1536, "topk_method": "greedy"},
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe": Architecture(
        _read_glm4_moe, frozenset(_GLM4_MOE_KEYS.split()), {"n_shared_experts": 1}
    ),
    "kimi_k2": _DEEPSEEK_V3,  # the authors' class is a copy of DeepSeek-V3's
    "mixtral": Architecture(_read_mixtral, frozenset(_MIXTRAL_KEYS.split())),
    "qwen2_moe": Architecture(_read_qwen2_moe, frozenset(_QWEN2_MOE_KEYS.split())),
    "qwen3_moe": Architecture(_read_qwen3_moe, frozenset(_QWEN3_MOE_KEYS.split())),
}
