"""Bytes of what FSDP's units hold, and of what passes through blocks of one shape need."""

from dataclasses import dataclass
from typing import NamedTuple

from meshwright.hwprofiles import LossKernel, Offload, Units
from meshwright.simulator.blocks import BlockShape, BlockTable, Ending
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import SentBytes, StateBytes, kept_logits_bytes
from meshwright.simulator.model import EMBEDDING, HEAD, layer_kinds
from meshwright.simulator.replication import (
    EndUnits,
    Replication,
    is_tied,
    keeps_last_layer,
    stage_parameters,
)

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
        products: What the head's product needs forward, and those of its backward, without what
            the loss keeps: it does not yet, or no more.
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
    products: tuple[int, int]

    @classmethod
    def of(cls, table: BlockTable, shape: BlockShape) -> "PassBytes":
        """Return the bytes of *shape*."""
        kind = layer_kinds(shape.model)[0]  # a window changes neither parameters nor bytes
        adding, kept, sent = (table.memory(shape, kind, each) for each in ENDINGS)
        head, embedding = table.memory(shape, HEAD), table.memory(shape, EMBEDDING)
        logits = kept_logits_bytes(shape)
        # PyTorch's own chain keeps logarithms of probabilities in fp32.
        kept_by_loss = 4 * (shape.stack.loss is LossKernel.EAGER)
        alone = shape.num_logits * (shape.element_bytes - kept_by_loss)
        inputs = adding.sent * (shape.tp if shape.sequence_parallel else 1)
        matrix = shape.local_vocab_size * shape.model.hidden_size
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
            products=(alone - logits, alone + inputs + matrix * shape.element_bytes),
        )

    def messages(self, stage: Stage) -> SentBytes:
        """Return what *stage* sends in a microbatch."""
        return SentBytes(
            output=0 if stage.has_head else self.message,
            gradient=0 if stage.has_embedding else self.message,
        )


