"""The loss of the PyTorch programs, whole or with the vocabulary split over ranks."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of all tokens, computed in fp32.

    Logits may be a DTensor whose vocabulary is split: then three all-reduces of a number a token
    take the place of a gather, inside `loss_context`.

    Args:
        logits: ``[batch, tokens, vocabulary]``.
        targets: Ids, the same on all ranks that share the logits.
    """
    loss = functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


def loss_context(*, is_split: bool) -> AbstractContextManager[object]:
    """Return the context in which losses and their gradients are computed."""
    return loss_parallel() if is_split else nullcontext()


class LossOfMicrobatch:
    """The share of one microbatch in the loss of a step; keeps each microbatch's own.

    Args:
        num_microbatches: Of the step.
    """

    def __init__(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._losses: list[Tensor] = []

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the microbatch's tokens, divided by the number of microbatches."""
        loss = token_loss(logits, targets)
        self._losses.append(loss.detach())
        return loss / self._num_microbatches

    def take(self) -> list[Tensor]:
        """Return the loss of each microbatch since the last call, in their order."""
        losses, self._losses = self._losses, []
        return losses
