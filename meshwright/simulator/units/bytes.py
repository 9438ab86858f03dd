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
        root: Gathered weights of embedding, final norm and head.
        gathers: Whether weights are gathered in buffers before they are copied out. Alone, a rank
            copies its shard into the weight (PyTorch's FSDPParamGroup, `wait_for_unshard`).
        layer_wire: A layer's gradients as they are reduced.
        layer_share: A reduced share of a layer's gradients as the all-reduce over replicas had it,
            which stays until backward is over beside one in the format in which it is kept.
        root_wire: The root's, as they are reduced.
        root_reduced: What comes out of their reduction, also in the format in which it is kept.
        root_gradient: Its gradients as a backward pass makes them, beside the first copy of the
            largest in the format in which they are summed.
        positions: Whole gradient of the position table, which is there before the words'.
        layer_kept: What this rank keeps of a layer's gradients.
        head_gradient: Whole gradient of the head's weights.
        last: Of the last weight, which the loop that fills the root's buffer still has.
        cut_table: A table's gradient that every tensor rank makes whole, and its own rows, which
            DTensor copies out of it.
        gradients: What it keeps of all gradients, which counts as held throughout. What leaves
            for the host when it is reduced is not kept.
        surplus: What a table's gradient that every tensor rank makes whole takes beyond its part,
            where it stays so: between microbatches that do not reduce.
        shard: What is kept of all gradients once they are reduced.
    """

    layer: int
    root: int
    gathers: bool
    layer_wire: int
    layer_share: int
    root_wire: int
    root_reduced: int
    root_gradient: int
    positions: int
    layer_kept: int
    head_gradient: int
    last: int
    cut_table: int
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
        makes_whole = shape.tp > 1 and stage.has_embedding and shape.stack.whole_table_gradient
        ranks, tied = replication.span.num_ranks, is_tied(shape, stage)
        is_cast = reduce_bytes != state.sharded_parameter
        gathers, has_replicas = ranks > 1, replication.replica_span is not None
        stays_whole = replication.keeps_whole_gradients and makes_whole and not tied
        on_host = replication.offload is Offload.PARAMETERS
        kept = 0 if on_host and replication.reduces_each_microbatch else state.gradient
        others = (shape.tp - 1) * matrix if stays_whole else 0  # rows of the other tensor ranks
        one_table = matrix * shape.element_bytes
        has_end = stage.has_embedding or stage.has_head
        is_copied = reduce_bytes != state.gathered_parameter
        # Positions follow the table: their first copy in the other format is made later.
        positions = shape.parameters[EMBEDDING] - matrix
        positions *= stage.has_embedding * state.gathered_parameter
        return cls(
            layer=layer * state.gathered_parameter,
            root=root * state.gathered_parameter,
            gathers=gathers,
            layer_wire=layer * reduce_bytes,
            layer_share=-(-layer // ranks) * reduce_bytes * (is_cast and has_replicas),
            root_wire=root * reduce_bytes,
            root_reduced=-(-root // ranks) * (reduce_bytes + is_cast * state.sharded_parameter),
            positions=positions,
            root_gradient=is_copied
            * ((matrix * has_end + others) * shape.element_bytes - positions),
            layer_kept=-(-layer // replication.shards.gradients) * kept,
            head_gradient=one_table * stage.has_head,
            last=one_table * (stage.has_head and gathers and not tied),
            cut_table=one_table * (shape.tp + 1) * makes_whole,
            gradients=-(-total // replication.shards.gradients) * kept,
            surplus=others * state.gradient,
            shard=0 if on_host else -(-total // ranks) * state.sharded_parameter,
        )

    @property
    def buffer(self) -> int:
        """In which the weights of a layer are gathered."""
        return self.layer * self.gathers


def is_tied(shape: BlockShape, stage: Stage) -> bool:
    """Return whether one weight is the stage's table and its output matrix.

    Added to that of the head, which is split over tensor ranks, the table's gradient is split, too.
    """
    return shape.trained.tied_embeddings and stage.has_embedding and stage.has_head
