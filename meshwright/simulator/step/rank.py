"""What each rank of a step computes, sends and reduces, from the costs of its parts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.blocks import BlockShape, step_cast_bytes
from meshwright.simulator.costs import Cost, CostModel, PhaseCost
from meshwright.simulator.engine import Message, PassSegment, RankWork, UnitWork, VirtualStageWork
from meshwright.simulator.layout import Axis, GroupSpan, Mesh, ParallelPlan, Stage, TrainingJob
from meshwright.simulator.memory import BlockBytes, stage_messages
from meshwright.simulator.model import BlockKind
from meshwright.simulator.replication import (
    Replication,
    StagePart,
    WireBytes,
    bucket_parts,
    buffer_copies,
    gather_cost,
    reduce_cost,
    sum_layers,
    sum_parameters,
    tensor_sums_cost,
    tied_table_bytes,
    used_map_bytes,
)
from meshwright.simulator.step.offload import HostSide, copy_back_ps, part_copies, rank_update_cost


@dataclass(frozen=True, slots=True)
class VirtualStageCost:
    """Cost of one forward and one backward pass through a virtual stage."""

    forward: PhaseCost
    backward: PhaseCost


class Hops(NamedTuple):
    """Whether messages of a rank to the next one, and to the previous one, cross nodes."""

    forward: bool
    backward: bool


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every part of one plan's step is built from."""

    job: TrainingJob
    plan: ParallelPlan
    costs: CostModel
    shape: BlockShape
    blocks: Mapping[BlockKind, BlockBytes[int]]
    mesh: Mesh
    wire: WireBytes
    replication: Replication
    host: HostSide
    parts: dict[Stage, tuple[StagePart, ...]]


def virtual_stage_cost(costs: CostModel, shape: BlockShape, stage: Stage) -> VirtualStageCost:
    """Return the cost of a pass through *stage*."""
    forward = backward = PhaseCost()
    for kind, count in stage.blocks:
        block = costs.block_cost(shape, kind)
        forward, backward = forward + block.forward * count, backward + block.backward * count
    return VirtualStageCost(forward, backward)


