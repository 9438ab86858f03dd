"""What all routed experts are made of: scores, rows of tokens by expert, grouped products.

Balanced routing gives each expert ``tokens x k / E`` rows, rounded up; of other routing the rank
with the hottest expert is followed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.blocks.parts.routed_dims import RoutedDims
from meshwright.simulator.graph import (
    NUMBER_BYTES,
    PARTIAL,
    STATISTIC_BYTES,
    Block,
    Dim,
    Gradient,
    Kind,
    Linear,
    Placement,
    Product,
    Reads,
    Tensor,
    Transfer,
    cast,
    fp8_scratch,
    gradient_placement,
    pointwise,
    product,
    saved_input,
    take,
)
from meshwright.simulator.layout import ExpertAxis

INT32_BYTES = 4


class Taken(NamedTuple):
    """What was read by number, and the numbers."""

    values: Tensor
    numbers: Tensor


def score(block: Block, logits: Tensor) -> Tensor:
    """Return scores in fp32, softmax or sigmoid, whose backward reads them."""
    wide = cast(block, logits, f"{logits.name} in fp32", STATISTIC_BYTES)
    return pointwise(block, "expert scores", wide, reads=Reads.OUTPUT)


def logits_of(block: Block, flat: Tensor, dims: RoutedDims, *, bias: bool = False) -> Tensor:
    """Return the router's product, whose weight every rank has whole."""
    weight = block.weight("router.weight", dims.experts, flat.dims[-1])
    operands = flat, weight
    linear = Linear(bias=bias)
    return product(block, "router", operands, dims.tokens, dims.experts, linear=linear)


def wide_logits(block: Block, flat: Tensor, dims: RoutedDims) -> Tensor:
    """Return the product of a router that casts both of its operands to fp32."""
    weight = block.weight("router.weight", dims.experts, flat.dims[-1])
    operands = (
        cast(block, flat, "tokens in fp32", STATISTIC_BYTES),
        cast(block, weight, "router weight in fp32", STATISTIC_BYTES),
    )
    return product(block, "router", operands, dims.tokens, dims.experts, linear=Linear(wide=True))


def taken(
    block: Block, x: Tensor, name: str, dims: tuple[Dim, ...], at: Placement | None = None
) -> Taken:
    """Return what `take` reads, and the numbers that its backward reads."""
    values = take(block, x, name, dims, at)
    return Taken(values, block.operators[-1].outputs[1])


def normalised(block: Block, shares: Tensor, *, in_place: bool = False) -> Tensor:
    """Return a token's shares divided by their sum, whose backward reads both.

    Args:
        block: Where it is written down.
        shares: Of tokens and their experts.
        in_place: They are overwritten, and a copy is kept of what they were.
    """
    total = shares.like("sum of shares", dims=shares.dims[:1])
    block.add([shares], [total], [Gradient(shares)], block.traffic(shares))
    given = shares.like("given shares") if in_place else shares
    made = shares.like("shares", base=shares.storage if in_place else None)
    read = (given, total)
    gradients = [
        Gradient(shares, read, (block.traffic(shares, shares),)),
        Gradient(total, read, at=total.at),
    ]
    outputs = [made, given] if in_place else [made]
    return block.add([shares, total], outputs, gradients, block.traffic(shares, shares))


def dropped(block: Block, shares: Tensor, dims: RoutedDims) -> Tensor:
    """Return *shares* of the tokens that experts take, by a mask that backward reads.

    Of each expert the largest are chosen, and their numbers spread over a mask
    (apply_router_token_dropping of megatron/core/transformer/moe/moe_utils.py, core 0.16).  As rows
    are fixed no rank is told of others' (preprocess of its dispatcher).
    """
    mask = shares.like("tokens taken", width=1)
    left = shares.like("shares of tokens taken")
    at = dims.rows_at(shares)
    largest = shares.like("largest shares", dims=(dims.rows,), at=at)
    numbered = largest.like("numbers of largest shares", width=NUMBER_BYTES)
    spread = shares.like("spread numbers")
    work = (
        block.traffic(shares, largest, numbered),
        block.traffic(spread, numbered, largest),
        block.traffic(spread, mask),
        block.traffic(shares, mask, left),
    )
    back = Gradient(shares, (mask,), (block.traffic(shares, mask, left),))
    scratch = (largest, numbered, spread), ()
    return block.add([shares], [left, mask], [back], *work, scratch=scratch)


class Numbers(NamedTuple):
    """Numbers of rows.

    Args:
        read: By backward, of those that are there.
        made: Such that backward reads.
        turned: Such that live while rows are moved.
    """

    read: tuple[Tensor, ...] = ()
    made: tuple[Tensor, ...] = ()
    turned: tuple[Tensor, ...] = ()


NO_NUMBERS = Numbers()


def moved(
    block: Block,
    x: Tensor,
    name: str,
    dims: tuple[Dim, ...],
    known: Numbers = NO_NUMBERS,
    at: Placement | None = None,
) -> Tensor:
    """Return rows of *x* in another order or number, a copy; its gradient is copied back.

    Args:
        block: Where it is written down.
        x: Rows.
        name: What it makes.
        dims: Of what it makes.
        known: Numbers of rows.
        at: Where it lies; by default where *x* does.
    """
    out = x.like(name, dims=dims, at=x.at if at is None else at)
    traffic = block.traffic(x, out)
    # A gradient that is a sum over ranks stays one where rows stay where they are.
    back = None if out.at == x.at else gradient_placement(x.at)
    gradient = Gradient(x, (*known.read, *known.made), (traffic,), at=back)
    return block.add([x], [out, *known.made], [gradient], traffic, scratch=(known.turned, ()))


