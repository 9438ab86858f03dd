"""Prediction of one rank, in the terms in which a run is measured."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.hwprofiles import PS_PER_S, CollectiveOp, ContextParallel, LayerFact
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import ResolvedPlan, StageMemory, StepResult, simulate
from meshwright.simulator.account import (
    NO_TRAFFIC,
    HostTraffic,
    Traffic,
    closing_traffic,
    host_traffic,
    message_traffic,
    norm_calls,
    norm_ranks,
    norm_traffic,
    rank_flops,
    rank_traffic,
    token_traffic,
)
from meshwright.simulator.layout import Axis, ExpertAxis, Mesh, MeshAxis, context_parallel_type
from meshwright.simulator.ledger import NORM_BYTES
from meshwright.validate.ranks.measurement import ByteKind, CollectiveCount

SEND, RECEIVE = "send", "recv"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPrediction:
    """One rank's step: fields as in `RankMeasurement`.

    ``reserved_bytes`` is what the device's allocator is to hold for the peak, ``spread_bytes`` by
    how much the peak of this rank may be below that, which is of the rank of its stage with most.
    """

    rank: int
    flops: int
    collectives: tuple[CollectiveCount, ...]
    peak_bytes: int
    bytes_at_peak: dict[ByteKind, int]
    reserved_bytes: int
    step_time_s: float
    host_bytes: int = 0
    host_traffic: HostTraffic = NO_TRAFFIC
    spread_bytes: int = 0


def pipeline_rank(plan: ResolvedPlan, rank: int) -> int:
    """Return the pipeline rank of *rank*: ranks of one stage follow each other."""
    return rank // (plan.world_size // plan.pp)


def default_ranks(plan: ResolvedPlan) -> tuple[int, ...]:
    """Return one rank of each kind: first, last, and a middle one for each number of layers."""
    stride = plan.world_size // plan.pp
    chosen = {0: None, plan.pp - 1: None}
    seen: set[tuple[int, ...]] = set()
    for pp_rank in range(1, plan.pp - 1):
        layers = tuple(plan.stages[index] for index in range(pp_rank, plan.num_stages, plan.pp))
        if layers not in seen:
            seen.add(layers)
            chosen[pp_rank] = None
    return tuple(sorted(pp_rank * stride for pp_rank in chosen))


def capped(saved: SavedPlan, ranks: Iterable[int] = ()) -> SavedPlan:
    """Return the plan with the fewest microbatches in which *ranks*, or all, act as with more.

    Each holds as many passes at a time, and runs a forward pass after its first backward pass:
    beside the gradients, to which later passes add.
    """
    plan, job = saved.plan, saved.job
    schedule = plan.schedule_of(saved.stack.pipeline_runtime)
    whole, vpp = plan.num_microbatches(job), plan.num_virtual_stages
    shown = {min(pipeline_rank(plan, rank), plan.pp - 1) for rank in ranks} or range(plan.pp)

    def in_flight(count: int) -> list[int]:
        return [schedule.in_flight(rank, plan.pp, count, vpp) for rank in shown]

    def shows(count: int) -> bool:
        if schedule.refusal(plan.pp, count, vpp) is not None:
            return False
        return max(in_flight(count)) < count * vpp and in_flight(count) == in_flight(whole)

    few = next(filter(shows, range(2, whole)), whole)
    return replace(saved, job=replace(job, global_batch_size=few * plan.dp * plan.microbatch_size))


def without_dropout(saved: SavedPlan) -> SavedPlan:
    """Return the plan of a model without dropout: what real processes run, so losses compare."""
    model = saved.job.model.model_copy(update={"dropout": False})
    return replace(saved, job=replace(saved.job, model=model))


def predict_rank(saved: SavedPlan, rank: int) -> RankPrediction:
    """Return the prediction of *rank* in one step of a plan.

    Raises:
        PlanError: If the plan cannot be simulated.
    """
    return predict_ranks(saved, (rank,))[rank]


def predict_ranks(saved: SavedPlan, ranks: Iterable[int]) -> dict[int, RankPrediction]:
    """Return the predictions of some ranks.

    Ranks of a stage differ in their number, in what they send to their host, and in which tokens of
    a sequence they have: where these are shifted, or attended to in a window.

    Raises:
        PlanError: If the plan cannot be simulated, or cuts sequences in a way whose counts are held
            against no program.
    """
    result = simulate(saved.job, saved.plan, saved.cluster, saved.stack)
    of_kind: dict[tuple[int, int], RankPrediction] = {}
    predictions = {}
    for rank in ranks:
        kind = pipeline_rank(saved.plan, rank), _cp_rank(saved.plan, rank)
        if kind not in of_kind:
            of_kind[kind] = _predict(saved, result, rank)
        traffic = _host_traffic(saved, rank)
        predictions[rank] = replace(of_kind[kind], rank=rank, host_traffic=traffic)
    return predictions


def _predict(saved: SavedPlan, result: StepResult, rank: int) -> RankPrediction:
    job, plan, stack = saved.job, saved.plan, saved.stack
    pp_rank = pipeline_rank(plan, rank)
    memory = result.memory.by_stage[pp_rank]
    count, cp_rank = plan.num_microbatches(job), _cp_rank(plan, rank)
    return RankPrediction(
        rank=rank,
        flops=rank_flops(job, plan, stack, pp_rank, microbatches=count, cp_rank=cp_rank),
        collectives=_collectives(saved, rank),
        peak_bytes=memory.peak_bytes,
        bytes_at_peak=bytes_of(memory),
        reserved_bytes=result.memory.stage_reserved_bytes(memory),
        step_time_s=result.step_ps / PS_PER_S,
        host_bytes=memory.host_bytes,
        spread_bytes=_spread_bytes(saved, cp_rank),
    )


def _spread_bytes(saved: SavedPlan, cp_rank: int) -> int:
    """Return the bytes by which gradients of keys and values are below those of the last cp rank.

    In a window of gathered tokens: its tokens are in the middle, before the first ones are none.
    """
    job, plan = saved.job, saved.plan
    if context_parallel_type(plan, saved.stack) is not ContextParallel.ALL_GATHER:
        return 0
    model = job.transformer
    if LayerFact.WINDOW not in model.layer_facts(job.seq_len):
        return 0
    half = job.seq_len // (2 * plan.cp)

    def seen(of_rank: int) -> int:
        ends = half * (of_rank + 1), half * (2 * plan.cp - of_rank)
        return sum(min(half + model.window - 1, end) for end in ends)

    num_tokens = (seen(plan.cp - 1) - seen(cp_rank)) * plan.microbatch_size
    width = model.num_kv_heads * (model.query_head_dim + model.value_head_dim) // plan.tp
    return num_tokens * width * job.precision.num_bytes


def bytes_of(memory: StageMemory) -> dict[ByteKind, int]:
    """Return the bytes of each kind of a rank at its peak."""
    return {
        ByteKind.PARAMETERS: memory.parameters_bytes,
        ByteKind.GRADIENTS: memory.gradients_bytes,
        ByteKind.OPTIMIZER: memory.weights_bytes - memory.parameters_bytes,
        ByteKind.ACTIVATIONS: memory.activations_bytes + memory.buffers_bytes,
    }


def _host_traffic(saved: SavedPlan, rank: int) -> HostTraffic:
    plan = saved.plan
    shard = rank // plan.tp % plan.num_shards
    return host_traffic(saved.job, plan, saved.stack, pipeline_rank(plan, rank), shard)


def _cp_rank(plan: ResolvedPlan, rank: int) -> int:
    """Return the index of *rank* among those with which it shares sequences."""
    return rank // plan.tp % plan.cp


def _is_at_end(plan: ResolvedPlan, rank: int) -> bool:
    """Return True if *rank* is at an end of more than two context-parallel ranks."""
    return plan.cp > 2 and _cp_rank(plan, rank) in (0, plan.cp - 1)


def _around(saved: SavedPlan, passes: Iterable[Traffic], rank: int) -> Iterator[Traffic]:
    """Yield the messages of a ring, or with the neighbours that a rank has."""
    messages = (each for each in passes if each.op is CollectiveOp.P2P)
    for each in messages:
        # A rank at an end has one neighbour instead of two.
        is_half = each.shifts_tokens(saved.plan.microbatch_size) and _is_at_end(saved.plan, rank)
        yield each._replace(num_calls=each.num_calls // 2) if is_half else each


def _collectives(saved: SavedPlan, rank: int) -> tuple[CollectiveCount, ...]:
    job, plan, stack = saved.job, saved.plan, saved.stack
    pp_rank = pipeline_rank(plan, rank)
    sent, received = message_traffic(job, plan, stack, pp_rank)
    counted: Counter[tuple[str, str, int, int]] = Counter()
    passes = rank_traffic(job, plan, stack, pp_rank)
    around = [*_around(saved, passes, rank)]
    stage = stage_name(plan)
    for each in token_traffic(job, plan, stack, pp_rank):
        counted[stage, each.op.value, each.num_ranks, each.size_bytes] += each.num_calls
    calls: list[tuple[str | None, Iterable[Traffic]]] = [
        (None, [each for each in passes if each.op is not CollectiveOp.P2P]),
        (None, closing_traffic(job, plan, stack, pp_rank)),
        (None, norm_traffic(job, plan, stack, pp_rank)),
        (SEND, [*sent, *around]),
        (RECEIVE, [*received, *around]),
    ]
    for message, group in calls:
        for each in group:
            is_message = message is not None and each.op is CollectiveOp.P2P
            op, num_ranks = (message, 2) if is_message else (each.op.value, each.num_ranks)
            axis = group_name(each.axis, plan)
            counted[axis, str(op), num_ranks, each.size_bytes] += each.num_calls
    for norm, num_norms in () if stack.norm_by_axis else norm_calls(plan, stack).items():
        axis = norm_axis(plan, norm)
        counted[axis, CollectiveOp.ALL_REDUCE.value, norm, NORM_BYTES] += num_norms
    return tuple(
        sorted(
            CollectiveCount(*key, count) for key, count in counted.items() if count and key[2] > 1
        )
    )


def group_name(axis: MeshAxis, plan: ResolvedPlan) -> str:
    """Return the name of an axis' group: replicas that only share sequences are those of cp.

    Ranks that share experts may be those of another axis, whose name they have then.
    """
    if isinstance(axis, ExpertAxis):
        axis = _usual_axis(axis, plan)
    return Axis.CP.value if axis is Axis.DP and plan.dp == 1 < plan.cp else axis.value


def _usual_axis(axis: ExpertAxis, plan: ResolvedPlan) -> MeshAxis:
    """Return the axis of layers whose groups have the same ranks as those of experts, if any."""
    mesh = Mesh.of(plan)
    layer_axes = {
        (1, plan.tp): Axis.TP,
        (plan.tp, plan.num_shards): Axis.DP,
        (plan.tp, plan.cp): Axis.CP,
    }
    if plan.cp > 1:
        layer_axes |= {(plan.tp * plan.cp, plan.dp): Axis.DP}
    num_ranks = plan.expert_shards if axis is ExpertAxis.EDP else mesh.degree(axis)
    return layer_axes.get((mesh.stride(axis), num_ranks), axis)


def norm_axis(plan: ResolvedPlan, num_ranks: int) -> str:
    """Return the name of the group, of so many ranks, over which a gradient norm is summed."""
    if num_ranks != norm_ranks(plan):  # of all experts
        every = ExpertAxis.EP if plan.expert_tp == 1 else ExpertAxis.ALL
        several = "world" if num_ranks == plan.world_size else "expert parts"
        return several if plan.pp > 1 else group_name(every, plan)
    shards = plan.num_shards if plan.zero_stage else 1
    degrees = {Axis.TP: plan.tp, Axis.DP: shards, Axis.PP: plan.pp}
    axes = [axis for axis, degree in degrees.items() if degree > 1]
    if len(axes) == 1:  # replicas' ranks: all of them, or one HSDP shard group
        return group_name(axes[0], plan)
    ranks = norm_ranks(plan)
    default = "world" if ranks == plan.world_size else "parts"
    return default if plan.pp > 1 else _experts_name(plan, ranks) or default


def stage_name(plan: ResolvedPlan) -> str:
    """Return the name of the group of all ranks of a stage."""
    if plan.tp == 1 and plan.num_shards == plan.dp_cp:
        return group_name(Axis.DP, plan)
    if plan.dp_cp == 1:
        return Axis.TP.value
    if plan.tp == plan.cp == 1:  # of several HSDP shard groups
        return "batch"
    return _experts_name(plan, plan.tp * plan.dp_cp) or ("world" if plan.pp == 1 else "stage")


def _experts_name(plan: ResolvedPlan, num_ranks: int) -> str | None:
    """Return the name of the group of *num_ranks* neighbours that share all experts, if any."""
    mesh = Mesh.of(plan)
    axes = (ExpertAxis.EP, ExpertAxis.ALL) if plan.ep > 1 else ()
    return next((axis.value for axis in axes if mesh.degree(axis) == num_ranks), None)
