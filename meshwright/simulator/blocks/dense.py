"""The dense transformer layer, written once."""

from typing import NamedTuple

from meshwright.hwprofiles import Attention
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.graph import (
    Block,
    Dim,
    Heads,
    Linear,
    Placement,
    Reads,
    Size,
    Tensor,
    columns,
    copy,
    counted,
    flash,
    norm,
    pointwise,
    residual,
    rounded_up,
    row,
    scored,
    share,
)
from meshwright.simulator.layout import Axis

# Widths of the queries that unfused attention moves in transposing and adding biases.
LAYOUT_WIDTHS = (8, 14)


class Columns(NamedTuple):
    """Tensor-parallel ranks and microbatch sizes of many shapes that are alike but for these."""

    tp: Size
    microbatch_size: Size


class LayerDims(NamedTuple):
    """Dims of a model's layers and ends, and of what runs through them.

    ``outside`` is where activations lie outside of tensor-parallel regions, ``scored`` is of the
    tokens on a rank that reach the output matrix.
    """

    tokens: Dim
    batch: Dim
    hidden: Dim
    heads: Dim
    queries: Dim
    keys: Dim
    values: Dim
    gate: Dim
    ffn: Dim
    inner: Dim
    vocabulary: Dim
    scored: Dim
    outside: Placement

    @classmethod
    def of(cls, shape: BlockShape, columns: Columns) -> "LayerDims":
        """Return the dims of *shape* with the sizes of *columns* in the place of its own."""
        model = shape.model
        tokens, width = Dim("tokens", shape.seq_len), model.head_dim
        own = columns.microbatch_size * shape.seq_len
        own = own // columns.tp if shape.sequence_parallel else own
        return cls(
            tokens=tokens,
            batch=Dim("batch", columns.microbatch_size),
            hidden=Dim("hidden", model.hidden_size),
            heads=Dim("heads", model.num_heads),
            queries=Dim("queries", model.hidden_size, width),
            keys=Dim("keys", model.kv_hidden_size, width),
            values=Dim("values", model.kv_hidden_size, width),
            gate=Dim("mlp gate", model.ffn_hidden_size),
            ffn=Dim("mlp in", model.ffn_hidden_size),
            inner=Dim("mlp inner", model.ffn_hidden_size),
            vocabulary=Dim(
                "vocabulary",
                rounded_up(model.vocab_size, shape.stack.vocabulary_multiple * columns.tp),
            ),
            scored=Dim("scored tokens", share(own, model.scored_fraction)),
            outside={Axis.TP: tokens} if shape.sequence_parallel else {},
        )

    def stream(self, block: Block, shape: BlockShape) -> Tensor:
        """Return what enters a layer: the residual stream."""
        width = shape.residual_bytes
        dims = (self.tokens, self.batch, self.hidden)
        return block.tensor("layer input", *dims, at=self.outside, width=width)


def layer(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the tokens after a layer."""
    model = shape.model
    centers = model.norm == "layernorm"
    with block.part("layer"):
        y = _attention(block, norm(block, x, "attention norm", centers=centers), shape, dims)
        x = residual(block, y, x, bias=model.output_bias, drops=model.dropout)
        y = _mlp(block, norm(block, x, "mlp norm", centers=centers), shape, dims)
        out = residual(block, y, x, bias=model.mlp_bias, drops=model.dropout)
        block.hold(x)
        return out


def _attention(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return self-attention of normalised tokens."""
    model = shape.model
    with block.module(x):
        is_unfused = shape.attention is Attention.UNFUSED
        bias = Linear(bias=model.attention_bias, counts_bias=not is_unfused)
        query, key, value = columns(block, x, dims.queries, dims.keys, dims.values, linear=bias)
        if block.lowering.fuses_products and model.num_kv_heads < model.num_heads:
            query = copy(block, query, "queries apart")  # a view of them is not one stretch
        if model.positions == "rotary":
            given = query, key
            query, key = (
                pointwise(block, f"rotated {x.name}", x, reads=Reads.NOTHING) for x in given
            )
            block.hold(*given)
        heads = Heads(dims.heads, dims.tokens, causal=model.causal, drops=model.dropout)
        attend = scored if is_unfused else flash
        with block.part("core"):
            context = attend(block, query, key, value, heads)
        if is_unfused:
            context = counted(block, context, *LAYOUT_WIDTHS)
        block.hold(query, key, value)
        bias = Linear(bias=model.output_bias)
        y = row(block, context, dims.hidden, "attention output", dims.outside, bias)
        block.hold(context)
        return y


def _mlp(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the MLP of normalised tokens."""
    model, bias = shape.model, Linear(bias=shape.model.mlp_bias)
    with block.module(x):
        widths = (dims.gate, dims.ffn) if model.gated_mlp else (dims.ffn,)
        inner = columns(block, x, *widths, linear=bias, packed=True)
        hidden = pointwise(block, "activation", *inner, last=dims.inner)
        y = row(block, hidden, dims.hidden, "mlp out", dims.outside, bias)
        block.hold(hidden)
        return y
