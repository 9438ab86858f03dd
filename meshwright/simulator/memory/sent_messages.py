"""What PyTorch's pipeline runtimes still hold of messages that they have sent.

A message's work holds its tensor (ProcessGroupNCCL stores it as the work's output), and so do the
lists in which a runtime keeps works and operations (torch/distributed/pipelining/schedules.py,
PyTorch 2.13).
"""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.simulator.schedules import Action, Phase


class SentBytes(NamedTuple):
    """Bytes of what a virtual stage sends in a microbatch; 0 where it sends nothing.

    Args:
        output: To the stage after it; it lives until the backward pass in any case.
        gradient: To the stage before it.
    """

    output: int = 0
    gradient: int = 0


NOTHING_SENT = SentBytes()


def sent_bytes_until_end(actions: Sequence[Action], sent: Sequence[SentBytes]) -> list[int]:
    """Return the sent bytes that live during each action, and after the last: all sent so far.

    The runtimes of GPipe and of interleaved schedules wait for their sends when all passes are
    done.  An output counts once its backward pass is over: until then it is kept anyway.

    >>> actions = [Action(Phase(name), 0, index) for name in "FB" for index in (0, 1)]
    >>> sent_bytes_until_end(actions, [SentBytes(output=10, gradient=1)])
    [0, 0, 0, 11, 22]
    """
    live_bytes = [0]
    for phase, virtual_stage, _ in actions:
        live_bytes.append(
            live_bytes[-1] + (sum(sent[virtual_stage]) if phase is Phase.BACKWARD else 0)
        )
    return live_bytes


def sent_bytes_until_next(actions: Sequence[Action], sent: SentBytes) -> list[int]:
    """Return the sent bytes that live during each action of 1F1B, and after the last.

    A gradient lives until the next backward pass has made another.  The last output that was sent
    alone, that of the forward pass before the last of the warm-up, lives until a gradient is sent
    alone, after the last forward pass.

    >>> order = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    >>> actions = [Action(Phase(name), 0, index) for name, index in order]
    >>> sent_bytes_until_next(actions, SentBytes(output=10, gradient=1))
    [0, 0, 0, 11, 11, 1, 1]
    """
    phases = [action.phase for action in actions]
    # Schedule1F1B keeps what it sends alone in `send_work`: warm-up outputs but for the last, then
    # gradients once no forward pass is left.  All else goes in a batch with a receive.
    warmup = phases.index(Phase.BACKWARD)
    steady = phases.count(Phase.FORWARD) - warmup  # passes after which a forward pass follows
    live_bytes, done = [0], 0
    for phase in phases:
        done += phase is Phase.BACKWARD
        output = sent.output if 1 <= warmup - 1 <= done <= steady else 0
        live_bytes.append(output + (sent.gradient if done else 0))
    return live_bytes
