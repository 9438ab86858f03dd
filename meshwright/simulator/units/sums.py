"""Memory of FSDP gradients that are accumulated whole until the last microbatch.

Accumulated gradients have the format of the reduction (`FSDPParam` of PyTorch 2.13,
`to_accumulated_grad_if_needed`). The last backward pass reduces them unit by unit, the root last.
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
    """Bytes of a stage's gradients and of their accumulated sums.

    Args:
        apart: Whether sums have another format than the gradients of a pass.
        scale: Bytes of a sum for each of a gradient as a pass makes it.
        layer_shards: Bytes that this rank keeps of a layer's gradients once they are reduced.
        expert_shards: Bytes of these that belong to experts with a unit of their own.
        head_shard: The same of the head's unit.
        shard: Bytes that it keeps of all gradients then.
        copying: The last units' gradients and their first copies as sums, at most, while they are
            copied one by one.
        positions: Gradient of a table of positions, as a pass makes it.
        cut_table: A tied embedding's gradient that every tensor rank makes whole, and its own rows,
            which are copied out of it to be added to the head's where nothing is wrapped.
        waits: Part of the output matrix's gradient that is accumulated together with the
            embedding's alone.
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
    """Return the most bytes of the last units' gradients with their first copies."""
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
    """Peaks of passes that accumulate whole gradients; the last pass reduces them."""

    first: PassPeak[Size]
    later: PassPeak[Size]
    last: PassPeak[Size]

    @classmethod
    def of(cls, stage_pass: StagePass, sums: SumBytes) -> "SummingPeaks":
        """Return the peaks of a whole model."""
        # First, later, and last: with one microbatch nothing is accumulated.
        kinds = ((True, False), (False, False), (False, True))
        return cls(*(_SummingPass(stage_pass, sums, *kind).peak() for kind in kinds))


