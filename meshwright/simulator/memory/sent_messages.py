"""What PyTorch's pipeline runtimes still hold of messages that they have sent.

A message's work holds its tensor (ProcessGroupNCCL stores it as the work's output), and so do the
lists in which a runtime keeps works and operations (torch/distributed/pipelining/schedules.py,
PyTorch 2.13).
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Counts: TypeAlias = NDArray[np.int64]


class SentBytes(NamedTuple):
    """Bytes of what a virtual stage sends in a microbatch; 0 where it sends nothing.

    Args:
        output: To the stage after it; it lives until the backward pass in any case.
        gradient: To the stage before it.
    """

    output: int = 0
    gradient: int = 0


NOTHING_SENT = SentBytes()


def kept_until_end(is_backward: NDArray[np.bool_], own: Counts) -> tuple[Counts, Counts]:
    """Return the outputs and gradients that live during each action, and after the last: all sent.

    The runtimes of GPipe and of interleaved schedules wait for their sends when all passes are
    done.  An output counts once its backward pass is over: until then it is kept anyway.

    Args:
        is_backward: Whether each action is a backward pass.
        own: 1 in the column of its virtual stage, or of the kind of that.

    >>> order = np.array([False, False, True, True])
    >>> [each.ravel().tolist() for each in kept_until_end(order, np.ones((4, 1), np.int64))]
    [[0, 0, 0, 1, 2], [0, 0, 0, 1, 2]]
    """
    sent = (own * is_backward[:, None]).cumsum(axis=0)
    found = np.concatenate([np.zeros_like(sent[:1]), sent])
    return found, found


def kept_until_next(is_backward: NDArray[np.bool_], own: Counts) -> tuple[Counts, Counts]:
    """Return those of 1F1B, as `kept_until_end`.

    A gradient lives until the next backward pass has made another.  The last output that was sent
    alone, that of the forward pass before the last of the warm-up, lives until a gradient is sent
    alone, after the last forward pass.

    >>> order = np.array([False, False, True, False, True, True])
    >>> [each.ravel().tolist() for each in kept_until_next(order, np.ones((6, 1), np.int64))]
    [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1]]
    """
    # Schedule1F1B keeps what it sends alone in `send_work`: warm-up outputs but for the last, then
    # gradients once no forward pass is left.  All else goes in a batch with a receive.
    warmup = int(is_backward.argmax())
    steady = len(is_backward) // 2 - warmup  # passes after which a forward pass follows
    done = np.concatenate([[0], is_backward.cumsum()])
    output = (done >= warmup - 1) & (done <= steady) & (done > 0) & (warmup > 1)
    return output[:, None] * own[:1], (done > 0)[:, None] * own[:1]
