"""What FSDP's units hold for a moment in a pass: gathered weights, whole gradients, wire buffers.

PyTorch's fully_shard: a unit's weights are copied out of the gathered buffer before it computes
and freed after; in backward the gather of the unit before is already under way.  A unit's
gradients stay whole until its backward is done, then lie in the wire's format until the next
unit's are there.  The root (embedding, final norm, head) is gathered first and reduced last.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hwprofiles import Offload
from simulator.activations import message_buffer_bytes, saved_head_bytes, saved_layer_bytes
from simulator.block_shape import BlockShape
from simulator.data_parallel import Replication, Stage, stage_parameters, sum_parameters
from simulator.end_liveness import embedding_backward_steps, head_workspace_bytes
from simulator.liveness import backward_steps, highest, layer_workspace_bytes
from simulator.memory import (
    ChunkMemory,
    Moment,
    RankMemory,
    StateBytes,
    chunk_memory,
    rank_memory,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitBytes:
    """Bytes of a stage's units.

    Args:
        layer: Gathered weights of one layer.
        root: Gathered weights of embedding, final norm and head.
        layer_wire: A layer's gradients as they are reduced.
        root_wire: The root's.
        layer_kept: What this rank keeps of a layer's gradients.
        head_gradient: Whole gradient of the head's weights.
        gradients: What it keeps of all gradients, which counts as held throughout.
    """

    layer: int
    root: int
    layer_wire: int
    root_wire: int
    layer_kept: int
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
            layer_kept=-(-layer // to.shards.gradients) * state.gradient,
            head_gradient=matrix * shape.element_bytes * stage.has_head,
            gradients=-(-total // to.shards.gradients) * state.gradient,
        )


def holds_units(shape: BlockShape, to: Replication) -> bool:
    """Return whether passes hold the units of fully_shard, also on a mesh of one rank."""
    return shape.stack.root_unit and to.offload is Offload.NONE


def unit_rank_memory(
    shape: BlockShape,
    stages: Sequence[Stage],
    to: Replication,
    sizes: tuple[StateBytes, int],
    num_microbatches: int,
) -> RankMemory:
    """Return the memory of a rank whose states are units of fully_shard.

    Args:
        shape: Sizes of its blocks.
        stages: Its virtual stages.
        to: How its states are sharded.
        sizes: Bytes of a parameter's states, and on the wire of a reduction.
        num_microbatches: Microbatches of the step.
    """
    state, reduce_bytes = sizes
    chunks = tuple(_chunk(shape, stage, to, state, reduce_bytes) for stage in stages)
    memory = rank_memory(sum_parameters(shape, stages), state, chunks, shards=to.shards)
    buffers = sum(
        message_buffer_bytes(shape, has_embedding=stage.has_embedding, has_head=stage.has_head)
        for stage in stages
    )
    spare = sum(whole_table_bytes(shape, stage, to, state) for stage in stages)
    return replace(
        memory,
        parameters_bytes=-(-sum_parameters(shape, stages) // to.shards.parameters)
        * state.sharded_parameter,
        gradients_bytes=memory.gradients_bytes + spare,
        message_buffers_bytes=num_microbatches * buffers,
    )


def whole_table_bytes(shape: BlockShape, stage: Stage, to: Replication, state: StateBytes) -> int:
    """Return what a table's gradient that every tensor rank makes whole takes beyond its part.

    Between the microbatches of a pipeline it stays so.
    """
    if not (to.keeps_units and stage.has_embedding and shape.stack.whole_table_gradient):
        return 0
    return (shape.tp - 1) * shape.local_vocab_size * shape.model.hidden_size * state.gradient


def _chunk(
    shape: BlockShape, stage: Stage, to: Replication, state: StateBytes, reduce_bytes: int
) -> ChunkMemory:
    units = UnitBytes.of(shape, stage, to, state, reduce_bytes)
    chunk = chunk_memory(
        shape, stage.num_layers, has_embedding=stage.has_embedding, has_head=stage.has_head
    )
    layers = stage.num_layers * units.layer
    later = _backward_moments(shape, stage, to, units, first=False)
    first = _backward_moments(shape, stage, to, units, first=True)
    return replace(
        chunk,
        forward_workspace_bytes=max(_forward_moments(shape, stage, to, units)),
        backward_workspace_bytes=max(moment.total_bytes for moment in later),
        late_gradients_bytes=units.gradients + whole_table_bytes(shape, stage, to, state),
        first_backward=max(first, key=lambda moment: moment.total_bytes),
        after_forward_bytes=units.root + (0 if to.reshards else layers),
        after_backward_bytes=(units.root + layers) if to.keeps_units else 0,
    )


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
    shape: BlockShape, stage: Stage, to: Replication, units: UnitBytes, *, first: bool
) -> list[Moment]:
    """Return the fullest moments of a backward pass beyond what was kept.

    In a chunk's *first* one the gradients appear layer by layer.
    """
    head = saved_head_bytes(shape) if stage.has_head else 0
    layers, saved = stage.num_layers, saved_layer_bytes(shape)
    late = units.gradients if first else 0
    appeared = units.layer_kept if first else 0
    stay = units.layer * layers if not to.reshards else 0
    moments = [Moment(0, late)]
    if stage.has_head:
        moments.append(Moment(head_workspace_bytes(shape)[1] + units.root + stay, late))
    work = _layer_backward(shape) if layers else 0
    for done in range(layers):
        here = work - done * saved - head + units.root + units.head_gradient
        here += _gathered_layers(to, units, done, layers)
        if done and not to.keeps_units:
            here += units.layer_wire
        moments.append(Moment(here, late - done * appeared))
    ended = _root_moment(shape, stage, to, units) - layers * saved - head
    moments.append(Moment(ended, late - layers * appeared))
    if first and to.keeps_units:
        # The root's gradients beside their first copy in the format in which they are summed.
        gathered = units.root + layers * units.layer
        moments.append(Moment(units.root + gathered - layers * saved - head))
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
    """Return the fullest moment after the layers: the table's gradient, or the root's reduction.

    Between the microbatches of a pipeline the layers stay gathered and nothing is reduced.
    """
    table = highest(embedding_backward_steps(shape)) if stage.has_embedding else 0
    if to.keeps_units:
        return table + units.root + stage.num_layers * units.layer
    embedding = table + units.root + units.head_gradient + units.layer_wire
    reduction = units.root + units.root_wire + units.root_wire // to.span.num_ranks
    return max(embedding, reduction)
