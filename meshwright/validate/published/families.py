"""Architectures of published runs: the fields of a model beside the sizes of its row."""

from enum import StrEnum


class Family(StrEnum):
    """Architectures of published runs; sizes come from the row, other fields from the family."""

    GPT = "gpt"
    BLOOM = "bloom"
    NEMOTRON = "nemotron"
    MPT = "mpt"
    LLAMA = "llama"
    BERT = "bert"
    MIXTRAL = "mixtral"
    QWEN3_MOE = "qwen3-moe"
    DEEPSEEK_V2 = "deepseek-v2"
    DEEPSEEK_V3 = "deepseek-v3"
    GPT_OSS = "gpt-oss"


_LLAMA: dict[str, object] = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "gated_mlp": True,
    "tied_embeddings": False,
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "dropout": False,
}
# DeepSeek-AI 2024 (arXiv 2405.04434, 3.1.2; arXiv 2412.19437, 4.2).
_LATENT = {
    "query_rank": 1536,
    "kv_rank": 512,
    "plain_head_dim": 128,
    "rotary_head_dim": 64,
    "value_head_dim": 128,
}
FAMILY_FIELDS: dict[Family, dict[str, object]] = {
    Family.GPT: {},
    Family.BLOOM: {"positions": "alibi", "embedding_norm": True},
    # Squared ReLU between two matrices, no biases (Parmar et al. 2024, arXiv 2402.16819).
    Family.NEMOTRON: {
        "positions": "rotary",
        "tied_embeddings": False,
        "attention_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "dropout": False,
    },
    # Biases and learned positions: the printed parameter counts follow from them to the unit.
    Family.MPT: {"dropout": False},
    Family.LLAMA: _LLAMA,
    Family.MIXTRAL: _LLAMA,
    Family.QWEN3_MOE: {**_LLAMA, "head_dim": 128, "qk_norm": "head"},
    Family.DEEPSEEK_V2: {**_LLAMA, "latent": _LATENT},
    Family.DEEPSEEK_V3: {**_LLAMA, "latent": _LATENT},
    # OpenAI 2025 (arXiv 2508.10925), section 2.
    Family.GPT_OSS: {
        **_LLAMA,
        "head_dim": 64,
        "attention_bias": True,
        "output_bias": True,
        "window": 128,
        "layer_pattern": "WF",
        "scaled_angles": True,
        "attention_sinks": True,
    },
    Family.BERT: {
        "causal": False,
        "token_types": 2,
        "mlm_head": True,
        "embedding_norm": True,
        # 20 masked positions of 128, 80 of 512.
        "scored_fraction": 0.15625,
    },
}


# Routing of experts, limited to some of their groups (sections 2.2.2 and 2.1.2 of the first two).
ROUTING: dict[Family, dict[str, object]] = {
    Family.DEEPSEEK_V2: {"num_groups": 8, "groups_per_token": 3},
    Family.DEEPSEEK_V3: {
        "scores": "sigmoid",
        "routing_bias": True,
        "num_groups": 8,
        "groups_per_token": 4,
    },
    Family.GPT_OSS: {"scores": "softmax of chosen", "bias": True, "activation": "clamped"},
}
