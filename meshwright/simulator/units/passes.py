"""Memory peaks of passes over FSDP units: weights, gradients and communication buffers.

PyTorch's fully_shard: a unit's weights are copied out of the all-gather buffer before it computes
and freed after; in forward that buffer stays until the next unit's are copied, in backward the
all-gather of the unit before is already under way. A unit's gradients stay whole until its backward
is done, then are in the reduce-scatter's buffer until the next unit's exist. A root is gathered
first and reduced last; so is the embedding's unit, but for its second gather for backward.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import NamedTuple

from meshwright.simulator.graph import Size, chosen, larger, largest
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import PassPeak, PassPeaks
from meshwright.simulator.units.bytes import LayerBytes, PassBytes, UnitBytes
from meshwright.simulator.units.layers import alike
from meshwright.simulator.units.nested import NestedUnit, is_apart, reduced
from meshwright.simulator.units.sharding import Sharding
from meshwright.simulator.units.stage_layers import StageLayers, kept_of, weights_of


def larger_peak(one: PassPeak[Size], other: PassPeak[Size]) -> PassPeak[Size]:
    """Return the larger peak, of two equal ones the first.

    >>> larger_peak(PassPeak(5, absent_bytes=3), PassPeak(4, absent_bytes=0))
    PassPeak(buffers_bytes=4, absent_bytes=0)
    """
    is_first = one.total_bytes >= other.total_bytes
    return PassPeak(*(chosen(is_first, *each) for each in zip(one, other, strict=True)))


def fullest(moments: Iterable[PassPeak[Size]]) -> PassPeak[Size]:
    """Return the first largest peak."""
    return reduce(larger_peak, moments)


class StagePass(NamedTuple):
    """Passes through a virtual stage: workspaces, FSDP units and sharding.

    Peaks are beyond all saved activations. ``whole`` says that a pass finds every unit gathered, as
    after a backward pass in a pipeline.
    """

    passes: PassBytes
    stage: Stage
    sharding: Sharding
    units: UnitBytes

    @property
    def held(self) -> StageLayers:
        """Bytes of the units of its layers."""
        return StageLayers(self.stage, self.sharding, self.units)

    def layer(self, place: int) -> LayerBytes:
        """Return the bytes of passes through the layer at an index *place*."""
        of_family = self.passes.layers[self.held.families[place]]
        return of_family[-1 if self.stage.checkpoints.keeps(place) else 0]

    def saved_layers(self, first: int = 0) -> Size:
        """Return the activations saved by the layers from the index *first* on."""
        total: Size = 0
        for family, is_kept, count in alike(self.stage, self.units.kinds, first):
            total = total + count * self.passes.layers[family][-1 if is_kept else 0].saved
        return total

    @property
    def gathered_bytes(self) -> Size:
        """Gathered weights of all units."""
        ends = self.units.root + self.units.table.weights + self.units.head.weights
        return ends + self.held.total(weights_of)

    @property
    def sends_output(self) -> bool:
        """Whether its output and the gradient of that are p2p messages."""
        return self.sharding.keeps_units and not self.stage.has_head

    @property
    def late_bytes(self) -> Size:
        """Gradients that its first backward pass allocates."""
        return self.units.gradients + self.units.surplus

    def moments(self, *, whole: bool) -> PassPeaks[Size]:
        """Return the peaks of its passes: forward, first and later backward."""
        backward = self._backward_peak(first=False, whole=whole).total_bytes
        return PassPeaks(
            PassPeak(_forward_bytes(self, whole=whole), 0),
            self._backward_peak(first=True, whole=whole),
            PassPeak(backward, 0),
        )

    def stays(self, *, whole: bool, otherwise: Size = 0) -> Size:
        """Return the gathered weights of embedding and layers that a backward pass finds."""
        _, stage, sharding, units = self
        if not stage.num_layers and len(units.last) == len(units.roots):
            return 0
        if sharding.reshards and not whole:
            return self.held.at(-1).weights if units.keeps_last else otherwise
        return units.table.weights + self.held.total(weights_of)

    def _backward_peak(self, *, first: bool, whole: bool) -> PassPeak[Size]:
        """Return the peak of a backward pass.

        In a virtual stage's *first* one the gradients are allocated layer by layer.
        """
        passes, stage, sharding, units = self
        late = self.late_bytes * first
        absent = late - units.head.kept * first
        peaks: list[PassPeak[Size]] = [PassPeak(0, late)]
        if stage.has_head:
            stay = self.stays(whole=whole)
            live = passes.head[1] + units.root + units.head.weights + stay
            peaks += [PassPeak(live, late), *_after_head(self, late, first=first, whole=whole)]
        for place in self.held.extreme_places:
            absent_here = absent - first * self.held.total(kept_of, place + 1)
            live = self._layer_backward(place, first=first, whole=whole)
            peaks.append(PassPeak(live, absent_here))
            # Pipeline runtimes reduce after the last pass, never layer by layer.
            if not sharding.keeps_units:
                live = largest(_layer_reduction(self, place, first=first))
                peaks.append(PassPeak(live, absent_here))
        freed = self.saved_layers() + self.freed_head
        last = self._root_peak(first=first, whole=whole) - freed
        peaks.append(PassPeak(last, absent - first * self.held.total(kept_of)))
        if first and sharding.keeps_units:
            # The last gradients beside their first copy in the format in which they are summed.
            freed = freed + passes.saved_embedding * stage.has_embedding
            peaks.append(PassPeak(units.end_gradient + self.gathered_bytes - freed, 0))
        return fullest(peaks)

    @property
    def freed_head(self) -> Size:
        """Activations that the head frees before its layers' backward."""
        return self.passes.freed_head if self.stage.has_head else 0

    def _layer_backward(self, place: int, *, first: bool, whole: bool) -> Size:
        """Return the peak of the backward pass of the layer at an index *place*."""
        passes, stage, sharding, units = self
        done = stage.num_layers - 1 - place
        shared: Size = units.root + units.head_gradient - self.freed_head
        shared = shared - self.saved_layers(place + 1)
        if self.held.is_nested(place) and not whole:
            return shared + _nested_backward(self, place, first=first)
        if sharding.keeps_units:
            shared = shared + units.head.weights
        else:
            # The unit behind has left the input of its reduction: FSDP2 holds on to one such buffer
            # until the next reduction wants its own (FSDPParamGroup, `post_backward`).
            shared = shared + self.held.left(place) + self.held.replica_bytes(done, first=first)
        receives_gradient = self.sends_output and not done
        layer = self.layer(place)
        work = layer.sent if receives_gradient else layer.work[1]
        live: Size = work + self.held.gathered(place, whole=whole)
        if not sharding.reshards or whole:
            return shared + live + units.table.weights
        gathered = self.held.total(weights_of, place + 1) if sharding.keeps_units else 0
        gradient = 0 if receives_gradient else passes.message
        if units.keeps_last and not done:
            return shared + live
        return shared + larger(live, gradient + gathered + self.held.fetched_again(place))

    def _root_peak(self, *, first: bool, whole: bool) -> Size:
        """Return the peak after the layers: the embedding's gradient and the last reductions.

        Between the microbatches of a pipeline layers stay gathered and nothing is reduced.
        """
        passes, stage, sharding, units = self
        table = passes.table + units.positions if stage.has_embedding else 0
        # The embedding's unit, resharded after forward, is gathered again for its backward.
        gathers = len(units.last) > len(units.roots) and sharding.reshards and not whole
        fetch = units.table.weights * units.gathers + passes.message if gathers else 0
        if sharding.keeps_units:
            return larger(table, fetch) + self.gathered_bytes
        table = largest((table, fetch, units.cut_table + units.positions))
        live = table + units.root + units.table.weights + units.head_gradient
        peaks = [live + self.held.wire(0)]
        weights = sum(unit.weights for unit in units.last)
        gradients = sum(unit.made for unit in units.last)
        kept: Size = 0
        for unit in units.last:
            # All gradients and the buffer of the wire; then that and its share.
            weights = weights - unit.weights
            peaks.append(weights + gradients + unit.wire + kept)
            gradients = gradients - unit.made
            peaks.append(weights + gradients + unit.last + unit.wire + unit.share + kept)
            kept = kept + unit.kept * first
        return largest(peaks) + self.held.replica_bytes(stage.num_layers, first=first)


