"""Operators of routed experts: router, permutation of tokens, all-to-all, grouped GEMM.

Balanced routing gives each expert ``tokens x k / E`` rows, rounded up; with imbalance the rank with
the hottest expert is simulated.
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


class GatheredRows(NamedTuple):
    """Gathered values and their indices."""

    values: Tensor
    row_indices: Tensor


def score(block: Block, logits: Tensor) -> Tensor:
    """Return router scores in fp32 (softmax or sigmoid); backward reads them."""
    wide = cast(block, logits, f"{logits.name} in fp32", STATISTIC_BYTES)
    return pointwise(block, "expert scores", wide, reads=Reads.OUTPUT)


def logits_of(block: Block, flat: Tensor, dims: RoutedDims, *, bias: bool = False) -> Tensor:
    """Return router logits; the router's weight is replicated."""
    weight = block.weight("router.weight", dims.experts, flat.dims[-1])
    operands = flat, weight
    linear = Linear(bias=bias)
    return product(block, "router", operands, dims.tokens, dims.experts, linear=linear)


def wide_logits(block: Block, flat: Tensor, dims: RoutedDims) -> Tensor:
    """Return the logits of a router in fp32."""
    weight = block.weight("router.weight", dims.experts, flat.dims[-1])
    operands = (
        cast(block, flat, "tokens in fp32", STATISTIC_BYTES),
        cast(block, weight, "router weight in fp32", STATISTIC_BYTES),
    )
    return product(block, "router", operands, dims.tokens, dims.experts, linear=Linear(wide=True))


def gather_rows(
    block: Block, x: Tensor, name: str, dims: tuple[Dim, ...], at: Placement | None = None
) -> GatheredRows:
    """Return the output of `take`, and the indices that its backward reads."""
    values = take(block, x, name, dims, at)
    return GatheredRows(values, block.operators[-1].outputs[1])


def normalised(block: Block, shares: Tensor, *, in_place: bool = False) -> Tensor:
    """Return routing weights divided by their sum; backward reads both.

    Args:
        block: Block to add the operators to.
        shares: Routing weights of tokens and their experts.
        in_place: Whether they are overwritten, with a copy saved.
    """
    weight_sum = shares.like("sum of shares", dims=shares.dims[:1])
    block.add([shares], [weight_sum], [Gradient(shares)], block.traffic(shares))
    saved_weights = shares.like("given shares") if in_place else shares
    made = shares.like("shares", base=shares.storage if in_place else None)
    read = (saved_weights, weight_sum)
    gradients = [
        Gradient(shares, read, (block.traffic(shares, shares),)),
        Gradient(weight_sum, read, at=weight_sum.at),
    ]
    outputs = [made, saved_weights] if in_place else [made]
    return block.add([shares, weight_sum], outputs, gradients, block.traffic(shares, shares))


def drop_tokens(block: Block, shares: Tensor, dims: RoutedDims) -> Tensor:
    """Return routing weights *shares* after token dropping by capacity; backward reads the mask.

    Each expert keeps its largest weights, whose indices are scattered to a mask
    (apply_router_token_dropping of megatron/core/transformer/moe/moe_utils.py, core 0.16).  As row
    counts are fixed, ranks need not gather them (preprocess of its dispatcher).
    """
    mask = shares.like("tokens taken", width=1)
    kept_weights = shares.like("shares of tokens taken")
    at = dims.rows_at(shares)
    largest = shares.like("largest shares", dims=(dims.rows,), at=at)
    kept_indices = largest.like("numbers of largest shares", width=NUMBER_BYTES)
    scattered = shares.like("spread numbers")
    work = (
        block.traffic(shares, largest, kept_indices),
        block.traffic(scattered, kept_indices, largest),
        block.traffic(scattered, mask),
        block.traffic(shares, mask, kept_weights),
    )
    gradient = Gradient(shares, (mask,), (block.traffic(shares, mask, kept_weights),))
    scratch = (largest, kept_indices, scattered), ()
    return block.add([shares], [kept_weights, mask], [gradient], *work, scratch=scratch)


class RowIndices(NamedTuple):
    """Index tensors of a permutation.

    Args:
        read: Existing ones that backward reads.
        made: New ones that backward reads.
        temporary: Temporary ones.
    """

    read: tuple[Tensor, ...] = ()
    made: tuple[Tensor, ...] = ()
    temporary: tuple[Tensor, ...] = ()


NO_INDICES = RowIndices()


