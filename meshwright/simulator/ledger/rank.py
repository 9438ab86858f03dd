"""Ledger of a pipeline rank: collectives of its passes, of its replicas, and of its step's end."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.blocks import BlockTable, Collective, RingMessages
from meshwright.simulator.layout import (
    IN_STEP,
    Axis,
    ContextAxis,
    ExpertAxis,
    Stage,
    join_stages,
    reads_embedding,
)
from meshwright.simulator.ledger.closing import (
    batch_calls,
    expert_tokens,
    gradient_norm,
    tensor_sums,
    tied_embedding_sums,
    weight_scales,
)
from meshwright.simulator.ledger.collectives import LedgerEntry, StepCollective, StepPoint
from meshwright.simulator.ledger.messages import message_collectives
from meshwright.simulator.ledger.replicas import (
    Exchange,
    bucket_exchanges,
    gradient_reductions,
    parameter_gathers,
    rank_collectives,
    replica_sums,
    scale_maxima,
)
from meshwright.simulator.ledger.setting import StepSetting
from meshwright.simulator.memory import block_bytes, stage_messages
from meshwright.simulator.replication import (
    StagePart,
    bucket_parts,
    parameters_by_group,
    part_gathers,
    used_map_bytes,
)
from meshwright.simulator.schedules import NO_REFETCHES, Refetches


class RankLedger(NamedTuple):
    """Entries of each virtual stage's passes, parts in model order, and of the step's end."""

    virtual_stages: tuple[tuple[LedgerEntry, ...], ...]
    closing: tuple[LedgerEntry, ...]

    def at(self, moment: StepPoint) -> LedgerEntry:
        """Return the entry of a *moment* that closes the step."""
        return next(entry for entry in self.closing if entry.moment is moment)

    @property
    def entries(self) -> Iterator[LedgerEntry]:
        """All entries: those of passes, then those that close the step."""
        return chain(*self.virtual_stages, self.closing)


def rank_ledger(setting: StepSetting, pp_rank: int) -> RankLedger:
    """Return the ledger of a pipeline rank."""
    stages = setting.rank_stages(pp_rank)
    passes = list(zip(stages, setting.refetches(pp_rank), strict=True))
    # Equal stages share their entries: most of a deep pipeline's do.
    entries = {each: stage_entries(setting, *each) for each in dict.fromkeys(passes)}
    return RankLedger(
        tuple(entries[each] for each in passes), tuple(closing_entries(setting, stages))
    )


def pass_entries(setting: StepSetting, blocks: BlockTable, pp_rank: int) -> Iterator[LedgerEntry]:
    """Yield the collectives between operators of a rank's passes, and the messages it sends.

    Times of the former are part of the passes' times, from the same walk through each block; of
    messages a rank receives as many of each size.
    """
    shape, mesh, count = setting.shape, setting.mesh, setting.num_microbatches
    spans = {axis: mesh.span(axis) for axis in (*IN_STEP, *ContextAxis, *ExpertAxis)}
    kinds = (kind for stage in setting.stages for kind, _ in stage.contents)
    sizes = block_bytes(blocks, shape, others=kinds)
    # All neighbours alike: the first pair stands for the others.
    crosses = setting.plan.pp > 1 and mesh.crosses_nodes(0, 1)
    for stage in setting.rank_stages(pp_rank):
        part = StagePart(stage, ())
        for kind, num_blocks in stage.passes:
            operators = blocks.operators(shape, kind)
            calls = tuple(
                StepCollective(each.axis, op, size_bytes, spans[each.axis], num_blocks * num_calls)
                for each in (*operators.forward, *operators.recompute, *operators.backward)
                if isinstance(each, Collective | RingMessages)
                for op, size_bytes, num_calls in each.collectives
            )
            yield LedgerEntry(StepPoint.OPERATORS, part, calls, count)
        # A stage sends forward unless it is the last, and backward unless it is the first.
        for size_bytes in filter(None, stage_messages(sizes, stage)):
            calls = message_collectives(shape, size_bytes, spans[Axis.TP], crosses_nodes=crosses)
            yield LedgerEntry(StepPoint.MESSAGE, part, calls, count)


def stage_entries(
    setting: StepSetting, stage: Stage, refetches: Refetches = NO_REFETCHES
) -> tuple[LedgerEntry, ...]:
    """Return the data-parallel collectives of *stage*'s passes: gathers, then reductions."""
    replication, parts = setting.replication, setting.parts[stage]
    gathered: list[tuple[StagePart, int]] = []
    if replication.gathers_units:
        count = setting.num_microbatches
        gathered = [(part, part_gathers(part, replication, count, refetches)) for part in parts]
    elif setting.gathers_in_pass:
        # Gathered are shards alone, and what is reduced in buckets is cut likewise.
        shape, is_cut = setting.shape, setting.shape.stack.overlap_gradient_reduce
        bucket_list = parts if is_cut else bucket_parts(shape, stage, replication.dp_cp)
        gathered = [(part, 1) for part in bucket_list]
    unused = [
        (part._replace(gathers=part.unused), count)
        for count in (setting.num_microbatches,)
        for part in parts
        if any(part.unused)
    ]
    reduced = [(part, setting.num_reductions) for part in parts]
    summed = [(part, 1) for part in parts if replication.sums_replicas_last]
    return (
        *_part_entries(setting, StepPoint.GATHER, parameter_gathers, gathered),
        *_part_entries(setting, StepPoint.AHEAD, parameter_gathers, unused),
        *_part_entries(setting, StepPoint.REDUCE, gradient_reductions, reduced),
        *_part_entries(setting, StepPoint.REPLICAS, replica_sums, summed),
    )


