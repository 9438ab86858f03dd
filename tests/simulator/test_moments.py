"""Adam's moments in other formats than fp32."""

from dataclasses import replace

import pytest

from meshwright.hwprofiles import (
    Attention,
    Offload,
    Precision,
    StackProfile,
    load_cluster,
    load_stack,
)
from meshwright.simulator import (
    PlanError,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.costs import Category
from meshwright.simulator.memory import StateBytes
from meshwright.simulator.replication import WireBytes

FP32, FP16, BF16, FP8, MXFP8 = (
    Precision(each) for each in ("fp32", "fp16", "bf16", "fp8", "mxfp8")
)
CLUSTER, STACK = load_cluster("dgx-h100"), load_stack("megatron-core")
JOB = TrainingJob(model=load_model("llama3-8b"), global_batch_size=16, seq_len=4096)
PLAN = ResolvedPlan(tp=2, dp=4, zero_stage=1, attention=Attention.FLASH, stages=(32,))


def ran(plan: ResolvedPlan, job: TrainingJob = JOB, stack: StackProfile = STACK) -> StepResult:
    return simulate(job, plan, CLUSTER, stack)


# Bytes of states and of copies in the update: the low half of the fp32 weight or all of it, twice
# the moment; a copy of both moments where they have a scale.
@pytest.mark.parametrize(
    ("training", "moments", "expected"),
    [
        (BF16, None, (12, 0)),
        (BF16, FP32, (2 + 8, 0)),
        (BF16, BF16, (2 + 4, 0)),
        (BF16, FP16, (2 + 4, 8)),
        (BF16, FP8, (2 + 2, 8)),
        (FP16, BF16, (4 + 4, 0)),
        (FP8, BF16, (4 + 4, 0)),
        (MXFP8, BF16, (4 + 4, 0)),
    ],
)
def test_states_take_what_their_formats_do(
    training: Precision, moments: Precision | None, expected: tuple[int, int]
) -> None:
    state = StateBytes.of(STACK, training, moments=moments)
    assert (state.optimizer, state.update_temporary) == expected


def test_gradients_in_bf16_are_not_copied_for_weights_in_bf16() -> None:
    half = replace(PLAN, gradient_precision=BF16)
    for training, copied in ((BF16, 0), (MXFP8, 4)):
        formats = half.gradient_formats
        assert StateBytes.of(STACK, training, formats, BF16).update_temporary == copied
        assert StateBytes.of(STACK, training, formats).update_temporary == 4


def test_a_shard_of_the_states_shrinks_and_nothing_else() -> None:
    usual, narrow = ran(PLAN), ran(replace(PLAN, moment_precision=BF16))
    before, after = (each.memory.by_stage[0] for each in (usual, narrow))
    assert after.optimizer_states_bytes * 12 == before.optimizer_states_bytes * 6
    assert after.peak_bytes - before.peak_bytes == (
        after.optimizer_states_bytes - before.optimizer_states_bytes
    )
    faster = {key for key in Category if usual.breakdown_ps[key] > narrow.breakdown_ps[key]}
    assert Category.OPTIMIZER in faster
    assert faster <= {Category.OPTIMIZER, Category.STEP_OVERHEAD}


def test_the_update_moves_what_it_reads_and_writes() -> None:
    usual, fp8 = (
        WireBytes.of(STACK, BF16, replace(PLAN, moment_precision=each)).update_traffic_bytes
        for each in (None, FP8)
    )
    # 28 bytes of gradient and states read and written, of which 16 are saved; both copies twice.
    assert (usual, fp8) == (42, 42 * 12 // 28 + 4 * 8)


def test_what_no_such_optimizer_does_is_refused() -> None:
    plan = replace(PLAN, moment_precision=BF16)
    with pytest.raises(PlanError, match="zero_stage=0; allowed: 1"):
        ran(replace(plan, zero_stage=0))
    with pytest.raises(PlanError, match="precision=fp32"):
        ran(plan, replace(JOB, precision=FP32))
    with pytest.raises(PlanError, match="allowed: fp32, fp16, bf16, fp8"):
        ran(replace(plan, moment_precision=MXFP8))
    with pytest.raises(PlanError, match="moment_precision=bf16 is not offered by stack torchtitan"):
        ran(replace(plan, tp=1, dp=8, zero_stage=3), stack=load_stack("torchtitan@0.2"))
    offloads = STACK.model_copy(update={"offload_modes": (Offload.NONE, Offload.OPTIMIZER)})
    with pytest.raises(PlanError, match="offload=optimizer; allowed: none"):
        ran(replace(plan, offload=Offload.OPTIMIZER), stack=offloads)
