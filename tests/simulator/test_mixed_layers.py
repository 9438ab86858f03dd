"""Layers of gpt-oss and Llama 4: experts beside windows, sinks, and layers without positions.

`tests_outside/test_experts.py` and `test_megatron_experts.py` count the frameworks' own; what they
found of one shape stands here.
"""

import pytest

from meshwright.hwprofiles import Attention, ContextParallel, Kernels, Precision, load_stack
from meshwright.simulator import ModelSpec, ResolvedPlan, TrainingJob, load_model, model_flops
from meshwright.simulator.blocks import BlockShape, BorderGradients, walk
from meshwright.simulator.graph import Backward, BlockMemory
from meshwright.simulator.layout import stack_refusal
from meshwright.simulator.model import Experts, layer_kinds, parameters_by_kind, parse_model

OSS, MAVERICK = load_model("gpt-oss-20b"), load_model("llama4-maverick")
TOKENS = 1024
SMALL = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_hidden_size": 384,
    "vocab_size": 512,
    "layer_pattern": "WF",
    "window": TOKENS,
}


def small(model: ModelSpec, head_dim: int) -> ModelSpec:
    """Return two layers of *model*, with eight experts."""
    assert isinstance(model.experts, Experts)
    given = model.experts
    shared = 384 * (given.shared_hidden_size > 0)
    few = 2 if given.experts_per_token > 1 else 1
    sizes = {"num_experts": 8, "experts_per_token": few, "hidden_size": 384, "layer_step": 1}
    experts = given.model_copy(update={**sizes, "shared_hidden_size": shared})
    fields = {**model.model_dump(), **SMALL, "head_dim": head_dim, "experts": experts.model_dump()}
    return parse_model(fields, origin="small")


def walked(model: ModelSpec, stack: str, kind: str, kernels: Kernels, **ranks: int) -> Backward:
    profile = load_stack(stack).model_copy(update={"kernels": kernels})
    job = TrainingJob(model=model, global_batch_size=8, seq_len=TOKENS, precision=Precision.BF16)
    is_eager = profile.megatron_layers and kernels is Kernels.EAGER
    plan = ResolvedPlan(
        **ranks,
        stages=(model.num_layers,),
        microbatch_size=2,
        attention=Attention.UNFUSED if is_eager else Attention.FLASH,
    )
    return walk(
        BlockShape.of(job, plan, profile), kind, ending=BorderGradients(keeps_gradients=True)
    )


@pytest.mark.parametrize(
    ("model", "head_dim", "stack", "kind", "ranks", "counted"),
    [
        (OSS, 64, "fsdp", "expert layer", {}, (45350944, 54804544, 52666400)),
        (OSS, 64, "fsdp", "windowed expert layer", {}, (45350944, 54804544, 52666400)),
        (OSS, 64, "megatron-core", "expert layer", {"ep": 4, "dp": 4, "etp": 1},
         (142303232, 252321792, 213992464)),
        (MAVERICK, 32, "megatron-core", "windowed expert layer", {},
         (60203008, 78389248, 81211904)),
        (MAVERICK, 32, "megatron-core", "expert layer", {}, (59940864, 76554240, 80949760)),
    ],
)  # fmt: skip
def test_a_layer_keeps_and_needs_what_was_counted(
    model: ModelSpec,
    head_dim: int,
    stack: str,
    kind: str,
    ranks: dict[str, int],
    counted: tuple[int, int, int],
) -> None:
    """Saved bytes, and the peaks forward and backward, of eager layers of the frameworks."""
    found = BlockMemory.of(walked(small(model, head_dim), stack, kind, Kernels.EAGER, **ranks))
    assert (found.saved, found.saved + found.forward, found.saved + found.backward) == counted


@pytest.mark.parametrize("kernels", [Kernels.FUSED, Kernels.EAGER])
@pytest.mark.parametrize(
    ("model", "stack"), [(OSS, "fsdp"), (OSS, "megatron-core"), (MAVERICK, "megatron-core")]
)
def test_weights_of_a_layer_are_its_parameters(
    model: ModelSpec, stack: str, kernels: Kernels
) -> None:
    parameters = parameters_by_kind(model)
    for kind in layer_kinds(model):
        weights = walked(model, stack, kind, kernels).tape.block.weights
        assert sum(int(each.numel) for each in weights) == parameters[kind]


