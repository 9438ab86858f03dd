"""Copies between the devices of one process: made, and written down."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.simulator.engine import TaskKind
from meshwright.validate.ranks import CollectiveCount


class Copy(NamedTuple):
    """One message from a device to another; kinds are those of the simulator's tasks."""

    kind: TaskKind
    source: int
    target: int
    size_bytes: int


class Devices:
    """The devices of one process, real or simulated on one device, and what crosses between them.

    Args:
        count: Number of devices.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.copies: list[Copy] = []
        # Entered around all work of a device: whoever counts puts a counter for each there.
        self.work_of: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext()

    @property
    def others(self) -> range:
        """All devices but the first."""
        return range(1, self.count)

    def copy_into(
        self, route: tuple[TaskKind, int, int], sources: Sequence[Tensor], targets: Iterable[Tensor]
    ) -> None:
        """Fill *targets* on another device, in one message.

        Args:
            route: Kind of message, source and target device.
            sources: Tensors of the one device.
            targets: Tensors of the other one.
        """
        self.record(route, sources)
        with self.work_of(route[2]), torch.no_grad():
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

    def copy(self, route: tuple[TaskKind, int, int], source: Tensor) -> Tensor:
        """Return a copy of *source* on another device; arguments as of `copy_into`."""
        self.record(route, [source])
        with self.work_of(route[2]):
            return source.detach().clone()

    def traffic(self, device: int) -> tuple[CollectiveCount, ...]:
        """Return the messages of a device, sorted; the axis of each is its kind."""
        counted: Counter[tuple[str, str, int]] = Counter()
        for kind, source, target, size_bytes in self.copies:
            if device in (source, target):
                op = "send" if device == source else "recv"
                counted[kind.value, op, size_bytes] += 1
        return tuple(
            CollectiveCount(kind, op, 2, size_bytes, count)
            for (kind, op, size_bytes), count in sorted(counted.items())
        )

    def record(self, route: tuple[TaskKind, int, int], tensors: Iterable[Tensor]) -> None:
        """Record a message of *tensors* that is copied elsewhere."""
        self.copies.append(Copy(*route, sum(tensor.nbytes for tensor in tensors)))
