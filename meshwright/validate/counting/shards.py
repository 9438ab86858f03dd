"""Shards of one rank among thousands: those of the others, which nobody reads, are not made."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from unittest.mock import patch

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param


class Chunks(Sequence[torch.Tensor]):
    """The parts of `torch.chunk`, each made when it is asked for; past its last ones empty tensors.

    FSDP2 takes two of them for each parameter, the first and its own (`_init_sharded_param`).

    >>> [part.tolist() for part in Chunks(torch.arange(5), 4, 0)]
    [[0, 1], [2, 3], [4], []]
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num_chunks, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._num_chunks

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override] # no slices
        if not 0 <= index < self._num_chunks:
            raise IndexError(index)
        size = self._tensor.size(self._dim)
        most = -(-size // self._num_chunks)
        length = min(most, size - index * most)
        if length <= 0 and size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, index * most, length)


def shard_patches() -> Iterator[AbstractContextManager[object]]:
    """Yield the patch that makes no shards of other ranks."""
    yield patch.object(_fsdp_param, "_chunk_with_empty", Chunks)
