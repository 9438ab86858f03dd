"""Linear layers: GEMMs, casts of their operands, and tensor-parallel redistribution."""

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
    product_gradients,
    product_work,
    redistribute_work,
)
from meshwright.simulator.graph.pointwise import copy, cut
from meshwright.simulator.graph.tensors import (
    PARTIAL,
    Dim,
    Placement,
    Size,
    Tensor,
    gradient_placement,
    product_placement,
    redistribute_collectives,
    replicated,
)
from meshwright.simulator.layout import Axis


class Linear(NamedTuple):
    """Options of a linear layer.

    Args:
        bias: Whether it has a bias.
        in_layer: It belongs to a layer, or runs as those do, and may be fp8.
        shared: Its weight is a parameter of another block.
        counts_bias: The bias gradient's traffic is counted here, not elsewhere.
        fuses: Linear layers of one input are one GEMM, whatever the stack does.
        wide: Operands and output are fp32.
        buffered: Its input is gathered into a global buffer that stays allocated.
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
    """Redistribute *x* to a placement; backward redistributes its gradient, even if *x* stays.

    Args:
        block: Block to add the operator to.
        x: Tensor to redistribute.
        at: Target placement.
        eight_bits: Whether the all-gathers, also the gradient's, move fp8.
        buffered: Whether it goes into a global buffer.
    """
    at = block.placed(at)
    # On one rank there is neither a collective nor an autograd node.
    if not block.mesh:
        return x
    # Megatron all-reduces a partial sum in place.
    stays = at == dict(x.at) or (
        at == gradient_placement(x.at) and block.lowering.fuses_redistribute
    )
    base = x.storage if stays else None
    if buffered and not stays:
        # Allocated before the pass, as weights are.
        base = replace(x.like("buffer of tokens", at=at), is_weight=True)
        block.buffers.append(base)
    out = x.like(f"{x.name} placed", at=at, base=base)
    width = block.width if eight_bits else None
    work = redistribute_work(
        redistribute_collectives(x.at, at), x, out, cast_from=width, scaled=block.lowering.scaled
    )
    gradient = Gradient(x, at=gradient_placement(x.at))
    return block.add([x], [out], [gradient], *work, kind=Kind.PLACE, eight_bits=eight_bits)


class Scratch(NamedTuple):
    """Temporary tensors of a GEMM, forward and backward."""

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
    """Return the einsum of two *operands* with output *dims*; all other dims are contracted.

    Args:
        block: Block to add the operator to.
        name: Name of the output.
        operands: Activations and weight, or two activations.
        dims: Dims of the output.
        linear: Bias and width.
        kind: Kind of operator.
        scratch: Fp8 copies of its operands, if any; of attention's GEMMs, temporary tensors.
    """
    x, weight = operands
    width = x.width if linear.wide else block.width
    out = x.like(name, dims=dims, at=product_placement(x.at, weight.at, dims), width=width)
    # C++ evaluates a call's arguments from the last one: autocast casts a bias first.
    biases = [_bias_weight(block, weight, out, counted=linear.counts_bias)] if linear.bias else []
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


def _bias_weight(
    block: Block, weight: Tensor, out: Tensor, *, counted: bool
) -> tuple[Tensor, Gradient]:
    """Return the bias of a linear layer, and its gradient, a sum over tokens."""
    bias_dims = [dim for dim in out.dims if dim in weight.dims]
    split = {axis: dim for axis, dim in weight.at.items() if dim in bias_dims}
    vector = block.weight(f"{out.name}.bias", *bias_dims, at=split)
    if block.lowering.casts:
        vector = _autocast_weight(block, vector)
    summed = gradient_placement(out.at)
    place = {axis: dim if dim in bias_dims else PARTIAL for axis, dim in summed.items()}
    return vector, Gradient(vector, (), (block.traffic(out),) if counted else (), at=place)


def cast_operands(block: Block, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return both operands of a GEMM as autocast casts them: a weight once a pass."""
    if not block.lowering.casts:
        return x, weight
    narrow = _autocast_weight(block, weight)
    return _autocast_input(block, x), narrow


