"""Which of Megatron-FSDP's buckets are gathered, and wait to be freed, at each block of a pass.

Its `AllGatherPipeline` gathers what a module is about to use, and ahead of it the buckets that
follow in the order of the model, in backward those before, until these have half a size that it
works in: twice a mean unit, or 1e9 elements.  Final norm and head lie before the layers in that
order, so that they gather the first layers ahead; the next gather frees them, unless it was their
own.  Its `GradReducePipeline` frees gradients that are reduced only when a later reduction finds
more than the whole size waiting (megatron/core/distributed/fsdp/src/megatron_fsdp/
param_and_grad_buffer.py and megatron_fsdp.py, core 0.16.1).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.simulator.model import BlockKind

LEAST_ELEMENTS = 1_000_000_000


class Weights(NamedTuple):
    """Shapes of a block's weights on one rank: of most, and of routed experts, one by one."""

    most: tuple[tuple[int, ...], ...]
    experts: tuple[tuple[int, ...], ...]


class FlatBucket(NamedTuple):
    """Elements of weights of a layer that are gathered together, filled up to equal shards.

    ``is_whole`` says that one rank has them all: nothing is gathered.
    """

    size: int
    is_expert: bool = False
    is_whole: bool = False


class EndBuckets(NamedTuple):
    """Elements of the buckets outside all layers.

    Args:
        early: Those with weights of the embedding, which reduce their gradients last.
        late: Those of final norm and head alone.
        is_shared: Whether the last early one has weights of these, too.
    """

    early: tuple[int, ...]
    late: tuple[int, ...]
    is_shared: bool


class UnitWalk(NamedTuple):
    """Elements at each block of a pass, beside a rank's shards.

    Args:
        ends: Buckets outside all layers.
        layers: Kind and buckets of each layer.
        forward: Weights gathered when embedding, layers and head run, the ends' buckets among them.
        backward: The same in backward, in the order of the model.
        gradients: Whole gradients at the same moments.
        vain_gathers: How often a microbatch gathers each bucket of each layer to free it unused.
    """

    ends: EndBuckets
    layers: tuple[tuple[BlockKind, tuple[FlatBucket, ...]], ...]
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    vain_gathers: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls,
        ends: EndBuckets,
        layers: tuple[tuple[BlockKind, tuple[FlatBucket, ...]], ...],
        mean_unit: int,
    ) -> "UnitWalk":
        """Return the walk through *layers* whose mean has *mean_unit* parameters."""
        walk = cls(ends, layers)
        size = max(LEAST_ELEMENTS, 2 * mean_unit)
        gathers = _Gathers(walk, size // 2)
        forward, backward = gathers.forward(), gathers.backward()
        return walk._replace(
            forward=forward,
            backward=backward,
            gradients=tuple(reversed([*_gradients(walk, size)])),
            vain_gathers=gathers.vain(),
        )


class _Gathers:
    """The gathered buckets, as a microbatch that is not the first goes through the model."""

    def __init__(self, walk: UnitWalk, ahead: int) -> None:
        ends = (*walk.ends.early, *walk.ends.late)
        self._num_early, self._num_ends = len(walk.ends.early), len(ends)
        self._ahead = ahead
        self._buckets = [
            *(FlatBucket(size) for size in ends),
            *(bucket for _, unit in walk.layers for bucket in unit),
        ]
        self._units: list[list[int]] = []
        first = len(ends)
        for _, unit in walk.layers:
            self._units.append([*range(first, first + len(unit))])
            first += len(unit)
        self._live = {*range(len(ends))}
        self._may_go: set[int] = set()
        self._counts = [0] * len(self._buckets)

    def forward(self) -> tuple[int, ...]:
        """Return what is gathered at each block of a forward pass."""
        levels = []
        for index in range(self._num_early):
            self._gather([index], 1)
        levels.append(self._level)
        for unit in self._units:
            self._gather(unit, 1)
            levels.append(self._level)
            self._live -= {*unit}
        self._gather([self._num_ends - 1], 1)
        return (*levels, self._level)

    def backward(self) -> tuple[int, ...]:
        """Return what is gathered at each block of a backward pass, in the order of the model."""
        levels = [self._level]
        self._may_go = {index for unit in self._units for index in unit}
        for unit in reversed(self._units):
            self._gather(unit, -1)
            levels.append(self._level)
            self._live -= {*unit}
        return (self._level, *reversed(levels))

    def vain(self) -> tuple[tuple[int, ...], ...]:
        """Return how often each layer's buckets were gathered beyond once in each pass."""
        return tuple(tuple(self._counts[index] - 2 for index in unit) for unit in self._units)

    @property
    def _level(self) -> int:
        own = (self._buckets[index] for index in self._live)
        return sum(bucket.size for bucket in own if not bucket.is_whole)

    def _gather(self, wanted: Sequence[int], step: int) -> None:
        self._may_go -= {*wanted}
        missing = sorted({*wanted, *self._following(wanted, step)} - self._live)
        if missing:
            self._live -= self._may_go
            self._may_go = set()
        for index in missing:
            self._live.add(index)
            self._counts[index] += 1

    def _following(self, wanted: Sequence[int], step: int) -> Iterator[int]:
        """Yield the buckets that are gathered ahead."""
        index, ahead = (wanted[-1] if step > 0 else wanted[0]) + step, 0
        while 0 <= index < len(self._buckets) and ahead < self._ahead:
            yield index
            ahead += self._buckets[index].size
            index += step


def _gradients(walk: UnitWalk, capacity: int) -> Iterator[int]:
    """Yield the whole gradients that live in the backward of head, layers and embedding."""
    queue: list[FlatBucket] = []
    early, late = ([FlatBucket(size) for size in sizes] for sizes in walk.ends[:2])
    # A bucket of both ends is there from the first of its gradients on.
    waiting = early[-1:] if walk.ends.is_shared else []
    for unit in (late, *(unit for _, unit in reversed(walk.layers)), early):
        own = (*queue, *unit, *(waiting if unit is not early else ()))
        yield sum(bucket.size for bucket in own if not bucket.is_whole)
        for bucket in reversed(unit):
            while sum(each.size for each in queue) > capacity:
                queue.pop(0)
            queue.append(bucket)
