"""Passes of a rank as they ran, split where they waited for parameters."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.simulator.engine import RankTimes, RankWork
from meshwright.simulator.schedules import Action


class Stretch(NamedTuple):
    """A time from start to end."""

    start_ps: int
    end_ps: int


class RankPass(NamedTuple):
    """A pass from start to end, with its compute times; in between it waited or copied.

    ``parts`` are the units of compute between which it may wait, in order: FSDP units that gather
    their parameters, or the whole pass.
    """

    action: Action
    start_ps: int
    end_ps: int
    parts: tuple[Stretch, ...]

    @property
    def waits(self) -> tuple[Stretch, ...]:
        """Times in which it did not compute."""
        edges = [self.start_ps, *(edge for part in self.parts for edge in part), self.end_ps]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return tuple(Stretch(*gap) for gap in gaps if gap[0] < gap[1])

    @property
    def computed(self) -> tuple[Stretch, ...]:
        """Times in which it computed: parts without a wait between them as one."""
        edges = [self.start_ps, *(edge for wait in self.waits for edge in wait), self.end_ps]
        rest = zip(edges[::2], edges[1::2], strict=True)
        return tuple(Stretch(*each) for each in rest if each[0] < each[1])


def rank_passes(work: RankWork, times: RankTimes) -> Iterator[RankPass]:
    """Yield the passes of a rank in order."""
    starts_ps = iter(times.part_starts_ps)
    for action, start_ps, end_ps in times.passes():
        pass_ps, parts_ps = _durations(work, action)
        if not parts_ps:
            # Overlapped with a pass of another microbatch it took less than by itself.
            done_ps = min(end_ps, start_ps + pass_ps)
            yield RankPass(action, start_ps, end_ps, (Stretch(start_ps, done_ps),))
            continue
        spans = ((next(starts_ps), part_ps) for part_ps in parts_ps)
        parts = tuple(Stretch(begin_ps, begin_ps + part_ps) for begin_ps, part_ps in spans)
        yield RankPass(action, start_ps, end_ps, parts)


def _durations(work: RankWork, action: Action) -> tuple[int, tuple[int, ...]]:
    """Return the compute time of a pass, and of its parts where each gathers parameters."""
    passes = work.virtual_stages[action.virtual_stage][action.phase]
    # Without FSDP units the first microbatch alone gathers, bucket by bucket.
    parts = passes.units or (() if action.microbatch else passes.gathers)
    return passes.compute_ps, tuple(part.compute_ps for part in parts)
