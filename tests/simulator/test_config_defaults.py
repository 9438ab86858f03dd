"""What an absent key of a Hugging Face configuration means: what its class assumes, no release.

Expected values are of the configuration classes of transformers 5.23.0, and of its layers where a
class has no such key; tests_outside compares every key with the classes themselves.
"""

from functools import reduce
from pathlib import Path
from typing import NamedTuple

import pytest

from meshwright.simulator import PlanError
from meshwright.simulator.model import ModelSpec, parse_model
from meshwright.simulator.model.huggingface import architectures, read_config

# Sizes that no released model has: what these have, an absent key does not say.
SIZES = {
    "hidden_size": 960,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "vocab_size": 512,
    "max_position_embeddings": 65_536,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT = {
    **EXPERTS,
    "num_key_value_heads": 12,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
LLAMA4 = {**EXPERTS, "num_experts_per_tok": 1, "attention_chunk_size": 64}
ALIKE = {"num_attention_heads": 32, "num_key_value_heads": None}  # 32 heads of 30
LATENT_HEADS = {"num_attention_heads": 128, "num_key_value_heads": 128}


class Default(NamedTuple):
    """A model_type, what its file says beside sizes, and a field that it leaves to the class."""

    model_type: str
    given: dict[str, object]
    absent: str
    field: str
    value: object
    source: str


def default(model_type: str, absent: str, field: str, value: object, **more: object) -> Default:
    """Return a row; the rest of *more* is what the file says.

    The source of a value is the configuration class of its model_type, where no other is named.
    """
    source = str(more.pop("source", f"{model_type}/configuration_{model_type}.py"))
    return Default(model_type, more, absent, field, value, source)


HEAD_DIM, KV_HEADS = ("head_dim", "head_dim"), ("num_key_value_heads", "num_kv_heads")
WINDOW, SEQ_LEN = ("sliding_window", "window"), ("rope_parameters", "seq_len")
SHARED = ("n_shared_experts", "experts.shared_hidden_size")
FIRST = ("first_k_dense_replace", "experts.first_dense_layers")
BY_HEADS = "hidden_size // num_attention_heads of its attention"
DEFAULTS = [
    default("qwen3_moe", *HEAD_DIM, 80, **EXPERTS, source=BY_HEADS),
    default("qwen3_moe", *HEAD_DIM, 68, **EXPERTS, num_attention_heads=14, num_key_value_heads=7),
    default("glm4_moe", *HEAD_DIM, 80, **EXPERTS, source=BY_HEADS),
    default("qwen2", *HEAD_DIM, 80, source=BY_HEADS),
    default("olmo2", *HEAD_DIM, 80, source=BY_HEADS),
    default("mixtral", *HEAD_DIM, 80, **EXPERTS, source="MixtralConfig: None"),
    default("llama", *HEAD_DIM, 80, source="LlamaConfig: None"),
    default("qwen3", *HEAD_DIM, 128, source="Qwen3Config"),
    default("glm4", *HEAD_DIM, 128, source="Glm4Config"),
    default("gpt_oss", *HEAD_DIM, 64, **EXPERTS, source="GptOssConfig"),
    default("llama4_text", *HEAD_DIM, 128, **LLAMA4, intermediate_size_mlp=64),
    default("ministral3", *HEAD_DIM, 128, source="Ministral3Config"),
    default("ernie4_5", *HEAD_DIM, 128, source="Ernie4_5Config"),
    default("seed_oss", *HEAD_DIM, 128, source="SeedOssConfig"),
    default("gemma", *HEAD_DIM, 256, source="GemmaConfig"),
    default("gemma2", *HEAD_DIM, 256, source="Gemma2Config"),
    default("gemma3_text", *HEAD_DIM, 256, source="Gemma3TextConfig"),
    default("llama", *KV_HEADS, 12, source="LlamaConfig: num_attention_heads"),
    default("ernie4_5", *KV_HEADS, 2, source="Ernie4_5Config"),
    default("ernie4_5_moe", *KV_HEADS, 4, **EXPERTS, moe_k=2, moe_num_experts=16),
    default("seed_oss", *KV_HEADS, 8, **ALIKE, source="SeedOssConfig"),
    default("smollm3", *KV_HEADS, 4, source="SmolLM3Config"),
    default("dots1", *KV_HEADS, 32, **EXPERTS | ALIKE | {"num_attention_heads": 64}),
    default("dots1", *WINDOW, 4096, **EXPERTS, max_window_layers=4, source="Dots1Config"),
    default("dots1", "max_window_layers", "window", 0, **EXPERTS, sliding_window=64),
    default("mistral", *WINDOW, 4096, source="MistralConfig"),
    default("mixtral", *WINDOW, 0, **EXPERTS, source="MixtralConfig: None"),
    default("olmo3", *WINDOW, 4096, source="Olmo3Config"),
    default("exaone4", *WINDOW, 4096, source="Exaone4Config"),
    default("exaone4", "layer_types", "layer_pattern", "WF", sliding_window_pattern=2),
    default("exaone4", "sliding_window_pattern", "layer_pattern", "WWWF", source="Exaone4Config"),
    default("gpt_oss", *WINDOW, 128, **EXPERTS, source="GptOssConfig"),
    default("gpt_oss", *SEQ_LEN, 4096, **EXPERTS, source="GptOssConfig.__post_init__"),
    default("gpt_oss", *SEQ_LEN, 4096, **EXPERTS, rope_scaling=None),
    default("ministral3", *SEQ_LEN, 16_384, source="Ministral3Config.__post_init__"),
    default("phi3", "original_max_position_embeddings", "seq_len", 4096, source="Phi3Config"),
    default("glm4_moe", *SHARED, 96, **EXPERTS, source="Glm4MoeConfig: 1"),
    default("glm4_moe_lite", *SHARED, 96, **LATENT, source="Glm4MoeLiteConfig: 1"),
    default("deepseek_v2", *SHARED, 192, **LATENT, source="DeepseekV2Config: 2"),
    default("deepseek_v3", *SHARED, 96, **LATENT, source="DeepseekV3Config: 1"),
    default("dots1", *SHARED, 0, **EXPERTS, source="Dots1Config: None"),
    default("deepseek_v2", *FIRST, 0, **LATENT, source="DeepseekV2Config"),
    default("deepseek_v3", *FIRST, 3, **LATENT, source="DeepseekV3Config"),
    default("glm4_moe", *FIRST, 1, **EXPERTS, source="Glm4MoeConfig"),
    default("deepseek_v3", "n_group", "experts.num_groups", 8, **LATENT),
    default("deepseek_v3", "topk_group", "experts.groups_per_token", 4, **LATENT),
    default("deepseek_v2", "topk_method", "experts.num_groups", 1, **LATENT, n_group=4),
    default("deepseek_v2", "q_lora_rank", "latent.query_rank", 1536, **LATENT),
    default("deepseek_v3", "q_lora_rank", "latent.query_rank", 1536, **LATENT),
    default("kimi_k2", "q_lora_rank", "latent.query_rank", 1536, **LATENT),
    default("glm4_moe_lite", "q_lora_rank", "latent.query_rank", 768, **LATENT),
    default("deepseek_v3", *KV_HEADS, 128, **LATENT | LATENT_HEADS, source="DeepseekV3Config"),
]


def spec_of(config: dict[str, object]) -> ModelSpec:
    return parse_model(read_config(config, path=Path("small/config.json")), origin="config")


def config_of(row: Default) -> dict[str, object]:
    """Return the file of a row: of keys with several names each model_type has its own."""
    known = architectures()[row.model_type].keys
    numbers = {"n_routed_experts", "num_experts", "num_local_experts"} & known
    config = {**SIZES, **row.given}
    count = config.pop("num_experts", None)
    config |= {min(numbers): count} if numbers and count else {}
    kept = {key: each for key, each in config.items() if key in known and key != row.absent}
    return {"model_type": row.model_type, **kept}


@pytest.mark.parametrize("row", DEFAULTS, ids=lambda row: f"{row.model_type} {row.absent}")
def test_an_absent_key_means_what_the_configuration_class_assumes(row: Default) -> None:
    spec = spec_of(config_of(row))
    assert reduce(getattr, row.field.split("."), spec) == row.value


@pytest.mark.parametrize(
    ("model_type", "key", "field", "value"),
    [
        ("deepseek_v2", "q_lora_rank", "latent.query_rank", 0),
        ("deepseek_v3", "q_lora_rank", "latent.query_rank", 0),
        ("mistral", "sliding_window", "window", 0),
        ("olmo3", "sliding_window", "window", 0),
        ("seed_oss", "head_dim", "head_dim", 80),
        ("ernie4_5", "head_dim", "head_dim", 80),
        ("gpt_oss", "rope_parameters", "seq_len", 4096),
    ],
)
def test_null_is_no_absent_key(model_type: str, key: str, field: str, value: object) -> None:
    given = LATENT if "deepseek" in model_type else EXPERTS
    row = Default(model_type, {**given}, "", field, value, "")
    spec = spec_of({**config_of(row), key: None})
    assert reduce(getattr, field.split("."), spec) == value


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (default("deepseek_v3", *KV_HEADS, 0, **LATENT), "num_key_value_heads=128 must equal"),
        (
            default("glm4_moe_lite", "", "", 0, **LATENT, first_k_dense_replace=3),
            "first_k_dense_replace=3 disagrees with mlp_layer_types, which has 1",
        ),
        (
            default("glm4_moe_lite", "", "", 0, **LATENT, head_dim=64),
            "head_dim=64 disagrees with qk_rope_head_dim=16",
        ),
        (
            default("llama", *HEAD_DIM, 0, num_attention_heads=14, num_key_value_heads=7),
            "num_attention_heads=14 does not divide hidden_size=960",
        ),
    ],
)
def test_what_the_class_assumes_may_not_go_with_the_rest(row: Default, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        spec_of(config_of(row))


def test_a_default_that_changes_no_size_is_told_too() -> None:
    row = default("llama4_text", "", "", 0, **LLAMA4, intermediate_size_mlp=64)
    assert "attn_temperature_tuning=True" in spec_of(config_of(row)).left_out
    assert (
        "llama_4_scaling_beta=0.1" in spec_of(config_of(default("ministral3", "", "", 0))).left_out
    )


@pytest.mark.parametrize("model_type", ["gemma3", "mistral3"])
@pytest.mark.parametrize("said", [True, False])
def test_a_table_is_tied_as_a_configuration_around_says(model_type: str, *, said: bool) -> None:
    """Its model has an output matrix of its own, outside of the language model."""
    config = {"model_type": model_type, "text_config": SIZES, "tie_word_embeddings": said}
    assert spec_of(config).tied_embeddings is said