def _layer_reduction(stage_pass: StagePass, place: int, *, first: bool) -> Iterator[Size]:
    """Yield the live bytes of the reduction of a layer's gradients, when it has run.

    Its weights are freed before that; of two shard groups the one gathered last comes first, and
    leaves the input of its reduce-scatter.
    """
    passes, stage, _, units = stage_pass
    layer, done = stage_pass.held.at(place), stage.num_layers - 1 - place
    # Experts that are a unit of their own are reduced by then.
    is_double = stage_pass.held.is_double(place)
    has_own_unit = stage_pass.held.is_nested(place) or is_double
    kept = first * layer.experts.kept * has_own_unit
    unit = layer.dense
    shared = units.root + units.head_gradient - stage_pass.freed_head + passes.message
    shared = shared - stage_pass.saved_layers(place)
    shared = shared + stage_pass.held.stay(place) + stage_pass.held.on_the_way(place)
    shared = shared + stage_pass.held.replica_bytes(done, first=first)
    if is_double:
        live = shared + unit.weights + layer.weights
        yield from reduced(live, layer.experts, cuts=units.cuts_experts)
        kept = kept + layer.experts.wire + is_apart(units, first=first) * layer.experts.replicas
    yield shared + kept + unit.wire + larger(unit.made, unit.share)


