"""Two products with an activation between them: an MLP, or shared experts and their gate."""

from collections.abc import Callable
from typing import NamedTuple

from meshwright.simulator.graph import (
    Activation,
    Block,
    Dim,
    Gradient,
    Linear,
    Placement,
    Reads,
    Tensor,
    activation,
    biased,
    columns,
    pointwise,
    product,
    row,
)

Write = Callable[[Block, Tensor], Tensor]


class Widths(NamedTuple):
    """Outputs of the first products, inputs of the last and its output; what is between them."""

    parts: tuple[Dim, ...]
    inner: Dim
    hidden: Dim
    activation: Activation = Activation.USUAL


def feed_forward(
    block: Block,
    x: Tensor,
    widths: Widths,
    outside: Placement,
    bias: Linear,
    name: str = "mlp out",
) -> Tensor:
    """Return the MLP of some *widths*, whose output lies *outside* of tensor-parallel regions."""
    with block.module(x):
        apart = block.lowering.is_local  # a kernel of its own adds the bias
        linear = Linear() if apart else bias
        inner = columns(block, x, *widths.parts, linear=linear, packed=True)
        if apart and bias.bias:
            inner = [biased(block, each, "mlp in") for each in inner]
        hidden = activation(
            block, *inner, parts=widths.parts, last=widths.inner, kind=widths.activation
        )
        y = row(block, hidden, widths.hidden, name, outside, bias)
        block.hold(hidden)
        return y


class Shared(NamedTuple):
    """Shared experts of a layer.

    Args:
        write: Writes what they make of tokens.
        has_gate: A product with one output, a sigmoid, weighs it (Qwen2-MoE).
    """

    write: Write
    has_gate: bool = False


def gated(block: Block, x: Tensor, out: Tensor) -> Tensor:
    """Return *out*, what shared experts made of tokens *x*, times the sigmoid of a product of *x*.

    Every rank has the gate's weight whole and multiplies its own tokens, in full width whatever the
    layer's other products do (`SharedExpertMLP` of megatron/core/transformer/moe/shared_experts.py,
    core 0.16; `Qwen2MoeSparseMoeBlock` of transformers 5.23).  The gradient of the gate is as large
    as *out* until it is summed over a token's width.
    """
    one = Dim("gate of shared experts", 1)
    weight = block.weight("shared_gate.weight", one, x.dims[-1])
    logit = product(block, "shared gate", (x, weight), *x.dims[:-1], one)
    share = pointwise(block, "share of shared experts", logit, reads=Reads.OUTPUT)
    if block.lowering.fuses_places:  # it has a name there
        block.argument(logit)
    made, twice = out.like("weighed shared out"), out.like("gradient of a gate")
    traffic, read = block.traffic(out, made), (share, out)
    gradients = [
        Gradient(out, read, (traffic, traffic)),
        Gradient(share, read, at=share.at),
    ]
    return block.add([out, share], [made], gradients, traffic, scratch=((), (twice,)))
