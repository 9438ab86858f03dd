"""Matrix products with weights, what they cast, and changes of place around them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from meshwright.simulator.graph.block import Block
from meshwright.simulator.graph.operators import (
    FP8_BYTES,
    Gradient,
    Kind,
    Traffic,
    place_work,
    product_gradients,
    product_work,
)
from meshwright.simulator.graph.pointwise import copy, cut
from meshwright.simulator.graph.tensors import (
    PARTIAL,
    Dim,
    Placement,
    Size,
    Tensor,
    changes,
    gradient_place,
    product_place,
    replicated,
)
from meshwright.simulator.layout import Axis


class Linear(NamedTuple):
    """How a product with weights is written.

    Args:
        bias: It has one.
        in_layer: It is one of a layer's, or runs as they do: which may multiply in fp8.
        shared: Its weight is a parameter of another block.
        counts_bias: The traffic of its bias's gradient is not counted elsewhere.
        fuses: Products of one input are one, whatever the stack does.
        wide: Its operands are in fp32, and so is what it makes.
        buffered: Ranks gather its input into a buffer that other products share, and that stays.
    """

    bias: bool = False
    in_layer: bool = True
    shared: bool = False
    counts_bias: bool = True
    fuses: bool = False
    wide: bool = False
    buffered: bool = False


PLAIN = Linear()
OUTSIDE = Linear(in_layer=False)


def place(
    block: Block,
    x: Tensor,
    at: Placement,
    *,
    eight_bits: bool = False,
    buffered: bool = False,
) -> Tensor:
    """Move *x*; its gradient moves back.  Even where *x* lies there, its gradient may not.

    Args:
        block: Where it is written down.
        x: What moves.
        at: Where to.
        eight_bits: Whether it is gathered in fp8, and its gradient.
        buffered: Whether it moves into a buffer of the block's.
    """
    at = block.placed(at)
    if not block.mesh:
        return x
    stays = at == dict(x.at) or (at == gradient_place(x.at) and block.lowering.fuses_places)
    base = x.storage if stays else None
    if buffered and not stays:
        # A pass finds it there, as it does weights.
        base = replace(x.like("buffer of tokens", at=at), is_weight=True)
        block.buffers.append(base)
    out = x.like(f"{x.name} placed", at=at, base=base)
    width = block.width if eight_bits else None
    work = place_work(changes(x.at, at), x, out, cast_from=width, scaled=block.lowering.scaled)
    gradient = Gradient(x, at=gradient_place(x.at))
    return block.add([x], [out], [gradient], *work, kind=Kind.PLACE, eight_bits=eight_bits)


class Scratch(NamedTuple):
    """Copies of operands that live with a product, forward and backward."""

    forward: tuple[Tensor, ...] = ()
    backward: tuple[Tensor, ...] = ()


def product(
    block: Block,
    name: str,
    operands: tuple[Tensor, Tensor],
    *dims: Dim,
    linear: Linear = PLAIN,
    kind: Kind = Kind.PRODUCT,
    scratch: Scratch | None = None,
) -> Tensor:
    """Return the einsum of two *operands* with *dims*: which of them are summed follows.

    Args:
        block: Where it is written down.
        name: What it makes.
        operands: Activations and weight, or two activations.
        dims: Of what it makes.
        linear: Whether a vector is added.
        kind: What it is.
        scratch: Copies of its operands in fp8, if it multiplies so; beside attention's products,
            what their kernels make for a moment.
    """
    x, weight = operands
    width = x.width if linear.wide else block.width
    out = x.like(name, dims=dims, at=product_place(x.at, weight.at, dims), width=width)
    # C++ evaluates a call's arguments from the last one: autocast casts a bias first.
    biases = [_bias(block, weight, out, counted=linear.counts_bias)] if linear.bias else []
    if weight.is_weight:
        x, weight = cast_operands(block, x, weight)
    gradients = (*product_gradients(x, weight, out), *(each for _, each in biases))
    inputs = [x, weight, *(vector for vector, _ in biases)]
    work = product_work(x, weight, dims)
    in_fp8 = scratch is not None and weight.is_weight
    copies = scratch or Scratch()
    if biases and block.lowering.is_local:
        copies = copies._replace(forward=(*copies.forward, out.like(f"{name} without bias")))
    return block.add(inputs, [out], gradients, work, kind=kind, eight_bits=in_fp8, scratch=copies)


def _bias(block: Block, weight: Tensor, out: Tensor, *, counted: bool) -> tuple[Tensor, Gradient]:
    """Return the vector that is added to a product, and its gradient, a sum over tokens."""
    own = [dim for dim in out.dims if dim in weight.dims]
    split = {axis: dim for axis, dim in weight.at.items() if dim in own}
    vector = block.weight(f"{out.name}.bias", *own, at=split)
    if block.lowering.casts:
        vector = _cast(block, vector)
    kept = gradient_place(out.at)
    place = {axis: dim if dim in own else PARTIAL for axis, dim in kept.items()}
    return vector, Gradient(vector, (), (block.traffic(out),) if counted else (), at=place)


def cast_operands(block: Block, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a product reads of both, cast where the stack casts: a weight once a pass."""
    if not block.lowering.casts:
        return x, weight
    narrow = _cast(block, weight)
    return _narrowed(block, x), narrow


