"""A step built from a plan: compute, messages, reductions and memory of each rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import product
from typing import NamedTuple

from meshwright.hwprofiles import CudaGraphs, Source, StackProfile
from meshwright.simulator.blocks import (
    BlockShape,
    extra_weight_bytes,
    num_rope_caches,
    rope_cache_bytes,
)
from meshwright.simulator.costs import Cost, CostModel, PhaseCost
from meshwright.simulator.engine import StepWork, check_passes
from meshwright.simulator.layout import REPLICATED, ResolvedPlan, Stage, TrainingJob
from meshwright.simulator.ledger import StepPoint, StepSetting, sums_first
from meshwright.simulator.memory import (
    PipelinePosition,
    RankMemory,
    RankStates,
    ReallocatedGradients,
    VirtualStageMemory,
    block_bytes,
    dummy_gradient_bytes,
    overlapped_pass_bytes,
    rank_memory,
    stage_messages,
    virtual_stage_memory,
    with_copies,
)
from meshwright.simulator.replication import (
    blocks_of,
    narrow_shard_bytes,
    parameters_by_group,
    shards_of,
)
from meshwright.simulator.schedules import Phase, get_schedule
from meshwright.simulator.step.activations import activation_host_bytes
from meshwright.simulator.step.beside import exchange_source
from meshwright.simulator.step.offload import (
    HostSide,
    offloaded_memory,
    rank_host_bytes,
)
from meshwright.simulator.step.rank import (
    PricedRank,
    StepContext,
    price_ranks,
)
from meshwright.simulator.step.sharing import PassSharing
from meshwright.simulator.units import ParameterBytes, PassBytes, holds_units, unit_rank_memory

PPM = 1_000_000


class TimeSources(NamedTuple):
    """Sources of the times of p2p messages, data-parallel collectives and host copies.

    And of the expert all-to-alls that another microbatch overlaps.
    """

    messages: Source
    replicas: Source
    host: Source
    exchanges: Source


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltStep:
    """A step ready to simulate, with the costs and memory that its report needs.

    ``virtual_stage_costs``, ``update_costs``, ``closing_costs`` (the closing entries of the ledger
    by moment), ``memory`` and ``host_shares`` have one entry for each pipeline rank; the last is
    the share of host copies in a rank's waits on its data-parallel stream.
    """

    setting: StepSetting
    work: StepWork
    evidence: TimeSources
    virtual_stage_costs: tuple[tuple[Mapping[Phase, PhaseCost], ...], ...]
    update_costs: tuple[PhaseCost, ...]
    closing_costs: tuple[Mapping[StepPoint, Cost], ...]
    memory: tuple[RankMemory, ...]
    host_shares: tuple[Fraction, ...]


def overhead_per_million(stack: StackProfile) -> int:
    """Return the step overhead of *stack* in the engine's unit, per million."""
    return round(stack.step_overhead_fraction * PPM)


def build_step(job: TrainingJob, plan: ResolvedPlan, costs: CostModel) -> BuiltStep:
    """Return the step of *plan*, ready to simulate; *costs* may be shared between plans."""
    setting = StepSetting.of(job, plan, costs.stack, costs.cluster.devices_per_node)
    host = HostSide(costs, setting.wire, setting.state, setting.replication)
    shape, table = setting.shape, costs.blocks
    late = ReallocatedGradients.of(table, shape, setting.state.gradient)
    kinds = (kind for stage in setting.parts for kind, _ in stage.passes)
    blocks = block_bytes(table, shape, others=kinds)
    context = StepContext(setting, costs, blocks, host, late)
    by_rank = tuple(setting.rank_stages(pp_rank) for pp_rank in range(plan.pp))
    # Equal ranks share one record: sizes depend on the stages alone.
    memory = _memory(context, tuple(dict.fromkeys(by_rank)))
    ranks = price_ranks(context)
    return BuiltStep(
        setting=setting,
        work=_step_work(context, ranks),
        evidence=_evidence(context, ranks),
        virtual_stage_costs=tuple(tuple(map(context.pass_costs, stages)) for stages in by_rank),
        update_costs=tuple(rank.exchanges.update for rank in ranks),
        closing_costs=tuple(rank.exchanges.closing for rank in ranks),
        memory=tuple(
            _at_rank(context, memory[stages], pp_rank) for pp_rank, stages in enumerate(by_rank)
        ),
        host_shares=tuple(
            rank.exchanges.host_share(setting, pp_rank) for pp_rank, rank in enumerate(ranks)
        ),
    )


