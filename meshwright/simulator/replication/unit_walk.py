"""Which of Megatron-FSDP's buckets are gathered, and wait to be freed, at each block of a pass.

Its `AllGatherPipeline` gathers what a module is about to use, and ahead of it the buckets that
follow in the order of the model, in backward those before, until these have half a size that it
works in: twice a mean unit, or 1e9 elements.  What lies outside all layers comes first in that
order, so that final norm and head gather the first layers ahead; the next gather frees them, unless
it was their own.  Its `GradReducePipeline` frees gradients that are reduced only when a later
reduction finds more than the whole size waiting (megatron/core/distributed/fsdp/src/megatron_fsdp/
param_and_grad_buffer.py and megatron_fsdp.py, core 0.16.1).

Weights in MXFP8 lie twice, along their rows and along their columns: backward gathers the latter.
Modules of a unit ask for their own weights there.  Up to core 0.17.1 they do so in backward, too,
and a module that has asked once in backward gathers nothing ahead in later forward passes; what a
part that runs again gathers along rows stays until the next backward pass.  From core 0.18 on units
ask in backward, which frees both copies behind it, and modules outside all units gather nothing
ahead after a first backward pass (`_root_pre_backward` marks all modules), in any format.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.simulator.model import BlockKind

LEAST_ELEMENTS = 1_000_000_000
NUM_POOLED = 2  # units that have buffers of their own in a double buffer
Key = tuple[int, bool]
"""A bucket, and whether it is of columns."""


class Weights(NamedTuple):
    """Shapes of a block's weights on one rank: of most, and of routed experts, one by one."""

    most: tuple[tuple[int, ...], ...]
    experts: tuple[tuple[int, ...], ...]


class FlatBucket(NamedTuple):
    """Elements of weights that are gathered together, filled up to equal shards.

    Args:
        size: How many.
        is_expert: Of routed experts.
        is_whole: One rank has them all: nothing is gathered.
        width: Bytes of one.
        has_columns: There is another copy, which backward gathers in its place.
        transposed: Bytes of transposes that backward makes of its weights.
    """

    size: int
    is_expert: bool = False
    is_whole: bool = False
    width: int = 2
    has_columns: bool = False
    transposed: int = 0

    @property
    def gathered(self) -> int:
        """Bytes of it where it is gathered."""
        return 0 if self.is_whole else self.size * self.width


class FlatUnit(NamedTuple):
    """A layer: its kind, its buckets, and which of these recomputation wants along rows again."""

    kind: BlockKind
    buckets: tuple[FlatBucket, ...]
    repeated: tuple[int, ...] = ()


class EndBucket(NamedTuple):
    """A bucket outside all layers, with the first and the last block that has weights of it."""

    bucket: FlatBucket
    first: int
    last: int


class Step(NamedTuple):
    """What a forward pass asks for within a block: buckets of an end, or a unit."""

    block: int
    ends: tuple[int, ...] = ()
    unit: int | None = None


class WalkSettings(NamedTuple):
    """What gathers and reductions go by.

    Args:
        size: Elements that they work in.
        is_pooled: Units share two buffers.
        ends_go_ahead: Modules outside all units gather ahead, as up to core 0.17.1.
    """

    size: int = LEAST_ELEMENTS
    is_pooled: bool = False
    ends_go_ahead: bool = True

    @classmethod
    def of(
        cls,
        mean_unit: int,
        size: int = 0,
        *,
        is_pooled: bool = False,
        ends_go_ahead: bool = True,
    ) -> "WalkSettings":
        """Return those of a *mean_unit* of so many parameters, with a *size* that was asked for."""
        return cls(size or max(LEAST_ELEMENTS, 2 * mean_unit), is_pooled, ends_go_ahead)


