"""Data-parallel times of ranks for bounds: sums over the work that the engine runs."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.hwprofiles import StackProfile, Units
from meshwright.simulator.layout import Stage
from meshwright.simulator.ledger import StepPoint, sums_first
from meshwright.simulator.replication import Replication
from meshwright.simulator.step import PartExchanges, RankExchanges, StageExchanges


class DataParallelTimes(NamedTuple):
    """Picoseconds of data parallelism of one rank that bounds are made of.

    Args:
        exposed: Least time of reductions after the last backward pass, and of tensor-parallel sums
            that come before they end.
        first_virtual_stage: Reductions of the rank's first virtual stage, all its buckets.
        every_virtual_stage: Reductions of all its virtual stages.
        gather_first: First parameter gather of the first virtual stage.
        gather_all: All gathers of that stage.
        gather_every: All gathers of every virtual stage.
        closing: Collectives after all reductions of passes, up to the gradient norm.
        tied: All-reduce of a tied embedding, after that.
        norm: All-reduces of the gradient norm.
        update: Optimizer, and the exposed gather after it.
        forward_wait: Least wait of each microbatch's forward passes for parameters.
        backward_wait: The same of backward passes, with exposed reductions.
        port_each: Port time of collectives in each microbatch.
        port_last: Port time of collectives in the last microbatch alone.
    """

    exposed: int = 0
    first_virtual_stage: int = 0
    every_virtual_stage: int = 0
    gather_first: int = 0
    gather_all: int = 0
    gather_every: int = 0
    closing: int = 0
    tied: int = 0
    norm: int = 0
    update: int = 0
    forward_wait: int = 0
    backward_wait: int = 0
    port_each: int = 0
    port_last: int = 0

    @classmethod
    def of(
        cls, rank: RankExchanges, replication: Replication, stack: StackProfile
    ) -> "DataParallelTimes":
        """Return the times of a *rank*."""
        closing = {moment: cost.time_ps for moment, cost in rank.closing.items()}
        norm_all_reduce_ps, reduce_ps = closing[StepPoint.SUMS], closing[StepPoint.PASSES_DONE]
        times = _of_buckets(rank.virtual_stages)
        if replication.in_units:
            times = _of_units(times, rank.virtual_stages, replication, stack)
        if sums_first(stack):  # while the last reduction of a pass may go on
            times = times._replace(
                exposed=max(times.exposed, norm_all_reduce_ps), closing=reduce_ps
            )
        else:
            times = times._replace(closing=reduce_ps + norm_all_reduce_ps)
        return times._replace(
            tied=closing[StepPoint.TIED_TABLE],
            norm=closing[StepPoint.TOKENS] + closing[StepPoint.NORM],
            update=rank.update.time_ps + rank.updated_ps,
        )


def end_part(stage: Stage, exchanges: StageExchanges) -> Stage:
    """Return the blocks of *stage* that are gathered last, and reduced first."""
    parts = exchanges.gathers or exchanges.reductions
    return parts[-1].part.stage if parts else stage


def _of_buckets(stages: Sequence[StageExchanges]) -> DataParallelTimes:
    """Return the times of gathers and reductions that overlap with passes."""
    gathers = [[part.forward.gather_ps for part in each.gathers] for each in stages]
    reductions = [[part.backward.reduce_ps for part in each.reductions] for each in stages]
    return DataParallelTimes(
        # The first bucket in model order is complete last.
        exposed=sum(reductions[0][:1]),
        first_virtual_stage=sum(reductions[0]),
        every_virtual_stage=sum(map(sum, reductions)),
        gather_first=sum(gathers[0][:1]),
        gather_all=sum(gathers[0]),
        gather_every=sum(map(sum, gathers)),
    )


def _of_units(
    times: DataParallelTimes,
    stages: Sequence[StageExchanges],
    replication: Replication,
    stack: StackProfile,
) -> DataParallelTimes:
    """Return *times* with those of ranks that gather or reduce FSDP units in every pass."""
    units = [unit for stage in stages for unit in stage.units]
    freed = [unit.backward for unit in units if not unit.backward.stays]
    keeps, each = replication.keeps_units, replication.reduces_each_microbatch
    once = sum(unit.forward.gather_ps for unit in units if unit.forward.gathered_once)
    gathered = sum(unit.forward.gather_ps for unit in units) - once
    again = sum(unit.gather_ps for unit in freed)
    reduced, added, last = (
        sum(getattr(unit.backward, name) for unit in units)
        for name in ("reduce_ps", "accumulate_ps", "last_ps")
    )
    # All units are gathered for every forward pass, and those that it frees for backward; where
    # they stay from a backward pass on these alone, and all others once at least.  A gradient of
    # the first microbatch is added to nothing.
    port_each = again + (0 if keeps else gathered) + (reduced if each else 0) + added
    port_last = once - added + (gathered if keeps else 0) + (0 if each else reduced) + last
    copied, written = (
        sum(unit.unpack_ps for unit in gathers if unit.gather_ps and not unit.gathered_once)
        for gathers in ([unit.forward for unit in units], freed)
    )
    packed = [sum(unit.backward.pack_ps for unit in stage.units) for stage in stages]
    # One by one, computation waits for all of them.
    waits = gathered, again + (reduced if each else 0)
    # Prefetched gathers overlap with the unit before.
    if stack.prefetches_units:
        waits = _first_gathers(stages, replication, stack)
        times = times._replace(exposed=sum(each.backward.reduce_ps for each in stages[0].units[:1]))
    # Where units stay gathered after a backward pass, as many gathers as there are microbatches
    # follow a forward pass, in whichever pass: their copies count as those of forward passes.
    forward, backward = (written, 0) if keeps else (copied, written)
    return times._replace(
        # Reduced once a step, gradients are copied in the last passes, of which the very last is
        # the first stage's: its copies put off the end.
        exposed=times.exposed + (0 if each else packed[0]),
        forward_wait=waits[0] + forward,
        backward_wait=waits[1] + backward + (sum(packed) if each else 0),
        port_each=port_each,
        port_last=port_last,
    )


def _first_gathers(
    stages: Sequence[StageExchanges], replication: Replication, stack: StackProfile
) -> tuple[int, int]:
    """Return the waits of forward and backward passes for gathers that are prefetched by one.

    All may overlap but a pass's first, and with a root even that one: it may be left gathered from
    the pass before. There a pipeline that reshards after forward passes alone has as many passes
    that gather as microbatches; which of them are backward passes the schedule decides, so the
    shorter gather of both ends counts, and none where the first unit may be gathered already.
    """
    ends = [(stage.units[0], stage.units[-1]) for stage in stages if stage.units]
    if stack.units is Units.LAYERS:
        return sum(unit.forward.gather_ps for unit, _ in ends), sum(
            _gather_again(unit) for _, unit in ends
        )
    if not replication.keeps_units:
        return 0, 0
    return sum(min(_gather_again(unit) for unit in both) for both in ends), 0


def _gather_again(unit: PartExchanges) -> int:
    """Return the gather of a *unit* in the pass after a forward pass."""
    return 0 if unit.backward.stays else unit.backward.gather_ps