def test_model_flops_of_mixed_layers_are_those_of_their_products() -> None:
    """Of Maverick's 24 expert layers a token passes one routed and one shared expert."""
    job = TrainingJob(model=MAVERICK, global_batch_size=1, seq_len=8192)
    h, q, g, f = 5120, 5120, 1024, 8192
    attention = 2 * h * (q + g) + 2 * q * 8192
    layers = 48 * attention + 24 * 3 * h * 2 * f + 24 * (h * 128 + 2 * 3 * h * f)
    assert model_flops(job) == 6 * 8192 * (layers + h * 202048)


def test_window_and_sinks_change_no_model_flops_but_the_band() -> None:
    job = TrainingJob(model=OSS, global_batch_size=1, seq_len=4096)
    plain = parse_model(
        {**OSS.model_dump(), "window": 0, "layer_pattern": "F", "attention_sinks": False},
        origin="plain",
    )
    all_ = TrainingJob(model=plain, global_batch_size=1, seq_len=4096)
    band = 3 * 4 * 64 * 64 * 12 * (4096 - 128) * 4096
    assert model_flops(all_) - model_flops(job) == band


@pytest.mark.parametrize(
    ("model", "stack", "seq_len", "changes", "message"),
    [
        (OSS, "torchtitan@0.2", 4096, {}, "window of gpt-oss-20b is not offered by stack torchtit"),
        (OSS, "torchtitan@0.2", 128, {}, "attention_sinks of gpt-oss-20b is not offered"),
        (OSS, "fsdp", 4096, {"attention": Attention.UNFUSED},
         "attention=unfused does not go with attention_sinks; allowed: flash"),
        (OSS, "megatron-core", 4096, {"cp": 2, "cp_type": ContextParallel.RING},
         "cp_type=ring is not offered by stack megatron-core@0.18 for gpt-oss-20b; allowed: all-t"),
        (OSS, "megatron-core", 128, {"cp": 2, "cp_type": ContextParallel.ALL_GATHER},
         "cp_type=all-gather is not offered by stack megatron-core@0.18 for gpt-oss-20b; allowed:"),
        (OSS, "megatron-core", 4096, {"cp": 2, "cp_type": ContextParallel.ALL_TO_ALL}, None),
        (OSS, "megatron-core", 4096, {"tp": 2, "sequence_parallel": True},
         "tp=2 is not offered by stack megatron-core@0.18 for gpt-oss-20b; allowed: 1, another on"),
        (OSS, "megatron-core", 4096, {"ep": 2, "etp": 2, "dp": 4}, "etp=2 is not offered"),
        (OSS, "megatron-core", 4096, {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1}, None),
        (OSS, "fsdp", 4096, {}, None),
        (MAVERICK, "megatron-core", 16384, {}, None),
        (MAVERICK, "megatron-core", 16384, {"cp": 2}, "cp=2 is not offered by stack megatron-core"),
        (MAVERICK.model_copy(update={"rotary_layers": "all", "experts": None}), "fsdp", 16384, {},
         "chunked_window of llama4-maverick is not offered by stack fsdp"),
        (MAVERICK.model_copy(update={"qk_norm": "unweighted", "experts": None}), "fsdp", 8192, {},
         "llama4-maverick has norms of heads in layers with positions alone, which stack fsdp"),
        (MAVERICK, "megatron-core", 8192, {}, None),
        (MAVERICK, "fsdp", 8192, {}, "experts.weighs_inputs of llama4-maverick is not offered by "),
    ],
)  # fmt: skip
def test_a_stack_refuses_what_it_lacks_by_name(
    model: ModelSpec, stack: str, seq_len: int, changes: dict[str, object], message: str | None
) -> None:
    profile = load_stack(stack)
    usual = {"attention": profile.attention, "zero_stage": profile.zero_stage}
    plan = ResolvedPlan.of({**usual, "stages": (model.num_layers,), **changes})
    job = TrainingJob(model=model, global_batch_size=8, seq_len=seq_len, precision=Precision.BF16)
    refusal = stack_refusal(job, plan, profile)
    assert refusal is None if message is None else (refusal or "").startswith(message)