def _narrowed(block: Block, x: Tensor) -> Tensor:
    """Return *x* in the block's format; compiled, one copy is for all who read it."""
    if x.width <= block.width:
        return x
    if x not in block.casts:
        made = copy(block, x, f"{x.name} cast", width=block.width)
        if not block.lowering.is_compiled:
            return made
        block.casts[x] = made
    return block.casts[x]


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
    whole = replicated(x.at, Axis.TP)
    with (
        kept_copy(block, x, linear) as kept,
        block.one_price(),
        block.one_node(fused=lowering.fuses_places),
    ):
        in_fp8 = _gathers_in_fp8(block, linear)
        if lowering.places_apart:
            return [
                _column(block, place(block, kept, whole), out, linear, again=False) for out in outs
            ]
        gathered = place(block, kept, whole, eight_bits=in_fp8, buffered=linear.buffered)
        if not lowering.fuses_places:
            block.argument(gathered)
        again = in_fp8 and gathered.storage is not kept.storage and lowering.fuses_places
        fuses = linear.fuses or (lowering.fuses_gate if packed else lowering.fuses_products)
        if not fuses or len(outs) == 1:
            return [_column(block, gathered, out, linear, again=again) for out in outs]
        side = _side_by_side(block, outs)
        fused = _column(block, gathered, side, linear, again=again)
    return [fused] if packed else cut(block, fused, *outs)


def _column(block: Block, x: Tensor, out: Dim, linear: Linear, *, again: bool) -> Tensor:
    """Return one product; *again* says that its input is gathered again in backward, in fp8."""
    weight = block.weight(
        f"{out.name}.weight", out, x.dims[-1], at={Axis.TP: out}, shared=linear.shared
    )
    scratch = None
    bits = block.lowering.eight_bits
    if bits is not None and linear.in_layer:
        made = x.like(out.name, dims=(*x.dims[:-1], out), at=block.placed({Axis.TP: out}))
        ready = bits.keeps_copy and not again
        scratch = narrow_scratch(block, (x, weight), made, copies=2, again=0 if ready else x.width)
    return product(block, out.name, (x, weight), *x.dims[:-1], out, linear=linear, scratch=scratch)


def _side_by_side(block: Block, outs: tuple[Dim, ...]) -> Dim:
    """Return the dim of a fused product: on each rank what it has of all *outs*."""
    ranks = block.mesh.get(Axis.TP, 1)
    size: Size = 0
    grain: Size = 0
    for out in outs:
        size = size + (out.split(ranks) if Axis.TP in block.mesh else out.size) * ranks
        grain = grain + out.grain
    return Dim(", ".join(out.name for out in outs), size, grain)


