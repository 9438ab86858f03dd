"""From a plan to the work of a step: what each rank computes, sends, reduces and keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

from meshwright.hwprofiles import Offload, PipelineRuntime, Source, StackProfile
from meshwright.simulator.blocks import BlockShape, weight_copy_bytes
from meshwright.simulator.costs import CostModel, PhaseCost
from meshwright.simulator.engine import StepWork
from meshwright.simulator.layout import (
    Axis,
    Mesh,
    ParallelPlan,
    Stage,
    TrainingJob,
    model_stages,
    reshards_units,
    syncs_by_default,
)
from meshwright.simulator.memory import (
    RankMemory,
    StateBytes,
    VirtualStageMemory,
    block_bytes,
    rank_memory,
    stage_messages,
    virtual_stage_memory,
    with_copies,
    with_workspace,
)
from meshwright.simulator.replication import (
    Replication,
    WireBytes,
    bucket_cast_bytes,
    norm_cost,
    reduce_cost,
    reduced_parts,
    sum_layers,
    sum_parameters,
    sums_first,
    tensor_sums_cost,
    unit_shards,
)
from meshwright.simulator.schedules import (
    MOST_GATHERED,
    NO_REFETCHES,
    Refetches,
    count_refetches,
    get_schedule,
)
from meshwright.simulator.step.offload import (
    HostSide,
    host_share,
    offloaded_memory,
    unit_workspace_bytes,
)
from meshwright.simulator.step.rank import (
    StepContext,
    VirtualStageCost,
    rank_update,
    rank_works,
    virtual_stage_cost,
)
from meshwright.simulator.units import ParameterBytes, PassBytes, holds_units, unit_rank_memory

PPM = 1_000_000


class Evidence(NamedTuple):
    """What the times of stage messages, replicas' collectives, norm and host copies rest on.

    Likewise those of sums over tensor-parallel ranks at the end.
    """

    messages: Source
    data_parallel: Source
    sums: Source
    norm: Source
    host: Source


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltStep:
    """A step ready to simulate, with what its report needs.

    ``stages``, ``virtual_stage_costs``, ``update_costs`` and ``memory`` have one entry a pipeline
    rank; ``evidence`` is what the times of communication rest on, ``host_shares`` is how much of
    what ranks wait for on their data-parallel streams is copies from and to the host.
    """

    job: TrainingJob
    plan: ParallelPlan
    work: StepWork
    mesh: Mesh
    shape: BlockShape
    stages: tuple[tuple[Stage, ...], ...]
    evidence: Evidence
    virtual_stage_costs: tuple[tuple[VirtualStageCost, ...], ...]
    update_costs: tuple[PhaseCost, ...]
    memory: tuple[RankMemory, ...]
    host_shares: tuple[Fraction, ...]


def overhead_per_million(stack: StackProfile) -> int:
    """Return the step overhead of *stack* as the engine counts it, per million."""
    return round(stack.step_overhead_fraction * PPM)


def replication_of(plan: ParallelPlan, stack: StackProfile, mesh: Mesh) -> Replication:
    """Return the data-parallel side of *plan*.

    Shards lie on neighbouring data-parallel ranks, replicas of them further apart.
    """
    usual = syncs_by_default(stack, plan.zero_stage, plan.pp)
    replicas = plan.dp // plan.num_shards
    stride = mesh.stride(Axis.DP)
    return Replication.of(
        plan.zero_stage,
        mesh.span_of(stride, plan.num_shards),
        replica_span=mesh.span_of(stride * plan.num_shards, replicas) if replicas > 1 else None,
        reduces_each_microbatch=(
            usual if plan.sync_each_microbatch is None else plan.sync_each_microbatch
        ),
        parameter_gather=stack.parameter_gather,
    )._replace(
        reshards=reshards_units(plan, stack),
        offload=plan.offload,
        keeps_units=stack.root_unit and plan.pp > 1,
    )


def rank_refetches(
    plan: ParallelPlan, replication: Replication, pp_rank: int, num_microbatches: int
) -> list[Refetches]:
    """Return how often each virtual stage of a rank is gathered anew for want of room."""
    vpp = plan.num_virtual_stages
    if not replication.keeps_units or vpp <= MOST_GATHERED:
        return [NO_REFETCHES] * vpp
    schedule = get_schedule(plan.schedule, PipelineRuntime.PYTORCH)  # FSDP2's alone keeps units
    return count_refetches(schedule.rank_actions(pp_rank, plan.pp, num_microbatches, vpp), vpp)


def build_step(job: TrainingJob, plan: ParallelPlan, costs: CostModel) -> BuiltStep:
    """Return everything a simulation of *plan* needs; *costs* may be shared between plans."""
    stages = model_stages(job.model, plan.stages)
    stages_by_rank = [stages[pp_rank :: plan.pp] for pp_rank in range(plan.pp)]
    stages_once = tuple(dict.fromkeys(stages))
    context = _context(job, plan, costs, stages_once)
    passes = {stage: virtual_stage_cost(costs, context.shape, stage) for stage in stages_once}
    distinct = tuple(dict.fromkeys(stages_by_rank))
    memory = _memory(context, distinct)
    updates = {stages: rank_update(context, stages) for stages in distinct}
    work = _step_work(context, stages_by_rank, passes)
    return BuiltStep(
        job=job,
        plan=plan,
        work=work,
        mesh=context.mesh,
        shape=context.shape,
        stages=tuple(stages_by_rank),
        evidence=_evidence(context, stages_by_rank[0]),
        virtual_stage_costs=tuple(
            tuple(passes[stage] for stage in stages) for stages in stages_by_rank
        ),
        update_costs=tuple(updates[stages] for stages in stages_by_rank),
        memory=tuple(memory[stages] for stages in stages_by_rank),
        host_shares=tuple(
            host_share(
                context.host,
                context.parts,
                stages,
                work.ranks[pp_rank],
                work.num_microbatches,
                rank_refetches(plan, context.replication, pp_rank, work.num_microbatches),
            )
            for pp_rank, stages in enumerate(stages_by_rank)
        ),
    )


def _context(
    job: TrainingJob, plan: ParallelPlan, costs: CostModel, stages: tuple[Stage, ...]
) -> StepContext:
    node_size = costs.cluster.devices_per_node
    mesh = Mesh.of(plan, node_size)
    shape = BlockShape.of(job, plan, costs.stack)
    replication = replication_of(plan, costs.stack, mesh)
    wire = WireBytes.of(costs.stack, job.precision, plan)
    state = StateBytes.of(costs.stack, job.precision, plan.gradient_formats)
    return StepContext(
        job=job,
        plan=plan,
        costs=costs,
        shape=shape,
        mesh=mesh,
        wire=wire,
        replication=replication,
        blocks=block_bytes(costs.blocks, shape),
        host=HostSide(costs, wire, state, replication),
        parts={stage: reduced_parts(shape, stage, replication) for stage in stages},
    )


def _evidence(context: StepContext, stages: tuple[Stage, ...]) -> Evidence:
    costs, plan, shape = context.costs, context.plan, context.shape
    crosses = plan.pp > 1 and context.mesh.crosses_nodes(0, plan.pp - 1)
    message = costs.message(stage_messages(context.blocks, stages[0]).output, crosses_nodes=crosses)
    parameters = sum_parameters(shape, stages)
    reduce = reduce_cost(costs, parameters, context.wire, context.replication)
    link = costs.cluster.host_link
    host = Source.DATASHEET if link is None else link.kind  # without a link nothing is copied
    sums = tensor_sums_cost(costs, shape, stages, context.wire)
    norm = norm_cost(costs)
    return Evidence(message.transfer.source, reduce.source, sums.source, norm.source, host)


def _step_work(
    context: StepContext,
    stages_by_rank: Sequence[tuple[Stage, ...]],
    passes: dict[Stage, VirtualStageCost],
) -> StepWork:
    plan, costs, stack = context.plan, context.costs, context.costs.stack
    schedule = get_schedule(plan.schedule, stack.pipeline_runtime)
    num_microbatches = plan.num_microbatches(context.job)
    messages_cross = plan.pp > 1 and context.mesh.crosses_nodes(0, plan.pp - 1)
    overlaps = (
        stack.overlap_gradient_reduce
        or stack.overlap_parameter_gather
        or context.replication.gathers_units
    )
    return StepWork(
        ranks=rank_works(context, stages_by_rank, passes),
        actions=schedule.actions(plan.pp, num_microbatches, plan.num_virtual_stages),
        num_microbatches=num_microbatches,
        blocking_messages=not stack.overlap_p2p,
        # Both through the node's cards, or both inside it: else they use different links.
        shared_port=overlaps and context.mesh.span(Axis.DP).crosses_nodes == messages_cross,
        prefetches=stack.prefetches_units,
        keeps_units=context.replication.keeps_units,
        sums_first=sums_first(stack),
        norm_ps=norm_cost(costs).time_ps,
        overhead_per_million=overhead_per_million(stack),
    )


def _memory(
    context: StepContext, ranks: tuple[tuple[Stage, ...], ...]
) -> dict[tuple[Stage, ...], RankMemory]:
    """Return the memory of each of *ranks* by its virtual stages."""
    if holds_units(context.shape, context.replication):
        passes = PassBytes.of(context.costs.blocks, context.shape)
        return {stages: _memory_of_units(context, stages, passes) for stages in ranks}
    passes_of = {stage: _stage_memory(context, stage) for stage in context.parts}
    return {
        stages: _memory_of_stages(context, stages, tuple(passes_of[stage] for stage in stages))
        for stages in ranks
    }


def _memory_of_units(
    context: StepContext, stages: tuple[Stage, ...], passes: PassBytes
) -> RankMemory:
    shape = context.shape
    microbatches = context.plan.num_microbatches(context.job)
    parameter = ParameterBytes(context.host.state, context.wire.reduce_bytes)
    replication = context.replication.in_steps_of(microbatches)
    memory = unit_rank_memory(shape, passes, stages, replication, parameter)
    memory = replace(
        memory,
        message_buffers_bytes=microbatches * memory.message_buffers_bytes,
        holds_sent=get_schedule(context.plan.schedule).holds_sent,
    )
    memory = _offloaded(context, memory, stages)
    # fp8 copies of weights stay on the device when the rest is offloaded: they come after.
    return with_copies(memory, weight_copy_bytes(shape, sum_layers(stages)))


def _stage_memory(context: StepContext, stage: Stage) -> VirtualStageMemory:
    virtual_stage = virtual_stage_memory(context.shape, stage, context.blocks)
    if context.replication.in_units:
        units = [sum(part.buckets) for part in context.parts[stage]]
        virtual_stage = with_workspace(virtual_stage, unit_workspace_bytes(context.host, units))
    return _with_casts(context, stage, virtual_stage)


def _memory_of_stages(
    context: StepContext,
    stages: tuple[Stage, ...],
    virtual_stages: tuple[VirtualStageMemory, ...],
) -> RankMemory:
    shape, shards = context.shape, context.replication.shards
    num_parameters = sum_parameters(shape, stages)
    memory = rank_memory(num_parameters, context.host.state, virtual_stages, shards=shards)
    memory = _offloaded(context, memory, stages)
    memory = with_copies(memory, weight_copy_bytes(shape, sum_layers(stages)))
    if context.parts[stages[0]]:
        return memory
    # Reduced as one after the last pass, gradients are cast when activations are gone: the copy
    # takes the place of what the update needs, not of what a pass does.
    at_end = max(memory.update_temporary_bytes, _cast_bytes(context, num_parameters))
    return replace(memory, update_temporary_bytes=at_end)


def _offloaded(context: StepContext, memory: RankMemory, stages: tuple[Stage, ...]) -> RankMemory:
    """Return *memory* with what the plan keeps on the host moved there.

    A host that adds gradients to those of earlier microbatches holds one weight's beside the sum.
    """
    shape, replication = context.shape, context.replication
    arriving = 0
    again = replication.reduces_each_microbatch and context.plan.num_microbatches(context.job) > 1
    if replication.offload is Offload.PARAMETERS and again:
        shards = (unit_shards(shape, stage, replication.span.num_ranks) for stage in stages)
        arriving = max(chain.from_iterable(shards))
    num_parameters = sum_parameters(shape, stages)
    return offloaded_memory(context.host, memory, num_parameters, arriving=arriving)


def _with_casts(
    context: StepContext, stage: Stage, virtual_stage: VirtualStageMemory
) -> VirtualStageMemory:
    """Return *virtual_stage* with buckets of gradients that are cast for the wire, if any are."""
    parts = context.parts[stage]
    largest = max((size for part in parts for size in part.buckets), default=0)
    if not _cast_bytes(context, largest):
        return virtual_stage
    if context.replication.in_units:
        return with_workspace(virtual_stage, (0, _cast_bytes(context, largest)))
    needed = bucket_cast_bytes(
        context.blocks, stage, parts, lambda size: _cast_bytes(context, size)
    )
    backward = max(virtual_stage.backward_workspace_bytes, needed)
    return replace(virtual_stage, backward_workspace_bytes=backward)


def _cast_bytes(context: StepContext, num_parameters: int) -> int:
    """Return what holds gradients that are reduced together in another format than their own."""
    casts, replication = context.wire.casts, context.replication
    if casts is None or replication.dp == 1:
        return 0
    return casts.buffer_bytes(num_parameters, replication.shards.gradients)