def told(block: Block, rows: Tensor, counts: Tensor, *splits: Tensor) -> tuple[Tensor, ...]:
    """Tell each rank how many *rows* it gets, in *counts*; return these and *splits* of them."""
    call = Transfer(CollectiveOp.ALL_TO_ALL, ExpertAxis.EP, counts.nbytes)
    block.add([rows], [counts, *splits], [], call)
    return (counts, *splits)


def exchanged(block: Block, x: Tensor, dims: RoutedDims, *, back: bool = False) -> Tensor:
    """Return rows that other ranks sent to this one's experts, or *back*; so do gradients.

    Each rank sends as many as it gets, but for the hottest one: that gets more.
    """
    if not dims.mesh.is_divided:
        return x
    given, made = (dims.arrived, dims.rows) if back else (dims.rows, dims.arrived)
    out = renamed_rows(x, given, made).like(f"{x.name} exchanged")
    most = x if back else out
    call = Transfer(CollectiveOp.ALL_TO_ALL, ExpertAxis.EP, most.nbytes)
    return block.add([x], [out], [Gradient(x, work=(call,))], call)


def renamed_rows(x: Tensor, given: Dim, made: Dim) -> Tensor:
    """Return a tensor like *x* with rows *made* in the place of *given*."""
    dims = tuple(made if dim is given else dim for dim in x.dims)
    at = {axis: made if dim is given else dim for axis, dim in x.at.items()}
    return x.like(x.name, dims=dims, at=at)


def grouped(
    block: Block,
    x: Tensor,
    out: Dim,
    dims: RoutedDims,
    *,
    split: Dim,
    reads: tuple[Tensor, ...] = (),
) -> Tensor:
    """Return a product of rows in the order of their experts with each expert's own weight.

    One kernel runs the products of all experts, ``rows / E`` rows each.

    Args:
        block: Where it is written down.
        x: Rows, of which there may be more than are computed.
        out: Outputs.
        dims: Experts, and rows that are computed.
        split: The dim of the weight that ranks of an expert split.
        reads: Where each expert's rows begin, which backward reads, too.
    """
    experts, inputs, bits = dims.experts, x.dims[-1], block.lowering.eight_bits
    with saved_input(block, x) as kept:
        axis, ranks = dims.mesh.split_on, dims.mesh.ranks
        at = {axis: split, ExpertAxis.EP: experts}
        weight = block.weight(f"expert {out.name}.weight", experts, out, inputs, at=at)
        made_at, back_at = (
            block.placed({axis: PARTIAL if each is not split else split}) for each in (out, inputs)
        )
        made = kept.like(out.name, dims=(kept.dims[0], out), at=made_at, width=block.width)
        rows, num = -(-dims.arrived.size * ranks // experts.size), experts.size // ranks
        n, k = weight.sizes[out], weight.sizes[inputs]
        gradients = [
            Gradient(kept, (weight, *reads), (Product(rows, k, n, num),), at=back_at),
            Gradient(weight, (kept, *reads), (Product(n, k, rows, num),), at=weight.at),
        ]
        scratch: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ())
        if bits is not None:
            scratch = fp8_scratch(
                block, (kept, weight), made, copies=2, again=0 if bits.keeps_copy else 2
            )
        work = Product(rows, n, k, num)
        return block.add(
            [kept, weight],
            [made],
            gradients,
            work,
            kind=Kind.GROUPED,
            eight_bits=bits is not None,
            scratch=scratch,
        )


def rows_weighted(block: Block, rows: Tensor, weights: Tensor) -> Tensor:
    """Return *rows* times a weight each, in its format; its gradient is a sum over its row."""
    spread = weights.like("weights by column", dims=rows.dims, base=weights.storage)
    block.add([weights], [spread], [Gradient(weights)])
    wide = rows.like("weighted rows", width=weights.width)
    traffic = block.traffic(rows, wide)
    # Where it is cast, that comes before the other gradient is summed over columns.
    is_cast = wide.width > rows.width
    made = wide.like("gradient in fp32") if is_cast else None
    last = () if is_cast else (weights.like("sum of gradient"),)
    gradients = [
        Gradient(rows, (weights, rows), (traffic, traffic), makes=made),
        Gradient(spread, (weights, rows)),
    ]
    return block.add([rows, spread], [wide], gradients, traffic, scratch=((), last))


def starts(x: Tensor, dims: RoutedDims, width: int = INT32_BYTES) -> Tensor:
    """Return a number for each expert, such as the row at which its own begin."""
    return x.like("starts of experts", dims=(dims.experts,), at={}, width=width)


def numbers(x: Tensor, name: str, width: int = NUMBER_BYTES) -> Tensor:
    """Return a number for each row of *x*."""
    at = {axis: dim for axis, dim in x.at.items() if dim is x.dims[0]}
    return x.like(name, dims=x.dims[:1], at=at, width=width)