def nested_unit(stage_pass: StagePass, place: int, *, adds: bool = False) -> NestedUnit:
    """Return the experts of the layer at an index *place*, a unit of their own.

    Args:
        stage_pass: Passes of the stage.
        place: Index of the layer.
        adds: Whether gradients are accumulated as they are made.
    """
    layer, sharding, units = stage_pass.layer(place), stage_pass.sharding, stage_pass.units
    nested = layer.nested_adding if adds else layer.nested
    return NestedUnit(nested, stage_pass.held.at(place), units, not sharding.reshards)


def _nested_backward(stage_pass: StagePass, place: int, *, first: bool) -> Size:
    """Return the workspace of a layer's backward whose experts are a unit of their own."""
    passes, stage, _, units = stage_pass
    held, done = stage_pass.held, stage.num_layers - 1 - place
    behind, experts = held.on_the_way(place), held.at(place).experts
    unit = nested_unit(stage_pass, place)
    kept = first * experts.kept + is_apart(units, first=first) * experts.replicas
    peaks = [
        *unit.backward(passes.message, held.left(place), behind, is_first=not done),
        *unit.reducing(behind, kept=kept),
    ]
    return largest(peaks) + held.stay(place) + held.replica_bytes(done, first=first)


def _forward_bytes(stage_pass: StagePass, *, whole: bool) -> Size:
    """Return the peak of a forward pass."""
    passes, stage, _, units = stage_pass
    peaks: list[Size] = [0] if whole else [0, *_gathering(stage_pass)]
    for place in _fullest_forward(stage_pass, whole=whole):
        peaks += _layer_forward(stage_pass, place, whole=whole)
    if stage.has_head:
        live = passes.head[0] + units.root + units.head.weights
        peaks.append(live + stage_pass.stays(whole=False))
    return largest(peaks)


def _fullest_forward(stage_pass: StagePass, *, whole: bool) -> list[int]:
    """Return the indices of layers whose forward may be the peak.

    Of equal layers it is the last one, as most is saved by then; or the first, where a pass finds
    all units and frees them one by one; or the last but one beside buffers of experts.
    """
    _, stage, sharding, units = stage_pass
    layers, ends = stage.num_layers, {stage.num_layers - 1}
    if stage.checkpoints.keeps_layers:
        return [*range(layers)]
    if len(units.layers) > 1:
        return [*reversed(stage_pass.held.extreme_places)]
    if whole:
        ends.add(0)
    elif sharding.divides_experts:
        ends.add(layers - 2)
    return sorted(ends.intersection(range(layers)))


def _layer_forward(stage_pass: StagePass, place: int, *, whole: bool) -> Iterator[Size]:
    """Yield the live bytes while the layer at *place* runs forward."""
    passes, stage, sharding, units = stage_pass
    behind = stage.num_layers - 1 - place
    # The output counts as kept, and is what the last layer makes.
    counted: Size = passes.saved_head * stage.has_head + passes.message * stage_pass.sends_output
    shared = units.root - counted - stage_pass.saved_layers(place + 1)
    if place and not whole:
        # Before the layer runs its input alone is live, and two units' buffers.
        yield _copy_out_bytes(stage_pass, place) + shared
    if stage_pass.held.is_nested(place) and not whole:
        ahead = units.head.weights * units.gathers
        if behind:
            ahead = stage_pass.held.at(place + 1).ahead
        shared, nested = shared + stage_pass.held.stay(place), nested_unit(stage_pass, place)
        yield from (shared + each for each in nested.forward(ahead, is_first=not place))
        return
    live = shared + stage_pass.layer(place).work[0] + whole * units.head.weights
    first, end = (place if sharding.reshards else 0), (None if whole else place + 1)
    live = live + stage_pass.held.total(weights_of, first, end)
    if not sharding.reshards:
        live = live + units.table.weights
    if whole:
        yield live
    else:
        yield from _with_buffers(stage_pass, live, place)


