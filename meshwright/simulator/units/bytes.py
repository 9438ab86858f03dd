"""Bytes of what FSDP's units hold, and of what passes through blocks of one shape need.

Sizes are whole numbers, or columns of them over layouts that are alike in structure.
"""

from collections.abc import Iterable
from typing import NamedTuple

from meshwright.hwprofiles import LossKernel, StackProfile, Units
from meshwright.simulator.blocks import BlockShape, BlockTable, Ending
from meshwright.simulator.graph import NestedMemory, Size, several
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import kept_logits_bytes
from meshwright.simulator.model import EMBEDDING, HEAD, BlockKind, KeptLayer
from meshwright.simulator.replication import (
    EIGHT_BIT_BYTES,
    is_tied,
    keeps_last_layer,
)
from meshwright.simulator.units.layers import Alike, ByFamily, Kinds, alike, families
from meshwright.simulator.units.sharding import Sharding
from meshwright.simulator.units.weights import LayerWeights, StageWeights, UnitWeights

# Weights' gradients are added to sums at once, or stay, also where the one that arrives lies in a
# message's buffer.
ENDINGS = (Ending(), Ending(keeps_gradients=True), Ending(keeps_gradients=True, arriving_bytes=0))


class LayerBytes(NamedTuple):
    """What passes through a layer keep and need.

    Args:
        saved: Kept from forward to backward.
        work: Workspaces, forward and backward; its weights' gradients stay.
        sent: Of a backward whose gradient lies in a message's buffer.
        adding: Of a backward whose weights' gradients are added to sums at once.
        nested: What lives around its experts, where they are a unit of their own.
        nested_adding: The same where weights' gradients are added to sums at once.
    """

    saved: Size
    work: tuple[Size, Size]
    sent: Size
    adding: Size
    nested: NestedMemory
    nested_adding: NestedMemory


class PassBytes(NamedTuple):
    """What passes through blocks of one shape keep and need, whatever the units hold.

    Args:
        layers: Of a layer as a plan recomputes it, and last of one that is kept where others run
            again, if the plan has such; of each family of layers.
        saved_embedding: Kept by the embedding.
        saved_head: Kept by the head.
        freed_head: Of that, freed when the head's backward is done: not a stage's kept output.
        message: A gradient of a layer's output.
        head: Workspaces of the head.
        table: Workspace of the embedding's backward.
        products: What the head's product needs forward, and those of its backward, without what
            the loss keeps: it does not yet, or no more.
    """

    layers: ByFamily[tuple[LayerBytes, ...]]
    saved_embedding: Size
    saved_head: Size
    freed_head: Size
    message: Size
    head: tuple[Size, Size]
    table: Size
    products: tuple[Size, Size]

    @classmethod
    def of(cls, table: BlockTable, shape: BlockShape, *, keeps_layers: bool = False) -> "PassBytes":
        """Return the bytes of *shape*; *keeps_layers* says that not all layers run again."""
        kinds = families(shape)
        message = table.memory(shape, kinds[0]).sent
        head, embedding = table.memory(shape, HEAD), table.memory(shape, EMBEDDING)
        logits = kept_logits_bytes(shape)
        # PyTorch's own chain keeps logarithms of probabilities in fp32.
        kept_by_loss = 4 * (shape.stack.loss is LossKernel.EAGER)
        alone = shape.num_logits * (shape.element_bytes - kept_by_loss)
        inputs = message * (shape.tp if shape.sequence_parallel else 1)
        matrix = shape.local_vocab_size * shape.model.hidden_size
        return cls(
            layers=tuple(
                tuple(
                    _layer_bytes(table, shape, each)
                    for each in ((kind, KeptLayer(kind)) if keeps_layers else (kind,))
                )
                for kind in kinds
            ),
            saved_embedding=embedding.saved,
            saved_head=head.saved + logits,
            freed_head=head.saved,
            message=message,
            head=(head.forward - logits, head.backward),
            table=embedding.backward,
            products=(alone - logits, alone + inputs + matrix * shape.element_bytes),
        )

    def messages(self, stage: Stage) -> tuple[Size, Size]:
        """Return what *stage* sends in a microbatch, forward and backward."""
        return 0 if stage.has_head else self.message, 0 if stage.has_embedding else self.message


