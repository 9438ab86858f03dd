"""Switches of stacks: each moves a number of a plan, or the result says that it has no effect."""

from functools import cache

import pytest

from meshwright.hwprofiles import Precision, ProfileError, load_cluster, load_stack, with_facts
from meshwright.simulator import (
    ParallelPlan,
    PlanError,
    StepResult,
    TrainingJob,
    load_model,
    simulate,
)

CLUSTER = load_cluster("dgx-b200")
# Models, formats and plans that use some switches and not others.
PLANS = {
    "dense": ("llama3-8b", "bf16", {"dp": 16}),
    "one rank": ("gpt2", "bf16", {}),
    "fp8": ("llama3-8b", "fp8", {"dp": 4, "tp": 2, "pp": 2, "zero_stage": 0}),
    "fp8 in shards": ("llama3-8b", "fp8", {"dp": 16, "zero_stage": 3}),
    "shards": ("llama3-8b", "bf16", {"dp": 16, "zero_stage": 3}),
    "split shards": ("llama3-8b", "bf16", {"dp": 8, "tp": 2, "zero_stage": 3}),
    "mxfp8": ("llama3-8b", "mxfp8", {"dp": 16}),
    "experts": ("qwen3-30b-a3b", "mxfp8", {"dp": 16, "ep": 8}),
    "unfused": ("llama3-8b", "bf16", {"dp": 16, "attention": "unfused", "recompute": "full"}),
    "selective": ("llama3-8b", "bf16", {"dp": 16, "recompute": "selective"}),
    "moments": ("llama3-8b", "bf16", {"dp": 4, "tp": 2, "pp": 2, "moment_precision": "bf16"}),
}
# Facts that a stack does not list, and may be set.
OTHERS = [
    ("megatron-core", "recompute_stops_early false|true"),
    ("torchtitan@0.2", "recompute_stops_early false|true"),
    ("torchtitan@0.2", "fp8.keeps_attention_output false|true"),
    ("torchtitan@0.2", "parameter_remainders false|true"),
    ("torchtitan@0.2", "grouped_experts true|false"),
    ("ddp", "overlap_gradient_reduce true|false"),
]
LISTED = [
    (stack, switch)
    for stack in ("ddp", "fsdp", "megatron-core", "torchtitan@0.2")
    for switch in load_stack(stack).switches
]
SWITCHES = [
    pytest.param(stack, key, values.replace("FACTOR", "1.25").split("|"), id=f"{stack}-{key}")
    for stack, switch in (*LISTED, *OTHERS)
    for key, _, values in [switch.partition(" ")]
]
# Its time is that of the host, for which dense layers do not wait.
UNSEEN = "cuda_graphs"


def step_of(plan: str, stack: str, *switches: str) -> StepResult | None:
    """Return the step of a plan; None where the stack refuses it."""
    model, precision, fields = PLANS[plan]
    job = TrainingJob(
        model=load_model(model),
        global_batch_size=16,
        seq_len=1024,
        precision=Precision(precision),
    )
    try:
        _, profile = with_facts(CLUSTER, load_stack(stack), switches)
        return simulate(job, ParallelPlan(**fields), CLUSTER, profile)
    except (PlanError, ProfileError):
        return None


@cache
def numbers(plan: str, stack: str, *switches: str) -> tuple[object, ...] | None:
    """Return what a switch may move, and whether it is said to move nothing."""
    step = step_of(plan, stack, *switches)
    if step is None:
        return None
    told = any(f"{each} has no effect" in said for each in switches for said in step.warnings)
    memory = step.memory
    sizes = memory.peak_bytes, memory.reserved_bytes, memory.device_bytes
    return (*sizes, step.step_ps, tuple(step.breakdown_ps.items())), told


@pytest.mark.parametrize(("stack", "key", "values"), SWITCHES)
def test_a_switch_moves_a_number_or_says_that_it_has_no_effect(
    stack: str, key: str, values: list[str]
) -> None:
    beside = ("cuda_graphs=layers",) if key == "cuda_graph_impl" else ()
    found = {}
    for plan in PLANS:
        usual = numbers(plan, stack, *beside)
        for value in values[len(values) > 1 :]:
            other = numbers(plan, stack, *beside, f"{key}={value}")
            if usual is not None and other is not None:
                found[plan, value] = usual[0] != other[0], not other[1]
    assert found
    wrong = {each: moves for each, (moves, is_used) in found.items() if moves != is_used}
    assert {each: moves for each, moves in wrong.items() if moves or key != UNSEEN} == {}