def _autocast_input(block: Block, x: Tensor) -> Tensor:
    """Return *x* in the block's dtype; compiled, all readers share one copy."""
    if x.width <= block.width:
        return x
    if x not in block.casts:
        made = copy(block, x, f"{x.name} cast", width=block.width)
        if not block.lowering.is_compiled:
            return made
        block.casts[x] = made
    return block.casts[x]


def _autocast_weight(block: Block, weight: Tensor) -> Tensor:
    """Return autocast's 16-bit copy of a weight."""
    narrow = copy(block, weight, f"{weight.name} cast", width=block.width)
    if block.lowering.caches_casts:
        block.cached.append(narrow)
    return narrow


def columns(
    block: Block, x: Tensor, *outs: Dim, linear: Linear = PLAIN, packed: bool = False
) -> list[Tensor]:
    """Return column-parallel linear layers of *x*; a fused one may stay *packed*."""
    lowering = block.lowering
    whole = replicated(x.at, Axis.TP)
    with (
        saved_input(block, x, linear) as saved,
        block.merged_gemm(),
        block.autograd_node(fused=lowering.fuses_redistribute),
    ):
        in_fp8 = _gathers_in_fp8(block, linear)
        if lowering.redistributes_each_input:
            return [
                _column(block, place(block, saved, whole), out, linear, again=False) for out in outs
            ]
        # Gate and up, or q, k and v, share one gathered input.
        gathered = place(block, saved, whole, eight_bits=in_fp8, buffered=linear.buffered)
        if not lowering.fuses_redistribute:
            block.argument(gathered)
        # Megatron saves the shard and gathers it again in backward: no fp8 copy of the whole stays.
        again = in_fp8 and gathered.storage is not saved.storage and lowering.fuses_redistribute
        fuses = linear.fuses or (lowering.fuses_gate if packed else lowering.fuses_products)
        if not fuses or len(outs) == 1:
            return [_column(block, gathered, out, linear, again=again) for out in outs]
        side = _side_by_side(block, outs)
        fused = _column(block, gathered, side, linear, again=again)
    return [fused] if packed else cut(block, fused, *outs)


def _column(block: Block, x: Tensor, out: Dim, linear: Linear, *, again: bool) -> Tensor:
    """Return one column-parallel GEMM; *again*: backward gathers its input again, in fp8."""
    weight = block.weight(
        f"{out.name}.weight", out, x.dims[-1], at={Axis.TP: out}, shared=linear.shared
    )
    scratch = None
    bits = block.lowering.eight_bits
    if bits is not None and linear.in_layer:
        made = x.like(out.name, dims=(*x.dims[:-1], out), at=block.placed({Axis.TP: out}))
        ready = bits.keeps_copy and not again
        scratch = fp8_scratch(block, (x, weight), made, copies=2, again=0 if ready else x.width)
    return product(block, out.name, (x, weight), *x.dims[:-1], out, linear=linear, scratch=scratch)


def _side_by_side(block: Block, outs: tuple[Dim, ...]) -> Dim:
    """Return the output dim of a fused GEMM: each rank's shards of all *outs*, concatenated."""
    ranks = block.mesh.get(Axis.TP, 1)
    size: Size = 0
    grain: Size = 0
    for out in outs:
        # Replicated key-value heads count once for each rank.
        size = size + (out.split(ranks) if Axis.TP in block.mesh else out.size) * ranks
        grain = grain + out.grain
    return Dim(", ".join(out.name for out in outs), size, grain)


def row(
    block: Block, x: Tensor, out: Dim, name: str, at: Placement, linear: Linear = PLAIN
) -> Tensor:
    """Return a row-parallel linear layer of *x*, reduced to a placement."""
    if block.lowering.fuses_residual:
        linear = linear._replace(bias=False)  # `residual` adds it
    # Megatron-Core's own RowParallelLinear reduce-scatters in an autograd function of its own.
    fused = block.lowering.fuses_redistribute and not block.lowering.is_local
    with (
        saved_input(block, x, linear) as saved,
        block.merged_gemm(),
        block.autograd_node(fused=fused),
    ):
        inputs = saved.dims[-1]
        weight = block.weight(f"{name}.weight", out, inputs, at={Axis.TP: inputs})
        in_fp8 = _gathers_in_fp8(block, linear)
        scratch = None
        bits = block.lowering.eight_bits
        if bits is not None:
            made = saved.like(name, dims=(*saved.dims[:-1], out), at={})
            gathered = in_fp8 and bool(block.placed(at))
            # Gathered in fp8, the output's gradient arrives as one of its two copies.
            again = 0 if bits.keeps_copy else 2
            scratch = fp8_scratch(
                block, (saved, weight), made, copies=1 if gathered else 2, again=again
            )
        partial = product(
            block, name, (saved, weight), *saved.dims[:-1], out, linear=linear, scratch=scratch
        )
        return place(block, partial, at, eight_bits=in_fp8)


