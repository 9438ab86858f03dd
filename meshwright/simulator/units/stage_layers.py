"""What the units of a stage's layers hold, by the places of the layers."""

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
    """Return what is kept of the gradients of a layer."""
    return layer.whole.kept


class StageLayers(NamedTuple):
    """Units of the layers of a stage, and how they are sharded."""

    stage: Stage
    sharding: Sharding
    units: UnitBytes

    @property
    def families(self) -> tuple[int, ...]:
        """The family of each layer."""
        return by_place(self.stage, self.units.kinds)

    @property
    def extreme_places(self) -> tuple[int, ...]:
        """Places of layers of which one may be fullest, the last one first."""
        return extreme_places(self.stage, self.units.kinds)

    def at(self, place: int) -> LayerUnit:
        """Return those of the layer at a *place*; of a stage without layers, those of one."""
        families = self.families
        return self.units.layers[families[place] if families else 0]

    def divides(self, place: int) -> bool:
        """Whether the layer at a *place* has experts of which other ranks hold others."""
        kinds, families = self.units.kinds, self.families
        has_experts = bool(families) and kinds[families[place]] in EXPERT_LAYERS
        return self.sharding.divides_experts and has_experts

    def total(
        self, of: Callable[[LayerUnit], Size], first: int = 0, end: int | None = None
    ) -> Size:
        """Return the sum of something *of* the layers from the place *first* to *end*."""
        found: Size = 0
        for each in alike(self.stage, self.units.kinds, first, end):
            found = found + each.num_layers * of(self.units.layers[each.family])
        return found

    def is_nested(self, place: int) -> bool:
        """Whether experts of a layer are gathered, freed and reduced by themselves within it."""
        return self.divides(place) and self.units.nests and not self.sharding.keeps_units

    def is_double(self, place: int) -> bool:
        """Whether its experts are gathered and reduced behind a layer's others, all at once."""
        return self.divides(place) and not self.units.nests

    def fetched(self, place: int, left: Size) -> Size:
        """Return what lives as a layer's weights are copied out forward, with the buffer *left*.

        That of the unit before is there until its first ones are (`wait_for_unshard`).
        """
        layer = self.at(place)
        if not self.is_double(place):
            return left + layer.buffer + layer.weights
        copied = layer.weights + self.units.cuts_experts * layer.experts.weights
        return layer.buffer + larger(left + layer.dense.weights, copied)

    def fetched_again(self, place: int) -> Size:
        """Return the same backward, where a buffer goes as it is copied out."""
        layer = self.at(place)
        if not self.is_double(place):
            return layer.weights + layer.buffer
        copied = layer.weights + self.units.cuts_experts * layer.experts.weights
        return layer.expert_buffer + larger(layer.dense_buffer + layer.dense.weights, copied)

    def last_buffer(self, place: int) -> Size:
        """Return the buffer that is left of a layer forward: of its experts, if these have one."""
        layer = self.at(place)
        return layer.expert_buffer if self.divides(place) else layer.buffer

    def wire(self, place: int) -> Size:
        """Return the inputs of reductions that the backward of a layer leaves."""
        layer = self.at(place)
        return layer.dense.wire if self.units.nests else layer.whole.wire

    def replica_bytes(self, done: int, *, first: bool) -> Size:
        """Return what reductions over replicas have left when *done* layers have run backward."""
        units, num = self.units, self.stage.num_layers
        left = self.total(lambda layer: layer.whole.replicas, num - done) + units.head.replicas
        return is_apart(units, first=first) * left

    @property
    def ahead_of_last(self) -> Size:
        """Buffer of the last layer, gathered ahead of its backward; not of units within it."""
        last = self.at(-1)
        return last.dense_buffer if self.units.nests else last.buffer

    def left(self, place: int) -> Size:
        """Return the input of the last reduction before the backward of the layer at a *place*."""
        is_first = place + 1 == self.stage.num_layers
        return self.units.head.wire if is_first else self.wire(place + 1)

    def stay(self, place: int) -> Size:
        """Return the weights before the layer at a *place* that are not freed after forward."""
        if self.sharding.reshards:
            return 0
        return self.units.table.weights + self.total(weights_of, 0, place)

    def gathered(self, place: int, *, whole: bool) -> Size:
        """Return the gathered weights of layers while the one at a *place* runs backward.

        On the way are those of the layer before, or of the table.
        """
        sharding = self.sharding
        behind = None if sharding.keeps_units else place + 1
        if whole or not sharding.reshards:
            return self.total(weights_of, 0, behind)
        return self.total(weights_of, place, behind) + self.on_the_way(place)

    def on_the_way(self, place: int) -> Size:
        """Return the buffer of what is gathered while the layer at a *place* runs backward."""
        if not self.sharding.reshards:
            return 0
        if not place:
            return self.units.table.weights * self.units.gathers
        before = self.at(place - 1)
        return before.ahead if self.is_nested(place - 1) else before.buffer
