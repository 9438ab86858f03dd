"""Token ids of context-parallel ranks, shifted by a token for MTP."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.validate.programs.context.group import ContextGroup


def shifted(numbers: Tensor, cp: ContextGroup | None) -> Tensor:
    """Return the number of the token after each of ``[batch, tokens]``; 0 after the last.

    What is shifted out of a rank's early part goes to the rank before, out of its late one to the
    rank behind; on the last rank one part follows the other.  The messages are those of
    Megatron-Core (roll_tensor of megatron/core/transformer/multi_token_prediction.py, core 0.16).

    >>> shifted(torch.tensor([[4, 5, 6]]), None)
    tensor([[5, 6, 0]])
    """
    if cp is None or cp.size == 1:
        return functional.pad(numbers[:, 1:], (0, 1))
    early, late = numbers.chunk(2, dim=1)
    after_early, after_late = _neighbours_first(early, late, cp)
    return torch.cat([early[:, 1:], after_early, late[:, 1:], after_late], dim=1)


def _neighbours_first(early: Tensor, late: Tensor, cp: ContextGroup) -> tuple[Tensor, Tensor]:
    """Return the numbers of the tokens after both parts, ``[batch, 1]`` each."""
    leaving = early[:, :1].contiguous(), late[:, :1].contiguous()
    after_early = leaving[1] if cp.rank == cp.size - 1 else torch.empty_like(leaving[0])
    after_late = torch.empty_like(leaving[1]) if cp.rank else torch.zeros_like(leaving[1])
    works = []
    if cp.rank:
        before = _global_rank(cp, cp.rank - 1)
        works.append(dist.isend(leaving[0], dst=before, group=cp.group))
        works.append(dist.irecv(after_late, src=before, group=cp.group))
    if cp.rank < cp.size - 1:
        behind = _global_rank(cp, cp.rank + 1)
        works.append(dist.irecv(after_early, src=behind, group=cp.group))
        works.append(dist.isend(leaving[1], dst=behind, group=cp.group))
    for each in works:
        if each is not None:
            each.wait()
    return after_early, after_late


def _global_rank(cp: ContextGroup, rank: int) -> int:
    assert cp.group is not None
    return dist.get_global_rank(cp.group, rank)
