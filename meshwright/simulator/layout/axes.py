"""Parallel axes, each declared once: position in the rank order, divisibility, supporting stacks.

The mesh, plans, the command line, the search, tables and refusals read these declarations. A new
axis is a member of `Axis`, a line in `AXES` and a field of the plan.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from meshwright.hwprofiles import (
    ContextParallel,
    OffloadModule,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    counted,
)
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.model import ModelSpec


class Axis(StrEnum):
    """Axes of the device mesh, fastest first.

    Ranks are numbered as in Megatron-LM: tensor parallel varies fastest, then context, then data,
    then pipeline (Narayanan et al. 2021, section 3; tp-cp-ep-dp-pp of Megatron-Core).
    """

    TP = "tp"
    CP = "cp"
    DP = "dp"
    PP = "pp"


# Neighbouring axes along which ranks hold the same parameters: gradients are reduced, and states
# sharded, over both, as context-parallel ranks see parts of the same sequences.
REPLICATED = (Axis.CP, Axis.DP)
IN_STEP = (Axis.TP, Axis.CP)  # ranks that run the same microbatch in lockstep
# Numbers of ranks over several axes, as Megatron-Core calls their groups.
DP_CP, TP_CP = "dp_cp", "tp_cp"
# Ranks that divide the heads where context-parallel ones run Ulysses (all-to-all); else 0.
TP_CP_INNER = "tp_cp_inner"
JOINT_AXES: dict[str, tuple[str, ...]] = {
    DP_CP: REPLICATED,
    TP_CP: IN_STEP,
    TP_CP_INNER: (Axis.TP, "cp_inner"),
}


class ExpertAxis(StrEnum):
    """Axes of the expert mesh: the ranks of `Axis`, factored a second way.

    The ranks of a pipeline stage are ``etp x ep x edp``, fastest first (`RankGenerator` of
    megatron/core/parallel_state.py, core 0.16, order tp-cp-ep-dp-pp): neighbours split an expert's
    widths, then come ranks of other experts, then data-parallel ranks of the same experts.
    """

    ETP = "etp"
    EP = "ep"
    EDP = "edp"
    ALL = "etp-ep"
    """Ranks that together hold all experts of a layer."""


class ContextAxis(StrEnum):
    """Axes of hybrid context parallelism (ring + all-to-all): ``inner x outer`` ranks.

    Inner ranks run Ulysses; ranks at the same position of the inner groups run ring attention
    (`hierarchical_context_parallel_sizes`, the inner number first: `create_hierarchical_groups` of
    megatron/core/parallel_state.py, core 0.16).
    """

    INNER = "cp-inner"
    OUTER = "cp-outer"


MeshAxis: TypeAlias = Axis | ExpertAxis | ContextAxis


class ParallelAxis(NamedTuple):
    """Declaration of an axis.

    Args:
        title: Name of its degree.
        refusal: Reason a degree cannot split the tensors or the batch of a job; None if it can.
        most: Largest degree that a rule for stages can lay out; None without a limit.
        offered_by: Trait of the stacks that have the axis; None where all do.
        takes_rest: Whether its default degree is the devices over the other degrees.
        is_rare: Whether its degree is shown only where it is not 1.
    """

    title: str
    refusal: Callable[[TrainingJob, int], str | None]
    most: Callable[[TrainingJob], int] | None = None
    offered_by: str | None = None
    takes_rest: bool = False
    is_rare: bool = False


def near_multiples(number: int, step: int) -> str:
    """Return the multiples of *step* around *number* as a hint.

    >>> near_multiples(100, 32), near_multiples(5, 32)
    ('nearest: 96 or 128', 'nearest: 32')
    """
    below = number // step * step
    return f"nearest: {below} or {below + step}" if below else f"nearest: {step}"


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of *number* closest to *wanted*, the smaller of two equally close.

    >>> nearest_divisor(64, 12), nearest_divisor(64, 0)
    (8, 1)
    """
    wanted = max(1, wanted)
    below = next(n for n in range(wanted, 0, -1) if number % n == 0)
    # Only divisors that are closer than the one below.
    above = (n for n in range(wanted + 1, 2 * wanted - below) if number % n == 0)
    return next(above, below)


