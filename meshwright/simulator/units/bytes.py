"""Bytes of FSDP units, and of passes through blocks of one shape.

Sizes are whole numbers, or columns of them over layouts that are alike in structure.
"""

from collections.abc import Iterable
from typing import NamedTuple

from meshwright.hwprofiles import LossKernel, StackProfile, Units
from meshwright.simulator.blocks import BlockShape, BlockTable, BorderGradients
from meshwright.simulator.graph import NestedMemory, Size, several
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import kept_logits_bytes
from meshwright.simulator.model import EMBEDDING, HEAD, BlockKind, KeptLayer
from meshwright.simulator.replication import (
    EIGHT_BIT_BYTES,
    is_tied,
    keeps_last_layer,
)
from meshwright.simulator.units.layers import AlikeLayers, ByFamily, Kinds, alike, families
from meshwright.simulator.units.sharding import Sharding
from meshwright.simulator.units.weights import LayerWeights, StageWeights, UnitWeights

# Weight gradients are accumulated at once, or stay, also where the arriving gradient is in a p2p
# buffer.
ENDINGS = (
    BorderGradients(),
    BorderGradients(keeps_gradients=True),
    BorderGradients(keeps_gradients=True, output_gradient_bytes=0),
)


class LayerBytes(NamedTuple):
    """Bytes that passes through a layer save and need.

    Args:
        saved: Activations saved from forward to backward.
        work: Workspaces of forward and backward; weight gradients stay.
        sent: Workspace of a backward pass whose output gradient is in a p2p buffer.
        adding: Workspace of a backward pass that accumulates weight gradients at once.
        nested: Live bytes around its experts, where they are a unit of their own.
        nested_adding: The same where weight gradients are accumulated at once.
    """

    saved: Size
    work: tuple[Size, Size]
    sent: Size
    adding: Size
    nested: NestedMemory
    nested_adding: NestedMemory


class PassBytes(NamedTuple):
    """Bytes that passes through blocks of one shape save and need, whatever their units.

    Args:
        layers: Of a layer as a plan recomputes it, and last of one that is kept where others run
            again, if the plan has such; of each family of layers.
        saved_embedding: Saved by the embedding.
        saved_head: Saved by the head.
        freed_head: Bytes of that freed after the head's backward: all but a stage's kept output.
        message: Gradient of a layer's output.
        head: Workspaces of the head.
        table: Workspace of the embedding's backward.
        products: Workspace of the head's forward GEMM, and of its backward GEMMs, without tensors
            saved by the loss: these do not exist yet, or no more.
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
        """Return the bytes of *shape*; *keeps_layers* says that not all layers are recomputed."""
        kinds = families(shape)
        message = table.memory(shape, kinds[0]).sent
        head, embedding = table.memory(shape, HEAD), table.memory(shape, EMBEDDING)
        logits = kept_logits_bytes(shape)
        # PyTorch's own chain keeps logarithms of probabilities in fp32.
        kept_by_loss = 4 * (shape.stack.loss is LossKernel.EAGER)
        alone = shape.num_logits * (shape.element_bytes - kept_by_loss)
        # The head's input is all-gathered from sequence-parallel shards.
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
        """Return the bytes that *stage* sends in a microbatch, forward and backward."""
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
    """Bytes of an FSDP unit: weights that are gathered, and gradients reduced, together.

    Args:
        weights: Gathered weights, with the padding of shards.
        made: Their whole gradients as a backward pass makes them.
        wire: Gradients in the format of the reduce-scatter, padded likewise.
        share: Output of the reduce-scatter, with its cast to the kept format.
        replicas: Reduced shard in the format of the HSDP all-reduce, alive until backward is over.
        kept: Gradients that this rank keeps.
        last: Gradient of the last weight, which the loop that fills the reduction's buffer still
            has (`foreach_reduce` of PyTorch 2.13).
        divided: Tensor of the gradients' size where one rank alone divides them.
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
        """Return the bytes of a unit of weights."""
        (size, last, padding, narrow), (state, reduce_bytes) = unit, sharding.parameter
        is_cast = reduce_bytes != state.sharded_parameter
        filled = size + padding
        share = -(-filled // sharding.num_ranks)
        # Without fully_shard nothing is gathered or reduced: gradients alone count.
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
            # Over several ranks the reduce-scatter averages.
            divided=size * reduce_bytes * (1 - several(sharding.num_ranks)),
        )

    def beside(self, other: "Unit") -> "Unit":
        """Return the sum of both units' bytes."""
        return Unit(*(one + more for one, more in zip(self, other, strict=True)))

    def without(self, other: "Unit") -> "Unit":
        """Return the bytes without another unit, a part of this one."""
        return Unit(*(one - less for one, less in zip(self, other, strict=True)))


