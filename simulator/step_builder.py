"""From a plan to the work of a step: what each rank computes, sends, reduces and keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hwprofiles import CollectiveOp, Source, StackProfile
from simulator.block_shape import BlockShape
from simulator.costs import Category, CostModel, PhaseCost
from simulator.data_parallel import (
    Replication,
    Stage,
    Wire,
    bucket_parameters,
    bucket_stages,
    gather_cost,
    norm_cost,
    part_parameters,
    reduce_cost,
    sharded_parts,
    sum_layers,
    sum_parameters,
    update_cost,
)
from simulator.engine import ChunkWork, Message, RankWork, Segment, StepWork, Unit
from simulator.fp8_casts import step_cast_bytes, weight_copy_bytes
from simulator.memory import (
    RankMemory,
    StateBytes,
    chunk_memory,
    rank_memory,
    sharded_workspace_bytes,
    with_workspace,
)
from simulator.mesh import Axis, GroupSpan, Mesh
from simulator.plan import ParallelPlan, TrainingJob
from simulator.schedules import get_schedule

PPM = 1_000_000


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """Cost of one forward and one backward pass through a virtual stage."""

    forward: PhaseCost
    backward: PhaseCost


class Evidence(NamedTuple):
    """What the times of stage messages, of replicas' collectives and of the norm rest on."""

    messages: Source
    replicas: Source
    norm: Source


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltStep:
    """A step ready to simulate, with what its report needs.

    ``stages``, ``chunk_costs``, ``update_costs`` and ``memory`` have one entry a pipeline rank;
    ``evidence`` is what the times of communication rest on.
    """

    job: TrainingJob
    plan: ParallelPlan
    work: StepWork
    mesh: Mesh
    shape: BlockShape
    stages: tuple[tuple[Stage, ...], ...]
    evidence: Evidence
    chunk_costs: tuple[tuple[ChunkCost, ...], ...]
    update_costs: tuple[PhaseCost, ...]
    memory: tuple[RankMemory, ...]


@dataclass(frozen=True, slots=True)
class _Context:
    """What every part of one plan's step is built from."""

    job: TrainingJob
    plan: ParallelPlan
    costs: CostModel
    shape: BlockShape
    mesh: Mesh
    wire: Wire
    replication: Replication


def overhead_per_million(stack: StackProfile) -> int:
    """Return the step overhead of *stack* as the engine counts it, per million."""
    return round(stack.step_overhead_fraction * PPM)


def rank_stages(plan: ParallelPlan, pp_rank: int) -> tuple[Stage, ...]:
    """Return the virtual stages of a pipeline rank: ``r, p + r, 2 p + r, ...``."""
    last = plan.num_stages - 1
    return tuple(
        Stage(plan.stages[index], index == 0, index == last)
        for index in range(pp_rank, plan.num_stages, plan.pp)
    )


def chunk_cost(costs: CostModel, shape: BlockShape, stage: Stage) -> ChunkCost:
    """Return the cost of a pass through *stage*."""
    layer = costs.block_cost(shape, "layer")
    forward, backward = layer.forward * stage.num_layers, layer.backward * stage.num_layers
    if stage.has_embedding:
        embedding = costs.block_cost(shape, "embedding")
        forward, backward = forward + embedding.forward, backward + embedding.backward
    if stage.has_head:
        head = costs.block_cost(shape, "head")
        forward, backward = forward + head.forward, backward + head.backward
    return ChunkCost(forward, backward)


