"""Data-parallel communication of a rank in a step, and its update.

The engine runs it between the parts of passes, lower bounds are chains of it: both read it here.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from meshwright.hwprofiles import Offload, Source
from meshwright.simulator.costs import Cost, CostModel, PhaseCost
from meshwright.simulator.engine import UnitWork
from meshwright.simulator.layout import Stage
from meshwright.simulator.ledger import (
    LedgerEntry,
    StepPoint,
    StepSetting,
    closing_entries,
    price,
    stage_entries,
)
from meshwright.simulator.replication import (
    StagePart,
    buffer_copies,
    filled_parameters,
    part_gathers,
    updated_cast_bytes,
)
from meshwright.simulator.step.offload import (
    HostSide,
    UnitCopies,
    copy_back_ps,
    part_copies,
    rank_update_cost,
)

NOTHING = UnitWork(0)


class PartExchanges(NamedTuple):
    """Gathers and reductions of forward and backward passes through a part of a stage.

    Compute times of the part are left open. ``copies`` are the host copies among its times.
    """

    part: StagePart
    forward: UnitWork
    backward: UnitWork
    copies: UnitCopies = UnitCopies()


class StageExchanges(NamedTuple):
    """Data-parallel communication in passes through a virtual stage, parts in model order.

    Args:
        gathers: Parts of the first forward pass, where it overlaps with parameter gathers.
        reductions: Parts of backward passes that overlap with gradient reductions.
        units: Parts of each pass, where parameters or gradients are sharded.
        source: Source of the times of its reductions, if it has any.
    """

    gathers: tuple[PartExchanges, ...] = ()
    reductions: tuple[PartExchanges, ...] = ()
    units: tuple[PartExchanges, ...] = ()
    source: Source | None = None


class RankExchanges(NamedTuple):
    """Data-parallel communication of a rank's virtual stages, and the close of its step.

    Args:
        virtual_stages: Communication of each, in model order.
        closing: Cost of the closing entries of the ledger, by moment.
        update: Cost of the optimizer.
        copied_back_ps: Time beyond the update of copying parameters back from the host.
    """

    virtual_stages: tuple[StageExchanges, ...]
    closing: Mapping[StepPoint, Cost]
    update: PhaseCost
    copied_back_ps: int

    @property
    def source(self) -> Source:
        """Source of the times of gradient reductions."""
        sources = (each.source for each in self.virtual_stages if each.source is not None)
        return next(sources, self.closing[StepPoint.PASSES_DONE].source)

    @property
    def updated_ps(self) -> int:
        """Time between the update and the next step."""
        return self.copied_back_ps + self.closing[StepPoint.UPDATED].time_ps

    def host_share(self, setting: StepSetting, pp_rank: int) -> Fraction:
        """Return the share of host copies in a rank's data-parallel stream over a step.

        Exposed waits for that stream are split by it.
        """
        replication, count = setting.replication, setting.num_microbatches
        if replication.offload is Offload.NONE:
            return Fraction(0)
        host_ps, busy_ps = self.copied_back_ps, self.updated_ps
        refetches = setting.refetches(pp_rank)
        for stage, each in zip(self.virtual_stages, refetches, strict=True):
            for part, forward, backward, copies in stage.units:
                # The first reduction has no earlier gradients on the host to add to.
                gathers, accumulate_ps = 0, (count - 1) * copies.accumulate_ps
                if replication.gathers_units:
                    gathers = part_gathers(part, replication, count, each)
                reductions = setting.num_reductions
                host_ps += gathers * copies.in_ps + reductions * copies.out_ps + accumulate_ps
                busy_ps += gathers * (forward.gather_ps + forward.unpack_ps) + accumulate_ps
                busy_ps += reductions * (backward.reduce_ps + backward.pack_ps)
        return Fraction(host_ps, busy_ps)


def rank_exchanges(
    setting: StepSetting,
    side: HostSide,
    stages: tuple[Stage, ...],
    known: dict[Stage, StageExchanges],
) -> RankExchanges:
    """Return the communication of a rank that holds *stages*, with that of *known* ones reused.

    All ranks of settings that differ in their stages alone may share *known*.
    """
    costs, shape, replication = side.costs, setting.shape, setting.replication
    for stage in dict.fromkeys(stages):
        if stage not in known:
            known[stage] = _stage_exchanges(setting, side, stage)
    entries = [*closing_entries(setting, stages)]
    cast_bytes = updated_cast_bytes(shape, stages, replication)
    updated = filled_parameters(shape, stages, replication)
    return RankExchanges(
        virtual_stages=tuple(known[stage] for stage in stages),
        closing={entry.moment: price(costs, entry.collectives) for entry in entries},
        update=rank_update_cost(costs, updated, setting.wire, replication, cast_bytes),
        copied_back_ps=copy_back_ps(side, sum(entries[0].part.buckets)),
    )


def _stage_exchanges(setting: StepSetting, side: HostSide, stage: Stage) -> StageExchanges:
    """Return the data-parallel communication of passes through *stage*."""
    replication, entries = setting.replication, stage_entries(setting, stage)
    gathers, ahead, reductions, sums = (
        _priced(side.costs, [entry for entry in entries if entry.moment is moment])
        for moment in (StepPoint.GATHER, StepPoint.AHEAD, StepPoint.REDUCE, StepPoint.REPLICAS)
    )
    units: list[PartExchanges] = []
    if replication.in_units:
        none = [0] * len(reductions)
        # Where parameters are whole, units only reduce.
        gathered = [cost.time_ps for _, cost in gathers] if replication.gathers_units else none
        summed = [cost.time_ps for _, cost in sums] or none
        unit_by_sizes: dict[tuple[object, ...], PartExchanges] = {}
        for (part, cost), gather_ps, last_ps in zip(reductions, gathered, summed, strict=True):
            sizes = part[1:]  # but for their stages
            if sizes not in unit_by_sizes:
                unit_by_sizes[sizes] = _unit(setting, side, part, gather_ps, cost.time_ps, last_ps)
            units.append(unit_by_sizes[sizes]._replace(part=part))
    return StageExchanges(
        gathers=tuple(
            PartExchanges(part, UnitWork(0, cost.time_ps), NOTHING)
            for part, cost in ([] if replication.gathers_units else gathers)
        ),
        reductions=tuple(
            PartExchanges(part, NOTHING, UnitWork(0, reduce_ps=cost.time_ps))
            for part, cost in ([] if replication.in_units else reductions)
        ),
        units=_with_ahead(units, sum(cost.time_ps for _, cost in ahead)),
        source=reductions[0][1].source if reductions else None,
    )


def _priced(costs: CostModel, entries: Sequence[LedgerEntry]) -> list[tuple[StagePart, Cost]]:
    """Return the parts of *entries* of one moment with their cost; equal parts share one."""
    # Layers of one kind have equal sizes: each is priced once.
    by_sizes = {entry.part.sizes: entry.collectives for entry in entries}
    cost_by_sizes = {sizes: price(costs, collectives) for sizes, collectives in by_sizes.items()}
    return [(entry.part, cost_by_sizes[entry.part.sizes]) for entry in entries]


def _unit(
    setting: StepSetting,
    side: HostSide,
    part: StagePart,
    gather_ps: int,
    reduce_ps: int,
    last_ps: int,
) -> PartExchanges:
    """Return the communication of a unit with its copies, from the times of its collectives."""
    replication = setting.replication
    # Only then a pass finds sums of earlier ones, which have the format of the wire already.
    adds_up = not replication.reduces_each_microbatch and setting.num_microbatches > 1
    copies = part_copies(side, part)
    buffer_times = buffer_copies(side.costs, part, setting.wire, replication, adds_up=adds_up)
    forward = UnitWork(
        0,
        gather_ps + copies.in_ps,
        unpack_ps=buffer_times.unpack_ps,
        stays=part.stays or not replication.reshards,
        gathered_once=part.gathered_once,
    )
    # Backward writes transposes of weights, each of which is read once.
    transposes = 2 * part.transposed
    written_ps = side.costs.memory_traffic(transposes).time_ps if transposes else 0
    backward = forward._replace(
        reduce_ps=reduce_ps + copies.out_ps,
        accumulate_ps=copies.accumulate_ps,
        last_ps=last_ps,
        unpack_ps=buffer_times.unpack_ps + written_ps,
        pack_ps=buffer_times.pack_ps,
    )
    return PartExchanges(part, forward, backward, copies)


def _with_ahead(units: list[PartExchanges], ahead_ps: int) -> tuple[PartExchanges, ...]:
    """Return *units* with the gathers that are done ahead of backward and not used.

    They delay the first gather of a backward pass: that of the last layer.
    """
    if ahead_ps:
        last = max(place for place, unit in enumerate(units) if not unit.backward.stays)
        backward = units[last].backward
        backward = backward._replace(gather_ps=backward.gather_ps + ahead_ps)
        units[last] = units[last]._replace(backward=backward)
    return tuple(units)
