"""What FSDP's units hold for a moment in a pass: gathered weights, whole gradients, wire buffers.

PyTorch's fully_shard: a unit's weights are copied out of the gathered buffer before it computes
and freed after; in backward the gather of the unit before is already under way.  A unit's
gradients stay whole until its backward is done, then lie in the wire's format until the next
unit's are there.  The root (embedding, final norm, head) is gathered first and reduced last.
"""

from dataclasses import dataclass

from hwprofiles import Offload
from simulator.activations import saved_head_bytes, saved_layer_bytes
from simulator.block_shape import BlockShape
from simulator.data_parallel import Replication, Stage, stage_parameters
from simulator.liveness import (
    backward_steps,
    embedding_backward_steps,
    head_workspace_bytes,
    highest,
    layer_workspace_bytes,
)
from simulator.memory import StateBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitBytes:
    """Bytes of a stage's units.

    Args:
        layer: Gathered weights of one layer.
        root: Gathered weights of embedding, final norm and head.
        layer_wire: A layer's gradients as they are reduced.
        root_wire: The root's.
        layer_shard: This rank's part of a layer's reduced gradients.
        head_gradient: Whole gradient of the head's weights.
        gradients: This rank's part of all gradients, which counts as held throughout.
    """

    layer: int
    root: int
    layer_wire: int
    root_wire: int
    layer_shard: int
    head_gradient: int
    gradients: int

    @classmethod
    def of(
        cls, shape: BlockShape, stage: Stage, to: Replication, state: StateBytes, reduce_bytes: int
    ) -> "UnitBytes":
        """Return the bytes of *stage*; *reduce_bytes* are those of a parameter on the wire."""
        layer = shape.parameters.layer
        total = stage_parameters(shape, stage)
        root = total - stage.num_layers * layer
        matrix = shape.local_vocab_size * shape.model.hidden_size
        return cls(
            layer=layer * state.gathered_parameter,
            root=root * state.gathered_parameter,
            layer_wire=layer * reduce_bytes,
            root_wire=root * reduce_bytes,
            layer_shard=-(-layer // to.span.num_ranks) * state.gradient,
            head_gradient=matrix * shape.element_bytes * stage.has_head,
            gradients=-(-total // to.shards.gradients) * state.gradient,
        )


def holds_units(shape: BlockShape, to: Replication) -> bool:
    """Return whether passes hold the units of fully_shard, also on a mesh of one rank."""
    return shape.stack.root_unit and to.zero_stage >= 3 and to.offload is Offload.NONE


def unit_pass_bytes(
    shape: BlockShape, stage: Stage, to: Replication, units: UnitBytes, *, single: bool
) -> tuple[int, int]:
    """Return what a pass through *stage* needs beside what waits for backward and static states.

    Args:
        shape: Sizes of its blocks.
        stage: Which virtual stage.
        to: How its states are sharded.
        units: Bytes of its units.
        single: The step has one microbatch: no gradient is there before the first unit's.
    """
    forward = max(_forward_moments(shape, stage, to, units))
    moments = list(_backward_moments(shape, stage, to, units, single=single))
    if single and not to.keeps_units:
        forward -= units.gradients
    return forward, max(moments)


def _forward_moments(
    shape: BlockShape, stage: Stage, to: Replication, units: UnitBytes
) -> list[int]:
    """Return the bytes of the fullest moments of a forward pass beyond what it keeps."""
    head = saved_head_bytes(shape) if stage.has_head else 0
    layers = stage.num_layers
    stay = units.layer * layers if not to.reshards else 0
    moments = [0]
    if layers:
        work = layer_workspace_bytes(shape)[0] - head
        saved = saved_layer_bytes(shape)
        moments.append(work + units.root + (stay or units.layer))
        moments.append(units.root + (stay or units.layer) + units.layer - saved - head)
        if to.keeps_units:
            moments.append(work - (layers - 1) * saved + units.root + layers * units.layer)
    if stage.has_head:
        moments.append(head_workspace_bytes(shape)[0] + units.root + stay)
    return moments


def _backward_moments(
    shape: BlockShape, stage: Stage, to: Replication, units: UnitBytes, *, single: bool
) -> list[int]:
    """Return the bytes of the fullest moments of a backward pass beyond what was kept."""
    head = saved_head_bytes(shape) if stage.has_head else 0
    layers, saved = stage.num_layers, saved_layer_bytes(shape)
    missing = units.gradients if single and not to.keeps_units else 0
    stay = units.layer * layers if not to.reshards else 0
    moments = [0]
    if stage.has_head:
        moments.append(head_workspace_bytes(shape)[1] + units.root + stay - missing)
    work = _layer_backward(shape) if layers else 0
    for done in range(layers):
        here = work - done * saved - head + units.root + units.head_gradient
        here += _gathered_layers(to, units, done, layers)
        if done and not to.keeps_units:
            here += units.layer_wire
        moments.append(here - missing + (done * units.layer_shard if missing else 0))
    if to.keeps_units:
        table = highest(embedding_backward_steps(shape)) if stage.has_embedding else 0
        moments.append(table + units.root + layers * (units.layer - saved) - head)
    else:
        moments.append(_root_moment(shape, stage, to, units) - layers * saved - head - missing)
    return moments


def _gathered_layers(to: Replication, units: UnitBytes, done: int, layers: int) -> int:
    """Return the gathered weights of layers while one runs backward and *done* have."""
    ahead = units.layer if done < layers - 1 else 0
    if not to.reshards:
        return (layers if to.keeps_units else layers - done) * units.layer
    return (done if to.keeps_units else 0) * units.layer + units.layer + ahead


def _layer_backward(shape: BlockShape) -> int:
    """Return a layer's backward workspace with the gradients of its weights kept."""
    dropped = layer_workspace_bytes(shape)[1] - highest(backward_steps(shape))
    return dropped + highest(backward_steps(shape, keeps_weight_gradients=True))


def _root_moment(shape: BlockShape, stage: Stage, to: Replication, units: UnitBytes) -> int:
    """Return the fullest moment after the layers: the table's gradient, or the root's reduction."""
    reduced = stage.num_layers * units.layer_shard
    table = highest(embedding_backward_steps(shape)) if stage.has_embedding else 0
    embedding = table + units.root + units.head_gradient + units.layer_wire
    reduction = units.root + units.root_wire + units.root_wire // to.span.num_ranks
    return max(embedding, reduction) + reduced
