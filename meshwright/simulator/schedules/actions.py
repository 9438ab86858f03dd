"""The vocabulary of pipeline schedules."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple, Self

from meshwright.simulator.schedules.periodic import Periodic

# Orders of fewer microbatches than so many times those with their period once are kept whole.
LEAST_TIMES = 8


class Phase(StrEnum):
    """What a pipeline rank does in one action (names as in torch.distributed.pipelining).

    Args:
        direction: Where its message goes: 1 to the next stage, -1 to the one before, 0 to nobody.
    """

    FORWARD = "F", 1
    BACKWARD = "B", -1

    direction: int

    def __new__(cls, value: str, direction: int) -> Self:
        """Return the phase that *value* stands for."""
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
        """Return rank and pass of the microbatch so many stages on; these go round the ranks.

        >>> Action(Phase.FORWARD, 0, 5).further(pp_rank=3, pp=4, num_stages=1)[0]
        0
        """
        virtual_stage, rank = divmod(self.virtual_stage * pp + pp_rank + num_stages, pp)
        return rank, self._replace(virtual_stage=virtual_stage)


def no_pairs(_pp_rank: int, _pp: int, _num_microbatches: int, _vpp: int) -> range:
    """Return the pairs of a schedule whose passes run one after the other."""
    return range(0)


def one_of_each_rank(pp: int, _num_microbatches: int) -> int:
    """Return the size of a group of as many microbatches as a pipeline has ranks."""
    return pp


class Schedule(NamedTuple):
    """A pipeline schedule: the action lists and what is known about them in closed form.

    Args:
        name: Registry key.
        title: One line for people.
        source: Where it was published.
        rank_actions: ``(pp_rank, pp, num_microbatches, vpp) -> `` the ordered actions of a rank.
        in_flight: ``(pp_rank, pp, num_microbatches, vpp) -> `` the most virtual-stage passes of
            a rank that wait for their backward at one time.
        around_last: ``(pp_rank, pp, num_microbatches, vpp) -> `` the forward and the backward
            passes of each virtual stage of a rank, from the first to the last one of the last.
        bubble_fraction: ``(pp, num_microbatches, vpp) -> `` idle share for equal stages and
            free communication.
        refusal: ``(pp, num_microbatches, vpp) -> `` why these numbers cannot run, or None.
        pairs: ``(pp_rank, pp, num_microbatches, vpp) -> `` where in the list of a rank forward
            passes are that run beside the backward pass behind them.
        group: ``(pp, num_microbatches) -> `` how many microbatches go through a virtual stage in a
            row, before the first of them goes on to the rank's next one.
        warmup: ``(pp_rank, pp, num_microbatches, vpp) -> `` the forward passes of a rank before
            each has a backward pass behind it; None where that is never so.
        interleaves: Whether it takes more than one virtual stage a rank.
        holds_sent: Whether PyTorch's runtime of it holds each message it sent until the step ends.
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
    holds_sent: bool = False

    def actions(self, pp: int, num_microbatches: int, vpp: int = 1) -> list[Sequence[Action]]:
        """Return the ordered actions of each pipeline rank, long ones with their period once."""
        return [self.order(rank, pp, num_microbatches, vpp) for rank in range(pp)]

    def order(self, pp_rank: int, pp: int, num_microbatches: int, vpp: int) -> Sequence[Action]:
        """Return the ordered actions of a pipeline rank, many with their period once."""
        once = self._microbatches_once(pp, num_microbatches, vpp)
        actions = self.rank_actions(pp_rank, pp, once, vpp)
        if once == num_microbatches or self.warmup is None:
            return actions
        group = self._group_in_a_row(pp, once)
        size, copies = len(Phase) * group * vpp, (num_microbatches - once) // group
        end = self.warmup(pp_rank, pp, once, vpp) + size
        group_of = self.group if self.interleaves else None
        make = partial(_made, self.rank_actions, group_of, (pp_rank, pp, vpp), (once, group))
        return Periodic(actions, end, size, copies, group, moved_actions, make)

    def _microbatches_once(self, pp: int, num_microbatches: int, vpp: int) -> int:
        """Return the microbatches of a step in which each rank runs its period once.

        Between warm-up and rest, forward and backward passes of a group of microbatches follow
        those of the group before it; they are as many where they would not come often.
        """
        if self.warmup is None:
            return num_microbatches
        group = self._group_in_a_row(pp, num_microbatches)
        longest = self.warmup(0, pp, num_microbatches, vpp)
        # The passes that reduce gradients, of the last group, are behind the period on all ranks.
        periods = max(1, -(-longest // (group * vpp))) + 1
        least = periods * group + num_microbatches % group
        # Of fewer microbatches a runtime may make other groups; which, comes again with a rest.
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
        """Return the most passes of a rank in flight, and of those through its last stage."""
        # Through the last stage of whole groups as many are in flight as with no other stage.
        is_whole = num_microbatches % self.group(pp, num_microbatches) == 0
        counts = vpp, 1 if is_whole else vpp
        most, last = (self.in_flight(pp_rank, pp, num_microbatches, count) for count in counts)
        return most, last

    @property
    def runs_beside(self) -> bool:
        """Whether it runs forward passes beside backward passes of other microbatches."""
        return self.pairs is not no_pairs


def refuse_virtual_stages(_pp: int, _num_microbatches: int, vpp: int) -> str | None:
    """Return the refusal of schedules that hold one stage a rank."""
    if vpp == 1:
        return None
    return f"vpp={vpp} needs a schedule with virtual stages, such as interleaved"


def all_passes(_pp_rank: int, _pp: int, num_microbatches: int, _vpp: int) -> list[tuple[int, int]]:
    """Return the forward and the backward passes of a rank that holds one stage."""
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


def _made(
    rank_actions: Callable[[int, int, int, int], list[Action]],
    group_of: Callable[[int, int], int] | None,
    place: tuple[int, int, int],
    microbatches: tuple[int, int],
    copies: int,
) -> list[Action] | None:
    """Return the actions of a rank with *copies* of its period; None where groups differ then."""
    (pp_rank, pp, vpp), (once, group) = place, microbatches
    count = once + copies * group
    if group_of is not None and group_of(pp, count) != group:
        return None
    return rank_actions(pp_rank, pp, count, vpp)


def moved_actions(actions: Sequence[Action], distance: int) -> list[Action]:
    """Return *actions* of microbatches that come so much later."""
    return [Action(phase, stage, microbatch + distance) for phase, stage, microbatch in actions]


def alternate(forward: list[Action], backward: list[Action], warmup: int) -> list[Action]:
    """Return *warmup* forward passes, then one forward and one backward, then the rest."""
    steady = list(chain.from_iterable(zip(forward[warmup:], backward, strict=False)))
    return [*forward[:warmup], *steady, *backward[len(steady) // 2 :]]


def steady_pairs(warmup: int, num_passes: int) -> range:
    """Return where the forward passes stand that have a backward pass behind each.

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