def _tensors_refusal(job: TrainingJob, degree: int) -> str | None:
    return job.model.split_refusal(degree)


def _batch_refusal(job: TrainingJob, degree: int) -> str | None:
    if job.global_batch_size % degree:
        return (
            f"global_batch_size={job.global_batch_size} is not divisible by dp={degree}; "
            f"{near_multiples(job.global_batch_size, degree)}"
        )
    return None


def _tokens_refusal(job: TrainingJob, degree: int) -> str | None:
    """Return the reason sequences cannot be split over *degree* ranks, or None.

    Under a causal mask each rank gets one early and one late of ``2 cp`` parts, which balances its
    work (Megatron-Core's
    `get_batch_on_this_cp_rank`, the load balancer of PyTorch's context_parallel).
    """
    if degree == 1:
        return None
    is_transformer = isinstance(job.model, ModelSpec)
    if not (isinstance(job.model, ModelSpec) and job.model.causal):
        lacks = "is not causal" if is_transformer else "has no attention"
        return f"cp={degree} does not go with {job.model.name}, which {lacks}; allowed: 1"
    if job.seq_len % (2 * degree):
        nearest = near_multiples(job.seq_len, 2 * degree)
        return f"seq_len={job.seq_len} is not divisible by 2 x cp={degree}; {nearest}"
    return None


def check_inner(cp: int, cp_type: ContextParallel | None, inner: int | None) -> None:
    """Raise PlanError unless *inner* is a size of Ulysses groups of *cp* ranks.

    >>> check_inner(8, ContextParallel.HYBRID_RING, 3)
    Traceback (most recent call last):
    meshwright.simulator.errors.PlanError: cp_inner=3 does not divide cp=8; nearest: 2
    """
    refusal = _inner_refusal(cp, cp_type, inner)
    if refusal is not None:
        raise PlanError(refusal)


def _inner_refusal(cp: int, cp_type: ContextParallel | None, inner: int | None) -> str | None:
    hybrid = ContextParallel.HYBRID_RING
    if cp_type is not hybrid:
        name = cp_type or "the stack's"
        refusal = f"cp_inner={inner} does not go with cp_type={name}; allowed: {hybrid}"
        return None if inner is None else refusal
    if inner is None:
        lacks = f"cp_type={hybrid} needs cp_inner; allowed: a divisor of cp={cp}"
        return lacks if cp > 1 else None
    if inner > 0 and cp % inner == 0:
        return None
    return f"cp_inner={inner} does not divide cp={cp}; nearest: {nearest_divisor(cp, inner)}"


def _no_refusal(_job: TrainingJob, _degree: int) -> str | None:
    return None


AXES: dict[Axis, ParallelAxis] = {
    Axis.TP: ParallelAxis(
        title="Tensor-parallel", refusal=_tensors_refusal, offered_by="tensor_parallel"
    ),
    Axis.CP: ParallelAxis(
        title="Context-parallel",
        refusal=_tokens_refusal,
        offered_by="context_parallel",
        is_rare=True,
    ),
    Axis.DP: ParallelAxis(title="Data-parallel", refusal=_batch_refusal, takes_rest=True),
    Axis.PP: ParallelAxis(
        title="Pipeline-parallel",
        refusal=_no_refusal,
        # Rules give each stage a layer; only an explicit list may leave one empty.
        most=lambda job: job.model.num_layers,
        offered_by="pipeline_parallel",
    ),
}


