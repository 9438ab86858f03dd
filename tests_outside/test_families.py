"""Families of dense models as transformers has them: parameters, and every byte of one layer."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from block_graph import GraphCase, as_measured
from block_witness import Given, Measured, count_pass
from test_kernels_exact import EAGER
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    PreTrainedConfig,
)
from transformers.activations import ACT2FN
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from witnesses.families import LAYERS, SMALL, Family, Layer, read_file, spec_of

from meshwright.hwprofiles import Kernels, Precision, StackProfile, load_stack
from meshwright.simulator import PlanError
from meshwright.simulator.blocks import BlockShape, BorderGradients, walk
from meshwright.simulator.graph import BlockMemory
from meshwright.simulator.model import (
    EMBEDDING,
    HEAD,
    TRANSFORMER_LAYER,
    BlockKind,
    ModelSpec,
    count_parameters,
)
from meshwright.simulator.model.huggingface import PREDICTION_KEYS, architectures
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.outside import load_outside_plans
from meshwright.validate.programs.megatron import default_dtype
from meshwright.validate.programs.pytorch import autocast

SAVED = next(plan.saved() for plan in load_outside_plans() if plan.name == "ddp llama")
TOKENS, NUM_SEQUENCES = SAVED.job.seq_len, 2
QWEN_32B = {
    "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
GEMMA_2_9B = {
    "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
    "num_attention_heads": 16, "num_key_value_heads": 8,
}  # fmt: skip
GEMMA_3_27B = {
    "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 16, "sliding_window": 1024,
}  # fmt: skip
FALCON_40B = {
    "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
    "new_decoder_architecture": True,
}  # fmt: skip
FALCON_RW_1B = {
    "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "alibi": True,
    "multi_query": False, "parallel_attn": False, "bias": True, "vocab_size": 50304,
}  # fmt: skip
NEMO_12B = {"hidden_size": 5120, "num_hidden_layers": 40, "head_dim": 128, "vocab_size": 131072}
QWEN3_235B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "moe_intermediate_size": 1536, "num_experts": 128, "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768,
}  # fmt: skip
GLM_4_5 = {
    "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "moe_intermediate_size": 1536, "n_routed_experts": 160, "vocab_size": 151552,
    "first_k_dense_replace": 3, "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip
GPT_OSS_20B = {"num_hidden_layers": 24, "num_local_experts": 32}
GRANITE_3_8B = {
    "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40, "vocab_size": 49155,
    "num_key_value_heads": 8, "tie_word_embeddings": True, "embedding_multiplier": 12.0,
}  # fmt: skip
SEED_OSS_36B = {"hidden_size": 5120}
DOTS_LLM1 = {
    "hidden_size": 4096, "n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}  # fmt: skip
HUNYUAN_A13B = {
    "intermediate_size": 3072, "num_key_value_heads": 8, "num_experts": 64, "moe_topk": [8] * 32,
    "vocab_size": 128167, "head_dim": 128,
}  # fmt: skip
MAVERICK = {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}
# By model_type, what is not as in its configuration class, and published counts where there are.
MODELS = [
    ("qwen2", {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}, None),
    ("qwen3", QWEN_32B, 32_762_123_264),
    ("gemma", {}, 8_537_680_896),
    ("gemma2", GEMMA_2_9B, 9_241_705_984),
    ("gemma3_text", GEMMA_3_27B, 27_009_346_304),
    ("phi3", {"sliding_window": 2047}, 3_821_079_552),
    ("falcon", {}, 6_921_720_704),
    ("falcon", FALCON_40B, None),
    ("falcon", FALCON_RW_1B, None),
    ("gpt_neox", {}, 20_554_567_680),
    ("olmo2", {}, None),
    ("glm4", {}, 9_400_279_040),
    ("mistral", NEMO_12B, 12_247_782_400),
    ("qwen3_moe", QWEN3_30B, 30_532_122_624),
    ("qwen3_moe", QWEN3_235B, 235_093_634_560),
    ("glm4_moe", GLM_4_5, None),
    ("gpt_oss", {}, 116_829_156_672),
    ("gpt_oss", GPT_OSS_20B, 20_914_757_184),
    ("llama4_text", {}, 107_769_861_120),
    ("llama4_text", MAVERICK, None),
    ("arcee", {}, None),
    ("dots1", DOTS_LLM1, None),
    ("ernie4_5", {}, None),
    ("ernie4_5_moe", {}, None),
    ("exaone4", {"sliding_window_pattern": 4}, None),
    ("glm4_moe_lite", {}, None),
    ("granite", GRANITE_3_8B, 8_170_848_256),
    ("granitemoe", {}, None),
    ("hunyuan_v1_dense", {"num_key_value_heads": 8, "head_dim": 128}, None),
    ("hunyuan_v1_moe", HUNYUAN_A13B, None),
    ("minimax_m2", {}, None),
    ("ministral3", {}, None),
    ("nemotron", {"num_key_value_heads": 8}, None),
    ("olmo3", {"num_key_value_heads": 8}, None),
    ("olmoe", {"intermediate_size": 1024}, 6_919_161_856),
    ("seed_oss", SEED_OSS_36B, 36_151_104_512),
    ("smollm3", {}, 3_075_098_624),
]  # fmt: skip


def counted_by_transformers(config: PreTrainedConfig) -> int:
    kind = AutoModelForPreTraining if config.model_type == "bert" else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    # Of most families a bias of routing is a buffer.
    biases = [each for name, each in model.named_buffers() if name.endswith("correction_bias")]
    return int(model.num_parameters() + sum(each.numel() for each in biases))


@pytest.mark.parametrize(("model_type", "sizes", "published"), MODELS)
def test_parameters_are_those_that_transformers_counts(
    model_type: str, sizes: dict[str, object], published: int | None
) -> None:
    config = CONFIG_MAPPING[model_type](**sizes)
    counted = counted_by_transformers(config)
    assert count_parameters(spec_of(config)) == counted
    assert published in {None, counted}


# Of these classes a number of experts or heads, or a width of heads, is None: no layer is made.
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 80, "num_key_value_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 80, "num_key_value_heads": 8},
    "nemotron": {"num_key_value_heads": 8},
}
NESTED = {"gemma3", "llama4", "mistral3"}  # their text_config is one of the others


def written(model_type: str) -> dict[str, object]:
    """Return a configuration with all keys that its class writes, and heads that no release has."""
    kind = CONFIG_MAPPING[model_type]
    width = 80 * kind().num_attention_heads
    config = kind(**{"hidden_size": width, **NEEDED.get(model_type, {})})
    return dict(json.loads(config.to_json_string(use_diff=False)))


def is_read(config: dict[str, object]) -> bool:
    try:
        read_file(config)
    except PlanError:
        return False
    return True


@pytest.mark.parametrize("model_type", sorted(set(architectures()) & set(CONFIG_MAPPING) - NESTED))
def test_an_absent_key_means_what_transformers_assumes(model_type: str) -> None:
    """Each key alone, and all that may be absent at once: of these the parameters agree, too."""
    whole, kind = written(model_type), CONFIG_MAPPING[model_type]
    least = dict(whole)
    known = architectures()[model_type].keys - {*PREDICTION_KEYS}  # these train nothing there
    for key in sorted(known & whole.keys()):
        config = {name: each for name, each in whole.items() if name != key}
        if is_read(config):
            assert read_file(config) == spec_of(kind.from_dict(dict(config))), key
            fewer = {name: each for name, each in least.items() if name != key}
            may_go = key not in NEEDED.get(model_type, {}) and is_read(fewer)
            least = fewer if may_go else least
    assert count_parameters(read_file(least)) == counted_by_transformers(kind.from_dict(least))


@pytest.mark.parametrize("name", ["squared relu of transformers", "squared relu under autocast"])
def test_the_square_of_relu_is_byte_exact(name: str) -> None:
    case = EAGER[name]
    derived = GraphCase(build=case.build, lowering=case.lowering).derive()
    assert derived == replace(case.module, make=lambda: ACT2FN["relu2"]).measure()


def eager(stack: str) -> StackProfile:
    return load_stack(stack).model_copy(update={"kernels": Kernels.EAGER})


def shape_of(model: ModelSpec, profile: StackProfile) -> BlockShape:
    plan = replace(SAVED.plan, microbatch_size=NUM_SEQUENCES, stages=(model.num_layers,))
    return BlockShape.of(replace(SAVED.job, model=model), plan, profile)


def measured(
    make: Callable[[], torch.nn.Module], *given: Given, profile: StackProfile
) -> tuple[torch.nn.Module, Measured]:
    """Return a module that runs as on a stack, and what a pass through it does."""
    dtype = torch.float32 if profile.autocast else torch.bfloat16
    precision = Precision.BF16 if profile.autocast else Precision.FP32
    with fake_cluster(0, 1):
        with default_dtype(dtype):
            module = make()
        for each in module.parameters() if profile.autocast else ():
            each.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            with autocast(precision, "cpu"):
                return module(*inputs)

        typed = [
            each._replace(dtype=dtype) if each.dtype.is_floating_point else each for each in given
        ]
        return module, count_pass(run, typed, RankOracle({}))


def derived(model: ModelSpec, kind: BlockKind, profile: StackProfile) -> Measured:
    ending = BorderGradients(keeps_gradients=not profile.autocast)
    found = walk(shape_of(model, profile), kind, ending=ending)
    assert BlockMemory.of(found).buffer == 0
    return as_measured(found)


@pytest.mark.parametrize("stack", ["fsdp", "ddp"])
@pytest.mark.parametrize("family", LAYERS.values(), ids=LAYERS.keys())
def test_a_layer_of_a_family_is_byte_exact(family: Family, stack: str) -> None:
    profile = eager(stack)
    layer, counted = measured(
        lambda: Layer(family, TOKENS, NUM_SEQUENCES),
        Given((NUM_SEQUENCES, TOKENS, int(str(SMALL["hidden_size"])))),
        profile=profile,
    )
    assert derived(layer.spec, TRANSFORMER_LAYER, profile) == counted


def test_scaled_embeddings_are_byte_exact() -> None:
    profile, config = eager("fsdp"), CONFIG_MAPPING["gemma3_text"](**{**SMALL, **GEMMA_3_27B})
    model = spec_of(config)
    _, counted = measured(
        lambda: Gemma3TextScaledWordEmbedding(model.vocab_size, model.hidden_size, 0, 2.0),
        Given((NUM_SEQUENCES, TOKENS), torch.long),
        profile=profile,
    )
    assert derived(model, EMBEDDING, profile) == counted


def head_of_gemma2(cap: float | None) -> tuple[Measured, Measured]:
    """Return what we say of the head, and what Gemma 2 without layers does after its embedding."""
    profile = eager("fsdp")
    config = CONFIG_MAPPING["gemma2"](**{**SMALL, "vocab_size": 4096}, final_logit_softcapping=cap)
    model = spec_of(config)
    config.num_hidden_layers, config.layer_types = 0, []

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = modeling_gemma2.Gemma2ForCausalLM(config)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self.model(inputs_embeds=x, labels=ids, use_cache=False).loss

    ids = Given((NUM_SEQUENCES, TOKENS), torch.long)
    x = Given((NUM_SEQUENCES, TOKENS, model.hidden_size))
    _, counted = measured(Head, x, ids, profile=profile)
    return derived(model, HEAD, profile), counted


def test_capped_logits_keep_and_need_what_gemma_2_does_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        monkeypatch.setattr(modeling_gemma2, name, lambda *_, **__: None)  # flash-attn needs none
    (ours, theirs), (ours_plain, theirs_plain) = head_of_gemma2(30.0), head_of_gemma2(None)
    for name in ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes", "forward_flops"):
        more = getattr(theirs, name) - getattr(theirs_plain, name)
        assert getattr(ours, name) - getattr(ours_plain, name) == more
