"""The fullest moments of passes that hold FSDP's units: weights, gradients and wire buffers.

PyTorch's fully_shard: a unit's weights are copied out of the gathered buffer before it computes
and freed after; in forward that buffer stays until the next unit's are copied, in backward the
gather of the unit before is already under way.  A unit's gradients stay whole until its backward
is done, then lie in the wire's format until the next unit's are there.  A root is gathered first
and reduced last; so is the table's unit, but for what is gathered again for its backward.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import PassPeak, PassPeaks
from meshwright.simulator.replication import Replication
from meshwright.simulator.units.bytes import PassBytes, UnitBytes


class StagePass(NamedTuple):
    """Passes through a virtual stage: what they need, what its units hold, how it is sharded.

    Moments are beside all that the passes keep.  ``whole`` says that a pass finds every unit
    gathered, as after a backward pass in a pipeline.
    """

    passes: PassBytes
    stage: Stage
    replication: Replication
    units: UnitBytes

    @property
    def gathered_bytes(self) -> int:
        """Weights of all units."""
        ends = self.units.root + self.units.table.weights + self.units.head.weights
        return ends + self.stage.num_layers * self.units.layer.weights

    @property
    def sends_output(self) -> bool:
        """Whether it hands on its output, and gets its gradient, as a message."""
        return self.replication.keeps_units and not self.stage.has_head

    @property
    def late_bytes(self) -> int:
        """Gradients that its first backward pass makes."""
        return self.units.gradients + self.units.surplus

    def moments(self, *, whole: bool) -> PassPeaks:
        """Return the fullest moments of its passes."""
        backward = self._backward_moment(first=False, whole=whole).total_bytes
        return PassPeaks(
            PassPeak(_forward_bytes(self, whole=whole)),
            self._backward_moment(first=True, whole=whole),
            PassPeak(backward),
        )

    def stays(self, *, whole: bool) -> int:
        """Return the gathered weights of table and layers that a backward pass finds."""
        _, stage, replication, units = self
        if replication.reshards and not whole:
            return units.kept_layer
        return units.table.weights + stage.num_layers * units.layer.weights

    def _backward_moment(self, *, first: bool, whole: bool) -> PassPeak:
        """Return the fullest moment of a backward pass.

        In a chunk's *first* one the gradients appear layer by layer.
        """
        passes, stage, replication, units = self
        layers, late = stage.num_layers, self.late_bytes * first
        appeared, stay = units.layer.kept * first, self.stays(whole=whole)
        moments = [PassPeak(0, late)]
        if stage.has_head:
            here = passes.head[1] + units.root + units.head.weights + stay
            moments += [PassPeak(here, late), *_after_head(self, late, stay, first=first)]
        absent = late - units.head.kept * first
        # From the second layer to the last but one each differs by as much from the one before.
        extreme_layers = {0, 1, layers - 2, layers - 1}
        for done in sorted(extreme_layers.intersection(range(layers))):
            here = self._layer_backward(done, whole=whole)
            moments.append(PassPeak(here, absent - done * appeared))
        freed = layers * passes.saved_layer + self.freed_head
        last = self._root_bytes(first=first, whole=whole) - freed
        moments.append(PassPeak(last, absent - layers * appeared))
        if first and replication.keeps_units:
            # The last gradients beside their first copy in the format in which they are summed.
            freed += passes.saved_embedding * stage.has_embedding
            moments.append(PassPeak(units.end_gradient + self.gathered_bytes - freed))
        return max(moments, key=lambda moment: moment.total_bytes)

    @property
    def freed_head(self) -> int:
        """What its head frees before its layers' backward."""
        return self.passes.freed_head if self.stage.has_head else 0

    def _layer_backward(self, done: int, *, whole: bool) -> int:
        """Return the fullest moment of a layer's backward when *done* layers have run theirs."""
        passes, _, replication, units = self
        others = units.root + units.head_gradient - done * passes.saved_layer - self.freed_head
        if replication.keeps_units:
            others += units.head.weights
        else:
            # The unit behind has left the input of its reduction: FSDP2 holds on to one such buffer
            # until the next reduction wants its own (FSDPParamGroup, `post_backward`).
            others += units.layer.wire if done else units.head.wire
            others += done * units.layer.replicas + units.head.replicas
        arrives = self.sends_output and not done
        work = passes.sent_layer if arrives else passes.layer[1]
        here = work + self.gathered_layers(done, whole=whole)
        if not replication.reshards or whole:
            return others + here + units.table.weights
        # Before the layer runs: its gathered buffer, and the weights copied out of it.
        resident = done * units.layer.weights if replication.keeps_units else 0
        gradient = 0 if arrives else passes.message
        if units.kept_layer and not done:
            return others + here
        return others + max(here, gradient + resident + units.layer.weights + units.buffer)

    def gathered_layers(self, done: int, *, whole: bool) -> int:
        """Return the gathered weights of layers while one runs backward and *done* have.

        On the way are those of the layer before, or of the table.
        """
        _, stage, replication, units = self
        layers, layer = stage.num_layers, units.layer.weights
        if whole or not replication.reshards:
            return (layers if replication.keeps_units else layers - done) * layer
        ahead = units.buffer if done < layers - 1 else units.table.weights * units.gathers
        return (done if replication.keeps_units else 0) * layer + layer + ahead

    def _root_bytes(self, *, first: bool, whole: bool) -> int:
        """Return the fullest moment after the layers: the table's gradient, the last reductions.

        Between the microbatches of a pipeline the layers stay gathered and nothing is reduced.
        """
        passes, stage, replication, units = self
        table = passes.table + units.positions if stage.has_embedding else 0
        gathers = units.table.weights and replication.reshards and not whole
        fetch = units.table.weights * units.gathers + passes.message if gathers else 0
        if replication.keeps_units:
            return max(table, fetch) + self.gathered_bytes
        table = max(table, fetch, units.cut_table + units.positions)
        moments = [table + units.root + units.table.weights + units.head_gradient]
        moments[0] += units.layer.wire
        weights = gradients = sum(unit.weights for unit in units.last)
        kept = 0
        for unit in units.last:
            # All gradients and the buffer of the wire; then that and its share.
            weights -= unit.weights
            moments.append(weights + gradients + unit.wire + kept)
            gradients -= unit.weights
            moments.append(weights + gradients + unit.last + unit.wire + unit.share + kept)
            kept += unit.kept * first
        replicas = stage.num_layers * units.layer.replicas + units.head.replicas
        return max(moments) + replicas


