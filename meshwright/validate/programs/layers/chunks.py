"""Chunked attention: each chunk of a sequence attends within itself."""

import torch
from torch import Tensor, nn


def cut(values: Tensor, size: int) -> Tensor:
    """Return ``[tokens, batch, ..]`` as ``[size, chunks, ..]``, zeros behind the last tokens."""
    missing = -len(values) % size
    if missing:
        values = torch.cat([values, values.new_zeros((missing, *values.shape[1:]))])
    return values.unflatten(0, (-1, size)).transpose(0, 1).flatten(1, 2).contiguous()


def joined(values: Tensor, num_tokens: int, batch: int) -> Tensor:
    """Return the chunks of `cut` in the order of tokens, without the padding."""
    return values.unflatten(1, (-1, batch)).transpose(0, 1).flatten(0, 1)[:num_tokens]


class ChunkedAttention(nn.Module):
    """Attention core that is called for one chunk after the other.

    Args:
        core: Attention core of a chunk.
        size: Tokens of a chunk.
        seq_dim: Dim of tokens.
    """

    def __init__(self, core: nn.Module, size: int, seq_dim: int) -> None:
        super().__init__()
        self.core, self.size, self.seq_dim = core, size, seq_dim

    def forward(self, *given: Tensor) -> Tensor:
        """Return the attention of queries to keys and values of their chunk."""
        chunks = zip(*(each.split(self.size, self.seq_dim) for each in given), strict=True)
        return torch.cat([self.core(*each) for each in chunks], self.seq_dim)
