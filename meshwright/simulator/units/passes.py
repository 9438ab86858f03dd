"""The fullest moments of passes that hold FSDP's units: weights, gradients and wire buffers.

PyTorch's fully_shard: a unit's weights are copied out of the gathered buffer before it computes
and freed after; in forward that buffer stays until the next unit's are copied, in backward the
gather of the unit before is already under way.  A unit's gradients stay whole until its backward
is done, then lie in the wire's format until the next unit's are there.  A root is gathered first
and reduced last; so is the table's unit, but for what is gathered again for its backward.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import NamedTuple

from meshwright.simulator.graph import Size, chosen, larger, largest
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import PassPeak, PassPeaks
from meshwright.simulator.units.bytes import PassBytes, UnitBytes
from meshwright.simulator.units.layers import experts_by_place, extreme_places
from meshwright.simulator.units.nested import NestedUnit, is_apart
from meshwright.simulator.units.sharding import Sharding
from meshwright.simulator.units.stage_layers import StageLayers, kept_of, weights_of


def fuller(one: PassPeak[Size], other: PassPeak[Size]) -> PassPeak[Size]:
    """Return the moment at which more lives; of two alike the first.

    >>> fuller(PassPeak(5, absent_bytes=3), PassPeak(4, absent_bytes=0))
    PassPeak(buffers_bytes=4, absent_bytes=0)
    """
    is_first = one.total_bytes >= other.total_bytes
    return PassPeak(*(chosen(is_first, *each) for each in zip(one, other, strict=True)))


def fullest(moments: Iterable[PassPeak[Size]]) -> PassPeak[Size]:
    """Return the first fullest one."""
    return reduce(fuller, moments)


class StagePass(NamedTuple):
    """Passes through a virtual stage: what they need, what its units hold, how it is sharded.

    Moments are beside all that the passes keep.  ``whole`` says that a pass finds every unit
    gathered, as after a backward pass in a pipeline.
    """

    passes: PassBytes
    stage: Stage
    sharding: Sharding
    units: UnitBytes

    @property
    def held(self) -> StageLayers:
        """What the units of its layers hold."""
        return StageLayers(self.stage, self.sharding, self.units)

    @property
    def gathered_bytes(self) -> Size:
        """Weights of all units."""
        ends = self.units.root + self.units.table.weights + self.units.head.weights
        return ends + self.held.total(weights_of)

    @property
    def sends_output(self) -> bool:
        """Whether it hands on its output, and gets its gradient, as a message."""
        return self.sharding.keeps_units and not self.stage.has_head

    @property
    def late_bytes(self) -> Size:
        """Gradients that its first backward pass makes."""
        return self.units.gradients + self.units.surplus

    def moments(self, *, whole: bool) -> PassPeaks[Size]:
        """Return the fullest moments of its passes."""
        backward = self._backward_moment(first=False, whole=whole).total_bytes
        return PassPeaks(
            PassPeak(_forward_bytes(self, whole=whole), 0),
            self._backward_moment(first=True, whole=whole),
            PassPeak(backward, 0),
        )

    def stays(self, *, whole: bool, otherwise: Size = 0) -> Size:
        """Return the gathered weights of table and layers that a backward pass finds, if any."""
        _, stage, sharding, units = self
        if not stage.num_layers and len(units.last) == len(units.roots):
            return 0
        if sharding.reshards and not whole:
            return self.held.at(-1).weights if units.keeps_last else otherwise
        return units.table.weights + self.held.total(weights_of)

    def _backward_moment(self, *, first: bool, whole: bool) -> PassPeak[Size]:
        """Return the fullest moment of a backward pass.

        In a chunk's *first* one the gradients appear layer by layer.
        """
        passes, stage, sharding, units = self
        late = self.late_bytes * first
        absent = late - units.head.kept * first
        moments: list[PassPeak[Size]] = [PassPeak(0, late)]
        if stage.has_head:
            stay = self.stays(whole=whole)
            here = passes.head[1] + units.root + units.head.weights + stay
            moments += [PassPeak(here, late), *_after_head(self, late, first=first, whole=whole)]
        for place in extreme_places(stage):
            there = absent - first * self.held.total(kept_of, place + 1)
            here = self._layer_backward(place, first=first, whole=whole)
            moments.append(PassPeak(here, there))
            if not sharding.keeps_units:
                here = _layer_reduction(self, place, first=first)
                moments.append(PassPeak(here, there))
        freed = passes.saved_layers(stage) + self.freed_head
        last = self._root_bytes(first=first, whole=whole) - freed
        moments.append(PassPeak(last, absent - first * self.held.total(kept_of)))
        if first and sharding.keeps_units:
            # The last gradients beside their first copy in the format in which they are summed.
            freed = freed + passes.saved_embedding * stage.has_embedding
            moments.append(PassPeak(units.end_gradient + self.gathered_bytes - freed, 0))
        return fullest(moments)

    @property
    def freed_head(self) -> Size:
        """What its head frees before its layers' backward."""
        return self.passes.freed_head if self.stage.has_head else 0

    def _layer_backward(self, place: int, *, first: bool, whole: bool) -> Size:
        """Return the fullest moment of the backward of the layer at a *place*."""
        passes, stage, sharding, units = self
        done, own = stage.num_layers - 1 - place, self.held.at(place)
        others: Size = units.root + units.head_gradient - self.freed_head
        others = others - passes.saved_layers(stage, place + 1)
        if self.held.is_nested(place) and not whole:
            return others + _nested_backward(self, place, first=first)
        if sharding.keeps_units:
            others = others + units.head.weights
        else:
            # The unit behind has left the input of its reduction: FSDP2 holds on to one such buffer
            # until the next reduction wants its own (FSDPParamGroup, `post_backward`).
            others = others + self.held.left(place) + self.held.replica_bytes(done, first=first)
        arrives = self.sends_output and not done
        layer = passes.layer(stage, place)
        work = layer.sent if arrives else layer.work[1]
        here: Size = work + self.held.gathered(place, whole=whole)
        if not sharding.reshards or whole:
            return others + here + units.table.weights
        # Before the layer runs: its gathered buffer, and the weights copied out of it.
        resident = self.held.total(weights_of, place + 1) if sharding.keeps_units else 0
        gradient = 0 if arrives else passes.message
        if units.keeps_last and not done:
            return others + here
        return others + larger(here, gradient + resident + own.weights + own.buffer)

    def _root_bytes(self, *, first: bool, whole: bool) -> Size:
        """Return the fullest moment after the layers: the table's gradient, the last reductions.

        Between the microbatches of a pipeline the layers stay gathered and nothing is reduced.
        """
        passes, stage, sharding, units = self
        table = passes.table + units.positions if stage.has_embedding else 0
        gathers = len(units.last) > len(units.roots) and sharding.reshards and not whole
        fetch = units.table.weights * units.gathers + passes.message if gathers else 0
        if sharding.keeps_units:
            return larger(table, fetch) + self.gathered_bytes
        table = largest((table, fetch, units.cut_table + units.positions))
        here = table + units.root + units.table.weights + units.head_gradient
        moments = [here + self.held.at(0).dense.wire]
        weights = gradients = sum(unit.weights for unit in units.last)
        kept: Size = 0
        for unit in units.last:
            # All gradients and the buffer of the wire; then that and its share.
            weights = weights - unit.weights
            moments.append(weights + gradients + unit.wire + kept)
            gradients = gradients - unit.weights
            moments.append(weights + gradients + unit.last + unit.wire + unit.share + kept)
            kept = kept + unit.kept * first
        return largest(moments) + self.held.replica_bytes(stage.num_layers, first=first)