def _part_entries(
    setting: StepSetting, moment: StepPoint, exchange: Exchange, parts: list[tuple[StagePart, int]]
) -> Iterator[LedgerEntry]:
    """Yield the *exchange* of each of *parts*, so many times each; layers share theirs."""
    by_sizes: dict[object, tuple[StepCollective, ...]] = {}
    for part, num_times in parts:
        if part.sizes not in by_sizes:
            wire, replication = setting.wire, setting.replication
            by_sizes[part.sizes] = bucket_exchanges(exchange, part, wire, replication)
        yield LedgerEntry(moment, part, by_sizes[part.sizes], num_times)


def closing_entries(setting: StepSetting, stages: tuple[Stage, ...]) -> Iterator[LedgerEntry]:
    """Yield the collectives that close the step of a rank with *stages*, by `StepPoint`."""
    shape, wire, replication = setting.shape, setting.wire, setting.replication
    parameters = parameters_by_group(shape, stages)
    closing = {
        StepPoint.PASSES_DONE: batch_calls(
            shape, setting.mesh.span(Axis.DP), setting.num_reductions
        ),
        StepPoint.SUMS: tensor_sums(shape, stages, wire, setting.mesh.span(Axis.TP)),
        StepPoint.TIED_TABLE: [],
        StepPoint.TOKENS: expert_tokens(shape, stages, setting.mesh),
        StepPoint.NORM: gradient_norm(shape, stages, setting.mesh, replication),
        StepPoint.UPDATED: scale_maxima(shape, stages, replication),
    }
    # Gradients that no pass has reduced are reduced at once, when passes are done.
    if not any(setting.parts[stage] for stage in stages):
        closing[StepPoint.PASSES_DONE] += rank_collectives(
            gradient_reductions, parameters, wire, replication
        )
    if setting.plan.find_unused:
        # After all buckets (DDP's reducer), so that nothing hides it.
        used = CollectiveOp.ALL_REDUCE, used_map_bytes(shape, stages), replication.span
        closing[StepPoint.PASSES_DONE].append(StepCollective(Axis.DP, *used))
    if any(each.has_embedding or reads_embedding(shape.trained, each) for each in stages):
        closing[StepPoint.TIED_TABLE] = tied_embedding_sums(shape, wire, setting.mesh, setting.plan)
    # Otherwise the next step's first forward gathers bucket by bucket, or units gather themselves.
    if not (shape.stack.overlap_parameter_gather or replication.gathers_units):
        closing[StepPoint.UPDATED] = rank_collectives(
            parameter_gathers, parameters, wire, replication
        )
    closing[StepPoint.UPDATED] += weight_scales(shape, stages, replication.span)
    # What closes a step is for all parameters of the rank.
    part = StagePart(join_stages(stages), (sum(parameters),))
    for moment, collectives in closing.items():
        yield LedgerEntry(moment, part, tuple(collectives))
