"""Dims of a model's layers, embedding and head, from the shape of its blocks."""

from fractions import Fraction
from typing import NamedTuple

from meshwright.simulator.blocks.parts import ExpertMesh, hottest_share
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.graph import Block, Dim, Placement, Size, Tensor, rounded_up, share
from meshwright.simulator.layout import Axis, ExpertAxis


class Columns(NamedTuple):
    """Columns of sizes in which shapes of one structure may differ; see `BlockShape`."""

    tp: Size
    cp: Size
    microbatch_size: Size
    ep: Size
    expert_tp: Size
    accumulated_bytes: Size

    @classmethod
    def of(cls, shape: BlockShape) -> "Columns":
        """Return the sizes of one shape, as numbers."""
        return cls(*(getattr(shape, name) for name in cls._fields))


def expert_mesh(shape: BlockShape, ranks: Size) -> ExpertMesh:
    """Return the expert-parallel layout of a layer over *ranks*."""
    experts = shape.model.experts
    split_on = Axis.TP if shape.splits_experts_alike else ExpertAxis.ETP
    has_one = experts is not None and experts.num_experts == shape.ep
    factor = shape.stack.expert_capacity
    capacity = None if factor is None else Fraction(factor).limit_denominator(1000)
    if shape.ep == 1:
        return ExpertMesh(split_on, split_on, has_one=has_one, capacity=capacity)
    expert_group = ExpertAxis.EP if shape.expert_tp == 1 else ExpertAxis.ALL
    assert experts is not None
    # DeepEP and HybridEP take routing weights in fp32 alone, so experts are weighted in fp32
    # (_DeepepManager and _HybridEPManager of megatron/core/transformer/moe/token_dispatcher.py,
    # core 0.16).
    return ExpertMesh(
        split_on,
        expert_group,
        ranks,
        is_divided=True,
        has_one=has_one,
        hottest=hottest_share(experts, shape.ep, 1.0 if capacity else shape.imbalance),
        widens_shares=shape.dispatcher.sends_once,
        capacity=capacity,
    )


class LayerDims(NamedTuple):
    """Dims of a model's layers, embedding and head.

    ``tokens`` are those of one of ``cp`` context-parallel ranks: all but attention uses them.
    ``outside`` is the placement of activations outside of tensor-parallel regions (split over
    tokens with sequence parallelism), ``scored`` the tokens on a rank that reach the LM head.
    """

    tokens: Dim
    batch: Dim
    hidden: Dim
    heads: Dim
    groups: Dim
    head: Dim
    queries: Dim
    keys: Dim
    values: Dim
    gate: Dim
    ffn: Dim
    inner: Dim
    vocabulary: Dim
    scored: Dim
    outside: Placement
    cp: Size
    experts: ExpertMesh

    @classmethod
    def of(cls, shape: BlockShape, columns: Columns) -> "LayerDims":
        """Return the dims of *shape*, with the sizes of *columns*."""
        model = shape.model
        tokens, width = Dim("tokens", shape.seq_len // columns.cp), model.head_dim
        local_tokens = columns.microbatch_size * tokens.size
        local_tokens = local_tokens // columns.tp if shape.sequence_parallel else local_tokens
        # The vocabulary is padded to a multiple on each rank that splits it.
        ranks = 1 if shape.whole_ends else columns.tp
        return cls(
            tokens=tokens,
            batch=Dim("batch", columns.microbatch_size),
            hidden=Dim("hidden", model.hidden_size),
            heads=Dim("heads", model.num_heads),
            groups=Dim("key heads", model.num_kv_heads, 1),
            head=Dim("head", width),
            queries=Dim("queries", model.query_hidden_size, width),
            keys=Dim("keys", model.kv_hidden_size, width),
            values=Dim("values", model.kv_hidden_size, width),
            gate=Dim("mlp gate", model.ffn_hidden_size),
            ffn=Dim("mlp in", model.ffn_hidden_size),
            inner=Dim("mlp inner", model.ffn_hidden_size),
            vocabulary=Dim(
                "vocabulary",
                rounded_up(model.vocab_size, shape.stack.vocabulary_multiple * ranks),
            ),
            scored=Dim("scored tokens", share(local_tokens, model.scored_fraction)),
            outside={Axis.TP: tokens} if shape.sequence_parallel else {},
            cp=columns.cp,
            experts=expert_mesh(shape, columns.ep),
        )

    def stream(self, block: Block, shape: BlockShape) -> Tensor:
        """Return the residual stream: the input of a layer."""
        width = shape.residual_bytes
        dims = (self.tokens, self.batch, self.hidden)
        return block.tensor("layer input", *dims, at=self.outside, width=width)