class _SummingPass(NamedTuple):
    """A backward pass that may allocate the step's gradients, or reduce them."""

    stage_pass: StagePass
    sums: SumBytes
    is_first: bool
    is_last: bool

    @property
    def adds(self) -> bool:
        """Whether it accumulates each gradient at once."""
        return not (self.is_first or self.sums.apart)

    def peak(self) -> PassPeak[Size]:
        """Return its peak, beyond all that the forward pass saved."""
        return fullest((*self._head_peaks(), *self._layer_peaks(), *self._root_peaks()))

    def _absent(self, first: int) -> Size:
        """Return the gradients not allocated yet, or freed, when head and layers have run.

        Layers from the index *first* on have run.
        """
        units, sums, stage = self.stage_pass.units, self.sums, self.stage_pass.stage
        if self.is_first:
            return self._late - units.head.kept - self.stage_pass.held.total(kept_of, first)
        if not self.is_last:
            return 0
        # Once a unit is reduced its whole sum has gone, but for this rank's shard.
        freed: Size = units.head.kept - sums.head_shard
        for family, _, count in alike(stage, units.kinds, first):
            freed = freed + count * (units.layers[family].whole.kept - sums.layer_shards[family])
        return freed

    @property
    def _late(self) -> Size:
        """Gradients that are not allocated when the pass begins."""
        return self.stage_pass.late_bytes if self.is_first else 0

    def _head_peaks(self) -> Iterator[PassPeak[Size]]:
        """Yield the peaks of the head: its workspace, gradients, and their reduction."""
        passes, stage, _, units = self.stage_pass
        head, stay = units.head, self.stage_pass.stays(whole=False)
        yield PassPeak(0, self._late)
        if not stage.has_head:
            return
        yield PassPeak(passes.head[1] + units.root + head.weights + stay, self._late)
        live = units.root + self.stage_pass.stays(
            whole=False, otherwise=self.stage_pass.held.ahead_of_last
        )
        yield PassPeak(live + head.weights + passes.products[1], self._late)
        live = live + passes.message - self.stage_pass.freed_head
        if self.is_last:
            last = head.last * self.sums.scale
            yield PassPeak(live + head.wire, 0)
            yield PassPeak(live + head.wire + last + head.share, head.kept)
        elif self.is_first and self.sums.apart:
            yield PassPeak(live + head.weights, self._absent(stage.num_layers))

    def _layer_peaks(self) -> Iterator[PassPeak[Size]]:
        """Yield the peaks of layers that may be the largest."""
        _, stage, _, units = self.stage_pass
        shared = units.root + (self.sums.waits if self.adds else units.head_gradient)
        shared = shared - self.stage_pass.freed_head
        for place in self.stage_pass.held.extreme_places:
            live = shared - self.stage_pass.saved_layers(place + 1)
            live = live + self._replicas(stage.num_layers - 1 - place)
            for each in self._in_layer(place):
                yield PassPeak(live + each, self._absent(place + 1))

    def _in_layer(self, place: int) -> Iterator[Size]:
        """Yield the live bytes of a layer's backward, beside all its accumulated gradients."""
        passes, stage, sharding, units = self.stage_pass
        held, done = self.stage_pass.held, stage.num_layers - 1 - place
        if held.is_nested(place):
            yield from self._in_nested(place)
            return
        unit, layer, left = held.at(place), self.stage_pass.layer(place), self._left(place)
        work = layer.adding if self.adds else layer.work[1]
        behind = held.on_the_way(place)
        live: Size = work + unit.weights + held.stay(place) + behind
        if self.stage_pass.sends_output and not done:
            # A received gradient is in a p2p buffer, which counts there.
            live = live - layer.work[1] + layer.sent
        if sharding.reshards and (done or not units.keeps_last):
            # Before the layer runs: its gathered buffer, and the weights copied out of it; then
            # these and the next one's buffer, beside shards that are cast to be copied into it.
            behind = larger(unit.buffer, behind + sharding.cast_bytes(behind))
            live = larger(live, passes.message + unit.weights + behind)
        yield live + left
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
        """Return the outputs of HSDP all-reduces when *done* layers have run."""
        return self.stage_pass.held.replica_bytes(done, first=True) if self.is_last else 0

    def _left(self, place: int) -> Size:
        """Return the input of the last reduce-scatter before a layer, if this pass reduces."""
        return self.stage_pass.held.left(place) if self.is_last else 0

    def _reduced(self, place: int, unit: Unit) -> Size:
        """Return the live bytes as a *unit* of a layer is reduced, its weights freed."""
        passes = self.stage_pass.passes
        held, layer = self.stage_pass.held, self.stage_pass.layer(place)
        live = passes.message - layer.saved
        live = live + held.stay(place) + held.on_the_way(place)
        return live + unit.wire + larger(0, unit.share - unit.kept)

    def _root_peaks(self) -> Iterator[PassPeak[Size]]:
        """Yield the peaks after the layers: the embedding's gradient, then the last units'.

        A reduction holds all accumulated gradients and the reduce-scatter's buffer; then that and
        its output, while the loop that filled it (`foreach_reduce` of PyTorch 2.13) still
        references the last gradient.
        """
        passes, stage, _, units = self.stage_pass
        sums, absent = self.sums, self._absent(0)
        freed: Size = self.stage_pass.saved_layers() + self.stage_pass.freed_head
        freed = freed - self._replicas(stage.num_layers)
        gradients: Size = sums.waits if self.adds else units.head_gradient + sums.positions
        wire = self.stage_pass.held.wire(0) if self.is_last else 0
        weights: Size = units.root + units.table.weights
        table = larger(passes.table * stage.has_embedding, sums.cut_table)
        yield PassPeak(table + gradients + wire + weights - freed, absent)
        for unit in units.last if self.is_last else ():
            weights = weights - unit.weights
            live = weights + unit.wire - freed
            yield PassPeak(live, absent)
            absent = absent + unit.kept + (units.surplus if unit is units.last[-1] else 0)
            yield PassPeak(live + unit.last * sums.scale + unit.share, absent)
        if self.is_first and sums.apart:
            yield PassPeak(sums.copying - freed, absent)