def _gathers_in_fp8(block: Block, linear: Linear) -> bool:
    bits = block.lowering.eight_bits
    return bits is not None and bits.gathers and linear.in_layer


@contextmanager
def saved_input(block: Block, x: Tensor, linear: Linear = PLAIN) -> Iterator[Tensor]:
    """Yield the input a linear layer saves for backward: an fp8 copy, if the recipe does so.

    Where the input is discarded and recomputed, it is saved itself, and backward makes the
    column-wise copy where forward has made both (`save_original_input` of Transformer Engine 2.6 to
    2.9, pytorch/module/linear.py and grouped_linear.py): 2 bytes more an element.
    """
    bits = block.lowering.eight_bits
    if bits is None or not bits.keeps_copy or not linear.in_layer:
        yield x
        return
    narrow = x.like(f"{x.name} in fp8", width=FP8_BYTES, scaled=bits.scaled)
    if not bits.discarded.intersection(_producing_parts(block, x)):
        yield block.add([x], [narrow], [Gradient(x, at=x.at, passes_through=True)])
        return
    with block.autograd_node(fused=True):
        again = Gradient(x, (), (Traffic(2 * x.numel),), at=x.at, passes_through=True)
        yield block.add([x], [narrow], [again], kind=Kind.NARROWED)


def _producing_parts(block: Block, x: Tensor) -> Iterator[str]:
    """Yield the names of the parts whose operators output *x*."""
    makers = (op for op in block.operators if x.storage in op.outputs)
    return (name.partition(":")[0] for op in makers for name in op.region)


def fp8_scratch(
    block: Block, operands: tuple[Tensor, Tensor], made: Tensor, *, copies: int, again: int
) -> Scratch:
    """Return the temporary fp8 copies of a GEMM, beside the saved input.

    Dgrad and wgrad read each operand transposed, so there are two copies of each (`fp8_casts`).

    Args:
        block: Block of the GEMM.
        operands: Input and weight.
        made: Output.
        copies: Fp8 copies of the output's gradient that are temporary.
        again: Fp8 copies of the input that backward makes.
    """
    x, weight = operands
    bits = block.lowering.eight_bits
    assert bits is not None
    scaled = bits.scaled
    weights = [] if bits.keeps_weights else [_fp8_copies(weight, 2, scaled)]
    again_made = [_fp8_copies(x, again, scaled)] if again else []
    # Of an input saved unquantized forward makes the row-wise copy alone.
    is_alone = block.operators[-1].kind is Kind.NARROWED
    return Scratch(
        (*([] if is_alone else [_fp8_copies(x, x.width, scaled)]), *weights),
        (_fp8_copies(made, copies, scaled), *again_made, *weights),
    )


def _fp8_copies(x: Tensor, copies: int, scaled: int) -> Tensor:
    return x.like(f"{x.name} in fp8", width=copies * FP8_BYTES, scaled=scaled)


def whole_product(block: Block, x: Tensor, out: Dim, name: str, linear: Linear = OUTSIDE) -> Tensor:
    """Return a linear layer whose weight is replicated on all ranks."""
    with saved_input(block, x, linear) as saved:
        weight = block.weight(f"{name}.weight", out, saved.dims[-1])
        bits, scratch = block.lowering.eight_bits, None
        if bits is not None and linear.in_layer:
            made = saved.like(name, dims=(*saved.dims[:-1], out), width=block.width)
            again = 0 if bits.keeps_copy else saved.width
            scratch = fp8_scratch(block, (saved, weight), made, copies=2, again=again)
        return product(
            block, name, (saved, weight), *saved.dims[:-1], out, linear=linear, scratch=scratch
        )