class UnitWalk(NamedTuple):
    """What lives at each block of a pass, beside a rank's shards.

    Args:
        ends: Buckets outside all layers, those of later groups behind the first ``num_first``.
        units: All layers in the order of the model, of which the first ``num_layers`` are ahead of
            the second group of ends, and others predict further tokens.
        steps: Of a forward pass.
        forward: Bytes of gathered weights at each block of it.
        backward: The same in backward, in the order of the model.
        gradients: Elements of whole gradients at the same moments.
        kept_gradients: Of these the ones whose buffers are never freed.
        vain_gathers: How often a microbatch gathers each bucket of each unit beyond once a pass.
    """

    ends: tuple[EndBucket, ...]
    num_first: int
    units: tuple[FlatUnit, ...]
    num_layers: int
    steps: tuple[Step, ...]
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    kept_gradients: int = 0
    vain_gathers: tuple[tuple[int, ...], ...] = ()

    @property
    def num_blocks(self) -> int:
        """Blocks of a pass."""
        return self.steps[-1].block + 1

    def walked(self, settings: WalkSettings) -> "UnitWalk":
        """Return the walk with what lives, and what is gathered."""
        gathers = _Gathers(self, settings)
        forward, backward = gathers.forward(), gathers.backward()
        pooled = gathers.pooled
        kept = sum(each.size for each in self._pool(pooled) if not each.is_whole)
        kept *= min(NUM_POOLED, len(pooled))
        made = _gradients(self, settings.size, pooled)
        return self._replace(
            forward=tuple(forward),
            backward=tuple(backward),
            gradients=tuple(kept + each for each in made),
            kept_gradients=kept,
            vain_gathers=gathers.vain(),
        )

    def _pool(self, pooled: Sequence[int]) -> tuple[FlatBucket, ...]:
        return self.units[pooled[0]].buckets if pooled else ()

    def largest_alike(self) -> tuple[int, ...]:
        """Return the units that share two buffers: most of one size and format.

        `FixedPoolAllocator` compares weights, not what fills them up; others have buffers of their
        own for as long as they are gathered.
        """
        alike: dict[tuple[tuple[int, int, bool], ...], list[int]] = {}
        for place, unit in enumerate(self.units):
            key = tuple((each.size, each.width, each.is_expert) for each in unit.buckets)
            alike.setdefault(key, []).append(place)
        most = max(map(len, alike.values()))
        return tuple(next(own for own in alike.values() if len(own) == most))


class _Gathers:
    """The gathered buckets, as a microbatch that is not the first goes through the model."""

    def __init__(self, walk: UnitWalk, settings: WalkSettings) -> None:
        self._walk, self._ahead = walk, settings.size // 2
        # Whether modules of units ask one by one in backward, and then no more ahead in forward.
        turned = any(each.has_columns for unit in walk.units for each in unit.buckets)
        self._is_by_module = turned and settings.ends_go_ahead
        self._ends_go_ahead = settings.ends_go_ahead and not turned
        self.pooled = walk.largest_alike() if settings.is_pooled else ()
        self._buckets: list[FlatBucket] = []
        self._unit_of: list[int | None] = []
        self._places: list[list[int]] = []  # of each unit's buckets
        self._ends: list[int] = []
        self._add_ends(walk.ends[: walk.num_first])
        self._add_units(walk.units[: walk.num_layers])
        self._add_ends(walk.ends[walk.num_first :])
        self._add_units(walk.units[walk.num_layers :])
        both = (False, True)
        self._live = {self._key(each, backward) for each in self._ends for backward in both}
        self._may_go: set[Key] = set()
        self._counts = [0] * len(self._buckets)

    def _add_ends(self, ends: Sequence[EndBucket]) -> None:
        for end in ends:
            self._ends.append(len(self._buckets))
            self._buckets.append(end.bucket)
            self._unit_of.append(None)

    def _add_units(self, units: Sequence[FlatUnit]) -> None:
        for unit in units:
            first = len(self._buckets)
            self._unit_of += [len(self._places)] * len(unit.buckets)
            self._buckets += unit.buckets
            self._places.append([*range(first, len(self._buckets))])

    def forward(self) -> list[int]:
        """Return what is gathered at each block of a forward pass."""
        levels = [0] * self._walk.num_blocks
        for block, ends, unit in self._walk.steps:
            for each in ends:
                own = [self._ends[each]]
                self._gather(own, 1, backward=False, prefetches=self._ends_go_ahead)
            if unit is not None:
                own = self._places[unit]
                self._gather(own, 1, backward=False, prefetches=not self._is_by_module)
            levels[block] = max(levels[block], self._level)
            if unit is not None:
                self._live -= {(each, False) for each in self._places[unit]}
        return levels

    def backward(self) -> list[int]:
        """Return what is gathered at each block of a backward pass, in the order of the model."""
        levels = [0] * self._walk.num_blocks
        self._may_go = {(each, False) for places in self._places for each in places}
        for block, _, unit in reversed(self._walk.steps):
            transposed = 0
            if unit is not None:
                transposed = self._want_again(unit)
            levels[block] = max(levels[block], self._level + transposed)
            if unit is not None:
                # Along rows, too, from core 0.18 on.
                both = (True,) if self._is_by_module else (False, True)
                self._live -= {self._key(each, way) for each in self._places[unit] for way in both}
        return levels

    def _want_again(self, unit: int) -> int:
        """Gather a *unit* for backward; return the bytes of transposes of its weights."""
        places, own = self._places[unit], self._walk.units[unit]
        again = [places[each] for each in own.repeated]
        if again:
            self._gather(again, 1, backward=False, prefetches=False)
            if len(again) == len(places):  # a whole layer's forward pass frees it later
                self._may_go |= {(each, False) for each in again}
        if not self._is_by_module:
            self._gather(places, -1, backward=True)
        else:
            for each in sorted(places, key=self._backward_order):
                self._gather([each], -1, backward=True)
        return sum(each.transposed for each in own.buckets)

    def _backward_order(self, place: int) -> tuple[bool, bool]:
        """Return what sorts buckets as backward comes to them: experts, products, norms."""
        bucket = self._buckets[place]
        return not bucket.is_expert, not bucket.has_columns

    def vain(self) -> tuple[tuple[int, ...], ...]:
        """Return how often each unit's buckets were gathered beyond once in each pass."""
        return tuple(tuple(self._counts[each] - 2 for each in places) for places in self._places)

    @property
    def _level(self) -> int:
        own = [each for each, _ in self._live if self._unit_of[each] not in self.pooled]
        alone = sum(self._buckets[each].gathered for each in own)
        if not self.pooled:
            return alone
        pool = self._walk.units[self.pooled[0]].buckets
        each = sum(bucket.gathered * (1 + bucket.has_columns) for bucket in pool)
        return alone + each * min(NUM_POOLED, len(self.pooled))

    def _key(self, bucket: int, backward: bool) -> Key:  # noqa: FBT001 -- of a pass
        return bucket, backward and self._buckets[bucket].has_columns

    def _gather(
        self, wanted: Sequence[int], step: int, *, backward: bool, prefetches: bool = True
    ) -> None:
        self._may_go -= {self._key(each, backward) for each in wanted}
        asked = {*wanted, *(self._following(wanted, step) if prefetches else ())}
        missing = {self._key(each, backward) for each in asked} - self._live
        if missing:
            self._live -= self._may_go
            self._may_go = set()
        for key in missing:
            self._live.add(key)
            self._counts[key[0]] += 1

    def _following(self, wanted: Sequence[int], step: int) -> Iterator[int]:
        """Yield the buckets that are gathered ahead: those of most of a layer, or its experts."""
        index, ahead = (wanted[-1] if step > 0 else wanted[0]) + step, 0
        units = {self._unit_of[each] for each in wanted}.intersection(self.pooled)
        seen: set[int | None] = {*units}
        while 0 <= index < len(self._buckets) and ahead < self._ahead:
            seen.add(self._unit_of[index])
            if self.pooled and len(seen) > NUM_POOLED:
                return
            for each in self._together(index):
                yield each
                ahead += self._buckets[each].size
                index = max(index, each) if step > 0 else min(index, each)
            index += step

    def _together(self, bucket: int) -> list[int]:
        """Return the buckets that are gathered and reduced together with one."""
        unit, is_expert = self._unit_of[bucket], self._buckets[bucket].is_expert
        if unit is None:
            return [bucket]
        return [each for each in self._places[unit] if self._buckets[each].is_expert is is_expert]