class Unit(NamedTuple):
    """Bytes of weights that are gathered, and whose gradients are reduced, together.

    Args:
        weights: Gathered; their whole gradients, as a backward pass makes them, are as large.
        wire: Gradients as they are reduced.
        share: What comes out of their reduction, also in the format in which it is kept.
        replicas: A reduced share as the all-reduce over replicas had it, which stays until backward
            is over beside one in the format in which it is kept.
        kept: What this rank keeps of the gradients.
        last: Gradient of the last weight, which the loop that fills the reduction's buffer still
            has (`foreach_reduce` of PyTorch 2.13).
    """

    weights: int = 0
    wire: int = 0
    share: int = 0
    replicas: int = 0
    kept: int = 0
    last: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitBytes:
    """Bytes of a stage's units.

    Args:
        layer: Of one layer.
        roots: Gathered before all, one after the other, and reduced last.
        table: Gathered for the embedding and again for its backward, reduced after the roots.
        head: Gathered for the head, and reduced after its backward.
        kept_layer: Weights of the last layer, where they stay until its backward.
        gathers: Whether weights are gathered in buffers before they are copied out. Alone, a rank
            copies its shard into the weight (PyTorch's FSDPParamGroup, `wait_for_unshard`).
        end_gradient: Gradients of a pipeline's embedding as a backward pass makes them, beside the
            first copy of the largest in the format in which they are summed.
        positions: Whole gradient of the position table, which is there before the words'.
        head_gradient: Whole gradient of the head's weights, where it waits for the roots' others.
        cut_table: A table's gradient that every tensor rank makes whole, and its own rows, which
            DTensor copies out of it.
        gradients: What it keeps of all gradients, which counts as held throughout. What leaves
            for the host when it is reduced is not kept.
        surplus: What a table's gradient that every tensor rank makes whole takes beyond its part,
            where it stays so: between microbatches that do not reduce.
        shard: What is kept of all gradients once they are reduced.
    """

    layer: Unit
    roots: tuple[Unit, ...]
    table: Unit
    head: Unit
    kept_layer: int
    gathers: bool
    is_copied: bool
    end_gradient: int
    positions: int
    head_gradient: int
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
        total = stage_parameters(shape, stage)
        matrix = shape.local_vocab_size * shape.model.hidden_size
        makes_whole = shape.tp > 1 and stage.has_embedding and shape.stack.whole_table_gradient
        ranks, tied = replication.span.num_ranks, is_tied(shape, stage)
        stays_whole = replication.keeps_whole_gradients and makes_whole and not tied
        on_host = replication.offload is Offload.PARAMETERS
        kept = 0 if on_host and replication.reduces_each_microbatch else state.gradient
        others = (shape.tp - 1) * matrix if stays_whole else 0  # rows of the other tensor ranks
        one_table = matrix * shape.element_bytes
        # Positions follow the table: their first copy in the other format is made later.
        positions = shape.parameters[EMBEDDING] - matrix
        positions *= stage.has_embedding * state.gathered_parameter
        roots, table, head = end_units(shape, stage, replication, parameter, kept)
        ends = stage.has_embedding or (stage.has_head and not head.weights)
        is_copied = reduce_bytes != state.gathered_parameter
        made_later = positions if shape.stack.units is Units.ROOT else 0
        kind = layer_kinds(shape.model)[0]
        layer = _unit(shape.parameters[kind], replication, parameter, kept)
        return cls(
            layer=layer,
            kept_layer=layer.weights * keeps_last_layer(shape, stage),
            roots=roots,
            table=table,
            head=head,
            gathers=ranks > 1,
            is_copied=is_copied,
            end_gradient=is_copied * ((matrix * ends + others) * shape.element_bytes - made_later),
            positions=positions,
            head_gradient=one_table * (stage.has_head and not head.weights),
            cut_table=one_table * (shape.tp + 1) * makes_whole,
            gradients=-(-total // replication.shards.gradients) * kept,
            surplus=others * state.gradient,
            shard=0 if on_host else -(-total // ranks) * state.sharded_parameter,
        )

    @property
    def buffer(self) -> int:
        """In which the weights of a layer are gathered."""
        return self.layer.weights * self.gathers

    @property
    def root(self) -> int:
        """Gathered weights of the roots."""
        return sum(unit.weights for unit in self.roots)

    @property
    def last(self) -> tuple[Unit, ...]:
        """Those that are reduced when all layers are, in that order."""
        return tuple(unit for unit in (*self.roots, self.table) if unit.weights)


def end_units(
    shape: BlockShape,
    stage: Stage,
    replication: Replication,
    parameter: ParameterBytes,
    kept_bytes: int,
) -> tuple[tuple[Unit, ...], Unit, Unit]:
    """Return a stage's roots, the unit of its table and that of its head."""

    def unit(size: int, last: int) -> Unit:
        return _unit(size, replication, parameter, kept_bytes, last)

    ends, tied = EndUnits.of(shape, stage, 1), is_tied(shape, stage)
    matrix = shape.local_vocab_size * shape.model.hidden_size
    if shape.stack.units is Units.ROOT:
        roots = tuple(unit(size, matrix * (stage.has_head and not tied)) for size in ends.root)
    else:
        roots = tuple(unit(size, min(size, matrix)) for size in ends.root)
    return roots, unit(ends.table, matrix), unit(ends.head, matrix)


def _unit(
    size: int,
    replication: Replication,
    parameter: ParameterBytes,
    kept_bytes: int,
    last: int = 0,
) -> Unit:
    """Return the bytes of a unit of *size* parameters, the last weight of which has *last*."""
    (state, reduce_bytes), ranks = parameter, replication.span.num_ranks
    is_cast = reduce_bytes != state.sharded_parameter
    share = -(-size // ranks)
    return Unit(
        weights=size * state.gathered_parameter,
        wire=size * reduce_bytes,
        share=share * (reduce_bytes + is_cast * state.sharded_parameter),
        replicas=share * reduce_bytes * (is_cast and replication.replica_span is not None),
        kept=-(-size // replication.shards.gradients) * kept_bytes,
        last=last * state.gathered_parameter * (ranks > 1 and size > 0),
    )
