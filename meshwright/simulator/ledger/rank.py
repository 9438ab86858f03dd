"""The ledger of a pipeline rank: what its passes and its replicas exchange, and its step's end."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.blocks import BlockTable, Collective
from meshwright.simulator.layout import Axis, Stage, join_stages
from meshwright.simulator.ledger.closing import gradient_norm, tensor_sums, tied_table
from meshwright.simulator.ledger.collectives import LedgerEntry, Moment, StepCollective
from meshwright.simulator.ledger.replicas import (
    bucket_exchanges,
    gradient_reductions,
    parameter_gathers,
)
from meshwright.simulator.ledger.setting import StepSetting
from meshwright.simulator.replication import (
    StagePart,
    bucket_parts,
    part_gathers,
    sum_parameters,
    used_map_bytes,
)
from meshwright.simulator.schedules import NO_REFETCHES, Refetches


class RankLedger(NamedTuple):
    """The entries of each virtual stage's passes, parts in model order, and of the step's end."""

    virtual_stages: tuple[tuple[LedgerEntry, ...], ...]
    closing: tuple[LedgerEntry, ...]

    def at(self, moment: Moment) -> LedgerEntry:
        """Return the entry of a *moment* that closes the step."""
        return next(entry for entry in self.closing if entry.moment is moment)

    @property
    def entries(self) -> Iterator[LedgerEntry]:
        """All of them."""
        return chain(*self.virtual_stages, self.closing)


def rank_ledger(setting: StepSetting, pp_rank: int) -> RankLedger:
    """Return the ledger of a pipeline rank."""
    stages = setting.rank_stages(pp_rank)
    passes = zip(stages, setting.refetches(pp_rank), strict=True)
    return RankLedger(
        tuple(stage_entries(setting, stage, again) for stage, again in passes),
        tuple(closing_entries(setting, stages)),
    )


def pass_entries(setting: StepSetting, blocks: BlockTable, pp_rank: int) -> Iterator[LedgerEntry]:
    """Yield what the blocks of a pipeline rank exchange between their operators, in all passes.

    Their time is in that of the passes, which comes of the same walk through each block.
    """
    span = setting.mesh.span(Axis.TP)
    for stage in setting.rank_stages(pp_rank):
        for kind, count in stage.blocks:
            operators = blocks.operators(setting.shape, kind)
            calls = tuple(
                StepCollective(Axis.TP, each.op, each.size_bytes, span, count)
                for each in (*operators.forward, *operators.recompute, *operators.backward)
                if isinstance(each, Collective)
            )
            yield LedgerEntry(
                Moment.OPERATORS, StagePart(stage, ()), calls, setting.num_microbatches
            )


def stage_entries(
    setting: StepSetting, stage: Stage, refetches: Refetches = NO_REFETCHES
) -> tuple[LedgerEntry, ...]:
    """Return what replicas exchange in the passes of *stage*: all gathers, then all reductions."""
    replication, parts = setting.replication, setting.parts[stage]
    gathered: list[tuple[StagePart, int]] = []
    if replication.gathers_units:
        count = setting.num_microbatches
        gathered = [(part, part_gathers(part, replication, count, refetches)) for part in parts]
    elif setting.gathers_in_pass:
        # Gathered are shards alone, and what is reduced is cut likewise.
        gathered = [(part, 1) for part in bucket_parts(setting.shape, stage, replication.dp)]
    wire = setting.wire
    gathers = (
        LedgerEntry(
            Moment.GATHER,
            part,
            bucket_exchanges(parameter_gathers, part.buckets, wire, replication),
            num_times,
        )
        for part, num_times in gathered
    )
    reductions = (
        LedgerEntry(
            Moment.REDUCE,
            part,
            bucket_exchanges(gradient_reductions, part.buckets, wire, replication),
            setting.num_reductions,
        )
        for part in parts
    )
    return (*gathers, *reductions)


def closing_entries(setting: StepSetting, stages: tuple[Stage, ...]) -> Iterator[LedgerEntry]:
    """Yield what closes the step of a rank with *stages*, in the order of `Moment`."""
    shape, wire, replication = setting.shape, setting.wire, setting.replication
    whole = sum_parameters(shape, stages)
    closing = {
        Moment.PASSES_DONE: []
        if setting.parts[stages[0]]
        else gradient_reductions(whole, wire, replication),
        Moment.SUMS: tensor_sums(shape, stages, wire, setting.mesh.span(Axis.TP)),
        Moment.TIED_TABLE: [],
        Moment.NORM: [gradient_norm(setting.mesh.world_size, setting.mesh.node_size)],
        Moment.UPDATED: [],
    }
    if setting.plan.find_unused:
        # After all buckets (DDP's reducer), so that nothing hides it.
        used = CollectiveOp.ALL_REDUCE, used_map_bytes(shape, stages), replication.span
        closing[Moment.PASSES_DONE].append(StepCollective(Axis.DP, *used))
    if stages[0].has_embedding or stages[-1].has_head:
        closing[Moment.TIED_TABLE] = tied_table(shape, wire, setting.mesh, setting.plan.num_shards)
    if not (shape.stack.overlap_parameter_gather or replication.gathers_units):
        closing[Moment.UPDATED] = parameter_gathers(whole, wire, replication)
    part = StagePart(join_stages(stages), (whole,))
    for moment, collectives in closing.items():
        yield LedgerEntry(moment, part, tuple(collectives))
