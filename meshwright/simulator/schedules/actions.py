"""Actions of pipeline schedules, and `Schedule`, which lists them for each rank."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple, Self

from meshwright.simulator.schedules.periodic import Periodic

# Orders shorter than this many times their first period are listed in full: little is saved there.
LEAST_TIMES = 8


class Phase(StrEnum):
    """Phase of an action of a pipeline rank (named as in torch.distributed.pipelining).

    Args:
        direction: Stages that its message moves on: 1 to the next, -1 to the previous, 0 for none.
    """

    FORWARD = "F", 1
    BACKWARD = "B", -1

    direction: int

    def __new__(cls, value: str, direction: int) -> Self:
        """Return the phase that *value* stands for."""
        # The direction is an attribute, and no part of the value that is written to JSON.
        phase = str.__new__(cls, value)
        phase._value_, phase.direction = value, direction
        return phase

    @property
    def label(self) -> str:
        """Its name for people: forward, backward."""
        return self.name.lower()


class Action(NamedTuple):
    """One forward or backward pass of a microbatch through one virtual stage.

    ``virtual_stage`` counts the virtual stages of the rank: rank r of p holds the stages
    ``r, p + r, 2 p + r, ...`` in model order.
    """

    phase: Phase
    virtual_stage: int
    microbatch: int

    def __str__(self) -> str:
        """Return a short form such as ``F0.3``: phase, virtual stage, microbatch."""
        return f"{self.phase}{self.virtual_stage}.{self.microbatch}"

    def further(self, pp_rank: int, pp: int, num_stages: int) -> tuple[int, "Action"]:
        """Return the rank and the pass of the same microbatch *num_stages* later.

        Virtual stages are assigned to ranks round-robin.

        >>> Action(Phase.FORWARD, 0, 5).further(pp_rank=3, pp=4, num_stages=1)[0]
        0
        """
        virtual_stage, rank = divmod(self.virtual_stage * pp + pp_rank + num_stages, pp)
        return rank, self._replace(virtual_stage=virtual_stage)


def no_pairs(_pp_rank: int, _pp: int, _num_microbatches: int, _vpp: int) -> range:
    """Return the overlapped pairs of a schedule that overlaps no passes: none."""
    return range(0)


def one_of_each_rank(pp: int, _num_microbatches: int) -> int:
    """Return a group of *pp* microbatches, as Narayanan et al. 2021 publish it."""
    return pp


class Schedule(NamedTuple):
    """A pipeline schedule: action lists, and their closed forms.

    Args:
        name: Registry key.
        title: One line for people.
        source: Where it was published.
        rank_actions: ``(pp_rank, pp, num_microbatches, vpp) -> `` the ordered actions of a rank.
        in_flight: ``(pp_rank, pp, num_microbatches, vpp) -> `` the largest number of passes of a
            rank that await their backward at one time.
        around_last: ``(pp_rank, pp, num_microbatches, vpp) -> `` the forward and the backward
            passes of each virtual stage of a rank, from the first to the last one of the last.
        bubble_fraction: ``(pp, num_microbatches, vpp) -> `` idle share for equal stages and
            free communication.
        refusal: ``(pp, num_microbatches, vpp) -> `` the reason these numbers cannot run, or None.
        pairs: ``(pp_rank, pp, num_microbatches, vpp) -> `` indices of forward passes that overlap
            with the backward pass behind them (F/B overlap).
        group: ``(pp, num_microbatches) -> `` microbatches in a row through a virtual stage,
            before the first of them goes on to the rank's next one.
        warmup: ``(pp_rank, pp, num_microbatches, vpp) -> `` the forward passes of a rank before
            1F1B alternation begins; None for schedules without alternation.
        interleaves: Whether it takes more than one virtual stage a rank.
        keeps_sent_buffers: Whether the runtime keeps sent p2p buffers alive until the step ends.
    """

    name: str
    title: str
    source: str
    rank_actions: Callable[[int, int, int, int], list[Action]]
    in_flight: Callable[[int, int, int, int], int]
    around_last: Callable[[int, int, int, int], list[tuple[int, int]]]
    bubble_fraction: Callable[[int, int, int], float]
    refusal: Callable[[int, int, int], str | None]
    pairs: Callable[[int, int, int, int], range] = no_pairs
    group: Callable[[int, int], int] = one_of_each_rank
    warmup: Callable[[int, int, int, int], int] | None = None
    interleaves: bool = False
    keeps_sent_buffers: bool = False

    def actions(self, pp: int, num_microbatches: int, vpp: int = 1) -> list[Sequence[Action]]:
        """Return the ordered actions of each pipeline rank, those of long steps as `Periodic`."""
        return [self.order(rank, pp, num_microbatches, vpp) for rank in range(pp)]

    def order(self, pp_rank: int, pp: int, num_microbatches: int, vpp: int) -> Sequence[Action]:
        """Return the ordered actions of a pipeline rank, those of long steps as `Periodic`."""
        once = self._microbatches_once(pp, num_microbatches, vpp)
        actions = self.rank_actions(pp_rank, pp, once, vpp)
        if once == num_microbatches or self.warmup is None:
            return actions
        group = self._group_in_a_row(pp, once)
        size, copies = len(Phase) * group * vpp, (num_microbatches - once) // group
        end = self.warmup(pp_rank, pp, once, vpp) + size
        group_of = self.group if self.interleaves else None
        make = partial(_extended, self.rank_actions, group_of, (pp_rank, pp, vpp), (once, group))
        return Periodic(actions, end, size, copies, group, shifted_actions, make)

    def _microbatches_once(self, pp: int, num_microbatches: int, vpp: int) -> int:
        """Return the smallest number of microbatches at which each rank runs one whole period.

        Between warm-up and rest, forward and backward passes of a group of microbatches follow
        those of the group before it.  Where that repeats too seldom it is *num_microbatches*.
        """
        if self.warmup is None:
            return num_microbatches
        group = self._group_in_a_row(pp, num_microbatches)
        longest = self.warmup(0, pp, num_microbatches, vpp)
        # Passes of the last group reduce gradients: on all ranks they must lie behind the period.
        periods = max(1, -(-longest // (group * vpp))) + 1
        least = periods * group + num_microbatches % group
        # With fewer microbatches a runtime may choose another group, which depends on remainders.
        most = min(num_microbatches // LEAST_TIMES, least + group * group)
        for once in range(least, most + 1, group):
            if self._group_in_a_row(pp, once) == group:
                return once
        return num_microbatches

    def _group_in_a_row(self, pp: int, num_microbatches: int) -> int:
        return self.group(pp, num_microbatches) if self.interleaves else 1

    def most_in_flight(
        self, pp_rank: int, pp: int, num_microbatches: int, vpp: int
    ) -> tuple[int, int]:
        """Return the most passes in flight of a rank, and of its last virtual stage."""
        # With whole groups the last virtual stage has as many in flight as if it were the only one.
        is_whole = num_microbatches % self.group(pp, num_microbatches) == 0
        counts = vpp, 1 if is_whole else vpp
        most, last = (self.in_flight(pp_rank, pp, num_microbatches, count) for count in counts)
        return most, last

    @property
    def runs_beside(self) -> bool:
        """Whether forward passes overlap with backward passes of other microbatches."""
        return self.pairs is not no_pairs


def refuse_virtual_stages(_pp: int, _num_microbatches: int, vpp: int) -> str | None:
    """Return the refusal of ``vpp > 1`` by schedules with one stage a rank, or None."""
    if vpp == 1:
        return None
    return f"vpp={vpp} needs a schedule with virtual stages, such as interleaved"


def all_passes(_pp_rank: int, _pp: int, num_microbatches: int, _vpp: int) -> list[tuple[int, int]]:
    """Return the numbers of forward and backward passes of a rank with one stage."""
    return [(num_microbatches, num_microbatches)]


def plain_bubble_fraction(pp: int, num_microbatches: int, vpp: int) -> float:
    """Return ``(p - 1) / (v m + p - 1)``, the idle share for equal stages.

    Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, give the ratio to the ideal time;
    this is the share of the whole step.  With fewer microbatches than ranks each virtual stage
    but the last waits for its input as if there were as many.

    >>> plain_bubble_fraction(4, 9, 1)
    0.25
    """
    passes = vpp * num_microbatches
    idle = pp - 1 + (vpp - 1) * max(0, pp - num_microbatches)
    return idle / (passes + idle)


def _extended(
    rank_actions: Callable[[int, int, int, int], list[Action]],
    group_of: Callable[[int, int], int] | None,
    position: tuple[int, int, int],
    microbatches: tuple[int, int],
    copies: int,
) -> list[Action] | None:
    """Return the actions of a rank with *copies* of its period; None if the group size changes."""
    (pp_rank, pp, vpp), (once, group) = position, microbatches
    count = once + copies * group
    if group_of is not None and group_of(pp, count) != group:
        return None
    return rank_actions(pp_rank, pp, count, vpp)


def shifted_actions(actions: Sequence[Action], distance: int) -> list[Action]:
    """Return *actions* with *distance* added to the microbatch of each."""
    return [Action(phase, stage, microbatch + distance) for phase, stage, microbatch in actions]


def alternate(forward: list[Action], backward: list[Action], warmup: int) -> list[Action]:
    """Return the 1F1B order: *warmup* forward passes, a steady alternation, and a cooldown."""
    # Forward passes run out first: the backward passes behind them are the cooldown.
    steady = list(chain.from_iterable(zip(forward[warmup:], backward, strict=False)))
    return [*forward[:warmup], *steady, *backward[len(steady) // 2 :]]


def steady_pairs(warmup: int, num_passes: int) -> range:
    """Return the indices of forward passes in the steady part of an `alternate` order.

    >>> list(steady_pairs(warmup=2, num_passes=4))
    [2, 4]
    """
    return range(warmup, max(warmup, 2 * num_passes - warmup), 2)


@lru_cache(maxsize=256)
def single_stage_passes(num_microbatches: int) -> tuple[list[Action], list[Action]]:
    """Return the forward and the backward passes of a rank with one virtual stage."""
    forward = [Action(Phase.FORWARD, 0, index) for index in range(num_microbatches)]
    backward = [Action(Phase.BACKWARD, 0, index) for index in range(num_microbatches)]
    return forward, backward
