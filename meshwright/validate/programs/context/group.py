"""Context-parallel ranks, and the tokens of a sequence that each holds."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.hwprofiles import ContextParallel

# PyTorch 2.13 renamed both; the old names warn there, the new ones are missing before.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The context-parallel ranks of a rank; ``group`` is None where there is only one.

    A sequence is cut into two parts a rank, of which each has one from the front and the one as far
    from the end: of causal attention all have the same work then.

    Args:
        group: All of them.
        rank: Index of this rank.
        size: Number of ranks.
        num_tokens: Of a whole sequence.
        way: Kind of context parallelism.
        levels: Of hybrid ring + all-to-all, the all-to-all group and the ring of this rank.

    >>> ContextGroup(None, 1, 2, num_tokens=8).starts
    (2, 4)
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    num_tokens: int
    way: ContextParallel | None = None
    levels: tuple["ContextGroup", ...] = ()

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each of the rank's parts, which have the same number of tokens."""
        if self.size == 1:
            return (0,)
        part = self.num_tokens // (2 * self.size)
        return self.rank * part, (2 * self.size - 1 - self.rank) * part

    def own_tokens(self, whole: Tensor) -> Tensor:
        """Return the rank's tokens of ``[batch, tokens]``."""
        if self.size == 1:
            return whole
        part = self.num_tokens // (2 * self.size)
        return torch.cat([whole[:, start : start + part] for start in self.starts], dim=1)

    def num_before(self, place: int) -> int:
        """Return the number of the rank's tokens before the one at *place* of a sequence.

        >>> ContextGroup(None, 0, 2, num_tokens=8).num_before(7)
        3
        """
        part = self.num_tokens // len(self.starts) // self.size
        return sum(min(max(place - start, 0), part) for start in self.starts)


def all_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Fill *whole* with every rank's *own*, along dim 0, and return it."""
    _GATHER(whole, own, group=group)
    return whole


def reduce_scatter(own: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Fill *own* with this rank's part of the sum of *whole*, and return it."""
    _REDUCE_SCATTER(own, whole, group=group)
    return own
