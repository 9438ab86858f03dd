"""Two products with an activation between them: an MLP, or what every token passes of experts."""

from typing import NamedTuple

from meshwright.simulator.graph import (
    Activation,
    Block,
    Dim,
    Linear,
    Placement,
    Tensor,
    activation,
    biased,
    columns,
    row,
)


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