def message_between(
    costs: CostModel, shape: BlockShape, *, crosses_nodes: bool
) -> tuple[Message, PhaseCost]:
    """Return the message of one microbatch between two stages, and its time on the port.

    With scatter/gather each rank of a tensor-parallel group sends its part, which the
    receiving group gathers inside the node (Narayanan et al. 2021, section 4.1).
    """
    size_bytes = shape.message_bytes
    delay_ps = 0
    if costs.stack.scatter_gather_p2p and shape.tp > 1 and not shape.sequence_parallel:
        span = costs.tp_span(shape.tp)
        gather = costs.collective(CollectiveOp.ALL_GATHER, size_bytes, span, Axis.TP)
        delay_ps = gather.time_ps
        size_bytes = -(-size_bytes // shape.tp)
    cost = costs.message(size_bytes, crosses_nodes=crosses_nodes)
    message = Message(cost.transfer.time_ps, cost.latency.time_ps + delay_ps)
    return message, PhaseCost.total([(Category.PP_COMM, cost.transfer)])


def replication_of(plan: ParallelPlan, stack: StackProfile, mesh: Mesh) -> Replication:
    """Return the data-parallel side of *plan*.

    In a pipeline gradients stay whole until the last microbatch, whatever the stage.  Shards lie
    on neighbouring data-parallel ranks, replicas of them further apart.
    """
    replicas = plan.dp // plan.num_shards
    stride = mesh.stride(Axis.DP)
    return Replication.of(
        plan.zero_stage,
        mesh.span_of(stride, plan.num_shards),
        replica_span=mesh.span_of(stride * plan.num_shards, replicas) if replicas > 1 else None,
        reduces_each_microbatch=stack.reduces_each_microbatch and plan.pp == 1,
    )._replace(reshards=plan.reshard_after_forward)


def build_step(job: TrainingJob, plan: ParallelPlan, costs: CostModel) -> BuiltStep:
    """Return everything a simulation of *plan* needs; *costs* may be shared between plans."""
    node_size = costs.cluster.devices_per_node
    mesh = Mesh(tp=plan.tp, dp=plan.dp, pp=plan.pp, node_size=node_size)
    context = _Context(
        job=job,
        plan=plan,
        costs=costs,
        shape=BlockShape.of(job, plan, costs.stack),
        mesh=mesh,
        wire=Wire.of(costs.stack, job.precision),
        replication=replication_of(plan, costs.stack, mesh),
    )
    held = [rank_stages(plan, pp_rank) for pp_rank in range(plan.pp)]
    passes = {stage: chunk_cost(costs, context.shape, stage) for stages in held for stage in stages}
    distinct = tuple(dict.fromkeys(held))
    memory = {stages: _memory(context, stages) for stages in distinct}
    updates = {stages: _update(context, stages) for stages in distinct}
    return BuiltStep(
        job=job,
        plan=plan,
        work=_step_work(context, held, passes),
        mesh=mesh,
        shape=context.shape,
        stages=tuple(held),
        evidence=_evidence(context, held[0]),
        chunk_costs=tuple(tuple(passes[stage] for stage in stages) for stages in held),
        update_costs=tuple(updates[stages] for stages in held),
        memory=tuple(memory[stages] for stages in held),
    )


def _evidence(context: _Context, stages: tuple[Stage, ...]) -> Evidence:
    costs, plan, shape = context.costs, context.plan, context.shape
    crosses = plan.pp > 1 and context.mesh.crosses_nodes(0, plan.pp - 1)
    message = costs.message(shape.message_bytes, crosses_nodes=crosses)
    parameters = sum_parameters(shape, stages)
    reduce = reduce_cost(costs, parameters, context.wire, context.replication)
    return Evidence(message.transfer.source, reduce.source, norm_cost(costs).source)


def _step_work(
    context: _Context, held: Sequence[tuple[Stage, ...]], passes: dict[Stage, ChunkCost]
) -> StepWork:
    plan, costs, stack = context.plan, context.costs, context.costs.stack
    schedule = get_schedule(plan.schedule)
    num_microbatches = plan.num_microbatches(context.job)
    messages_cross = plan.pp > 1 and context.mesh.crosses_nodes(0, plan.pp - 1)
    overlaps = (
        stack.overlap_gradient_reduce
        or stack.overlap_parameter_gather
        or context.replication.gathers_units
    )
    return StepWork(
        ranks=_rank_works(context, held, passes),
        actions=schedule.actions(plan.pp, num_microbatches, plan.num_virtual_stages),
        num_microbatches=num_microbatches,
        blocking_messages=not stack.overlap_p2p,
        shared_port=overlaps and context.mesh.span(Axis.DP).crosses_nodes == messages_cross,
        prefetches=stack.prefetches_units,
        norm_ps=norm_cost(costs).time_ps,
        overhead_per_million=overhead_per_million(stack),
    )


def _rank_works(
    context: _Context, held: Sequence[tuple[Stage, ...]], passes: dict[Stage, ChunkCost]
) -> tuple[RankWork, ...]:
    """Return the work of each pipeline rank; equal ranks share one record."""
    known: dict[tuple[tuple[Stage, ...], tuple[Message, Message]], RankWork] = {}
    ranks = []
    for pp_rank, stages in enumerate(held):
        messages = (_message(context, pp_rank, 1), _message(context, pp_rank, -1))
        key = (stages, messages)
        if key not in known:
            known[key] = _rank_work(context, stages, messages, passes)
        ranks.append(known[key])
    return tuple(ranks)


def _rank_work(
    context: _Context,
    stages: tuple[Stage, ...],
    messages: tuple[Message, Message],
    passes: dict[Stage, ChunkCost],
) -> RankWork:
    plan, costs, stack = context.plan, context.costs, context.costs.stack
    parameters = sum_parameters(context.shape, stages)
    reduce = reduce_cost(costs, parameters, context.wire, context.replication)
    gather = gather_cost(costs, parameters, context.wire, context.replication)
    update = _update(context, stages)
    in_passes = bool(sharded_parts(context.shape, stages[0], context.replication))
    gathers_units = context.replication.gathers_units
    return RankWork(
        chunks=tuple(_chunk_work(context, stage, messages, passes[stage]) for stage in stages),
        reduce_ps=0 if stack.overlap_gradient_reduce or in_passes else reduce.time_ps,
        shared_embedding_ps=shared_embedding_ps(costs, context.shape, plan, context.mesh),
        optimizer_ps=update.time_ps,
        gather_ps=0 if stack.overlap_parameter_gather or gathers_units else gather.time_ps,
    )


def shared_embedding_ps(costs: CostModel, shape: BlockShape, plan: ParallelPlan, mesh: Mesh) -> int:
    """Return the all-reduce of a tied table's gradient between first and last pipeline rank."""
    if plan.pp == 1 or not shape.model.tied_embeddings:
        return 0
    wire = Wire.of(costs.stack, shape.precision)
    table_bytes = shape.local_vocab_size * shape.model.hidden_size * wire.reduce_bytes
    crosses = mesh.crosses_nodes(0, plan.pp - 1)
    span = GroupSpan(2, 2, 1) if crosses else GroupSpan(2, 1, 2)
    # Two ranks that meet after the pipeline has drained reach what a benchmark does: the times of
    # Zero Bubble (arXiv 2401.10241, 14.6B over two nodes) leave no room for the in-step share.
    return costs.collective(CollectiveOp.ALL_REDUCE, table_bytes, span, Axis.PP).time_ps


def _chunk_work(
    context: _Context, stage: Stage, messages: tuple[Message, Message], passed: ChunkCost
) -> ChunkWork:
    stack, replication = context.costs.stack, context.replication
    forward_message, backward_message = messages
    has_replicas = replication.dp > 1
    parts = sharded_parts(context.shape, stage, replication)
    gathers = stack.overlap_parameter_gather and replication.gather_op is not None
    gathers = gathers and has_replicas and not replication.gathers_units
    reduces = stack.overlap_gradient_reduce and has_replicas and not parts
    forward_units, backward_units = _units(context, stage, parts)
    return ChunkWork(
        forward_ps=passed.forward.time_ps,
        backward_ps=passed.backward.time_ps,
        forward_message=forward_message,
        backward_message=backward_message,
        gathers=_gathers(context, stage) if gathers else (),
        reductions=_reductions(context, stage) if reduces else (),
        forward_units=forward_units if replication.gathers_units else (),
        backward_units=backward_units,
        reduces_each_pass=replication.reduces_each_microbatch,
    )


def _units(
    context: _Context, stage: Stage, parts: list[Stage]
) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """Return the units of each forward pass in model order, and of each backward pass reversed."""
    costs, shape, to = context.costs, context.shape, context.replication
    forward, backward = [], []
    counts = part_parameters(shape, stage, parts) if parts else []
    for part, parameters in zip(parts, counts, strict=True):
        passed = chunk_cost(costs, shape, part)
        gather_ps = 0
        if to.gathers_units:
            gather_ps = gather_cost(costs, parameters, context.wire, to).time_ps
        reduce_ps = reduce_cost(costs, parameters, context.wire, to).time_ps
        forward.append(Unit(passed.forward.time_ps, gather_ps))
        regather_ps = gather_ps if to.reshards else 0
        backward.append(Unit(passed.backward.time_ps, regather_ps, reduce_ps))
    return tuple(forward), tuple(reversed(backward))


def _message(context: _Context, pp_rank: int, step: int) -> Message:
    """Return the message of a rank to the next one (*step* 1) or the previous one (-1)."""
    if context.plan.pp == 1:
        return Message()
    target = (pp_rank + step) % context.plan.pp
    crosses = context.mesh.crosses_nodes(min(pp_rank, target), max(pp_rank, target))
    return message_between(context.costs, context.shape, crosses_nodes=crosses)[0]


def _gathers(context: _Context, stage: Stage) -> tuple[Segment, ...]:
    """Return the first forward pass cut at its parameter buckets, in model order."""
    costs, shape = context.costs, context.shape
    return tuple(
        Segment(
            chunk_cost(costs, shape, part).forward.time_ps,
            gather_cost(costs, parameters, context.wire, context.replication).time_ps,
        )
        for part, parameters in zip(
            bucket_stages(shape, stage), bucket_parameters(shape, stage), strict=True
        )
    )


def _reductions(context: _Context, stage: Stage) -> tuple[Segment, ...]:
    """Return the last backward pass cut at its gradient buckets, last layers first."""
    costs, shape = context.costs, context.shape
    segments = [
        Segment(
            chunk_cost(costs, shape, part).backward.time_ps,
            reduce_cost(costs, parameters, context.wire, context.replication).time_ps,
        )
        for part, parameters in zip(
            bucket_stages(shape, stage), bucket_parameters(shape, stage), strict=True
        )
    ]
    return tuple(reversed(segments))


def _update(context: _Context, stages: tuple[Stage, ...]) -> PhaseCost:
    shape = context.shape
    parameters = sum_parameters(shape, stages)
    cast_bytes = step_cast_bytes(shape, sum_layers(stages))
    return update_cost(context.costs, parameters, context.wire, context.replication, cast_bytes)


def _memory(context: _Context, stages: tuple[Stage, ...]) -> RankMemory:
    shape, shards = context.shape, context.replication.shards
    state = StateBytes.of(context.costs.stack, context.job.precision)
    chunks = []
    for stage in stages:
        chunk = chunk_memory(
            shape, stage.num_layers, has_embedding=stage.has_embedding, has_head=stage.has_head
        )
        parts = sharded_parts(shape, stage, context.replication)
        if parts:
            units = part_parameters(shape, stage, parts)
            reshards = context.replication.reshards
            extra = sharded_workspace_bytes(units, state, shards, reshards=reshards)
            chunk = with_workspace(chunk, extra)
        chunks.append(chunk)
    copies = weight_copy_bytes(shape, sum_layers(stages))
    parameters = sum_parameters(shape, stages)
    return rank_memory(parameters, state, tuple(chunks), shards=shards, copies_bytes=copies)
