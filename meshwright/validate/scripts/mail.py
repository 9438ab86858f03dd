"""Python objects that ranks send each other: a sender is run until it has sent its own."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshwright.simulator import PlanError
from meshwright.validate.counting import pipeline_patches


class ObjectKey(NamedTuple):
    """Key of an object: source, target, and its number among those between the two."""

    source: int
    target: int
    number: int


class MissingObjectError(BaseException):
    """A rank waits for an object that its sender must be run for.

    No `Exception`, so that no script catches it.
    """

    def __init__(self, letter: ObjectKey) -> None:
        super().__init__(letter)
        self.letter = letter


class ObjectSentError(BaseException):
    """A rank has sent the object that it was run for."""


class ObjectExchange:
    """The objects that ranks have sent, kept from run to run of one script.

    Stages of a pipeline so tell each other their shapes before the first step.
    """

    def __init__(self) -> None:
        self._sent: dict[ObjectKey, object] = {}

    @contextmanager
    def delivered(self, rank: int, wanted: ObjectKey | None) -> Iterator[None]:
        """Let the code inside send and receive as *rank*, until *wanted* is sent.

        Raises:
            MissingObjectError: If it receives what was not sent yet.
            ObjectSentError: When *wanted* has been sent.
            PlanError: If it receives from any rank.
        """
        numbers: dict[tuple[int, int], int] = {}

        def letter(source: int, target: int) -> ObjectKey:
            number = numbers.get((source, target), 0)
            numbers[source, target] = number + 1
            return ObjectKey(source, target, number)

        def send(
            objects: Sequence[object], dst: int | None = None, *rest: object, **named: object
        ) -> None:
            target = _global_rank(dst, named.get("group_dst"), rest, named)
            for each in objects:
                own = letter(rank, target)
                self._sent[own] = each
                if own == wanted:
                    raise ObjectSentError

        def receive(
            objects: list[object], src: int | None = None, *rest: object, **named: object
        ) -> int:
            source = _global_rank(src, named.get("group_src"), rest, named)
            for index in range(len(objects)):
                own = letter(source, rank)
                if own not in self._sent:
                    raise MissingObjectError(own)
                objects[index] = self._sent[own]
            return source

        with ExitStack() as stack:
            for change in pipeline_patches(asks=True):
                stack.enter_context(change)
            for module in (dist, distributed_c10d):
                stack.enter_context(patch.object(module, "send_object_list", send))
                stack.enter_context(patch.object(module, "recv_object_list", receive))
            yield


def _global_rank(
    rank: int | None, in_group: object, rest: Sequence[object], named: dict[str, object]
) -> int:
    """Return the rank that is meant, by its number in the world or in its group.

    Raises:
        PlanError: If it is any rank.
    """
    if rank is not None:
        return rank
    group = rest[0] if rest else named.get("group")
    if not isinstance(in_group, int):
        raise PlanError("an object is received from any rank; allowed when counting: from one")
    if isinstance(group, dist.ProcessGroup):
        return dist.get_global_rank(group, in_group)
    return in_group
