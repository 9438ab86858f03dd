"""Megatron-FSDP's buckets that are gathered, or wait to be freed, at each block of a pass.

Its `AllGatherPipeline` gathers the weights that a module is about to use, and prefetches the
buckets that follow in the order of the model, in backward those before, until these fill half a
limit: twice a mean unit, or 1e9 elements. Weights outside all layers come first in that order, so
that final norm and head prefetch the first layers; the next gather frees them, unless it was their
own. Its `GradReducePipeline` frees reduced gradients only when a later reduction finds more than
the whole limit waiting (megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py
and megatron_fsdp.py, core 0.16.1).

Weights in MXFP8 have two copies, along rows and along columns: backward gathers the latter. Modules
of a unit ask for their own weights there. Up to core 0.17.1 they do so in backward, too, and a
module that has asked once in backward prefetches nothing in later forward passes; rows that a
recomputed part gathers stay until the next backward pass. From core 0.18 on units ask in backward,
which frees both copies behind it, and modules outside all units prefetch nothing after a first
backward pass (`_root_pre_backward` marks all modules), in any format.
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
    """Elements of weights that are gathered together, padded to equal shards.

    Args:
        size: Number of elements.
        is_expert: Whether they are of routed experts.
        is_whole: Whether one rank has them all, so that nothing is gathered.
        width: Bytes of an element.
        has_columns: Whether backward gathers a second copy, along columns, in its place.
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
        """Bytes of the gathered bucket."""
        return 0 if self.is_whole else self.size * self.width


class FlatUnit(NamedTuple):
    """Unit of a layer: its kind, its buckets, and those that recomputation gathers along rows."""

    kind: BlockKind
    buckets: tuple[FlatBucket, ...]
    repeated: tuple[int, ...] = ()


class EndBucket(NamedTuple):
    """Bucket outside all layers, with the first and the last block that has weights of it."""

    bucket: FlatBucket
    first: int
    last: int


class Step(NamedTuple):
    """Gathers that a forward pass asks for within a block: buckets of an end, or a unit."""

    block: int
    ends: tuple[int, ...] = ()
    unit: int | None = None


class WalkSettings(NamedTuple):
    """Limits and options of gathers and reductions.

    Args:
        size: Limit of elements that are gathered ahead, or wait to be freed.
        is_pooled: Whether units share two buffers (double buffering).
        ends_prefetch: Whether modules outside all units prefetch, as up to core 0.17.1.
    """

    size: int = LEAST_ELEMENTS
    is_pooled: bool = False
    ends_prefetch: bool = True

    @classmethod
    def of(
        cls,
        mean_unit: int,
        size: int = 0,
        *,
        is_pooled: bool = False,
        ends_prefetch: bool = True,
    ) -> "WalkSettings":
        """Return the settings for a *mean_unit* of so many parameters, and a user's *size*."""
        return cls(size or max(LEAST_ELEMENTS, 2 * mean_unit), is_pooled, ends_prefetch)