def message_between(
    costs: CostModel, shape: BlockShape, size_bytes: int, *, crosses_nodes: bool
) -> Message:
    """Return the message of one microbatch between two stages.

    With scatter/gather each rank of a tensor-parallel group sends its part, which the
    receiving group gathers inside the node (Narayanan et al. 2021, section 4.1).
    """
    delay_ps = 0
    if costs.stack.scatter_gather_p2p and shape.tp > 1 and not shape.sequence_parallel:
        span = costs.tp_span(shape.tp)
        gather = costs.collective(CollectiveOp.ALL_GATHER, size_bytes, span, Axis.TP)
        delay_ps = gather.time_ps
        size_bytes = -(-size_bytes // shape.tp)
    cost = costs.message(size_bytes, crosses_nodes=crosses_nodes)
    return Message(cost.transfer.time_ps, cost.latency.time_ps + delay_ps)


def rank_update(context: StepContext, stages: tuple[Stage, ...]) -> PhaseCost:
    """Return the time of the optimizer of a rank that holds *stages*, casts of weights included."""
    parameters = sum_parameters(context.shape, stages)
    cast_bytes = step_cast_bytes(context.shape, sum_layers(stages))
    return rank_update_cost(context.host, parameters, cast_bytes)


def rank_works(
    context: StepContext,
    stages_by_rank: Sequence[tuple[Stage, ...]],
    passes: dict[Stage, VirtualStageCost],
) -> tuple[RankWork, ...]:
    """Return the work of each pipeline rank; equal ranks share one record."""
    known: dict[tuple[tuple[Stage, ...], Hops], RankWork] = {}
    ranks = []
    for pp_rank, stages in enumerate(stages_by_rank):
        hops = Hops(_crosses(context, pp_rank, 1), _crosses(context, pp_rank, -1))
        key = (stages, hops)
        if key not in known:
            known[key] = _rank_work(context, stages, hops, passes)
        ranks.append(known[key])
    return tuple(ranks)


def _used_ps(context: StepContext, stages: tuple[Stage, ...]) -> int:
    """Return the time of telling the other replicas which weights were used."""
    replication, costs = context.replication, context.costs
    if not context.plan.find_unused or replication.dp == 1:
        return 0
    size_bytes = used_map_bytes(context.shape, stages)
    return costs.collective(CollectiveOp.ALL_REDUCE, size_bytes, replication.span, Axis.DP).time_ps


def _rank_work(
    context: StepContext,
    stages: tuple[Stage, ...],
    hops: Hops,
    passes: dict[Stage, VirtualStageCost],
) -> RankWork:
    plan, costs, stack = context.plan, context.costs, context.costs.stack
    parameters = sum_parameters(context.shape, stages)
    reduce = reduce_cost(costs, parameters, context.wire, context.replication)
    gather = gather_cost(costs, parameters, context.wire, context.replication)
    update = rank_update(context, stages)
    back_ps = copy_back_ps(context.host, parameters)
    gathers_units = context.replication.gathers_units
    virtual_stages = {
        stage: _virtual_stage_work(context, stage, hops, passes[stage])
        for stage in dict.fromkeys(stages)
    }
    return RankWork(
        virtual_stages=tuple(virtual_stages[stage] for stage in stages),
        # Parts are reduced in passes; the map of used weights, if any, after all of them (DDP's
        # reducer), so that nothing hides it.
        reduce_ps=(0 if context.parts[stages[0]] else reduce.time_ps) + _used_ps(context, stages),
        sums_ps=tensor_sums_cost(costs, context.shape, stages, context.wire).time_ps,
        shared_embedding_ps=shared_embedding_ps(
            costs, context.shape, context.mesh, context.wire, plan.num_shards
        ),
        optimizer_ps=update.time_ps,
        gather_ps=back_ps
        + (0 if stack.overlap_parameter_gather or gathers_units else gather.time_ps),
    )


def shared_embedding_ps(
    costs: CostModel, shape: BlockShape, mesh: Mesh, wire: WireBytes, num_shards: int
) -> int:
    """Return the all-reduce of a tied table's gradient between first and last pipeline rank.

    Args:
        costs: Times of collectives.
        shape: Sizes of the blocks.
        mesh: Where the ranks are.
        wire: Bytes of a gradient on its way.
        num_shards: Data-parallel ranks over which fully_shard splits the table.
    """
    last = mesh.degree(Axis.PP) - 1
    if last == 0 or not shape.tied_parameters:
        return 0
    table_bytes = tied_table_bytes(shape, wire, num_shards)
    span = GroupSpan(2, 2, 1) if mesh.crosses_nodes(0, last) else GroupSpan(2, 1, 2)
    # Two ranks that meet after the pipeline has drained reach what a benchmark does: the times of
    # Zero Bubble (arXiv 2401.10241, 14.6B over two nodes) leave no room for the in-step share.
    return costs.collective(CollectiveOp.ALL_REDUCE, table_bytes, span, Axis.PP).time_ps


def _virtual_stage_work(
    context: StepContext, stage: Stage, hops: Hops, pass_cost: VirtualStageCost
) -> VirtualStageWork:
    stack, replication = context.costs.stack, context.replication
    messages = stage_messages(context.blocks, stage)
    parts = context.parts[stage]
    gathers = (
        stack.overlap_parameter_gather and replication.gather_op is not None and replication.dp > 1
    )
    forward_units, backward_units = _units(context, parts) if replication.in_units else ((), ())
    return VirtualStageWork(
        forward_ps=pass_cost.forward.time_ps,
        backward_ps=pass_cost.backward.time_ps,
        forward_message=_message(context, messages.output, crosses_nodes=hops.forward),
        backward_message=_message(context, messages.gradient, crosses_nodes=hops.backward),
        gathers=_gathers(context, stage) if gathers and not replication.gathers_units else (),
        reductions=() if replication.in_units else _reductions(context, parts),
        forward_units=forward_units if replication.gathers_units else (),
        backward_units=backward_units,
        reduces_each_pass=replication.reduces_each_microbatch,
    )


def _units(
    context: StepContext, parts: tuple[StagePart, ...]
) -> tuple[tuple[UnitWork, ...], tuple[UnitWork, ...]]:
    """Return the units of each forward pass in model order, and of each backward pass reversed."""
    replication = context.replication
    # Only then a pass finds sums of earlier ones, which have the format of the wire already.
    adds_up = (
        not replication.reduces_each_microbatch and context.plan.num_microbatches(context.job) > 1
    )
    forward, backward = [], []
    for part in parts:
        pass_cost = virtual_stage_cost(context.costs, context.shape, part.stage)
        copies = part_copies(context.host, part)
        gather_ps = copies.in_ps
        if replication.gathers_units:
            gather_ps += _buckets_ps(context, part, gather_cost)
        reduce_ps = _buckets_ps(context, part, reduce_cost) + copies.out_ps
        copied = buffer_copies(
            context.costs, sum(part.buckets), context.wire, replication, adds_up=adds_up
        )
        unit = UnitWork(
            pass_cost.forward.time_ps,
            gather_ps,
            unpack_ps=copied.unpack_ps,
            stays=part.stays or not replication.reshards,
        )
        forward.append(unit)
        backward.append(
            replace(
                unit,
                compute_ps=pass_cost.backward.time_ps,
                reduce_ps=reduce_ps,
                again_ps=copies.again_ps,
                pack_ps=copied.pack_ps,
            )
        )
    return tuple(forward), tuple(reversed(backward))


def _buckets_ps(
    context: StepContext,
    part: StagePart,
    cost: Callable[[CostModel, int, WireBytes, Replication], Cost],
) -> int:
    """Return the time of the collectives of a part, one bucket after the other."""
    counts = Counter(part.buckets)
    return sum(
        count * cost(context.costs, parameters, context.wire, context.replication).time_ps
        for parameters, count in counts.items()
    )


def _crosses(context: StepContext, pp_rank: int, step: int) -> bool:
    """Return whether the next rank (*step* 1), or the previous one (-1), is on another node."""
    # Round the ranks, as the virtual stages go: the last rank sends to the first one's next stage.
    target = (pp_rank + step) % context.plan.pp
    return context.mesh.crosses_nodes(min(pp_rank, target), max(pp_rank, target))


def _message(context: StepContext, size_bytes: int, *, crosses_nodes: bool) -> Message:
    """Return a message of *size_bytes*; none where there is nothing to send."""
    if size_bytes == 0:
        return Message()
    return message_between(context.costs, context.shape, size_bytes, crosses_nodes=crosses_nodes)


def _gathers(context: StepContext, stage: Stage) -> tuple[PassSegment, ...]:
    """Return the first forward pass cut at its parameter buckets, in model order."""
    return tuple(
        PassSegment(
            virtual_stage_cost(context.costs, context.shape, part.stage).forward.time_ps,
            _buckets_ps(context, part, gather_cost),
        )
        for part in bucket_parts(context.shape, stage, context.replication.dp)
    )


def _reductions(context: StepContext, parts: tuple[StagePart, ...]) -> tuple[PassSegment, ...]:
    """Return a backward pass cut where gradients are reduced, last layers first."""
    return tuple(
        PassSegment(
            virtual_stage_cost(context.costs, context.shape, part.stage).backward.time_ps,
            _buckets_ps(context, part, reduce_cost),
        )
        for part in reversed(parts)
    )
