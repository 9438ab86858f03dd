"""AdamW over contiguous shards: fp32 master copies and moments, clipped by the global norm."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.validate.programs.contract import (
    BETAS,
    CLIP_NORM,
    EPSILON,
    LEARNING_RATE,
    WEIGHT_DECAY,
)
from meshwright.validate.programs.megatron.buffers import ParameterBucket, StageBuffers
from meshwright.validate.ranks import ByteKind


class ShardedAdam:
    """The optimizer of one rank: its part of every bucket, or all of it.

    Args:
        buffers: Of the rank's virtual stages; those of experts, if they have their own, apart.
        norm: Ranks over which the norm is summed; None where there is one.
        is_joint: It is summed once for all buffers, not of each apart (`ChainedOptimizer` of
            megatron/core/optimizer/optimizer.py, core 0.12 to 0.19).
        device: Device of the rank, which may have no weights.
    """

    def __init__(
        self,
        buffers: Sequence[Sequence[StageBuffers]],
        norm: dist.ProcessGroup | None,
        device: torch.device,
        *,
        is_joint: bool,
    ) -> None:
        self.norm, self.parts, self.device = norm, buffers, device
        self.is_joint = is_joint
        self.shards = [
            (each, bucket) for part in buffers for each in part for bucket in each.buckets
        ]
        self.masters = [self._master(buffers, bucket) for buffers, bucket in self.shards]
        self.adam = torch.optim.AdamW(
            [{"params": self.masters}],  # a list of tensors may not be empty
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    def step(self) -> None:
        """Clip, update, and all-gather the new weights.

        Gradients kept in 16 bits are copied to fp32 first, and the copies clipped
        (`MixedPrecisionOptimizer` of megatron/core/optimizer/optimizer.py, core r0.8).
        """
        gradients = [gradient.float() for gradient in self._gradients()]
        self._clip(gradients)
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        del gradients
        self.adam.step()
        for master, (buffers, bucket) in zip(self.masters, self.shards, strict=True):
            master.grad = None
            weights = bucket.weights[_own(buffers, bucket)]
            if weights.dtype is not master.dtype:
                weights.copy_(master.detach())
        for buffers in dict.fromkeys(buffers for buffers, _ in self.shards):
            buffers.gather()

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield master copies and moments."""
        for master, (_, bucket) in zip(self.masters, self.shards, strict=True):
            if master.dtype is not bucket.weights.dtype:
                yield master, ByteKind.OPTIMIZER
            for name, state in self.adam.state[master].items():
                if name != "step":
                    yield state, ByteKind.OPTIMIZER

    def _gradients(self) -> list[Tensor]:
        return [bucket.gradients[_own(buffers, bucket)] for buffers, bucket in self.shards]

    def _master(self, buffers: StageBuffers, bucket: ParameterBucket) -> Tensor:
        """Return the tensor to update: an fp32 master copy, or the weights if they are fp32."""
        weights = bucket.weights[_own(buffers, bucket)]
        return weights.float().requires_grad_() if weights.dtype is not torch.float32 else weights

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of the whole model's gradients, each counted once."""
        totals = [self._square(gradients, part) for part in self.parts]
        if self.is_joint and len(totals) > 1:
            totals = [torch.stack(totals).sum()]
        for total in totals if self.norm is not None else ():
            dist.all_reduce(total, group=self.norm)
        return torch.stack(totals).sum().sqrt() if len(totals) > 1 else totals[0].sqrt()

    def _square(self, gradients: Sequence[Tensor], part: Sequence[StageBuffers]) -> Tensor:
        """Return the sum of the squares of the rank's gradients of a *part*."""
        total = torch.zeros((), device=self.device)
        for gradient, (buffers, bucket) in zip(gradients, self.shards, strict=True):
            for own in _counted_once(bucket, _own(buffers, bucket)) if buffers in part else ():
                total += torch.linalg.vector_norm(gradient[own]).square()
        return total

    def _clip(self, gradients: Sequence[Tensor]) -> None:
        # 1e-6 as in `torch.nn.utils.clip_grad_norm_`: a norm of 0 must not divide.
        factor = (CLIP_NORM / (self.gradient_norm(gradients) + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)


def _own(buffers: StageBuffers, bucket: ParameterBucket) -> slice:
    return bucket.shard(buffers.dp) if buffers.shards else slice(0, bucket.weights.numel())


def _counted_once(bucket: ParameterBucket, own: slice) -> Iterator[slice]:
    """Yield the parts of *own* that no other rank counts."""
    for entry in bucket.entries:
        start, end = max(entry.start, own.start), min(entry.end, own.stop)
        if start < end and not entry.is_duplicate:
            yield slice(start - own.start, end - own.start)