def _forward_bytes(stage_pass: StagePass, *, whole: bool) -> int:
    """Return the bytes of the fullest moment of a forward pass."""
    passes, stage, replication, units = stage_pass
    layers, layer = stage.num_layers, units.layer.weights
    stay = stage_pass.stays(whole=False)
    moments = [0] if whole else [0, *_gathering(stage_pass)]
    if layers:
        # The output counts as kept, and is what the last layer makes.
        counted = passes.saved_head * stage.has_head + passes.message * stage_pass.sends_output
        work = passes.layer[0] - counted + units.root + whole * units.head.weights
        moments.append(work + (stay or layer) + (0 if whole else units.buffer))
        if whole:
            # It frees them one by one: at the first layer all are there, and little is saved.
            table = 0 if replication.reshards else units.table.weights
            moments.append(work - (layers - 1) * passes.saved_layer + layers * layer + table)
    if stage.has_head:
        moments.append(passes.head[0] + units.root + units.head.weights + stay)
    return max(moments)


def _gathering(stage_pass: StagePass) -> Iterator[int]:
    """Yield the moments in which a forward pass gathers the first units, and the head.

    A buffer stays until the next unit's weights are copied out of their own.
    """
    passes, stage, replication, units = stage_pass
    layers, frees, copies = stage.num_layers, replication.reshards, 1 + units.gathers
    saved = layers * passes.saved_layer + passes.saved_head * stage.has_head
    ahead = saved + passes.saved_embedding * stage.has_embedding
    held = buffer = 0
    for unit in units.last:
        yield held + buffer + copies * unit.weights - ahead
        held, buffer = held + unit.weights, unit.weights * units.gathers
    yield held + buffer + passes.message - saved
    held -= frees * units.table.weights
    if layers:
        yield held + buffer + copies * units.layer.weights + passes.message - saved
        held, buffer = held + (not frees) * layers * units.layer.weights, units.buffer
    if units.head.weights:
        held += copies * units.head.weights
        yield held + buffer + passes.message - passes.saved_head
        yield held + passes.products[0]


def _after_head(stage_pass: StagePass, late: int, stay: int, *, first: bool) -> Iterator[PassPeak]:
    """Yield the moments in which the head's gradients are made, and reduced or become sums.

    The last layer's weights are on their way.
    """
    passes, _, replication, units = stage_pass
    here = units.root + (stay or units.buffer)
    yield PassPeak(here + units.head.weights + passes.products[1], late)
    here += passes.message - stage_pass.freed_head
    if replication.keeps_units:
        gradient = units.is_copied * units.head.weights
        yield PassPeak(here + units.head.weights + gradient, late - units.head.kept * first)
        return
    yield PassPeak(here + units.head.weights + units.head.wire, late)
    yield PassPeak(here + units.head.last + units.head.wire + units.head.share, late)


def reduction(stage_pass: StagePass, *, is_alone: bool) -> PassPeak:
    """Return what the reduction after the last backward pass needs, and the gradients it takes.

    Units are freed and reduced one by one, the roots first and the head last, into a shard
    beside the wire's buffer.  The runtimes of ranks with one virtual stage hold the last output
    still.
    """
    passes, stage, replication, units = stage_pass
    output = passes.saved_head - passes.freed_head if stage.has_head and is_alone else 0
    most, gone = -output, 0
    for unit in (*units.last, *[units.layer] * stage.num_layers, units.head):
        shard = unit.wire // replication.span.num_ranks
        most = max(most, unit.wire + shard - unit.weights - gone)
        gone += unit.weights + unit.wire - shard
    return PassPeak(output + most, stage_pass.late_bytes - units.shard)
