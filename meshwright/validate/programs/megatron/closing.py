"""Gradients that are summed once, after the last backward pass, outside the replicas' buckets."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.validate.programs.megatron.buffers import ChunkBuffers
from meshwright.validate.programs.megatron.tensor_parallel import TensorGroup


def sum_replicated(
    chunks: Sequence[ChunkBuffers], replicated: Sequence[nn.Parameter], tp: TensorGroup
) -> None:
    """Sum the gradients of weights that saw only a rank's own tokens, in one all-reduce.

    With sequence parallelism norms and the biases of row layers are such weights.
    """
    if not (tp.splits_tokens and replicated):
        return
    views = [gradient_view(chunks, parameter) for parameter in replicated]
    flat = torch.cat([view.flatten() for view in views])
    tp.sum(flat)
    for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
        view.copy_(part.view(view.shape))


def sum_tied_table(
    chunks: Sequence[ChunkBuffers], table: nn.Parameter, ends: dist.ProcessGroup
) -> None:
    """Sum the gradients of a table that first and last stage both hold."""
    dist.all_reduce(gradient_view(chunks, table), group=ends)


def gradient_view(chunks: Sequence[ChunkBuffers], parameter: nn.Parameter) -> Tensor:
    """Return the gradient of *parameter* in whichever chunk has it."""
    return next(chunk.gradient_of(parameter) for chunk in chunks if chunk.holds(parameter))
