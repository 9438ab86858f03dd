"""Gradients of FSDP's units that stay whole, and are summed so, until the last microbatch.

Their sums have the format of the wire (`FSDPParam` of PyTorch 2.13,
`to_accumulated_grad_if_needed`).  The last backward pass reduces them unit by unit, the root last.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.hwprofiles import Units
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.graph import Size, larger, largest
from meshwright.simulator.memory import PassPeak
from meshwright.simulator.replication import is_tied
from meshwright.simulator.units.bytes import Unit
from meshwright.simulator.units.layers import ByFamily, alike
from meshwright.simulator.units.nested import is_apart
from meshwright.simulator.units.passes import StagePass, fullest, nested_unit
from meshwright.simulator.units.stage_layers import kept_of
from meshwright.simulator.units.weights import StageWeights


class SumBytes(NamedTuple):
    """Bytes of a stage's gradients and of their sums.

    Args:
        apart: Whether sums have another format than the gradients of a pass.
        scale: Bytes of a sum for each of a gradient as a pass makes it.
        layer_shards: What this rank keeps of a layer's gradients once they are reduced.
        expert_shards: Of that, of experts that are a unit of their own.
        head_shard: The same of the head's unit.
        shard: What it keeps of all gradients then.
        copying: The last units' gradients and their first copies as sums, at most, while they are
            copied one by one.
        positions: Gradient of a table of positions, as a pass makes it.
        cut_table: A tied table's gradient that every tensor rank makes whole, and its own rows,
            which are copied out of it to be added to the head's where nothing is wrapped.
        waits: What of the output matrix's gradient is not added to a sum before the embedding's
            is there.
    """

    apart: bool
    scale: int
    layer_shards: ByFamily[Size]
    expert_shards: ByFamily[Size]
    head_shard: Size
    shard: Size
    copying: Size
    positions: int
    cut_table: Size
    waits: Size

    @classmethod
    def of(cls, shape: BlockShape, stage_pass: StagePass, weights: StageWeights) -> "SumBytes":
        """Return the bytes of *stage_pass*, whose stage has *weights*."""
        (_, stage, sharding, units), model = stage_pass, shape.model
        state, wire_bytes = sharding.parameter
        made_bytes, tied = state.gathered_parameter, is_tied(shape, stage)
        positions = model.max_positions * model.hidden_size if model.positions == "learned" else 0
        apart = made_bytes != wire_bytes
        kept_bytes = 0 if sharding.on_host else state.gradient

        def shard(wire: Size, experts: Size = 0) -> Size:
            counts = (wire - experts) // wire_bytes, experts // wire_bytes
            return sharding.shares(*counts) * kept_bytes

        return cls(
            apart=apart,
            scale=wire_bytes // made_bytes,
            layer_shards=tuple(shard(e.whole.wire, e.experts.wire) for e in units.layers),
            expert_shards=tuple(shard(e.experts.wire, e.experts.wire) for e in units.layers),
            head_shard=shard(units.head.wire),
            shard=units.shares * kept_bytes,
            copying=_copying(shape, stage_pass, weights.matrix),
            positions=positions * made_bytes,
            cut_table=units.cut_table * (sharding.is_plain and tied),
            waits=units.head_gradient * (apart or tied),
        )


def _copying(shape: BlockShape, stage_pass: StagePass, matrix: Size) -> Size:
    """Return the last units' gradients and their first copies, at most."""
    units, (state, wire_bytes) = stage_pass.units, stage_pass.sharding.parameter
    made_bytes = state.gathered_parameter
    surplus = units.surplus // wire_bytes
    if not units.last:
        return 0
    sizes = [unit.made // made_bytes for unit in units.last]
    if shape.stack.units is not Units.ROOT:
        sizes[-1] = sizes[-1] + surplus
        return largest(
            sum(sizes[index:]) * made_bytes + sum(sizes[: index + 1]) * wire_bytes
            for index in range(len(sizes))
        )
    # Of one unit, the table is copied first, and last the matrix of the head if it is another.
    root, last = sizes[0] + surplus, units.last[0].last // made_bytes
    first_copied = root * made_bytes + (matrix + surplus) * wire_bytes
    return larger(first_copied, last * made_bytes + root * wire_bytes)


class SummingPeaks(NamedTuple):
    """The fullest instants of passes that keep sums, and what the last one reduces them by."""

    first: PassPeak[Size]
    later: PassPeak[Size]
    last: PassPeak[Size]

    @classmethod
    def of(cls, stage_pass: StagePass, sums: SumBytes) -> "SummingPeaks":
        """Return those of a whole model."""
        kinds = ((True, False), (False, False), (False, True))
        return cls(*(_SummingPass(stage_pass, sums, *kind).fullest_moment() for kind in kinds))


class _SummingPass(NamedTuple):
    """A backward pass: whether it makes the step's first gradients, and reduces the sums."""

    stage_pass: StagePass
    sums: SumBytes
    is_first: bool
    is_last: bool

    @property
    def adds(self) -> bool:
        """Whether it adds each gradient to a sum at once."""
        return not (self.is_first or self.sums.apart)

    def fullest_moment(self) -> PassPeak[Size]:
        """Return its fullest moment, beside all that the forward pass kept."""
        return fullest((*self._head_moments(), *self._layer_moments(), *self._root_moments()))

    def _absent(self, first: int) -> Size:
        """Return the sums that are not there, or no more, when head and layers have run.

        These are those from the place *first* on.
        """
        units, sums, stage = self.stage_pass.units, self.sums, self.stage_pass.stage
        if self.is_first:
            return self._late - units.head.kept - self.stage_pass.held.total(kept_of, first)
        if not self.is_last:
            return 0
        # Once a unit is reduced its whole sum has gone, but for this rank's shard.
        gone: Size = units.head.kept - sums.head_shard
        for family, _, count in alike(stage, units.kinds, first):
            gone = gone + count * (units.layers[family].whole.kept - sums.layer_shards[family])
        return gone

    @property
    def _late(self) -> Size:
        """Sums that are not there when the pass begins."""
        return self.stage_pass.late_bytes if self.is_first else 0

    def _head_moments(self) -> Iterator[PassPeak[Size]]:
        passes, stage, _, units = self.stage_pass
        head, stay = units.head, self.stage_pass.stays(whole=False)
        yield PassPeak(0, self._late)
        if not stage.has_head:
            return
        yield PassPeak(passes.head[1] + units.root + head.weights + stay, self._late)
        here = units.root + self.stage_pass.stays(
            whole=False, otherwise=self.stage_pass.held.ahead_of_last
        )
        yield PassPeak(here + head.weights + passes.products[1], self._late)
        here = here + passes.message - self.stage_pass.freed_head
        if self.is_last:
            last = head.last * self.sums.scale
            yield PassPeak(here + head.wire, 0)
            yield PassPeak(here + head.wire + last + head.share, head.kept)
        elif self.is_first and self.sums.apart:
            yield PassPeak(here + head.weights, self._absent(stage.num_layers))

    def _layer_moments(self) -> Iterator[PassPeak[Size]]:
        _, stage, _, units = self.stage_pass
        others = units.root + (self.sums.waits if self.adds else units.head_gradient)
        others = others - self.stage_pass.freed_head
        for place in self.stage_pass.held.extreme_places:
            here = others - self.stage_pass.saved_layers(place + 1)
            here = here + self._replicas(stage.num_layers - 1 - place)
            for each in self._in_layer(place):
                yield PassPeak(here + each, self._absent(place + 1))

    def _in_layer(self, place: int) -> Iterator[Size]:
        """Yield what lives in the backward of the layer at a *place*, beside all sums of it."""
        passes, stage, sharding, units = self.stage_pass
        held, done = self.stage_pass.held, stage.num_layers - 1 - place
        if held.is_nested(place):
            yield from self._in_nested(place)
            return
        unit, layer, left = held.at(place), self.stage_pass.layer(place), self._left(place)
        work = layer.adding if self.adds else layer.work[1]
        behind = held.on_the_way(place)
        here: Size = work + unit.weights + held.stay(place) + behind
        if self.stage_pass.sends_output and not done:
            here = here - layer.work[1] + layer.sent
        if sharding.reshards and (done or not units.keeps_last):
            # Before the layer runs: its gathered buffer, and the weights copied out of it; then
            # these and the next one's buffer, beside shards that are cast to be copied into it.
            behind = larger(unit.buffer, behind + sharding.cast_bytes(behind))
            here = larger(here, passes.message + unit.weights + behind)
        yield here + left
        if self.is_last:
            yield self._reduced(place, unit.whole)

    def _in_nested(self, place: int) -> Iterator[Size]:
        """Yield the same of a layer whose experts are a unit of their own."""
        passes, stage, _, units = self.stage_pass
        held, is_first = self.stage_pass.held, place + 1 == stage.num_layers
        layer, behind = held.at(place), held.on_the_way(place)
        nested, stay = nested_unit(self.stage_pass, place, adds=self.adds), held.stay(place)
        before = nested.backward(passes.message, self._left(place), behind, is_first=is_first)
        yield from (each + stay for each in before)
        if not self.is_last:
            yield nested.nested.back_before + layer.dense.weights + behind + stay
            return
        shard = self.sums.expert_shards[held.families[place]]
        shard = shard + is_apart(units, first=True) * layer.experts.replicas
        made = 0 if self.adds else layer.experts.made
        last = nested.reducing_sums(behind, shard=shard, made=made, scale=self.sums.scale)
        yield from (each + stay for each in last)
        yield self._reduced(place, layer.dense) + shard - layer.experts.kept

    def _replicas(self, done: int) -> Size:
        """Return what reductions over replicas have left when *done* layers have run."""
        return self.stage_pass.held.replica_bytes(done, first=True) if self.is_last else 0

    def _left(self, place: int) -> Size:
        return self.stage_pass.held.left(place) if self.is_last else 0

    def _reduced(self, place: int, unit: Unit) -> Size:
        """Return what lives as a *unit* of the layer at a *place* is reduced, its weights freed."""
        passes = self.stage_pass.passes
        held, layer = self.stage_pass.held, self.stage_pass.layer(place)
        here = passes.message - layer.saved
        here = here + held.stay(place) + held.on_the_way(place)
        return here + unit.wire + larger(0, unit.share - unit.kept)

    def _root_moments(self) -> Iterator[PassPeak[Size]]:
        """Yield the fullest moments after the layers: the table's gradient, then the last units'.

        A reduction holds all sums and the buffer of the wire; then that and its share, while the
        loop that filled it (`foreach_reduce` of PyTorch 2.13) still has the last gradient.
        """
        passes, stage, _, units = self.stage_pass
        sums, absent = self.sums, self._absent(0)
        freed: Size = self.stage_pass.saved_layers() + self.stage_pass.freed_head
        freed = freed - self._replicas(stage.num_layers)
        made: Size = sums.waits if self.adds else units.head_gradient + sums.positions
        wire = self.stage_pass.held.wire(0) if self.is_last else 0
        weights: Size = units.root + units.table.weights
        table = larger(passes.table * stage.has_embedding, sums.cut_table)
        yield PassPeak(table + made + wire + weights - freed, absent)
        for unit in units.last if self.is_last else ():
            weights = weights - unit.weights
            here = weights + unit.wire - freed
            yield PassPeak(here, absent)
            absent = absent + unit.kept + (units.surplus if unit is units.last[-1] else 0)
            yield PassPeak(here + unit.last * sums.scale + unit.share, absent)
        if self.is_first and sums.apart:
            yield PassPeak(sums.copying - freed, absent)
