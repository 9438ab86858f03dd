"""The dense transformer layer, written once."""

from typing import NamedTuple

from meshwright.hwprofiles import Attention
from meshwright.simulator.blocks.parts import latent_attention, routed
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.graph import (
    Block,
    Dim,
    Heads,
    Linear,
    Placement,
    Size,
    Tensor,
    activation,
    biased,
    cast,
    columns,
    copy,
    counted,
    flash,
    norm,
    residual,
    rotary,
    rounded_up,
    row,
    scored,
    share,
)
from meshwright.simulator.layout import Axis
from meshwright.simulator.model import ModelSpec

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


def layer(
    block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, *, has_experts: bool = False
) -> Tensor:
    """Return the tokens after a layer, with routed experts or an MLP."""
    model, last = shape.model, _experts if has_experts else _mlp
    first = _attention if model.latent is None else _latent
    entered, centers = x, model.norm == "layernorm"
    with block.part("layer"):
        y = first(block, norm(block, x, "attention norm", centers=centers), shape, dims)
        x = residual(block, y, x, bias=model.output_bias, drops=model.dropout)
        y = last(block, norm(block, x, "mlp norm", centers=centers), shape, dims)
        out = residual(block, y, x, bias=model.mlp_bias, drops=model.dropout)
        block.hold(entered, x)
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
            query, key = rotary(block, *given)
            if block.lowering.is_eager:  # they have names until it returns
                block.argument(*(given if block.lowering.is_local else ()), query, key)
            key, query = (cast(block, x, f"{x.name} cast", block.width) for x in (key, query))
        given = key, value
        if block.lowering.copies_operands and _leaves_gaps(model):
            key, value = (copy(block, each, f"{each.name} apart") for each in given)
        heads = Heads(dims.heads, dims.tokens, causal=model.causal, drops=model.dropout)
        attend = scored if is_unfused else flash
        with block.part("core"):
            context = attend(block, query, key, value, heads)
        if is_unfused:
            context = counted(block, context, *LAYOUT_WIDTHS)
        block.hold(query, key, value, *given)
        bias = Linear(bias=model.output_bias)
        y = row(block, context, dims.hidden, "attention output", dims.outside, bias)
        block.hold(context)
        return y


def _latent(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return latent attention of normalised tokens."""
    model = shape.model
    assert model.latent is not None
    heads = Heads(dims.heads, dims.tokens, causal=model.causal, drops=model.dropout)
    attend = scored if shape.attention is Attention.UNFUSED else flash

    def core(block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(block, query, key, value, heads)

    return latent_attention(block, x, model.latent, model.num_heads, dims.outside, core)


def _leaves_gaps(model: ModelSpec) -> bool:
    """Return whether keys and values are parts of a product that lie as no kernel knows.

    Transformer Engine copies such (get_qkv_layout of its dot_product_attention/utils.py, 0.12 to
    2.x).  Of rotated ones it would copy the values, but runs of real size hold as much as with the
    whole product (docs/accuracy.md).
    """
    return model.num_kv_heads < model.num_heads and model.positions != "rotary"


def _mlp(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the MLP of normalised tokens."""
    model, bias = shape.model, Linear(bias=shape.model.mlp_bias)
    widths = (dims.gate, dims.ffn) if model.gated_mlp else (dims.ffn,)
    return _feed_forward(block, x, dims, Widths(widths, dims.inner), bias)


def _experts(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return what routed and shared experts make of normalised tokens."""
    experts = shape.model.experts
    assert experts is not None
    width = experts.shared_hidden_size
    parts = Dim("shared gate", width), Dim("shared up", width)

    def shared(block: Block, x: Tensor) -> Tensor:
        widths = Widths(parts, Dim("shared inner", width))
        return _feed_forward(block, x, dims, widths, Linear(), name="shared out")

    return routed(block, x, experts, dims.outside, shared if width else None)


class Widths(NamedTuple):
    """Outputs of an MLP's first products, and inputs of its last."""

    parts: tuple[Dim, ...]
    inner: Dim


def _feed_forward(
    block: Block,
    x: Tensor,
    dims: LayerDims,
    widths: Widths,
    bias: Linear,
    name: str = "mlp out",
) -> Tensor:
    """Return the MLP of some *widths*."""
    with block.module(x):
        apart = block.lowering.is_local  # a kernel of its own adds the bias
        linear = Linear() if apart else bias
        inner = columns(block, x, *widths.parts, linear=linear, packed=True)
        if apart and bias.bias:
            inner = [biased(block, each, "mlp in") for each in inner]
        hidden = activation(block, *inner, parts=widths.parts, last=widths.inner)
        y = row(block, hidden, dims.hidden, name, dims.outside, bias)
        block.hold(hidden)
        return y