def _end(units: tuple[UnitWeights, ...], sharding: Sharding) -> Unit:
    """Return the bytes of the only one of *units*, zeros if there is none."""
    return Unit.of(units[0], sharding) if units else Unit()


class LayerUnit(NamedTuple):
    """Bytes of a layer's FSDP units.

    Args:
        whole: Unit of the layer, with its experts.
        experts: Experts with a shard group of their own: a unit within the layer's.
        dense_buffer: All-gather buffer of its other weights.
        expert_buffer: All-gather buffer of these experts.
        ahead: All-gather buffers of it when it is prefetched.
    """

    whole: Unit
    experts: Unit
    dense_buffer: Size
    expert_buffer: Size
    ahead: Size

    @classmethod
    def of(cls, weights: LayerWeights, sharding: Sharding, stack: StackProfile) -> "LayerUnit":
        """Return the bytes of a layer; *stack* decides if its experts are prefetched, too."""
        experts = Unit.of(weights.experts, sharding.of_experts)
        dense = Unit.of(weights.most, sharding)
        dense_buffer = dense.weights * several(sharding.num_ranks)
        expert_buffer = experts.weights * several(sharding.num_expert_ranks)
        # Without explicit prefetch a layer's own unit is gathered ahead, its experts are not.
        ahead = dense_buffer + expert_buffer if stack.prefetches_units else dense_buffer
        return cls(dense.beside(experts), experts, dense_buffer, expert_buffer, ahead)

    @property
    def dense(self) -> Unit:
        """Unit without the experts that are a unit of their own."""
        return self.whole.without(self.experts)

    @property
    def weights(self) -> Size:
        """Gathered weights of the layer, with its experts."""
        return self.whole.weights

    @property
    def buffer(self) -> Size:
        """All-gather buffers of the layer, with its experts."""
        return self.dense_buffer + self.expert_buffer


def _kept_experts(layers: ByFamily[LayerUnit], groups: Iterable[AlikeLayers]) -> Size:
    """Return the kept gradients of experts of *groups* of layers."""
    return sum(each.num_layers * layers[each.family].experts.kept for each in groups)


class UnitBytes(NamedTuple):
    """Bytes of a stage's FSDP units.

    Args:
        kinds: A kind of layers of each family.
        layers: Units of a layer of each family.
        roots: Units gathered before all others, one after the other, and reduced last.
        table: Unit gathered for the embedding and again for its backward, reduced after the roots.
        head: Unit gathered for the head, and reduced after its backward.
        last: Roots and table, if they exist: reduced after all layers.
        prefetches: Whether a layer that begins prefetches all of the next, not one unit alone.
        nests: Whether experts with a shard group of their own are a unit within the layer's.
        has_head: Whether the head is a unit.
        keeps_last: Whether the last layer stays until its backward.
        gathers: 1 where weights are gathered in buffers before they are copied out, else 0. One
            rank copies its shard into the weight (FSDPParamGroup's `wait_for_unshard`).
        cuts_experts: 1 where each of them is cut along its widths, as they are fewer than the ranks
            that share them, else 0.
        casts_shares: Whether reduced shards are kept in another format; else the first of a step
            are kept as they are.
        is_copied: Whether gradients are accumulated in another format than backward makes.
        end_gradient: Gradients of a pipeline's embedding as a backward pass makes them, beside the
            first copy of the largest in the format in which they are summed.
        positions: Whole gradient of the position embedding, made before the word embedding's.
        head_gradient: Whole gradient of the head's weights, where it waits for the roots' others.
        cut_table: An embedding's gradient that every tensor rank makes whole, and its own rows,
            which DTensor copies out of it.
        gradients: Kept bytes of all gradients, which count as static. Those offloaded when they are
            reduced are not kept.
        surplus: Bytes of an embedding's whole gradient beyond a tensor rank's part, where it stays
            whole: between microbatches that do not reduce.
        shares: A rank's shards of all gradients, in elements.
        shard: Kept bytes of all gradients once they are reduced.
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
            surplus=others * reduce_bytes,  # it stays unsharded
            shares=sharding.shares(*weights.filled),
            shard=sharding.shard_bytes(*weights.filled),
        )

    @property
    def root(self) -> Size:
        """Gathered weights of the roots."""
        return sum(unit.weights for unit in self.roots)
