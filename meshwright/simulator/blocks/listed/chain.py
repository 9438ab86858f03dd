"""Blocks of a chain of linear layers."""

from meshwright.simulator.graph import (
    OUTSIDE,
    Block,
    Dim,
    Linear,
    Placement,
    Reads,
    Size,
    Tensor,
    columns,
    pointwise,
    row,
    view,
    whole_product,
)
from meshwright.simulator.layout import Axis
from meshwright.simulator.model import ChainModel, LinearLayer


def end(block: Block, model: ChainModel, num_rows: Size, *, is_first: bool) -> Tensor:
    """Add the empty first or last block of a chain; return its input."""
    width = model.layers[0].inputs if is_first else model.layers[-1].outputs
    x = block.tensor("rows", Dim("rows", num_rows), Dim("width", width))
    view(block, x, *x.dims)
    return x


def linear_layer(block: Block, kind: LinearLayer, num_rows: Size) -> Tensor:
    """Add a linear layer of *kind* for *num_rows*; return its input."""
    inputs, outputs = Dim("inputs", kind.inputs), Dim("outputs", kind.outputs)
    at: Placement = {Axis.TP: inputs} if kind.split == "rows" else {}
    x = block.tensor("rows", Dim("rows", num_rows), inputs, at=at)
    with block.part("layer"), block.module(x):
        y = _linear(block, x, outputs, kind)
        if kind.activation:
            pointwise(block, "activation", y, reads=Reads.OUTPUT)
    return x


def _linear(block: Block, x: Tensor, outputs: Dim, kind: LinearLayer) -> Tensor:
    """Return the linear layer of *x*: column-parallel, row-parallel or replicated."""
    match kind.split:
        case "columns":
            (y,) = columns(block, x, outputs, linear=Linear(bias=kind.bias))
            return y
        case "rows":
            return row(block, x, outputs, "outputs", {}, Linear(bias=kind.bias))
        case "none":
            return whole_product(block, x, outputs, "outputs", OUTSIDE._replace(bias=kind.bias))
