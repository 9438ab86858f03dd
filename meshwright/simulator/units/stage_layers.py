"""What the units of a stage's layers hold, by the places of the layers."""

from collections.abc import Callable
from typing import NamedTuple

from meshwright.simulator.graph import Size
from meshwright.simulator.layout import Stage
from meshwright.simulator.units.bytes import LayerUnit, UnitBytes
from meshwright.simulator.units.layers import alike, experts_by_place, member
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

    def at(self, place: int) -> LayerUnit:
        """Return those of the layer at a *place*; of a stage without layers, those of one."""
        have = experts_by_place(self.stage)
        return member(self.units.layers, has_experts=have[place] if have else False)

    def total(
        self, of: Callable[[LayerUnit], Size], first: int = 0, end: int | None = None
    ) -> Size:
        """Return the sum of something *of* the layers from the place *first* to *end*."""
        found: Size = 0
        for each in alike(self.stage, first, end):
            layer = member(self.units.layers, has_experts=each.has_experts)
            found = found + each.num_layers * of(layer)
        return found

    def is_nested(self, place: int) -> bool:
        """Whether experts of a layer are gathered, freed and reduced by themselves within it."""
        sharding, have = self.sharding, experts_by_place(self.stage)
        is_unit = sharding.divides_experts and bool(have) and have[place]
        return is_unit and not sharding.keeps_units

    def replica_bytes(self, done: int, *, first: bool) -> Size:
        """Return what reductions over replicas have left when *done* layers have run backward."""
        units, num = self.units, self.stage.num_layers
        left = self.total(lambda layer: layer.whole.replicas, num - done) + units.head.replicas
        return is_apart(units, first=first) * left

    def left(self, place: int) -> Size:
        """Return the input of the last reduction before the backward of the layer at a *place*."""
        is_first = place + 1 == self.stage.num_layers
        return self.units.head.wire if is_first else self.at(place + 1).dense.wire

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
