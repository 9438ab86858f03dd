"""The loss of the PyTorch programs, whole or with the vocabulary split over ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

LossFunction = Callable[[Tensor, Tensor], Tensor]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of all tokens, computed in fp32."""
    return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def split_token_loss(logits: Tensor, targets: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the same of logits whose vocabulary is split: three all-reduces of a number a token.

    Must be called, and its gradient computed, inside `loss_context`.

    Args:
        logits: This rank's part.
        targets: All of them, the same on every rank of *mesh*.
        mesh: One-dimensional, of the tensor-parallel ranks.
    """
    whole = DTensor.from_local(logits.flatten(0, -2), mesh, [Shard(1)], run_check=False)
    loss = functional.cross_entropy(whole.float(), targets.flatten())
    assert isinstance(loss, DTensor)
    return loss.to_local()


def loss_context(*, is_split: bool) -> AbstractContextManager[object]:
    """Return the context in which losses and their gradients are computed."""
    return loss_parallel() if is_split else nullcontext()


class LossOfMicrobatch:
    """The share of one microbatch in the loss of a step; keeps each microbatch's own.

    Args:
        num_microbatches: Of the step.
        mesh: Over which the vocabulary is split, or None.
    """

    def __init__(self, num_microbatches: int, mesh: DeviceMesh | None) -> None:
        self._num_microbatches = num_microbatches
        self._mesh = mesh
        self._seen: list[Tensor] = []

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the microbatch's tokens, divided by the number of microbatches."""
        if self._mesh is None:
            loss = token_loss(logits, targets)
        else:
            loss = split_token_loss(logits, targets, self._mesh)
        self._seen.append(loss.detach())
        return loss / self._num_microbatches

    def take(self) -> list[Tensor]:
        """Return the loss of each microbatch since the last call, in their order."""
        seen, self._seen = self._seen, []
        return seen
