"""Bytes of what FSDP's units hold, and of what passes through blocks of one shape need."""

from dataclasses import dataclass
from typing import NamedTuple

from meshwright.hwprofiles import Offload
from meshwright.simulator.blocks import BlockShape, BlockTable, Ending
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import SentBytes, StateBytes, kept_logits_bytes
from meshwright.simulator.model import EMBEDDING, HEAD, TRANSFORMER_LAYER
from meshwright.simulator.replication import Replication, stage_parameters

# Weights' gradients are added to sums at once, or stay, also where the one that arrives lies in a
# message's buffer.
ENDINGS = (Ending(), Ending(keeps_gradients=True), Ending(keeps_gradients=True, arriving_bytes=0))


class ParameterBytes(NamedTuple):
    """Bytes a parameter costs: its states, and on the wire of a reduction."""

    state: StateBytes
    reduce_bytes: int


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
        sent_layer: Of a backward whose gradient lies in a message's buffer.
        adding: Of a backward whose weights' gradients are added to sums at once.
        head: Workspaces of the head.
        table: Workspace of the embedding's backward.
    """

    saved_layer: int
    saved_embedding: int
    saved_head: int
    freed_head: int
    message: int
    layer: tuple[int, int]
    sent_layer: int
    adding: int
    head: tuple[int, int]
    table: int

    @classmethod
    def of(cls, table: BlockTable, shape: BlockShape) -> "PassBytes":
        """Return the bytes of *shape*."""
        adding, kept, sent = (table.memory(shape, TRANSFORMER_LAYER, each) for each in ENDINGS)
        head, embedding = table.memory(shape, HEAD), table.memory(shape, EMBEDDING)
        logits = kept_logits_bytes(shape)
        return cls(
            saved_layer=adding.saved,
            saved_embedding=embedding.saved,
            saved_head=head.saved + logits,
            freed_head=head.saved,
            message=adding.sent,
            layer=(kept.forward, kept.backward),
            sent_layer=sent.backward,
            adding=adding.backward,
            head=(head.forward - logits, head.backward),
            table=embedding.backward,
        )

    def messages(self, stage: Stage) -> SentBytes:
        """Return what *stage* sends in a microbatch."""
        return SentBytes(
            output=0 if stage.has_head else self.message,
            gradient=0 if stage.has_embedding else self.message,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitBytes:
    """Bytes of a stage's units.

    Args:
        layer: Gathered weights of one layer.
        buffer: In which they are gathered, before they are copied out; none on a mesh of one rank.
        root: Gathered weights of embedding, final norm and head.
        layer_wire: A layer's gradients as they are reduced.
        root_wire: The root's.
        root_gradient: Its gradients as a backward pass makes them, beside the first copy of the
            largest in the format in which they are summed.
        positions: Whole gradient of the position table, which is there before the words'.
        layer_kept: What this rank keeps of a layer's gradients.
        head_gradient: Whole gradient of the head's weights.
        gradients: What it keeps of all gradients, which counts as held throughout. What leaves
            for the host when it is reduced is not kept.
        surplus: What a table's gradient that every tensor rank makes whole takes beyond its part,
            where it stays so: between microbatches that do not reduce.
        shard: What is kept of all gradients once they are reduced.
    """

    layer: int
    buffer: int
    root: int
    layer_wire: int
    root_wire: int
    root_gradient: int
    positions: int
    layer_kept: int
    head_gradient: int
    gradients: int
    surplus: int
    shard: int

    @classmethod
    def of(
        cls, shape: BlockShape, stage: Stage, replication: Replication, parameter: ParameterBytes
    ) -> "UnitBytes":
        """Return the bytes of *stage* from those of a parameter."""
        state, reduce_bytes = parameter
        layer = shape.parameters[TRANSFORMER_LAYER]
        total = stage_parameters(shape, stage)
        root = total - stage.num_layers * layer
        matrix = shape.local_vocab_size * shape.model.hidden_size
        makes_whole = stage.has_embedding and shape.stack.whole_table_gradient
        stays_whole = (
            replication.keeps_whole_gradients and makes_whole and not is_tied(shape, stage)
        )
        on_host = replication.offload is Offload.PARAMETERS
        kept = 0 if on_host and replication.reduces_each_microbatch else state.gradient
        others = (shape.tp - 1) * matrix if stays_whole else 0  # rows of the other tensor ranks
        has_end = stage.has_embedding or stage.has_head
        is_copied = reduce_bytes != state.gathered_parameter
        # Positions follow the table: their first copy in the other format is made later.
        positions = shape.parameters[EMBEDDING] - matrix
        positions *= stage.has_embedding * state.gathered_parameter
        return cls(
            layer=layer * state.gathered_parameter,
            # Alone, a rank copies its shard into the weight and gathers nothing (PyTorch's
            # FSDPParamGroup, `wait_for_unshard`).
            buffer=layer * state.gathered_parameter if replication.span.num_ranks > 1 else 0,
            root=root * state.gathered_parameter,
            layer_wire=layer * reduce_bytes,
            root_wire=root * reduce_bytes,
            positions=positions,
            root_gradient=(matrix * has_end + others) * shape.element_bytes - positions
            if is_copied
            else 0,
            layer_kept=-(-layer // replication.shards.gradients) * kept,
            head_gradient=matrix * shape.element_bytes if stage.has_head else 0,
            gradients=-(-total // replication.shards.gradients) * kept,
            surplus=others * state.gradient,
            shard=0
            if on_host
            else -(-total // replication.span.num_ranks) * state.sharded_parameter,
        )


def is_tied(shape: BlockShape, stage: Stage) -> bool:
    """Return whether one weight is the stage's table and its output matrix.

    Added to that of the head, which is split over tensor ranks, the table's gradient is split, too.
    """
    return shape.trained.tied_embeddings and stage.has_embedding and stage.has_head