def permute(
    block: Block,
    x: Tensor,
    name: str,
    dims: tuple[Dim, ...],
    indices: RowIndices = NO_INDICES,
    at: Placement | None = None,
) -> Tensor:
    """Return rows of *x* permuted, padded or repeated: a copy, whose gradient is copied back.

    Args:
        block: Block to add the operator to.
        x: Rows.
        name: Name of the output.
        dims: Dims of the output.
        indices: Index tensors.
        at: Placement; by default that of *x*.
    """
    out = x.like(name, dims=dims, at=x.at if at is None else at)
    traffic = block.traffic(x, out)
    # A gradient that is a sum over ranks stays one where rows stay where they are.
    back = None if out.at == x.at else gradient_placement(x.at)
    gradient = Gradient(x, (*indices.read, *indices.made), (traffic,), at=back)
    return block.add(
        [x], [out, *indices.made], [gradient], traffic, scratch=(indices.temporary, ())
    )


def exchange_counts(
    block: Block, rows: Tensor, counts: Tensor, *splits: Tensor
) -> tuple[Tensor, ...]:
    """All-to-all the *counts* of *rows* per expert; return them and the host's *splits*."""
    call = Transfer(CollectiveOp.ALL_TO_ALL, ExpertAxis.EP, counts.nbytes)
    block.add([rows], [counts, *splits], [], call)
    return (counts, *splits)


def all_to_all_rows(block: Block, x: Tensor, dims: RoutedDims, *, back: bool = False) -> Tensor:
    """Return rows after dispatch, or *back*: combine; gradients go the other way.

    Each rank receives as many as it sends, except the hottest, which receives more.
    """
    if not dims.mesh.is_divided:
        return x
    sent, received = (dims.arrived, dims.rows) if back else (dims.rows, dims.arrived)
    out = renamed_rows(x, sent, received).like(f"{x.name} exchanged")
    larger = x if back else out
    call = Transfer(CollectiveOp.ALL_TO_ALL, ExpertAxis.EP, larger.nbytes)
    return block.add([x], [out], [Gradient(x, work=(call,))], call)


def renamed_rows(x: Tensor, before: Dim, made: Dim) -> Tensor:
    """Return a tensor like *x* with rows *made* in the place of *before*."""
    dims = tuple(made if dim is before else dim for dim in x.dims)
    at = {axis: made if dim is before else dim for axis, dim in x.at.items()}
    return x.like(x.name, dims=dims, at=at)


def grouped_gemm(
    block: Block,
    x: Tensor,
    out: Dim,
    dims: RoutedDims,
    *,
    split: Dim,
    reads: tuple[Tensor, ...] = (),
) -> Tensor:
    """Return the grouped GEMM of rows sorted by expert with each expert's weight.

    One kernel runs all experts, ``rows / E`` rows each.

    Args:
        block: Block to add the operator to.
        x: Rows, possibly padded.
        out: Output dim.
        dims: Dims of experts and of rows without padding.
        split: Dim of the weight that expert tp splits.
        reads: Offsets of each expert's rows, which backward reads, too.
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


def weighted_by(block: Block, rows: Tensor, weights: Tensor) -> Tensor:
    """Return *rows* times their weights, in the weights' dtype; backward sums over each row."""
    spread = weights.like("weights by column", dims=rows.dims, base=weights.storage)
    block.add([weights], [spread], [Gradient(weights)])
    wide = rows.like("weighted rows", width=weights.width)
    traffic = block.traffic(rows, wide)
    # The rows' gradient is cast before the weights' is summed over columns.
    is_cast = wide.width > rows.width
    made = wide.like("gradient in fp32") if is_cast else None
    last = () if is_cast else (weights.like("sum of gradient"),)
    gradients = [
        Gradient(rows, (weights, rows), (traffic, traffic), makes=made),
        Gradient(spread, (weights, rows)),
    ]
    return block.add([rows, spread], [wide], gradients, traffic, scratch=((), last))


def offsets_like(x: Tensor, dims: RoutedDims, width: int = INT32_BYTES) -> Tensor:
    """Return an integer for each expert, such as the offset of its rows."""
    return x.like("starts of experts", dims=(dims.experts,), at={}, width=width)


def row_indices(x: Tensor, name: str, width: int = NUMBER_BYTES) -> Tensor:
    """Return an integer for each row of *x*."""
    at = {axis: dim for axis, dim in x.at.items() if dim is x.dims[0]}
    return x.like(name, dims=x.dims[:1], at=at, width=width)
