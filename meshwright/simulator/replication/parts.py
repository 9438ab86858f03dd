"""Parts of a stage: whole blocks with the buckets that are reduced and gathered for them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshwright.simulator.costs import CostModel
from meshwright.simulator.engine import num_gathers
from meshwright.simulator.layout import Stage
from meshwright.simulator.replication.data_parallel import (
    BufferCopies,
    Replication,
    WireBytes,
    unit_buffer_copies,
)
from meshwright.simulator.schedules import NO_REFETCHES, Refetches


class GradientBucket(NamedTuple):
    """Gradients that are reduced together, and the block whose backward completes them.

    ``place`` counts the blocks of the stage from 0, in model order.
    """

    num_parameters: int
    place: int


class StagePart(NamedTuple):
    """Consecutive blocks of a stage, with the buckets that are reduced and gathered for them.

    In backward the first block of the part, in model order, completes the ``buckets``; in forward
    it is the first one to need their parameters. A part that ``stays`` is not resharded between a
    forward pass and its backward. ``expert_buckets`` are those of experts with a data-parallel
    group of their own. A part ``gathered_once`` stays gathered to the end of a step; ``unused``
    are buckets, and such experts', that each microbatch gathers once more, and frees again, in
    bytes; ``gathers`` are bytes gathered in another format than the wire's. Backward makes
    transposes of ``transposed`` bytes of weights.
    """

    stage: Stage
    buckets: tuple[int, ...]
    stays: bool = False
    expert_buckets: tuple[int, ...] = ()
    gathered_once: bool = False
    unused: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    gathers: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    transposed: int = 0

    def by_holders(self, replication: Replication) -> list[tuple[tuple[int, ...], Replication]]:
        """Return the buckets with the data-parallel groups that hold the same weights."""
        found = [(self.buckets, replication)]
        if replication.experts is not None:
            found.append((self.expert_buckets, replication.experts))
        return found

    @property
    def sizes(self) -> tuple[object, ...]:
        """Sizes from which the times of its collectives follow."""
        return self.buckets, self.expert_buckets, self.gathers

    @property
    def all_buckets(self) -> tuple[int, ...]:
        """Buckets of all weights."""
        return self.buckets + self.expert_buckets


def cut_at(
    stage: Stage,
    buckets: tuple[GradientBucket, ...],
    of_experts: tuple[GradientBucket, ...] = (),
) -> tuple[StagePart, ...]:
    """Return *stage* split where *buckets*, or those *of_experts*, are complete, in model order."""
    completed, experts = map(_by_place, (buckets, of_experts))
    parts: list[StagePart] = []
    end = stage.num_blocks
    # Backward order: each part ends where the one behind it begins.
    for first in sorted({*completed, *experts}, reverse=True):
        own, of_others = (tuple(sizes.get(first, ())) for sizes in (completed, experts))
        parts.append(StagePart(stage.part(first, end), own, expert_buckets=of_others))
        end = first
    return tuple(reversed(parts))


def _by_place(buckets: Iterable[GradientBucket]) -> Mapping[int, list[int]]:
    """Return the parameters of *buckets* by the block that completes them."""
    sizes: defaultdict[int, list[int]] = defaultdict(list)
    for num_parameters, place in buckets:
        sizes[place].append(num_parameters)
    return sizes


def buffer_copies(
    costs: CostModel,
    part: StagePart,
    wire: WireBytes,
    replication: Replication,
    *,
    adds_up: bool,
) -> BufferCopies:
    """Return the copy times of a *part*; see `unit_buffer_copies`."""
    copies = [
        unit_buffer_copies(costs, sum(buckets), wire, holders, adds_up=adds_up)
        for buckets, holders in part.by_holders(replication)
    ]
    return BufferCopies(*map(sum, zip(*copies, strict=True)))


def part_gathers(
    part: StagePart,
    replication: Replication,
    num_microbatches: int,
    refetches: Refetches = NO_REFETCHES,
) -> int:
    """Return the number of all-gathers of the parameters of *part* in a step."""
    if part.gathered_once:
        return 1
    # Without reshard_after_forward backward finds the parameters of its forward pass.
    stays = part.stays or not replication.reshards
    return num_gathers(
        num_microbatches, stays=stays, keeps_units=replication.keeps_units, refetches=refetches
    )