def _layer_reduction(stage_pass: StagePass, place: int, *, first: bool) -> Size:
    """Return the fullest moment of the reduction of a layer's gradients, when it has run.

    Its weights are freed before that.
    """
    passes, stage, _, units = stage_pass
    layer, done = stage_pass.held.at(place), stage.num_layers - 1 - place
    # Experts that are a unit of their own are reduced by then.
    kept = first * layer.experts.kept * stage_pass.held.is_nested(place)
    unit = layer.dense
    others = kept + units.root + units.head_gradient - stage_pass.freed_head + passes.message
    others = others - passes.saved_layers(stage, place)
    others = others + stage_pass.held.stay(place) + stage_pass.held.on_the_way(place)
    others = others + stage_pass.held.replica_bytes(done, first=first)
    return others + unit.wire + larger(unit.made, unit.share)


def nested_unit(stage_pass: StagePass, place: int, *, adds: bool = False) -> NestedUnit:
    """Return the experts of the layer at a *place*, a unit of their own.

    Args:
        stage_pass: Whose passes.
        place: Of the layer.
        adds: Whether gradients are added to sums as they are made.
    """
    passes, stage, sharding, units = stage_pass
    layer = passes.layer(stage, place)
    nested = layer.nested_adding if adds else layer.nested
    return NestedUnit(nested, stage_pass.held.at(place), units, not sharding.reshards)