def _gradients(walk: UnitWalk, capacity: int, pooled: Sequence[int]) -> list[int]:
    """Return the whole gradients that live in the backward pass of each block.

    Those of *pooled* units have buffers of their own, which count apart.
    """
    levels, queue = [0] * walk.num_blocks, _Queue(capacity)
    for index, (block, _, unit) in reversed([*enumerate(walk.steps)]):
        own = () if unit is None else walk.units[unit].buckets
        # A bucket of several blocks is there from the first of its gradients on.
        waiting = [end.bucket for end in walk.ends if end.first <= block <= end.last]
        alive = (*queue.buckets, *(() if unit in pooled else own), *waiting)
        levels[block] = max(levels[block], sum(each.size for each in alive if not each.is_whole))
        for is_expert in (True, False):
            group = [each for each in own if each.is_expert is is_expert]
            if group:
                queue.add(group, unit if unit in pooled else None)
        if index == 0 or walk.steps[index - 1].block != block:
            for end in reversed(walk.ends):
                if end.first == block:
                    queue.add([end.bucket])
    return levels


class _Queue:
    """Gradients that are reduced, and wait to be freed; of pooled units, which one."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: list[tuple[FlatBucket, int | None]] = []

    @property
    def buckets(self) -> list[FlatBucket]:
        """Those without buffers that are never freed."""
        return [bucket for bucket, pooled in self._waiting if pooled is None]

    def add(self, group: Sequence[FlatBucket], pooled: int | None = None) -> None:
        """Reduce a *group*; of no more than two units that share buffers."""
        while sum(each.size for each, _ in self._waiting) > self._capacity:
            self._waiting.pop(0)
        while pooled is not None and len(self._units | {pooled}) > NUM_POOLED:
            self._waiting.pop(0)
        self._waiting += [(each, pooled) for each in group]

    @property
    def _units(self) -> set[int]:
        return {pooled for _, pooled in self._waiting if pooled is not None}
