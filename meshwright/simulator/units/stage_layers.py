"""Bytes of the FSDP units of a stage's layers, by layer index."""

from collections.abc import Callable
from typing import NamedTuple

from meshwright.simulator.graph import Size, larger
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import EXPERT_LAYERS
from meshwright.simulator.units.bytes import LayerUnit, UnitBytes
from meshwright.simulator.units.layers import alike, by_place, extreme_places
from meshwright.simulator.units.nested import is_apart
from meshwright.simulator.units.sharding import Sharding


def weights_of(layer: LayerUnit) -> Size:
    """Return the gathered weights of a layer."""
    return layer.whole.weights


def kept_of(layer: LayerUnit) -> Size:
    """Return the kept gradients of a layer."""
    return layer.whole.kept


class StageLayers(NamedTuple):
    """FSDP units of the layers of a stage, and their sharding."""

    stage: Stage
    sharding: Sharding
    units: UnitBytes

    @property
    def families(self) -> tuple[int, ...]:
        """Family of each layer."""
        return by_place(self.stage, self.units.kinds)

    @property
    def extreme_places(self) -> tuple[int, ...]:
        """Indices of layers whose passes may be the peak, the last one first."""
        return extreme_places(self.stage, self.units.kinds)

    def at(self, place: int) -> LayerUnit:
        """Return the units of the layer at an index; of a stage without layers, of any layer."""
        families = self.families
        return self.units.layers[families[place] if families else 0]

    def divides(self, place: int) -> bool:
        """Whether the layer at an index has experts with a shard group of their own."""
        kinds, families = self.units.kinds, self.families
        has_experts = bool(families) and kinds[families[place]] in EXPERT_LAYERS
        return self.sharding.divides_experts and has_experts

    def total(
        self, of: Callable[[LayerUnit], Size], first: int = 0, end: int | None = None
    ) -> Size:
        """Return the sum of a size *of* the layers from the index *first* to *end*."""
        found: Size = 0
        for each in alike(self.stage, self.units.kinds, first, end):
            found = found + each.num_layers * of(self.units.layers[each.family])
        return found

    def is_nested(self, place: int) -> bool:
        """Whether a layer's experts are gathered, freed and reduced by themselves within it."""
        return self.divides(place) and self.units.nests and not self.sharding.keeps_units

    def is_double(self, place: int) -> bool:
        """Whether its experts are gathered and reduced after a layer's others, all at once."""
        return self.divides(place) and not self.units.nests

    def fetched(self, place: int, left: Size) -> Size:
        """Return the live bytes as a layer's weights are copied out, with the buffer *left*.

        The buffer of the unit before lives until the first weights are copied (`wait_for_unshard`).
        """
        layer = self.at(place)
        if not self.is_double(place):
            return left + layer.buffer + layer.weights
        copied = layer.weights + self.units.cuts_experts * layer.experts.weights
        return layer.buffer + larger(left + layer.dense.weights, copied)

    def fetched_again(self, place: int) -> Size:
        """Return the same in backward, where a buffer is freed as it is copied out."""
        layer = self.at(place)
        if not self.is_double(place):
            return layer.weights + layer.buffer
        copied = layer.weights + self.units.cuts_experts * layer.experts.weights
        return layer.expert_buffer + larger(layer.dense_buffer + layer.dense.weights, copied)

    def last_buffer(self, place: int) -> Size:
        """Return the buffer left after a layer's forward: of its experts, if they have one."""
        layer = self.at(place)
        return layer.expert_buffer if self.divides(place) else layer.buffer

    def wire(self, place: int) -> Size:
        """Return the inputs of reduce-scatters that a layer's backward leaves."""
        layer = self.at(place)
        return layer.dense.wire if self.units.nests else layer.whole.wire

    def replica_bytes(self, done: int, *, first: bool) -> Size:
        """Return the outputs of HSDP all-reduces when *done* layers have run backward."""
        units, num = self.units, self.stage.num_layers
        # The head is reduced before all layers.
        left = self.total(lambda layer: layer.whole.replicas, num - done) + units.head.replicas
        return is_apart(units, first=first) * left

    @property
    def ahead_of_last(self) -> Size:
        """All-gather buffer of the last layer, prefetched for its backward, without experts."""
        last = self.at(-1)
        return last.dense_buffer if self.units.nests else last.buffer

    def left(self, place: int) -> Size:
        """Return the input of the last reduce-scatter before a layer's backward."""
        is_first = place + 1 == self.stage.num_layers
        return self.units.head.wire if is_first else self.wire(place + 1)

    def stay(self, place: int) -> Size:
        """Return the weights of the layers before one that are not resharded after forward."""
        if self.sharding.reshards:
            return 0
        return self.units.table.weights + self.total(weights_of, 0, place)

    def gathered(self, place: int, *, whole: bool) -> Size:
        """Return the gathered weights of layers while one runs backward.

        Among them is the buffer of the layer before, or of the embedding, which is being gathered.
        """
        sharding = self.sharding
        # Between passes of a pipeline the layers behind stay gathered, too.
        behind = None if sharding.keeps_units else place + 1
        if whole or not sharding.reshards:
            return self.total(weights_of, 0, behind)
        return self.total(weights_of, place, behind) + self.on_the_way(place)

    def on_the_way(self, place: int) -> Size:
        """Return the buffer that is being gathered while a layer runs backward."""
        if not self.sharding.reshards:
            return 0
        # Before the first layer comes the embedding, whose unit is gathered again.
        if not place:
            return self.units.table.weights * self.units.gathers
        before = self.at(place - 1)
        return before.ahead if self.is_nested(place - 1) else before.buffer
