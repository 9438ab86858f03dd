"""What FSDP's units hold for a moment in a pass: gathered weights, whole gradients, wire buffers.

PyTorch's fully_shard: a unit's weights are copied out of the gathered buffer before it computes
and freed after; in backward the gather of the unit before is already under way.  A unit's
gradients stay whole until its backward is done, then lie in the wire's format until the next
unit's are there.  The root (embedding, final norm, head) is gathered first and reduced last.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hwprofiles import Offload
from simulator.activations import (
    kept_logits_bytes,
    kept_output_bytes,
    message_buffer_bytes,
    saved_embedding_bytes,
    saved_head_bytes,
    saved_layer_bytes,
)
from simulator.block_shape import BlockShape
from simulator.data_parallel import Replication, Stage, stage_parameters, sum_parameters
from simulator.end_liveness import embedding_backward_steps, head_workspace_bytes
from simulator.liveness import backward_steps, highest, layer_workspace_bytes
from simulator.memory import (
    ChunkMemory,
    Moment,
    RankMemory,
    StateBytes,
    rank_memory,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassBytes:
    """What passes through blocks of one shape keep and need, whatever the units hold.

    Args:
        saved_layer: Kept by one layer.
        saved_embedding: Kept by the embedding.
        saved_head: Kept by the head.
        freed_head: Of that, freed when the head's backward is done: not a stage's kept output.
        message: A gradient of a layer's output.
        layer: Workspaces of a layer, forward and backward; its weights' gradients stay.
        head: Workspaces of the head.
        table: Workspace of the embedding's backward.
    """

    saved_layer: int
    saved_embedding: int
    saved_head: int
    freed_head: int
    message: int
    layer: tuple[int, int]
    head: tuple[int, int]
    table: int

    @classmethod
    def of(cls, shape: BlockShape) -> "PassBytes":
        """Return the bytes of *shape*."""
        forward, backward = layer_workspace_bytes(shape)
        again = backward - highest(backward_steps(shape))
        return cls(
            saved_layer=saved_layer_bytes(shape),
            saved_embedding=saved_embedding_bytes(shape),
            saved_head=saved_head_bytes(shape),
            freed_head=saved_head_bytes(shape) - kept_logits_bytes(shape),
            message=shape.message_bytes,
            layer=(forward, again + highest(backward_steps(shape, keeps_weight_gradients=True))),
            head=head_workspace_bytes(shape),
            table=highest(embedding_backward_steps(shape)),
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
        surplus: What a table's gradient that every tensor rank makes whole takes beyond its part,
            where it stays so: between the microbatches of a pipeline.
    """

    layer: int
    root: int
    layer_wire: int
    root_wire: int
    layer_kept: int
    head_gradient: int
    gradients: int
    surplus: int

    @classmethod
    def of(
        cls, shape: BlockShape, stage: Stage, to: Replication, state: StateBytes, reduce_bytes: int
    ) -> "UnitBytes":
        """Return the bytes of *stage*; *reduce_bytes* are those of a parameter on the wire."""
        layer = shape.parameters.layer
        total = stage_parameters(shape, stage)
        root = total - stage.num_layers * layer
        matrix = shape.local_vocab_size * shape.model.hidden_size
        stays_whole = to.keeps_units and stage.has_embedding and shape.stack.whole_table_gradient
        return cls(
            layer=layer * state.gathered_parameter,
            root=root * state.gathered_parameter,
            layer_wire=layer * reduce_bytes,
            root_wire=root * reduce_bytes,
            layer_kept=-(-layer // to.shards.gradients) * state.gradient,
            head_gradient=matrix * shape.element_bytes * stage.has_head,
            gradients=-(-total // to.shards.gradients) * state.gradient,
            surplus=(shape.tp - 1) * matrix * state.gradient * stays_whole,
        )


def holds_units(shape: BlockShape, to: Replication) -> bool:
    """Return whether passes hold the units of fully_shard, also on a mesh of one rank."""
    return shape.stack.root_unit and to.offload is Offload.NONE


def unit_rank_memory(
    shape: BlockShape,
    passes: PassBytes,
    stages: Sequence[Stage],
    to: Replication,
    sizes: tuple[StateBytes, int],
) -> RankMemory:
    """Return the memory of a rank whose states are units of fully_shard, for one microbatch.

    Args:
        shape: Sizes of its blocks.
        passes: What passes through them need.
        stages: Its virtual stages.
        to: How its states are sharded.
        sizes: Bytes of a parameter's states, and on the wire of a reduction.
    """
    state, reduce_bytes = sizes
    num_parameters = sum_parameters(shape, stages)
    units = [UnitBytes.of(shape, stage, to, state, reduce_bytes) for stage in stages]
    chunks = tuple(
        _chunk(shape, passes, stage, to, held) for stage, held in zip(stages, units, strict=True)
    )
    memory = rank_memory(num_parameters, state, chunks, shards=to.shards)
    shards = -(-num_parameters // to.shards.parameters)
    return replace(
        memory,
        parameters_bytes=shards * state.sharded_parameter,
        gradients_bytes=memory.gradients_bytes + sum(held.surplus for held in units),
        message_buffers_bytes=sum(
            message_buffer_bytes(shape, has_embedding=stage.has_embedding, has_head=stage.has_head)
            for stage in stages
        ),
    )


def _chunk(
    shape: BlockShape, passes: PassBytes, stage: Stage, to: Replication, units: UnitBytes
) -> ChunkMemory:
    layers = stage.num_layers * units.layer
    # The gradient of a stage's input waits until it has left.
    leaving = shape.message_bytes if shape.keeps_outputs and not stage.has_embedding else 0
    later = _backward_moments(passes, stage, to, units, first=False)
    first = _backward_moments(passes, stage, to, units, first=True)
    fullest = max(first, key=lambda moment: moment.total_bytes)
    return ChunkMemory(
        saved_bytes=stage.num_layers * passes.saved_layer
        + stage.has_embedding * passes.saved_embedding
        + stage.has_head * passes.saved_head
        + kept_output_bytes(shape, has_embedding=stage.has_embedding, has_head=stage.has_head),
        forward_workspace_bytes=leaving + max(_forward_moments(passes, stage, to, units)),
        backward_workspace_bytes=leaving + max(moment.total_bytes for moment in later),
        late_gradients_bytes=units.gradients + units.surplus,
        first_backward=Moment(leaving + fullest.buffers_bytes, fullest.absent_bytes),
        after_forward_bytes=units.root + (0 if to.reshards else layers),
        after_backward_bytes=(units.root + layers) if to.keeps_units else 0,
    )


def _forward_moments(
    passes: PassBytes, stage: Stage, to: Replication, units: UnitBytes
) -> list[int]:
    """Return the bytes of the fullest moments of a forward pass beyond what it keeps."""
    head = passes.saved_head if stage.has_head else 0
    layers, saved = stage.num_layers, passes.saved_layer
    stay = units.layer * layers if not to.reshards else 0
    moments = [0]
    if layers:
        work = passes.layer[0] - head
        moments.append(work + units.root + (stay or units.layer))
        moments.append(units.root + (stay or units.layer) + units.layer - saved - head)
        if to.keeps_units:
            moments.append(work - (layers - 1) * saved + units.root + layers * units.layer)
    if stage.has_head:
        moments.append(passes.head[0] + units.root + stay)
    return moments


def _backward_moments(
    passes: PassBytes, stage: Stage, to: Replication, units: UnitBytes, *, first: bool
) -> list[Moment]:
    """Return the fullest moments of a backward pass beyond what was kept.

    In a chunk's *first* one the gradients appear layer by layer.
    """
    head = passes.freed_head if stage.has_head else 0
    layers, saved = stage.num_layers, passes.saved_layer
    late = units.gradients if first else 0
    appeared = units.layer_kept if first else 0
    stay = units.layer * layers if not to.reshards else 0
    moments = [Moment(0, late)]
    if stage.has_head:
        moments.append(Moment(passes.head[1] + units.root + stay, late))
    for done in range(layers):
        others = units.root + units.head_gradient - done * saved - head
        if done and not to.keeps_units:
            others += units.layer_wire
        here = others + passes.layer[1] + _gathered_layers(to, units, done, layers)
        absent = late - done * appeared
        moments.append(Moment(here, absent))
        if to.reshards:
            # Before the layer runs: its gathered buffer, and the weights copied out of it.
            resident = done * units.layer if to.keeps_units else 0
            moments.append(Moment(others + passes.message + resident + 2 * units.layer, absent))
    ended = _root_moment(passes, stage, to, units) - layers * saved - head
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


def _root_moment(passes: PassBytes, stage: Stage, to: Replication, units: UnitBytes) -> int:
    """Return the fullest moment after the layers: the table's gradient, or the root's reduction.

    Between the microbatches of a pipeline the layers stay gathered and nothing is reduced.
    """
    table = passes.table if stage.has_embedding else 0
    if to.keeps_units:
        return table + units.root + stage.num_layers * units.layer
    embedding = table + units.root + units.head_gradient + units.layer_wire
    reduction = units.root + units.root_wire + units.root_wire // to.span.num_ranks
    return max(embedding, reduction)