def divides(job: TrainingJob, axis: Axis, degree: int) -> bool:
    """Return True if *axis* can have *degree* in a layout of *job*."""
    declaration = AXES[axis]
    is_small_enough = declaration.most is None or degree <= declaration.most(job)
    return is_small_enough and declaration.refusal(job, degree) is None


def check_expert_degrees(ep: int, etp: int | None, tp: int, of_stage: int, of_shards: int) -> None:
    """Refuse expert degrees that do not divide the ranks of a stage and of a sharding group.

    Raises:
        PlanError: Naming the degrees.
    """
    if etp is not None and etp < 1:
        raise PlanError(f"etp must be >= 1, got {etp}")
    if ep == 1 and etp not in (None, tp):
        raise PlanError(f"etp={etp} does not go with ep=1; allowed: tp, which is {tp}")
    # Megatron-Core's default (expert_tensor_parallel_size of parallel_state.py) is tp.
    expert_tp = tp if etp is None else etp
    groups = {"of a stage": of_stage, "that have a set of shards between them": of_shards}
    for name, ranks in groups.items():
        if ep > 1 and ranks % (ep * expert_tp):
            fault = f"ep={ep} x etp={expert_tp} does not divide the {ranks} ranks {name}"
            if ranks % expert_tp:
                raise PlanError(f"{fault}; nearest: etp={nearest_divisor(ranks, expert_tp)}")
            raise PlanError(f"{fault}; nearest: ep={nearest_divisor(ranks // expert_tp, ep)}")


def check_modules(recompute: Recompute, modules: tuple[RecomputeModule, ...]) -> None:
    """Refuse modules to recompute without selective recomputation."""
    if modules and recompute is not Recompute.SELECTIVE:
        raise PlanError(
            f"recompute_modules={','.join(modules)} does not go with recompute={recompute}; "
            f"allowed: {Recompute.SELECTIVE}"
        )


def check_layers(recompute: Recompute, number: int | None, method: RecomputeMethod | None) -> None:
    """Refuse a number of layers to recompute without full recomputation."""
    if method is not None and number is None:
        raise PlanError(f"recompute_method={method} needs recompute_layers; allowed: a number")
    if number is not None and number < 1:
        raise PlanError(f"recompute_layers must be >= 1, got {number}")
    if number is not None and recompute is not Recompute.FULL:
        raise PlanError(
            f"recompute_layers={number} does not go with recompute={recompute}; "
            f"allowed: {Recompute.FULL}"
        )


def check_offloaded(number: int | None, modules: tuple[OffloadModule, ...]) -> None:
    """Refuse activation offloading of no layers, and of layers together with modules."""
    if number is not None and number < 1:
        raise PlanError(f"offload_layers must be >= 1, got {number}")
    if number is not None and modules:
        raise PlanError(
            f"offload_layers={number} does not go with offload_modules={','.join(modules)}; "
            "allowed: one of them (TransformerConfig of Megatron-Core 0.16 to 0.19)"
        )


def recomputed_modules(
    recompute: Recompute, modules: tuple[RecomputeModule, ...]
) -> tuple[RecomputeModule, ...]:
    """Return the modules that are recomputed; selective recomputation defaults to attention."""
    default = (RecomputeModule.CORE_ATTN,) if recompute is Recompute.SELECTIVE else ()
    return modules or default


def check_stages(stages: tuple[int, ...], pp: int, num_virtual_stages: int) -> None:
    """Refuse a list of layers of another number of stages than the plan's, or without layers.

    Raises:
        PlanError: Naming the numbers.
    """
    if stages and len(stages) != pp * num_virtual_stages:
        raise PlanError(
            f"stages lists {counted(len(stages), 'stage')}; the plan has "
            f"pp={pp} x vpp={num_virtual_stages} = {pp * num_virtual_stages}"
        )
    if stages and (min(stages) < 0 or not any(stages)):
        raise PlanError(
            f"stages={','.join(map(str, stages))} are no layers; allowed: 0 or more on each, 1 or "
            "more in all"
        )