class UnitWalk(NamedTuple):
    """Gathered weights and whole gradients at each block of a pass, beside a rank's shards.

    Args:
        ends: Buckets outside all layers, those of later groups behind the first ``num_first``.
        units: All layers in the order of the model, of which the first ``num_layers`` are ahead of
            the second group of ends, and the others are of MTP.
        steps: Gathers of a forward pass, in order.
        forward: Bytes of gathered weights at each block of it.
        backward: The same in backward, in the order of the model.
        gradients: Elements of whole gradients at the same moments.
        kept_gradients: Elements of these whose buffers are never freed.
        repeated_gathers: Gathers of each bucket of each unit in a microbatch beyond once a pass.
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
    repeated_gathers: tuple[tuple[int, ...], ...] = ()

    @property
    def num_blocks(self) -> int:
        """Number of blocks of a pass."""
        return self.steps[-1].block + 1

    def walked(self, settings: WalkSettings) -> "UnitWalk":
        """Return the walk with live bytes and gathers filled in."""
        gathers = _Gathers(self, settings)
        forward, backward = gathers.forward(), gathers.backward()
        pooled = gathers.pooled
        kept = sum(each.size for each in self._pool(pooled) if not each.is_whole)
        # A pool has as many buffers as units, at most two.
        kept *= min(NUM_POOLED, len(pooled))
        gradient_sizes = _gradients(self, settings.size, pooled)
        return self._replace(
            forward=tuple(forward),
            backward=tuple(backward),
            gradients=tuple(kept + each for each in gradient_sizes),
            kept_gradients=kept,
            repeated_gathers=gathers.vain(),
        )

    def _pool(self, pooled: Sequence[int]) -> tuple[FlatBucket, ...]:
        return self.units[pooled[0]].buckets if pooled else ()

    def largest_alike(self) -> tuple[int, ...]:
        """Return the units that share two buffers: the largest group of one size and format.

        `FixedPoolAllocator` compares weights without padding; other units have buffers of their own
        for as long as they are gathered.
        """
        units_by_size: dict[tuple[tuple[int, int, bool], ...], list[int]] = {}
        for place, unit in enumerate(self.units):
            key = tuple((each.size, each.width, each.is_expert) for each in unit.buckets)
            units_by_size.setdefault(key, []).append(place)
        most = max(map(len, units_by_size.values()))
        return tuple(next(own for own in units_by_size.values() if len(own) == most))


class _Gathers:
    """Gathered buckets while a microbatch that is not the first goes through the model."""

    def __init__(self, walk: UnitWalk, settings: WalkSettings) -> None:
        self._walk, self._ahead = walk, settings.size // 2
        # Whether modules of units ask one by one in backward, and then no more ahead in forward.
        has_columns_copy = any(each.has_columns for unit in walk.units for each in unit.buckets)
        self._is_by_module = has_columns_copy and settings.ends_prefetch
        self._ends_go_ahead = settings.ends_prefetch and not has_columns_copy
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
        self._freeable: set[Key] = set()
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
        """Return the gathered bytes at each block of a forward pass."""
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
                # Units reshard after their forward pass; ends stay.
                self._live -= {(each, False) for each in self._places[unit]}
        return levels

    def backward(self) -> list[int]:
        """Return the gathered bytes at each block of a backward pass, in the order of the model."""
        levels = [0] * self._walk.num_blocks
        self._freeable = {(each, False) for places in self._places for each in places}
        for block, _, unit in reversed(self._walk.steps):
            transposed = 0
            if unit is not None:
                transposed = self._gather_for_backward(unit)
            levels[block] = max(levels[block], self._level + transposed)
            if unit is not None:
                # Along rows, too, from core 0.18 on.
                both = (True,) if self._is_by_module else (False, True)
                self._live -= {self._key(each, way) for each in self._places[unit] for way in both}
        return levels

    def _gather_for_backward(self, unit: int) -> int:
        """Gather a *unit* for backward; return the bytes of transposes of its weights."""
        places, own = self._places[unit], self._walk.units[unit]
        again = [places[each] for each in own.repeated]
        if again:
            self._gather(again, 1, backward=False, prefetches=False)
            if len(again) == len(places):  # a whole layer's forward pass frees it later
                self._freeable |= {(each, False) for each in again}
        if not self._is_by_module:
            self._gather(places, -1, backward=True)
        else:
            for each in sorted(places, key=self._backward_order):
                self._gather([each], -1, backward=True)
        return sum(each.transposed for each in own.buckets)

    def _backward_order(self, place: int) -> tuple[bool, bool]:
        """Return the sort key of buckets in backward: experts, linear layers, norms."""
        bucket = self._buckets[place]
        return not bucket.is_expert, not bucket.has_columns

    def vain(self) -> tuple[tuple[int, ...], ...]:
        """Return the number of gathers of each unit's buckets beyond once in each pass."""
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
        self._freeable -= {self._key(each, backward) for each in wanted}
        asked = {*wanted, *(self._following(wanted, step) if prefetches else ())}
        missing = {self._key(each, backward) for each in asked} - self._live
        if missing:
            # Freed lazily: buckets released earlier go when something new is gathered.
            self._live -= self._freeable
            self._freeable = set()
        for key in missing:
            self._live.add(key)
            self._counts[key[0]] += 1

    def _following(self, wanted: Sequence[int], step: int) -> Iterator[int]:
        """Yield the buckets of a prefetch: those of most of a layer, or its experts."""
        index, ahead = (wanted[-1] if step > 0 else wanted[0]) + step, 0
        units = {self._unit_of[each] for each in wanted}.intersection(self.pooled)
        seen_units: set[int | None] = {*units}
        while 0 <= index < len(self._buckets) and ahead < self._ahead:
            seen_units.add(self._unit_of[index])
            # A third unit would need a third buffer of the pool.
            if self.pooled and len(seen_units) > NUM_POOLED:
                return
            for each in self._together(index):
                yield each
                ahead += self._buckets[each].size
                index = max(index, each) if step > 0 else min(index, each)
            index += step

    def _together(self, bucket: int) -> list[int]:
        """Return the buckets that are gathered and reduced together with *bucket*."""
        unit, is_expert = self._unit_of[bucket], self._buckets[bucket].is_expert
        if unit is None:
            return [bucket]
        return [each for each in self._places[unit] if self._buckets[each].is_expert is is_expert]


def _gradients(walk: UnitWalk, capacity: int, pooled: Sequence[int]) -> list[int]:
    """Return the elements of whole gradients that live in the backward pass of each block.

    Gradients of *pooled* units have buffers of their own, which count separately.
    """
    levels, queue = [0] * walk.num_blocks, _Queue(capacity)
    for index, (block, _, unit) in reversed([*enumerate(walk.steps)]):
        unit_buckets = () if unit is None else walk.units[unit].buckets
        # A bucket of several blocks is there from the first of its gradients on.
        incomplete = [end.bucket for end in walk.ends if end.first <= block <= end.last]
        live = (*queue.buckets, *(() if unit in pooled else unit_buckets), *incomplete)
        levels[block] = max(levels[block], sum(each.size for each in live if not each.is_whole))
        # Experts run last in a layer's forward, so that their gradients come first.
        for is_expert in (True, False):
            group = [each for each in unit_buckets if each.is_expert is is_expert]
            if group:
                queue.add(group, unit if unit in pooled else None)
        if index == 0 or walk.steps[index - 1].block != block:
            for end in reversed(walk.ends):
                if end.first == block:
                    queue.add([end.bucket])
    return levels


class _Queue:
    """Reduced gradients that wait to be freed, with the unit of pooled ones."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: list[tuple[FlatBucket, int | None]] = []

    @property
    def buckets(self) -> list[FlatBucket]:
        """Buckets whose buffers are freed."""
        return [bucket for bucket, pooled in self._waiting if pooled is None]

    def add(self, group: Sequence[FlatBucket], pooled: int | None = None) -> None:
        """Reduce a *group*; at most two units that share buffers wait."""
        # Checked before the new group is added, as its `GradReducePipeline` does.
        while sum(each.size for each, _ in self._waiting) > self._capacity:
            self._waiting.pop(0)
        while pooled is not None and len(self._units | {pooled}) > NUM_POOLED:
            self._waiting.pop(0)
        self._waiting += [(each, pooled) for each in group]

    @property
    def _units(self) -> set[int]:
        return {pooled for _, pooled in self._waiting if pooled is not None}
