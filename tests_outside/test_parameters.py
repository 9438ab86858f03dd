"""Parameters of models with experts, as transformers counts those of its own on no device."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.mixtral import MixtralConfig
from transformers.models.qwen2_moe import Qwen2MoeConfig

from meshwright.simulator.model import ModelSpec, count_parameters, list_models, load_model

# DeepSeek-V2 of arXiv 2405.04434, 3.1.2, and Qwen1.5-MoE-A2.7B; the defaults are Mixtral 8x7B and
# DeepSeek-V3.
DEEPSEEK_V2 = DeepseekV2Config(
    hidden_size=5120,
    num_attention_heads=128,
    num_hidden_layers=60,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    num_experts_per_tok=6,
    n_group=8,
    topk_group=3,
    topk_method="group_limited_greedy",
    first_k_dense_replace=1,
)
# Of arXiv 2507.20534, table 2, and its released configuration, which names a model_type of its own.
KIMI_K2 = DeepseekV3Config(
    num_attention_heads=64,
    num_key_value_heads=64,
    n_routed_experts=384,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    vocab_size=163840,
)
MIXTRAL_8X22B = MixtralConfig(
    hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48
)
CONFIGS = {
    "mixtral-8x22b": MIXTRAL_8X22B,
    "kimi-k2": KIMI_K2,
    "mixtral-8x7b": MixtralConfig(),
    "deepseek-v3": DeepseekV3Config(),
    "deepseek-v2": DEEPSEEK_V2,
    "qwen1.5-moe": Qwen2MoeConfig(),
    "qwen2-moe with every second layer dense": Qwen2MoeConfig(decoder_sparse_step=2),
}


def count(config: PretrainedConfig) -> int:
    """Return the parameters of a model, and the biases of its routing, which are buffers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    biases = (each for name, each in model.named_buffers() if name.endswith("correction_bias"))
    return sum(each.numel() for each in (*model.parameters(), *biases))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_equal_those_that_transformers_makes(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    path = tmp_path / "config.json"
    kind = {"model_type": "kimi_k2"} if name == "kimi-k2" else {}
    path.write_text(json.dumps({**config.to_dict(), **kind}))
    model = load_model(str(path))
    assert isinstance(model, ModelSpec)
    assert count_parameters(model) == count(config)
    if name in list_models():
        assert count_parameters(load_model(name)) == count_parameters(model)


def test_built_in_sizes_are_those_of_published_configurations() -> None:
    published = {"mixtral-8x7b": 46_702_792_704, "deepseek-v3": 671_026_419_200}
    assert {name: count_parameters(load_model(name)) for name in published} == published