def _evidence(context: StepContext, ranks: Sequence[PricedRank]) -> TimeSources:
    """Return the sources of a step's times; equal ranks have the same."""
    costs, setting = context.costs, context.setting
    crosses = setting.plan.pp > 1 and setting.mesh.crosses_nodes(0, setting.plan.pp - 1)
    size_bytes = stage_messages(context.blocks, setting.stages[0]).output
    message = costs.message(size_bytes, crosses_nodes=crosses)
    link = costs.cluster.host_link
    host = Source.DATASHEET if link is None else link.kind  # without a link nothing is copied
    exchanges = exchange_source(costs, setting)
    return TimeSources(message.transfer.source, ranks[0].exchanges.source, host, exchanges)


def _step_work(context: StepContext, ranks: Sequence[PricedRank]) -> StepWork:
    """Return the engine's input: work of each rank, action lists and options of the runtime."""
    setting, stack = context.setting, context.costs.stack
    plan, replication = setting.plan, setting.replication
    schedule = plan.schedule_of(stack.pipeline_runtime)
    messages_cross = plan.pp > 1 and setting.mesh.crosses_nodes(0, plan.pp - 1)
    overlaps = (
        stack.overlap_gradient_reduce or stack.overlap_parameter_gather or replication.gathers_units
    )
    size = plan.pp, setting.num_microbatches, plan.num_virtual_stages
    overlaps_passes = plan.expert_overlap is not None
    if schedule.warmup is None:  # nothing of it comes again: all of it is run
        check_passes(plan.num_stages, setting.num_microbatches)
    return StepWork(
        ranks=tuple(rank.work for rank in ranks),
        actions=schedule.actions(*size),
        pairs=tuple(schedule.pairs(rank, *size) for rank in range(plan.pp))
        if overlaps_passes
        else (),
        num_microbatches=setting.num_microbatches,
        blocking_messages=not stack.overlap_p2p,
        # Both through the node's cards, or both inside it: else they use different links.
        shared_port=overlaps and setting.mesh.span(*REPLICATED).crosses_nodes == messages_cross,
        prefetches=stack.prefetches_units,
        keeps_units=replication.keeps_units,
        sums_first=sums_first(stack),
        norm_ps=max(
            sum(rank.exchanges.closing[each].time_ps for each in (StepPoint.TOKENS, StepPoint.NORM))
            for rank in ranks
        ),
        overhead_per_million=overhead_per_million(stack),
    )


def _memory(
    context: StepContext, ranks: tuple[tuple[Stage, ...], ...]
) -> dict[tuple[Stage, ...], RankMemory]:
    """Return the memory of each of *ranks* by its virtual stages."""
    if holds_units(context.setting.shape, context.setting.replication):
        keeps = any(stage.checkpoints.keeps_layers for stage in context.setting.stages)
        passes = PassBytes.of(context.costs.blocks, context.setting.shape, keeps_layers=keeps)
        return {stages: _memory_of_units(context, stages, passes) for stages in ranks}
    passes_of = {stage: _stage_memory(context, stage) for stage in context.setting.parts}
    return {
        stages: _memory_of_stages(context, stages, tuple(passes_of[stage] for stage in stages))
        for stages in ranks
    }


def _at_rank(context: StepContext, memory: RankMemory, pp_rank: int) -> RankMemory:
    """Return the memory of stages at a pipeline rank, whose position decides its p2p buffers."""
    plan = context.setting.plan
    # Buffers kept alive while passes overlap (combined_1f1b.py) are not modelled.
    if plan.pp == 1 or plan.expert_overlap is not None or not context.costs.stack.holds_messages:
        return memory
    return replace(memory, p2p_position=PipelinePosition(pp_rank, plan.pp))


