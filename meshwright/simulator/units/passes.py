"""The fullest moments of passes that hold FSDP's units: weights, gradients and wire buffers.

PyTorch's fully_shard: a unit's weights are copied out of the gathered buffer before it computes
and freed after; in forward that buffer stays until the next unit's are copied, in backward the
gather of the unit before is already under way.  A unit's gradients stay whole until its backward
is done, then lie in the wire's format until the next unit's are there.  The root (embedding,
final norm, head) is gathered first and reduced last.
"""

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
        return self.units.root + self.stage.num_layers * self.units.layer

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
            PassPeak(self._forward_bytes(whole=whole)),
            self._backward_moment(first=True, whole=whole),
            PassPeak(backward),
        )

    def _forward_bytes(self, *, whole: bool) -> int:
        """Return the bytes of the fullest moment of a forward pass."""
        passes, stage, replication, units = self
        layers = stage.num_layers
        stay = 0 if replication.reshards else layers * units.layer
        moments = [0]
        if layers:
            # The output counts as kept, and is what the last layer makes.
            counted = passes.saved_head * stage.has_head + passes.message * self.sends_output
            work = passes.layer[0] - counted + units.root
            moments.append(work + (stay or units.layer) + (0 if whole else units.buffer))
            if not whole:
                # The root's buffer stays until the first layer's weights are copied out of its own.
                gathered = (units.root + units.layer) * (1 + units.gathers)
                saved = layers * passes.saved_layer + passes.saved_head * stage.has_head
                moments.append(gathered + passes.message - saved)
            else:
                # It frees them one by one: at the first layer all are there, and little is saved.
                moments.append(work - (layers - 1) * passes.saved_layer + layers * units.layer)
        if stage.has_head:
            moments.append(passes.head[0] + units.root + stay)
        return max(moments)

    def _backward_moment(self, *, first: bool, whole: bool) -> PassPeak:
        """Return the fullest moment of a backward pass.

        In a chunk's *first* one the gradients appear layer by layer.
        """
        passes, stage, replication, units = self
        layers, late = stage.num_layers, self.late_bytes * first
        appeared = units.layer_kept * first
        moments = [PassPeak(0, late)]
        if stage.has_head:
            stay = layers * units.layer if whole or not replication.reshards else 0
            moments.append(PassPeak(passes.head[1] + units.root + stay, late))
        # From the second layer to the last but one each differs by as much from the one before.
        extreme_layers = {0, 1, layers - 2, layers - 1}
        for done in sorted(extreme_layers.intersection(range(layers))):
            here = self._layer_backward(done, whole=whole)
            moments.append(PassPeak(here, late - done * appeared))
        freed = layers * passes.saved_layer + self.freed_head
        moments.append(PassPeak(self._root_bytes() - freed, late - layers * appeared))
        if first and replication.keeps_units:
            # The root's gradients beside their first copy in the format in which they are summed.
            freed += passes.saved_embedding * stage.has_embedding
            moments.append(PassPeak(units.root_gradient + self.gathered_bytes - freed))
        return max(moments, key=lambda moment: moment.total_bytes)

    def reduction(self, *, is_alone: bool) -> PassPeak:
        """Return what the reduction after the last backward pass needs, and the gradients it takes.

        Units are freed and reduced one by one, the root first, into a shard beside the wire's
        buffer.  The runtimes of ranks with one virtual stage hold the last output still.
        """
        passes, stage, replication, units = self
        first, wire = units.root, units.root_wire
        if not first:
            first, wire = units.layer, units.layer_wire
        output = passes.saved_head - passes.freed_head if stage.has_head and is_alone else 0
        buffers_bytes = output + wire + wire // replication.span.num_ranks - first
        return PassPeak(max(0, buffers_bytes), self.late_bytes - units.shard)

    @property
    def freed_head(self) -> int:
        """What its head frees before its layers' backward."""
        return self.passes.freed_head if self.stage.has_head else 0

    def _layer_backward(self, done: int, *, whole: bool) -> int:
        """Return the fullest moment of a layer's backward when *done* layers have run theirs."""
        passes, _, replication, units = self
        others = units.root + units.head_gradient - done * passes.saved_layer - self.freed_head
        # The layer behind has left the input of its reduction: FSDP2 holds on to one such buffer
        # until the next reduction wants its own (FSDPParamGroup, `post_backward`).
        if done and not replication.keeps_units:
            others += units.layer_wire + done * units.layer_share
        arrives = self.sends_output and not done
        work = passes.sent_layer if arrives else passes.layer[1]
        here = work + self.gathered_layers(done, whole=whole)
        if not replication.reshards or whole:
            return others + here
        # Before the layer runs: its gathered buffer, and the weights copied out of it.
        resident = done * units.layer if replication.keeps_units else 0
        gradient = 0 if arrives else passes.message
        return others + max(here, gradient + resident + units.layer + units.buffer)

    def gathered_layers(self, done: int, *, whole: bool) -> int:
        """Return the gathered weights of layers while one runs backward and *done* have."""
        _, stage, replication, units = self
        layers = stage.num_layers
        if whole or not replication.reshards:
            return (layers if replication.keeps_units else layers - done) * units.layer
        ahead = units.buffer if done < layers - 1 else 0  # before the first layer none is left
        return (done if replication.keeps_units else 0) * units.layer + units.layer + ahead

    def _root_bytes(self) -> int:
        """Return the fullest moment after the layers: the table's gradient, the root's reduction.

        Between the microbatches of a pipeline the layers stay gathered and nothing is reduced.
        """
        passes, stage, replication, units = self
        table = passes.table + units.positions if stage.has_embedding else 0
        if replication.keeps_units:
            return table + self.gathered_bytes
        table = max(table, units.cut_table + units.positions)
        embedding = table + units.root + units.head_gradient + units.layer_wire
        # All gradients and the buffer of the wire; then that and its share.
        filled = units.root + units.root_wire
        reduced = units.last + units.root_wire + units.root_reduced
        return max(embedding, filled, reduced) + stage.num_layers * units.layer_share
