"""Matrix products with weights, what they cast, and changes of place around them."""

from typing import NamedTuple

from meshwright.simulator.graph.block import Block
from meshwright.simulator.graph.operators import (
    Gradient,
    Kind,
    Transfer,
    product_gradients,
    product_work,
)
from meshwright.simulator.graph.pointwise import copy, cut
from meshwright.simulator.graph.tensors import (
    Dim,
    Placement,
    Size,
    Tensor,
    changes,
    gradient_place,
    larger,
    product_place,
)
from meshwright.simulator.layout import Axis

COPIES_OF_OPERAND = 2  # an fp8 product for gradients wants each operand the other way round


class Linear(NamedTuple):
    """How a product with weights is written: its biases, and whether it may multiply in fp8."""

    bias: bool = False
    in_layer: bool = True


PLAIN = Linear()


def place(block: Block, x: Tensor, at: Placement) -> Tensor:
    """Move *x*; its gradient moves back.  Even where *x* lies there, its gradient may not."""
    at = block.placed(at)
    if not block.mesh:
        return x
    stays = at == dict(x.at) or (at == gradient_place(x.at) and block.lowering.fuses_places)
    out = x.like(f"{x.name} placed", at=at, base=x.storage if stays else None)
    size = larger(x.nbytes, out.nbytes)
    work = [Transfer(op, axis, size) for op, axis in changes(x.at, at)]
    gradient = Gradient(x, at=gradient_place(x.at))
    return block.add([x], [out], [gradient], *work, kind=Kind.PLACE)


def product(
    block: Block,
    name: str,
    operands: tuple[Tensor, Tensor],
    *dims: Dim,
    bias: bool = False,
    kind: Kind = Kind.PRODUCT,
) -> Tensor:
    """Return the einsum of two *operands* with *dims*: which of them are summed follows."""
    x, weight = operands
    out = x.like(name, dims=dims, at=product_place(x.at, weight.at, dims))
    gradients = product_gradients(x, weight, out)
    inputs = [x, weight]
    if bias:
        own = [dim for dim in dims if dim in weight.dims]
        split = {axis: dim for axis, dim in weight.at.items() if dim in own}
        vector = block.weight(f"{name}.bias", *own, at=split)
        if block.lowering.casts:
            vector = _cast(block, vector)
        gradients += (Gradient(vector, (), (block.traffic(out),)),)
        inputs.append(vector)
    return block.add(inputs, [out], gradients, product_work(x, weight, dims), kind=kind)


def operands(block: Block, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a product reads of both, cast where the stack casts: a weight once a pass."""
    if not block.lowering.casts:
        return x, weight
    narrow = _cast(block, weight)
    if x.width > block.width:
        x = copy(block, x, f"{x.name} cast", width=block.width)
    return x, narrow


def _cast(block: Block, weight: Tensor) -> Tensor:
    """Return the 16-bit copy of a weight."""
    narrow = copy(block, weight, f"{weight.name} cast", width=block.width)
    if block.lowering.caches_casts:
        block.cached.append(narrow)
    return narrow


def columns(
    block: Block, x: Tensor, *outs: Dim, linear: Linear = PLAIN, packed: bool = False
) -> list[Tensor]:
    """Return products of *x* whose outputs the tensor axis splits; a fused one may be *packed*."""
    lowering = block.lowering
    whole: Placement = {axis: dim for axis, dim in x.at.items() if axis is not Axis.TP}
    with block.one_node(fused=lowering.fuses_places):
        gathered = place(block, x, whole)
        if not lowering.fuses_places:
            block.argument(gathered)
        if not lowering.fuses_products or len(outs) == 1:
            return [_column(block, gathered, out, linear) for out in outs]
        fused = _column(block, gathered, _side_by_side(block, outs), linear)
    return [fused] if packed else cut(block, fused, *outs)


def _column(block: Block, x: Tensor, out: Dim, linear: Linear) -> Tensor:
    weight = block.weight(f"{out.name}.weight", out, x.dims[-1], at={Axis.TP: out})
    pair = operands(block, x, weight)
    return product(block, out.name, pair, *x.dims[:-1], out, bias=linear.bias)


def _side_by_side(block: Block, outs: tuple[Dim, ...]) -> Dim:
    """Return the dim of a fused product: on each rank what it has of all *outs*."""
    ranks = block.mesh.get(Axis.TP, 1)
    size: Size = 0
    grain: Size = 0
    for out in outs:
        size = size + (out.split(ranks) if Axis.TP in block.mesh else out.size) * ranks
        grain = grain + out.grain
    return Dim("+".join(out.name for out in outs), size, grain)


def row(
    block: Block, x: Tensor, out: Dim, name: str, at: Placement, linear: Linear = PLAIN
) -> Tensor:
    """Return the product of *x*, whose last dim the tensor axis splits, summed and placed."""
    bias = linear.bias and not block.lowering.fuses_residual  # else `residual` adds it
    with block.one_node(fused=block.lowering.fuses_places):
        inputs = x.dims[-1]
        weight = block.weight(f"{name}.weight", out, inputs, at={Axis.TP: inputs})
        pair = operands(block, x, weight)
        partial = product(block, name, pair, *x.dims[:-1], out, bias=bias)
        return place(block, partial, at)


def whole_product(block: Block, x: Tensor, out: Dim, name: str, *, bias: bool = False) -> Tensor:
    """Return a product with a weight that no axis splits."""
    weight = block.weight(f"{name}.weight", out, x.dims[-1])
    return product(block, name, operands(block, x, weight), *x.dims[:-1], out, bias=bias)