def _layer_bytes(table: BlockTable, shape: BlockShape, kind: BlockKind) -> LayerBytes:
    adding, kept, sent = (table.memory(shape, kind, each) for each in ENDINGS)
    work = kept.forward, kept.backward
    return LayerBytes(
        saved=adding.saved,
        work=work,
        sent=sent.backward,
        adding=adding.backward,
        nested=table.nested_memory(shape, kind, ENDINGS[1]),
        nested_adding=table.nested_memory(shape, kind, ENDINGS[0]),
    )


class Unit(NamedTuple):
    """Bytes of weights that are gathered, and whose gradients are reduced, together.

    Args:
        weights: Gathered, with what fills up shards.
        made: Their whole gradients as a backward pass makes them.
        wire: Gradients as they are reduced, filled up likewise.
        share: What comes out of their reduction, also in the format in which it is kept.
        replicas: A reduced share as the all-reduce over replicas had it, which stays until backward
            is over.
        kept: What this rank keeps of the gradients.
        last: Gradient of the last weight, which the loop that fills the reduction's buffer still
            has (`foreach_reduce` of PyTorch 2.13).
        divided: Where one rank alone divides gradients, a tensor of their size.
    """

    weights: Size = 0
    made: Size = 0
    wire: Size = 0
    share: Size = 0
    replicas: Size = 0
    kept: Size = 0
    last: Size = 0
    divided: Size = 0

    @classmethod
    def of(cls, unit: UnitWeights, sharding: Sharding) -> "Unit":
        """Return the bytes of a unit of parameters."""
        (size, last, padding, narrow), (state, reduce_bytes) = unit, sharding.parameter
        is_cast = reduce_bytes != state.sharded_parameter
        filled = size + padding
        share = -(-filled // sharding.num_ranks)
        if sharding.is_plain:
            return cls(kept=sharding.kept_bytes(size))
        return cls(
            weights=filled * state.gathered_parameter
            - narrow * (state.gathered_parameter - EIGHT_BIT_BYTES),
            made=size * state.gathered_parameter,
            wire=filled * reduce_bytes,
            share=share * (reduce_bytes + is_cast * state.sharded_parameter),
            replicas=share * reduce_bytes * several(sharding.num_replicas),
            kept=sharding.kept_bytes(size, padding),
            last=last * state.gathered_parameter * several(sharding.num_ranks),
            divided=size * reduce_bytes * (1 - several(sharding.num_ranks)),
        )

    def beside(self, other: "Unit") -> "Unit":
        """Return the bytes of both units."""
        return Unit(*(one + more for one, more in zip(self, other, strict=True)))

    def without(self, other: "Unit") -> "Unit":
        """Return the bytes of what is left without another, a part of it."""
        return Unit(*(one - less for one, less in zip(self, other, strict=True)))


def _end(units: tuple[UnitWeights, ...], sharding: Sharding) -> Unit:
    """Return the bytes of the only one of *units*, if there is one."""
    return Unit.of(units[0], sharding) if units else Unit()


class LayerUnit(NamedTuple):
    """Bytes of a layer's units.

    Args:
        whole: Of the layer, with its experts.
        experts: Of that, experts of which other ranks hold others: a unit within the layer's.
        dense_buffer: In which its weights but those of these experts are gathered.
        expert_buffer: In which theirs are.
        ahead: In which what is gathered ahead of it lies.
    """

    whole: Unit
    experts: Unit
    dense_buffer: Size
    expert_buffer: Size
    ahead: Size

    @classmethod
    def of(cls, weights: LayerWeights, sharding: Sharding, stack: StackProfile) -> "LayerUnit":
        """Return the bytes of a layer, all of which *stack* may gather ahead."""
        experts = Unit.of(weights.experts, sharding.of_experts)
        dense = Unit.of(weights.most, sharding)
        dense_buffer = dense.weights * several(sharding.num_ranks)
        expert_buffer = experts.weights * several(sharding.num_expert_ranks)
        ahead = dense_buffer + expert_buffer if stack.prefetches_units else dense_buffer
        return cls(dense.beside(experts), experts, dense_buffer, expert_buffer, ahead)

    @property
    def dense(self) -> Unit:
        """What is left without the experts that are a unit of their own."""
        return self.whole.without(self.experts)

    @property
    def weights(self) -> Size:
        """Gathered weights of all of it."""
        return self.whole.weights

    @property
    def buffer(self) -> Size:
        """In which all of it is gathered."""
        return self.dense_buffer + self.expert_buffer


def _kept_experts(layers: ByFamily[LayerUnit], groups: Iterable[Alike]) -> Size:
    """Return what is kept of the gradients of experts of *groups* of layers."""
    return sum(each.num_layers * layers[each.family].experts.kept for each in groups)


class UnitBytes(NamedTuple):
    """Bytes of a stage's units.

    Args:
        kinds: A kind of layers of each family.
        layers: Of a layer.
        roots: Gathered before all, one after the other, and reduced last.
        table: Gathered for the embedding and again for its backward, reduced after the roots.
        head: Gathered for the head, and reduced after its backward.
        last: Roots and table, as far as they are there: reduced when all layers are.
        prefetches: Whether a layer that begins has all of the next gathered, not its unit alone.
        nests: Whether experts of which other ranks hold others are a unit within the layer's.
        has_head: Whether the head is a unit.
        keeps_last: Whether the last layer stays until its backward.
        gathers: 1 where weights are gathered in buffers before they are copied out, else 0. Alone,
            a rank copies its shard into the weight (PyTorch's FSDPParamGroup, `wait_for_unshard`).
        cuts_experts: 1 where each of them is cut along its widths, as they are fewer than the ranks
            that share them, else 0.
        casts_shares: Whether reduced shares are kept in another format; else the first of a step
            are kept as they are.
        is_copied: Whether gradients are summed in another format than a backward pass makes.
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
        shares: A rank's parts of all gradients.
        shard: What is kept of all gradients once they are reduced.
    """

    kinds: Kinds
    layers: ByFamily[LayerUnit]
    roots: tuple[Unit, ...]
    table: Unit
    head: Unit
    last: tuple[Unit, ...]
    prefetches: bool
    nests: bool
    has_head: bool
    keeps_last: bool
    gathers: Size
    cuts_experts: Size
    casts_shares: bool
    is_copied: bool
    end_gradient: Size
    positions: Size
    head_gradient: Size
    cut_table: Size
    gradients: Size
    surplus: Size
    shares: Size
    shard: Size

    @classmethod
    def of(
        cls, shape: BlockShape, stage: Stage, weights: StageWeights, sharding: Sharding
    ) -> "UnitBytes":
        """Return the bytes of *stage*, of blocks like those of *shape*, from its *weights*."""
        (state, reduce_bytes), has_head = sharding.parameter, bool(weights.head)
        roots = tuple(Unit.of(each, sharding) for each in weights.roots)
        table, head = (_end(units, sharding) for units in (weights.table, weights.head))
        makes_whole = stage.has_embedding and shape.stack.whole_table_gradient
        stays_whole = sharding.keeps_whole_gradients and makes_whole and not is_tied(shape, stage)
        others = (weights.tp - 1) * weights.matrix * stays_whole  # rows of the other tensor ranks
        one_table: Size = weights.matrix * shape.element_bytes
        # Positions follow the table: their first copy in the other format is made later.
        positions: Size = weights.positions * stage.has_embedding * state.gathered_parameter
        copied: Size = one_table * (stage.has_embedding or (stage.has_head and not has_head))
        copied = copied + others * shape.element_bytes
        copied = copied - positions * (shape.stack.units is Units.ROOT)
        is_copied = reduce_bytes != state.gathered_parameter
        layers = tuple(LayerUnit.of(each, sharding, shape.stack) for each in weights.layers)
        kinds = families(shape)
        kept = sharding.kept_bytes(weights.total, weights.padding.most)
        return cls(
            kinds=kinds,
            layers=layers,
            roots=roots,
            table=table,
            head=head,
            last=(*roots, table) if weights.table else roots,
            prefetches=shape.stack.prefetches_units,
            nests=shape.stack.nests_experts,
            has_head=has_head,
            keeps_last=keeps_last_layer(shape, stage),
            gathers=several(sharding.num_ranks),
            cuts_experts=weights.cuts_experts,
            casts_shares=reduce_bytes != state.sharded_parameter,
            is_copied=is_copied,
            end_gradient=is_copied * copied,
            positions=positions,
            head_gradient=one_table * (stage.has_head and not has_head),
            cut_table=one_table * (weights.tp + 1) * several(weights.tp) * makes_whole,
            gradients=kept + _kept_experts(layers, alike(stage, kinds)),
            surplus=others * reduce_bytes,  # it stays whole
            shares=sharding.shares(*weights.filled),
            shard=sharding.shard_bytes(*weights.filled),
        )

    @property
    def root(self) -> Size:
        """Gathered weights of the roots."""
        return sum(unit.weights for unit in self.roots)