def _nested_backward(stage_pass: StagePass, place: int, *, first: bool) -> Size:
    """Return what a layer's backward needs whose experts are a unit of their own."""
    passes, stage, _, units = stage_pass
    held, done = stage_pass.held, stage.num_layers - 1 - place
    behind, experts = held.on_the_way(place), held.at(place).experts
    unit = nested_unit(stage_pass, place)
    kept = first * experts.kept + is_apart(units, first=first) * experts.replicas
    moments = [
        *unit.backward(passes.message, held.left(place), behind, is_first=not done),
        *unit.reducing(behind, kept=kept),
    ]
    return largest(moments) + held.stay(place) + held.replica_bytes(done, first=first)


def _forward_bytes(stage_pass: StagePass, *, whole: bool) -> Size:
    """Return the bytes of the fullest moment of a forward pass."""
    passes, stage, _, units = stage_pass
    moments: list[Size] = [0] if whole else [0, *_gathering(stage_pass)]
    for place in _fullest_forward(stage_pass, whole=whole):
        moments += _layer_forward(stage_pass, place, whole=whole)
    if stage.has_head:
        here = passes.head[0] + units.root + units.head.weights
        moments.append(here + stage_pass.stays(whole=False))
    return largest(moments)


def _fullest_forward(stage_pass: StagePass, *, whole: bool) -> list[int]:
    """Return the places of layers whose forward may be fullest.

    Of layers that are all alike it is the last one, as most is saved by then; or the first, where
    a pass finds all units and frees them one by one; or the last but one beside buffers of experts.
    """
    _, stage, sharding, units = stage_pass
    layers, ends = stage.num_layers, {stage.num_layers - 1}
    if stage.checkpoints.keeps_layers:
        return [*range(layers)]
    if len(units.layers) > 1:
        return [*reversed(extreme_places(stage))]
    if whole:
        ends.add(0)
    elif sharding.divides_experts:
        ends.add(layers - 2)
    return sorted(ends.intersection(range(layers)))


def _layer_forward(stage_pass: StagePass, place: int, *, whole: bool) -> Iterator[Size]:
    """Yield what is live while the layer at *place* runs forward."""
    passes, stage, sharding, units = stage_pass
    behind = stage.num_layers - 1 - place
    # The output counts as kept, and is what the last layer makes.
    counted: Size = passes.saved_head * stage.has_head + passes.message * stage_pass.sends_output
    others = units.root - counted - passes.saved_layers(stage, place + 1)
    if place and not whole:
        yield _before_layer(stage_pass, place) + others
    if stage_pass.held.is_nested(place) and not whole:
        ahead = units.head.weights * units.gathers
        if behind:
            ahead = stage_pass.held.at(place + 1).ahead
        others, nested = others + stage_pass.held.stay(place), nested_unit(stage_pass, place)
        yield from (others + each for each in nested.forward(ahead, is_first=not place))
        return
    here = others + passes.layer(stage, place).work[0] + whole * units.head.weights
    first, end = (place if sharding.reshards else 0), (None if whole else place + 1)
    here = here + stage_pass.held.total(weights_of, first, end)
    if not sharding.reshards:
        here = here + units.table.weights
    if whole:
        yield here
    else:
        yield from _with_buffers(stage_pass, here, place)


def _before_layer(stage_pass: StagePass, place: int) -> Size:
    """Return what lives when a layer's weights are copied out, beside what its passes share.

    The buffer that was gathered before theirs is there until then (`wait_for_unshard`).
    """
    passes, stage, _, units = stage_pass
    own, before = stage_pass.held.at(place), stage_pass.held.at(place - 1)
    unit, buffer = own.whole, own.buffer
    if stage_pass.held.is_nested(place):
        unit, buffer = own.dense, own.buffer if units.prefetches else own.dense_buffer
    left = before.expert_buffer if stage_pass.held.is_nested(place - 1) else before.buffer
    here = passes.message - passes.layer(stage, place).saved + stage_pass.held.stay(place)
    return here + left + buffer + unit.weights


