"""Interleaved 1F1B: several virtual stages a rank, which divide the bubble by their number.

Microbatches go through a rank's virtual stages in groups.  Runtimes differ in the group size,
and so in the numbers of microbatches that they take.
"""

from collections.abc import Callable
from functools import lru_cache
from operator import sub
from typing import NamedTuple

from meshwright.hwprofiles import PipelineRuntime
from meshwright.simulator.schedules.actions import (
    Action,
    Phase,
    Schedule,
    alternate,
    no_pairs,
    plain_bubble_fraction,
    steady_pairs,
)


def ranks_group(pp: int, num_microbatches: int) -> int | None:
    """Return the published group size, *pp*; None unless it divides the microbatches."""
    return pp if num_microbatches % pp == 0 else None


def core_group(pp: int, num_microbatches: int) -> int | None:
    """Return the smallest group size that Megatron-Core takes, or None.

    Its ``microbatch_group_size_per_vp_stage`` is at least the number of ranks and leaves no rest
    below that (`forward_backward_pipelining_with_interleaving`, megatron/core/pipeline_parallel/
    schedules.py of core 0.16); a larger one holds more passes at a time.

    >>> [core_group(4, count) for count in (3, 8, 10, 11)]
    [None, 4, 5, 6]
    """
    sizes = range(pp, num_microbatches + 1)
    fitting = (size for size in sizes if not 0 < num_microbatches % size < pp)
    return next(fitting, None)


