"""The optimizer of the PyTorch programs, and the clipping of gradients before it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshwright.validate.programs.contract import (
    BETAS,
    CLIP_NORM,
    EPSILON,
    LEARNING_RATE,
    WEIGHT_DECAY,
)
from meshwright.validate.ranks import ByteKind


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return AdamW in one kernel, which needs no temporaries; foreach needs the parameters' size.

    Plain and distributed tensors, and those of different meshes, are in groups of their own: one
    operator takes tensors of one kind.
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()],
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's part of each gradient."""
    gradients = (parameter.grad for parameter in parameters)
    return [_local(gradient) for gradient in gradients if gradient is not None]


def summed_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's part of each gradient; Partial placements are summed first."""
    gradients = [parameter.grad for parameter in parameters]
    return [_local(_summed(gradient)) for gradient in gradients if gradient is not None]


def sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, in fp32."""
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]
    return torch.stack(norms).square().sum()


@torch.no_grad()
def clip_gradients(
    own: list[Tensor], shared: list[Tensor], group: dist.ProcessGroup | None
) -> Tensor:
    """Scale gradients in place so that their norm is at most `CLIP_NORM`; return the norm before.

    Args:
        own: Gradients that this rank counts: over the group each element is counted once.
        shared: Those that another rank counts; scaled, too.
        group: Ranks that hold different parts; None where this one holds everything.
    """
    total = sum_of_squares(own) if own else shared[0].new_zeros(())
    if group is not None:
        dist.all_reduce(total, group=group)
    return _scale_gradients([*own, *shared], total)


class ExpertNorms(NamedTuple):
    """Gradients of experts that other ranks hold than layers, whose norms are summed first.

    Args:
        meshes: Over whose ranks, one after the other.
        are: Of each gradient, whether it is of such experts.
    """

    meshes: Sequence[DeviceMesh]
    are: Sequence[bool]


@torch.no_grad()
def clip_gradients_by_axis(
    gradients: Sequence[Tensor],
    sums: Sequence[Tensor],
    counts: Sequence[bool],
    mesh: DeviceMesh,
    experts: ExpertNorms,
) -> Tensor:
    """Clip as `clip_gradients`, with a norm for each gradient, summed over axis after axis.

    Args:
        gradients: All of this rank.
        sums: The same, where they are parts of a sum the sum.
        counts: True of those that this rank counts.
        mesh: With the axes over which weights are split, then that of the pipeline.
        experts: Which of them are summed over other axes (`_clip_grad_norm_with_ep` of torchtitan
            0.2.2, distributed/utils.py).
    """
    totals = []
    meshes = {True: experts.meshes, False: [mesh[axis] for axis in ("dp_shard", "tp")]}
    for of_experts, axes in meshes.items():
        chosen = [are is of_experts for are in experts.are]
        squares = [sum_of_squares([each]) for each in compress(sums, chosen)]
        if squares:
            own = torch.tensor([*compress(counts, chosen)], device=squares[0].device)
            norms = torch.stack(squares) * own
            for axis in axes:
                _sum_over(norms, axis)
            totals.append(norms.sum())
    total = totals[0] if len(totals) == 1 else totals[0] + totals[1]
    _sum_over(total, mesh["pp"])
    return _scale_gradients(gradients, total)


def _sum_over(values: Tensor, axis: DeviceMesh) -> None:
    """Sum *values* in place over the ranks of an axis, if there are others."""
    if axis.size() > 1:
        dist.all_reduce(values, group=axis.get_group())


def _scale_gradients(gradients: Iterable[Tensor], total: Tensor) -> Tensor:
    """Scale *gradients*, *total* the sum of the squares of all, and return their norm."""
    norm = total.sqrt()
    # 1e-6 as in `torch.nn.utils.clip_grad_norm_`: a norm of 0 must not divide.
    scale = (CLIP_NORM / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def trained_tensors(
    parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Tensor, ByteKind]]:
    """Yield the tensors that live between steps: weights, gradients, optimizer states."""
    for parameter in parameters:
        yield parameter, ByteKind.PARAMETERS
        if parameter.grad is not None:
            yield parameter.grad, ByteKind.GRADIENTS
        for state in optimizer.state.get(parameter, {}).values():
            yield state, ByteKind.OPTIMIZER


def _summed(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor) or not any(each.is_partial() for each in tensor.placements):
        return tensor
    whole = [Replicate() if each.is_partial() else each for each in tensor.placements]
    return tensor.redistribute(placements=whole)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