def _with_buffers(stage_pass: StagePass, here: Size, place: int) -> Iterator[Size]:
    """Yield what is live while a layer runs forward, *here* without buffers of what is gathered.

    Where experts are units of their own, torchtitan has the next layer gathered ahead: beside its
    buffers, or the head's, that of the experts that run is still there (`apply_fsdp` of 0.2.2,
    models/llama4/infra/parallelize.py).
    """
    _, stage, sharding, units = stage_pass
    own = stage_pass.held.at(place)
    if not (sharding.divides_experts and experts_by_place(stage)[place]):
        yield here + own.buffer
    elif place + 1 == stage.num_layers:
        yield here + own.expert_buffer + units.head.weights * units.gathers
    else:
        yield here + own.expert_buffer + stage_pass.held.at(place + 1).buffer


def _gathering(stage_pass: StagePass) -> Iterator[Size]:
    """Yield the moments in which a forward pass gathers the first units, and the head.

    A buffer stays until the next unit's weights are copied out of their own.
    """
    passes, stage, sharding, units = stage_pass
    layers, frees, copies = stage.num_layers, sharding.reshards, 1 + units.gathers
    saved = passes.saved_layers(stage) + passes.saved_head * stage.has_head
    ahead = saved + passes.saved_embedding * stage.has_embedding
    held: Size = 0
    buffer: Size = 0
    for unit in units.last:
        yield held + buffer + copies * unit.weights - ahead
        held, buffer = held + unit.weights, unit.weights * units.gathers
    yield held + buffer + passes.message - saved
    held = held - frees * units.table.weights
    if layers:
        first, last = stage_pass.held.at(0), stage_pass.held.at(-1)
        own = first.dense if stage_pass.held.is_nested(0) else first.whole
        yield held + buffer + copies * own.weights + passes.message - saved
        held = held + (not frees) * stage_pass.held.total(weights_of)
        buffer = last.expert_buffer if stage_pass.held.is_nested(-1) else last.buffer
    if units.has_head:
        held = held + copies * units.head.weights
        yield held + buffer + passes.message - passes.saved_head
        yield held + passes.products[0]
    elif stage.has_head:
        yield held + buffer + passes.products[0]


def _after_head(
    stage_pass: StagePass, late: Size, *, first: bool, whole: bool
) -> Iterator[PassPeak[Size]]:
    """Yield the moments in which the head's gradients are made, and reduced or become sums.

    The last layer's weights are on their way.
    """
    passes, _, sharding, units = stage_pass
    head = units.head
    # Experts, a unit of their own, are not gathered ahead of the last layer's backward.
    ahead = stage_pass.held.at(-1).dense_buffer
    here = units.root + stage_pass.stays(whole=whole, otherwise=ahead)
    yield PassPeak(here + head.weights + passes.products[1], late)
    here = here + passes.message - stage_pass.freed_head
    if sharding.keeps_units:
        gradient = units.is_copied * head.weights
        yield PassPeak(here + head.weights + gradient, late - head.kept * first)
        return
    yield PassPeak(here + head.weights + head.wire, late)
    yield PassPeak(here + head.last + head.wire + head.share, late)


def reduction(stage_pass: StagePass, *, is_alone: bool) -> PassPeak[Size]:
    """Return what the reduction after the last backward pass needs, and the gradients it takes.

    Units are freed and reduced one by one, the roots first and the head last: of several layers the
    first needs most.  The wire's buffer lies beside all sums of a unit, its shard beside the last
    of them alone, which the loop that filled the buffer still has (`foreach_reduce` of PyTorch
    2.13).  The runtimes of ranks with one virtual stage hold the last output still.
    """
    passes, stage, sharding, units = stage_pass
    scale = sharding.parameter[1] // sharding.parameter[0].gathered_parameter
    output = passes.saved_head - passes.freed_head if stage.has_head and is_alone else 0
    experts, layers, own = sharding.of_experts, stage.num_layers, sharding
    runs, layer = [(unit, own, 1) for unit in units.last], stage_pass.held.at(0)
    if sharding.divides_experts:
        runs += [(layer.dense, own, min(1, layers)), (layer.experts, experts, min(1, layers))]
        runs += [(layer.dense, own, layers - 1), (layer.experts, experts, layers - 1)]
    else:
        runs.append((layer.whole, own, layers))
    most, gone = -output, 0 * output
    for unit, shared, count in (*runs, (units.head, own, 1)):
        shard = unit.wire // shared.num_ranks
        if count:
            divided = unit.divided if unit is layer.experts else 0
            beside = largest((unit.wire, unit.last * scale + shard, shard + divided))
            most = larger(most, beside - unit.weights - gone)
        gone = gone + count * (unit.weights + unit.wire - shard)
    return PassPeak(output + most, stage_pass.late_bytes - units.shard)