def pytorch_group(pp: int, num_microbatches: int) -> int | None:
    """Return the microbatches of one of PyTorch's rounds, which are all equal, or None.

    ``number_of_rounds`` and ``microbatches_per_round`` of `ScheduleInterleaved1F1B`
    (torch/distributed/pipelining/schedules.py of PyTorch 2.13).

    >>> [pytorch_group(4, count) for count in (3, 8, 10, 11)]
    [3, 4, 5, None]
    """
    num_rounds = max(1, num_microbatches // pp)
    return None if num_microbatches % num_rounds else num_microbatches // num_rounds


GROUPS: dict[PipelineRuntime, Callable[[int, int], int | None]] = {
    PipelineRuntime.PUBLISHED: ranks_group,
    PipelineRuntime.MEGATRON_CORE: core_group,
    PipelineRuntime.PYTORCH: pytorch_group,
}
ALLOWED = {
    PipelineRuntime.PUBLISHED: "a multiple of pp={pp}",
    PipelineRuntime.MEGATRON_CORE: "at least pp={pp}",
    PipelineRuntime.PYTORCH: "a multiple of its {rounds} rounds of {pp} or more",
}


def any_core_group(size: int) -> Callable[[int, int], int | None]:
    """Return a function that gives *size* where Megatron-Core takes it, like `core_group`.

    >>> [any_core_group(6)(4, count) for count in (5, 6, 8, 10)]
    [None, 6, None, 6]
    """

    def group(pp: int, num_microbatches: int) -> int | None:
        is_whole = pp <= size <= num_microbatches
        return size if is_whole and not 0 < num_microbatches % size < pp else None

    return group


class _Order(NamedTuple):
    """Interleaved order of a runtime or of a group size, with or without F/B overlap.

    With F/B overlap a rank runs one more forward pass ahead, so that no backward
    pass needs the output of the forward pass before it (`get_pp_rank_microbatches`, megatron/core/
    pipeline_parallel/schedules.py of core 0.16).
    """

    runtime: PipelineRuntime
    group_size: int | None
    has_overlap: bool

    def group(self, pp: int, num_microbatches: int) -> int:
        size = _groups(self.runtime, self.group_size)(pp, num_microbatches)
        assert size is not None, "refused before"
        return size

    def warmup(self, pp_rank: int, pp: int, num_microbatches: int, vpp: int) -> int:
        # Twice the distance to the last rank, as in `get_pp_rank_microbatches` of Megatron-Core.
        ahead = 2 * (pp - pp_rank - 1) + self.has_overlap
        return ahead + (vpp - 1) * self.group(pp, num_microbatches)

    def rank_actions(self, pp_rank: int, pp: int, num_microbatches: int, vpp: int) -> list[Action]:
        passes = group_passes(self.group(pp, num_microbatches), num_microbatches, vpp)
        return alternate(*passes, self.warmup(pp_rank, pp, num_microbatches, vpp))

    def in_flight(self, pp_rank: int, pp: int, num_microbatches: int, vpp: int) -> int:
        warmup = self.warmup(pp_rank, pp, num_microbatches, vpp)
        return min(num_microbatches * vpp, warmup + 1)

    def around_last(
        self, pp_rank: int, pp: int, num_microbatches: int, vpp: int
    ) -> list[tuple[int, int]]:
        warmup = self.warmup(pp_rank, pp, num_microbatches, vpp)
        return _around_last(self.group(pp, num_microbatches), warmup, num_microbatches, vpp)

    def pairs(self, pp_rank: int, pp: int, num_microbatches: int, vpp: int) -> range:
        warmup = self.warmup(pp_rank, pp, num_microbatches, vpp)
        return steady_pairs(warmup, num_microbatches * vpp)


def interleaved(
    runtime: PipelineRuntime, group_size: int | None = None, *, beside: bool = False
) -> Schedule:
    """Return the interleaved 1F1B order with the groups of *runtime*, or of one size.

    Args:
        runtime: Runtime that decides the group size.
        group_size: Microbatches of a group, if chosen by the user.
        beside: Whether forward passes overlap with backward passes of other microbatches.

    >>> lists = interleaved(PipelineRuntime.PUBLISHED).actions(2, 2, 2)
    >>> "".join(f"{a.phase}{a.virtual_stage}" for a in lists[1])
    'F0F0F1B1F1B1B0B0'
    """
    order = _Order(runtime, group_size, beside)
    return Schedule(
        name="interleaved",
        title="1F1B over several virtual stages a rank: bubble / vpp, more messages and memory",
        source="Narayanan et al. 2021 (arXiv 2104.04473), sec. 2.2",
        rank_actions=order.rank_actions,
        in_flight=order.in_flight,
        around_last=order.around_last,
        bubble_fraction=plain_bubble_fraction,
        refusal=lambda *size: _refusal(runtime, group_size, *size),
        pairs=order.pairs if beside else no_pairs,
        group=order.group,
        warmup=order.warmup,
        interleaves=True,
        keeps_sent_buffers=True,
    )


@lru_cache(maxsize=256)
def group_passes(group: int, num_microbatches: int, vpp: int) -> tuple[list[Action], list[Action]]:
    """Return the orders of forward and of backward passes, the same on every rank."""
    forward = [
        Action(Phase.FORWARD, virtual_stage, microbatch)
        for first in range(0, num_microbatches, group)
        for virtual_stage in range(vpp)
        for microbatch in range(first, min(first + group, num_microbatches))
    ]
    backward = [
        Action(Phase.BACKWARD, vpp - 1 - virtual_stage, microbatch)
        for _, virtual_stage, microbatch in forward
    ]
    return forward, backward


def _groups(runtime: PipelineRuntime, group_size: int | None) -> Callable[[int, int], int | None]:
    return GROUPS[runtime] if group_size is None else any_core_group(group_size)


def _refusal(
    runtime: PipelineRuntime, group_size: int | None, pp: int, num_microbatches: int, vpp: int
) -> str | None:
    if vpp < 2 or pp < 2:
        return f"interleaved needs vpp >= 2 and pp >= 2, got vpp={vpp}, pp={pp}"
    if _groups(runtime, group_size)(pp, num_microbatches) is not None:
        return None
    if group_size is not None:
        return _group_refusal(group_size, pp, num_microbatches)
    allowed = ALLOWED[runtime].format(pp=pp, rounds=num_microbatches // pp)
    return f"interleaved needs num_microbatches={num_microbatches} to be {allowed}"


def _group_refusal(size: int, pp: int, num_microbatches: int) -> str:
    rest = num_microbatches % size
    if pp <= size <= num_microbatches:
        return (
            f"microbatch_group_size={size} leaves {rest} of {num_microbatches} microbatches; "
            f"allowed: one that leaves none, or at least pp={pp}"
        )
    return f"microbatch_group_size={size} is out of range; allowed {pp} to {num_microbatches}"


def _around_last(group: int, warmup: int, num_microbatches: int, vpp: int) -> list[tuple[int, int]]:
    before = (vpp - 1) * min(group, num_microbatches)
    # Backward passes of the last group go through the last virtual stage before the others.
    backward = num_microbatches * vpp - (vpp - 1) * ((num_microbatches - 1) % group + 1)
    forward = min(num_microbatches * vpp, warmup + backward)

    size = group, num_microbatches, vpp
    forward_passes = map(sub, first_passes(*size, forward), first_passes(*size, before))
    backward_passes = reversed(first_passes(*size, backward))
    return list(zip(forward_passes, backward_passes, strict=True))


def first_passes(group: int, num_microbatches: int, vpp: int, count: int) -> list[int]:
    """Return the number of passes through each virtual stage among the first *count* forward ones.

    Backward passes are counted alike, from the last virtual stage on.

    >>> first_passes(4, 8, 2, 7), first_passes(4, 6, 2, 10)
    ([4, 3], [6, 4])
    """
    rounds, rest = divmod(count, group * vpp)
    size = min(group, num_microbatches - rounds * group)
    done = rounds * group
    stages, part = divmod(rest, size) if rest else (0, 0)
    return [*[done + size] * stages, done + part, *[done] * vpp][:vpp]