def _memory_of_units(
    context: StepContext, stages: tuple[Stage, ...], passes: PassBytes
) -> RankMemory:
    """Return the memory of a rank whose states are FSDP units."""
    shape = context.setting.shape
    microbatches = context.setting.num_microbatches
    parameter = ParameterBytes(context.host.state, context.setting.wire.reduce_bytes)
    replication = context.setting.replication.in_steps_of(microbatches)
    memory = unit_rank_memory(shape, passes, stages, replication, parameter)
    # Pipeline runtimes hold the batch of all microbatches.
    memory = replace(
        memory,
        buffers_bytes=microbatches * memory.buffers_bytes + _rope_cache_bytes(shape, stages),
        keeps_sent_buffers=get_schedule(context.setting.plan.schedule).keeps_sent_buffers,
    )
    memory = _offloaded(context, memory, stages)
    # fp8 copies of weights stay on the device when the rest is offloaded: they come after.
    return with_copies(memory, extra_weight_bytes(shape, blocks_of(stages)))


def _rope_cache_bytes(shape: BlockShape, stages: tuple[Stage, ...]) -> int:
    """Return the RoPE cos/sin caches that layers of *stages* share."""
    return rope_cache_bytes(shape) * num_rope_caches(shape.trained, stages)


def _stage_memory(context: StepContext, stage: Stage) -> VirtualStageMemory:
    """Return the memory of a pass through *stage*, with that of data parallelism."""
    setting, blocks = context.setting, context.blocks
    alone = virtual_stage_memory(setting.shape, stage, blocks)
    parts = setting.parts[stage]
    return _sharing(context).added_to(alone, setting.shape, stage, blocks, parts, context.late)


def _sharing(context: StepContext) -> PassSharing:
    return PassSharing(context.setting.replication, context.host.state, context.setting.wire)


def _memory_of_stages(
    context: StepContext,
    stages: tuple[Stage, ...],
    virtual_stages: tuple[VirtualStageMemory, ...],
) -> RankMemory:
    """Return the memory of a rank whose states are not FSDP units."""
    shape, replication = context.setting.shape, context.setting.replication
    parameters = parameters_by_group(shape, stages)
    states = (
        RankStates.of(count, context.host.state, holders.shards)
        for count, holders in parameters.by_holders(replication)
    )
    memory = rank_memory(reduce(RankStates.beside, states), virtual_stages)
    memory = _offloaded(context, memory, stages)
    blocks = blocks_of(stages)
    shared_buffers = dummy_gradient_bytes(shape, blocks) + _rope_cache_bytes(shape, stages)
    memory = replace(memory, buffers_bytes=memory.buffers_bytes + shared_buffers)
    memory = with_copies(memory, extra_weight_bytes(shape, blocks))
    if replication.has_flat_units:
        memory = with_copies(memory, narrow_shard_bytes(shape, blocks, *shards_of(replication)))
    if context.setting.plan.expert_overlap is not None:
        memory = replace(memory, overlapped_bytes=_pairs_bytes(context, stages))
    if shape.stack.cuda_graphs == CudaGraphs.WHOLE_STEP:
        # The graph's pool is not given back to what the update needs, nor that to the graph.
        buffers = memory.buffers_bytes + memory.update_temporary_bytes
        memory = replace(memory, buffers_bytes=buffers, update_temporary_bytes=0)
    if any(context.setting.parts[stage] for stage in stages):
        return memory
    # Reduced as one after the last pass, gradients are cast when activations are gone: the copy
    # takes the place of what the update needs, not of what a pass does.
    at_end = max(memory.update_temporary_bytes, _sharing(context).cast_bytes(sum(parameters)))
    return replace(memory, update_temporary_bytes=at_end)


def _pairs_bytes(context: StepContext, stages: tuple[Stage, ...]) -> dict[tuple[int, int], int]:
    """Return the bytes that overlapped passes through the virtual *stages* of a rank add."""
    by_stages = {
        (forward, backward): int(overlapped_pass_bytes(context.blocks, forward, backward))
        for forward, backward in product({*stages}, repeat=2)
    }
    indices = product(range(len(stages)), repeat=2)
    return {(f, b): by_stages[stages[f], stages[b]] for f, b in indices}


def _offloaded(context: StepContext, memory: RankMemory, stages: tuple[Stage, ...]) -> RankMemory:
    """Return *memory* with offloaded states and activations moved to the host."""
    setting, replication = context.setting, context.setting.replication
    count = setting.num_microbatches
    host_bytes = rank_host_bytes(setting.shape, stages, context.host.state, replication, count)
    memory = offloaded_memory(memory, replication, host_bytes)
    host_bytes = memory.host_bytes + activation_host_bytes(context.blocks, stages)
    return replace(memory, host_bytes=host_bytes)