def row(
    block: Block, x: Tensor, out: Dim, name: str, at: Placement, linear: Linear = PLAIN
) -> Tensor:
    """Return the product of *x*, whose last dim the tensor axis splits, summed and placed."""
    if block.lowering.fuses_residual:
        linear = linear._replace(bias=False)  # `residual` adds it
    # Megatron-Core's own row layers scatter what they sum in a node of its own.
    fused = block.lowering.fuses_places and not block.lowering.is_local
    with (
        kept_copy(block, x, linear) as kept,
        block.one_price(),
        block.one_node(fused=fused),
    ):
        inputs = kept.dims[-1]
        weight = block.weight(f"{name}.weight", out, inputs, at={Axis.TP: inputs})
        in_fp8 = _gathers_in_fp8(block, linear)
        scratch = None
        bits = block.lowering.eight_bits
        if bits is not None:
            made = kept.like(name, dims=(*kept.dims[:-1], out), at={})
            gathered = in_fp8 and bool(block.placed(at))
            again = 0 if bits.keeps_copy else 2
            scratch = narrow_scratch(
                block, (kept, weight), made, copies=1 if gathered else 2, again=again
            )
        partial = product(
            block, name, (kept, weight), *kept.dims[:-1], out, linear=linear, scratch=scratch
        )
        return place(block, partial, at, eight_bits=in_fp8)


def _gathers_in_fp8(block: Block, linear: Linear) -> bool:
    bits = block.lowering.eight_bits
    return bits is not None and bits.gathers and linear.in_layer


@contextmanager
def kept_copy(block: Block, x: Tensor, linear: Linear = PLAIN) -> Iterator[Tensor]:
    """Yield what a linear layer reads, and keeps, of its input: a narrow copy, if the stack does.

    Where the input is given up, and made again, that is kept, and backward makes a copy along
    columns of it where forward has made both (`save_original_input` of Transformer Engine 2.6 to
    2.9, pytorch/module/linear.py and grouped_linear.py): it reads 2 bytes more of an element.
    """
    bits = block.lowering.eight_bits
    if bits is None or not bits.keeps_copy or not linear.in_layer:
        yield x
        return
    narrow = x.like(f"{x.name} in fp8", width=FP8_BYTES, scaled=bits.scaled)
    if not bits.given_up.intersection(_parts_of(block, x)):
        yield block.add([x], [narrow], [Gradient(x, at=x.at, hands_on=True)])
        return
    with block.one_node(fused=True):
        again = Gradient(x, (), (Traffic(2 * x.numel),), at=x.at, hands_on=True)
        yield block.add([x], [narrow], [again], kind=Kind.NARROWED)


def _parts_of(block: Block, x: Tensor) -> Iterator[str]:
    """Yield the names of the parts that make *x*."""
    makers = (op for op in block.operators if x.storage in op.outputs)
    return (name.partition(":")[0] for op in makers for name in op.region)


def narrow_scratch(
    block: Block, operands: tuple[Tensor, Tensor], made: Tensor, *, copies: int, again: int
) -> Scratch:
    """Return the narrow copies that live with a product beside what is kept.

    A product for gradients wants each operand the other way round than one for outputs, so there
    are two of each (see `fp8_casts`).

    Args:
        block: Where it is written down.
        operands: Input and weight.
        made: What it makes.
        copies: Of what it makes, those of its gradient that are not there otherwise.
        again: Copies of its input that backward makes.
    """
    x, weight = operands
    bits = block.lowering.eight_bits
    assert bits is not None
    scaled = bits.scaled
    weights = [] if bits.keeps_weights else [_narrow(weight, 2, scaled)]
    again_made = [_narrow(x, again, scaled)] if again else []
    # Of an input that is kept as it is there is no other copy than the one along rows.
    is_alone = block.operators[-1].kind is Kind.NARROWED
    return Scratch(
        (*([] if is_alone else [_narrow(x, x.width, scaled)]), *weights),
        (_narrow(made, copies, scaled), *again_made, *weights),
    )


def _narrow(x: Tensor, copies: int, scaled: int) -> Tensor:
    return x.like(f"{x.name} in fp8", width=copies * FP8_BYTES, scaled=scaled)


def whole_product(block: Block, x: Tensor, out: Dim, name: str, linear: Linear = OUTSIDE) -> Tensor:
    """Return a product with a weight that no axis splits."""
    with kept_copy(block, x, linear) as kept:
        weight = block.weight(f"{name}.weight", out, kept.dims[-1])
        bits, scratch = block.lowering.eight_bits, None
        if bits is not None and linear.in_layer:
            made = kept.like(name, dims=(*kept.dims[:-1], out), width=block.width)
            again = 0 if bits.keeps_copy else kept.width
            scratch = narrow_scratch(block, (kept, weight), made, copies=2, again=again)
        return product(
            block, name, (kept, weight), *kept.dims[:-1], out, linear=linear, scratch=scratch
        )