def _copy_out_bytes(stage_pass: StagePass, place: int) -> Size:
    """Return the live bytes as a layer's weights are copied out, beside those of all passes.

    The all-gather buffer before theirs lives until then (`wait_for_unshard`).
    """
    passes, _, _, units = stage_pass
    own, left = stage_pass.held.at(place), stage_pass.held.last_buffer(place - 1)
    here = passes.message - stage_pass.layer(place).saved + stage_pass.held.stay(place)
    if not stage_pass.held.is_nested(place):
        return here + stage_pass.held.fetched(place, left)
    return here + left + (own.buffer if units.prefetches else own.dense_buffer) + own.dense.weights


def _with_buffers(stage_pass: StagePass, here: Size, place: int) -> Iterator[Size]:
    """Yield the live bytes while a layer runs forward, *here* without all-gather buffers.

    With expert parallelism torchtitan prefetches the next layer, or the head: beside its buffers
    the last one of the running layer is still alive (`apply_fsdp` of 0.2.2,
    models/llama4/infra/parallelize.py).
    """
    _, stage, sharding, units = stage_pass
    ahead: Size = 0
    if sharding.divides_experts and units.prefetches:
        is_last = place + 1 == stage.num_layers
        gathered = units.head.weights * units.gathers
        ahead = gathered if is_last else stage_pass.held.at(place + 1).buffer
    yield here + stage_pass.held.last_buffer(place) + ahead


def _gathering(stage_pass: StagePass) -> Iterator[Size]:
    """Yield the live bytes as a forward pass gathers the first units, and the head.

    A buffer lives until the next unit's weights are copied out of their own.
    """
    passes, stage, sharding, units = stage_pass
    layers, frees, copies = stage.num_layers, sharding.reshards, 1 + units.gathers
    saved = stage_pass.saved_layers() + passes.saved_head * stage.has_head
    saved_with_embedding = saved + passes.saved_embedding * stage.has_embedding
    gathered: Size = 0
    buffer: Size = 0
    for unit in units.last:
        yield gathered + buffer + copies * unit.weights - saved_with_embedding
        gathered, buffer = gathered + unit.weights, unit.weights * units.gathers
    yield gathered + buffer + passes.message - saved
    gathered = gathered - frees * units.table.weights
    if layers:
        fetched = stage_pass.held.fetched(0, buffer)
        if stage_pass.held.is_nested(0):
            fetched = buffer + copies * stage_pass.held.at(0).dense.weights
        yield gathered + fetched + passes.message - saved
        gathered = gathered + (not frees) * stage_pass.held.total(weights_of)
        buffer = stage_pass.held.last_buffer(-1)
    # Before the loss, logits have no gradient yet: the forward GEMM alone.
    if units.has_head:
        gathered = gathered + copies * units.head.weights
        yield gathered + buffer + passes.message - passes.saved_head
        yield gathered + passes.products[0]
    elif stage.has_head:
        yield gathered + buffer + passes.products[0]


def _after_head(
    stage_pass: StagePass, late: Size, *, first: bool, whole: bool
) -> Iterator[PassPeak[Size]]:
    """Yield the peaks at which the head's gradients are made, and reduced or accumulated.

    The last layer's weights are being gathered by then.
    """
    passes, _, sharding, units = stage_pass
    head = units.head
    here = units.root + stage_pass.stays(whole=whole, otherwise=stage_pass.held.ahead_of_last)
    yield PassPeak(here + head.weights + passes.products[1], late)
    here = here + passes.message - stage_pass.freed_head
    if sharding.keeps_units:
        gradient = units.is_copied * head.made
        yield PassPeak(here + head.weights + gradient, late - head.kept * first)
        return
    # First its gradients are copied into the reduce-scatter's buffer, then freed but for the last.
    yield PassPeak(here + head.made + head.wire, late)
    yield PassPeak(here + head.last + head.wire + head.share, late)
