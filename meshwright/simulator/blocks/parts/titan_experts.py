"""Routed experts of torchtitan, in PyTorch's operators."""

from meshwright.simulator.blocks.parts.feed_forward import Shared
from meshwright.simulator.blocks.parts.routed_dims import EXPERTS, RoutedDims
from meshwright.simulator.blocks.parts.routing import (
    INT32_BYTES,
    GatheredRows,
    RowIndices,
    all_to_all_rows,
    exchange_counts,
    gather_rows,
    grouped_gemm,
    logits_of,
    normalised,
    offsets_like,
    permute,
    row_indices,
    score,
    weighted_by,
    wide_logits,
)
from meshwright.simulator.graph import (
    NUMBER_BYTES,
    STATISTIC_BYTES,
    Block,
    Dim,
    Gradient,
    Kind,
    Placement,
    Reads,
    Tensor,
    activation,
    cast,
    pass_through,
    place,
    pointwise,
    product_gradients,
    product_work,
    rounded_up,
    view,
)
from meshwright.simulator.model import Experts

MASK_BYTES = 1
ALIGNED_ROWS = 8  # torch._grouped_mm in 16 bits (TOKEN_GROUP_ALIGN_SIZE_M of torchtitan 0.2.2)


def torchtitan(
    block: Block, x: Tensor, dims: RoutedDims, outside: Placement, shared: Shared | None
) -> Tensor:
    """Return the output of `MoE` (torchtitan/models/common/moe.py of 0.3).

    The router is in fp32; tokens per expert are counted by a routing map.
    """
    flat, hidden = dims.flat(block, x), x.dims[-1]
    scores = pointwise(block, "scores", wide_logits(block, flat, dims), reads=Reads.OUTPUT)
    chosen = gather_rows(block, scores, "shares", (dims.tokens, dims.chosen))
    shares = pointwise(block, "scaled", normalised(block, chosen.values), reads=Reads.NOTHING)
    mask, counts = scores.like("routing map", width=MASK_BYTES), offsets_like(x, dims, NUMBER_BYTES)
    block.add([scores], [mask, counts], [])
    with block.part(EXPERTS):
        rows, tokens = gather_rows(block, flat, "rows", (dims.rows, hidden))
        order = row_indices(rows, "order of rows")
        by_row = view(block, shares, dims.rows)
        weights = permute(block, by_row, "weights", (dims.rows,), RowIndices(made=(order,)))
        made = _unpadded_experts(block, rows, x, dims)
    result = _scatter_add(block, made, GatheredRows(weights, tokens), dims)
    block.hold(rows, made, weights)
    result = place(block, view(block, result, *x.dims), outside)
    if shared is not None:
        out = shared.write(block, x)
        made = out.like("all experts out")
        result = pass_through(block, [result, out], made, block.traffic(out, out))
    block.hold(scores, chosen.row_indices, shares, mask, counts)
    return result


def _unpadded_experts(block: Block, rows: Tensor, x: Tensor, dims: RoutedDims) -> Tensor:
    """Return the output of `GroupedExperts` for *rows* sorted by expert, without padding.

    Rows of other ranks are sorted by local expert once more (`AllToAllTokenDispatcher` of
    torchtitan 0.3, models/common/token_dispatcher.py).
    """
    offsets = x.like("starts", dims=(Dim("own", dims.num_local),), at={}, width=INT32_BYTES)
    if not dims.mesh.is_divided:
        block.add([rows], [offsets], [])
        return _swiglu_experts(block, rows, dims, offsets)
    names = _tokens_per_expert(block, rows, x, dims)
    received = all_to_all_rows(block, rows, dims)
    places = row_indices(received, "places of rows")
    lines = permute(block, received, "rows by expert", received.dims, RowIndices(made=(places,)))
    block.add([lines], [offsets], [])
    made = _swiglu_experts(block, lines, dims, offsets)
    back = permute(block, made, "rows in order", received.dims, RowIndices((places,)))
    block.hold(*names, lines)
    return all_to_all_rows(block, back, dims, back=True)


def _scatter_add(block: Block, rows: Tensor, weights: GatheredRows, dims: RoutedDims) -> Tensor:
    """Return the sums of tokens' *rows* times their *weights* in fp32, by ``scatter_add``."""
    zeros = rows.like("zeros", dims=(dims.tokens, rows.dims[-1]))
    block.add([rows], [zeros], [])
    wide = cast(block, rows, "rows in fp32", STATISTIC_BYTES)
    narrow = cast(block, weighted_by(block, wide, weights.values), "weighted rows", block.width)
    result = permute(block, narrow, "experts out", zeros.dims, RowIndices((weights.row_indices,)))
    block.hold(zeros, narrow)
    return result


def padded_torchtitan(
    block: Block,
    x: Tensor,
    experts: Experts,
    dims: RoutedDims,
    outside: Placement,
    shared: Shared | None,
) -> Tensor:
    """Return the output of `MoE` (torchtitan/models/moe/moe.py of 0.2.2).

    Rows are copied once more, padded to the grouped GEMM's alignment; routing weights apply to the
    experts' output, or to their input in Llama 4.
    """
    flat, hidden = dims.flat(block, x), x.dims[-1]
    scores = score(block, logits_of(block, flat, dims))
    shares = gather_rows(block, scores, "shares", (dims.tokens, dims.chosen)).values
    if not experts.weighs_inputs:
        shares = normalised(block, shares)
    shares = pointwise(block, "scaled shares", shares, reads=Reads.NOTHING)
    rows, names, order = _sorted_rows(block, x, flat, shares, experts, dims)
    with block.part(EXPERTS):
        back = _padded_experts(block, rows, x, dims)
    out = None if shared is None else shared.write(block, x)
    indices = RowIndices((order,)) if experts.weighs_inputs else RowIndices(made=(order,))
    unsorted = permute(block, back, "rows of tokens", (dims.rows, hidden), indices)
    if experts.weighs_inputs:
        result = unsorted.like("sums of one row", dims=(dims.tokens, hidden))
        result = pass_through(block, [unsorted], result, block.traffic(unsorted, result))
    else:
        result = _weighted(block, shares, unsorted, dims)
    result = place(block, view(block, result, *x.dims), outside)
    if out is not None:
        made = out.like("all experts out")
        result = pass_through(block, [out, result], made, block.traffic(out, out))
    block.hold(shares, rows, back, unsorted, *names)
    return result


def _sorted_rows(
    block: Block, x: Tensor, flat: Tensor, shares: Tensor, experts: Experts, dims: RoutedDims
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Return rows of *flat* tokens sorted by expert, other local variables, and the order.

    Sorted weights and tokens per expert stay in variables even if nothing reads them.
    """
    whole = dims.rows, flat.dims[-1]
    order = row_indices(flat.like("rows", dims=whole), "order of rows")
    if not experts.weighs_inputs:
        rows = gather_rows(block, flat, "rows", whole).values
        names = (
            row_indices(rows, "sorted shares", STATISTIC_BYTES),
            offsets_like(x, dims, NUMBER_BYTES),
        )
        block.add([rows], [*names], [])
        return rows, names, order
    by_row, counts = view(block, shares, dims.rows), offsets_like(x, dims, NUMBER_BYTES)
    weights = permute(block, by_row, "sorted shares", (dims.rows,), RowIndices(made=(order,)))
    block.add([weights], [counts], [])
    unweighted = gather_rows(block, flat, "rows", whole).values
    wide = cast(block, unweighted, "rows in fp32", STATISTIC_BYTES)
    rows = cast(block, weighted_by(block, wide, weights), "weighted rows", block.width)
    block.hold(unweighted)
    return rows, (weights, counts), order


def _padded_experts(block: Block, rows: Tensor, x: Tensor, dims: RoutedDims) -> Tensor:
    """Return the output of `GroupedExperts` for *rows* of tokens *x*, sorted by expert.

    They are dispatched and combined (`ExpertParallel` of torchtitan 0.2.2,
    distributed/expert_parallel.py); only a call's arguments keep them while they are copied.
    """
    hidden, is_divided = rows.dims[-1], dims.mesh.is_divided
    names = _tokens_per_expert(block, rows, x, dims) if is_divided else ()
    received = all_to_all_rows(block, rows, dims)
    one_more = Dim("rows and an empty one", dims.arrived.size + 1)
    more = received.like(one_more.name, dims=(one_more, hidden))
    more = pass_through(block, [received], more, block.traffic(received, received))
    local_experts = Dim("own experts", dims.num_local)
    space = dims.arrived.size + ALIGNED_ROWS * local_experts.size
    padded = Dim("padded rows", rounded_up(space, ALIGNED_ROWS))
    places = row_indices(rows.like("rows", dims=(padded, hidden)), "places of rows", INT32_BYTES)
    offsets = x.like("starts of own experts", dims=(local_experts,), at={}, width=INT32_BYTES)
    lines = permute(block, more, padded.name, (padded, hidden), RowIndices(made=(places, offsets)))
    block.hold(*names, *((received,) if is_divided else ()))
    made = _swiglu_experts(block, lines, dims, block.operators[-1].outputs[2])
    back = permute(block, made, "rows in order", (one_more, hidden), RowIndices((places,)))
    cut = back.like("rows again", dims=(dims.arrived, hidden), base=back.storage)
    cut = block.add([back], [cut], [Gradient(back)])
    if not is_divided:
        return cut
    cut = all_to_all_rows(block, cut, dims, back=True)
    block.hold(made)
    return cut


def _tokens_per_expert(
    block: Block, rows: Tensor, x: Tensor, dims: RoutedDims
) -> tuple[Tensor, ...]:
    """All-to-all the tokens per expert; return them with input and output splits."""
    counts = offsets_like(x, dims, NUMBER_BYTES)
    ranks = Dim("ranks of experts", dims.mesh.ranks)
    splits = (x.like(name, dims=(ranks,), at={}, width=NUMBER_BYTES) for name in ("sent", "got"))
    return exchange_counts(block, rows, counts, *splits)


def _swiglu_experts(block: Block, lines: Tensor, dims: RoutedDims, offsets: Tensor) -> Tensor:
    """Return the experts' output of *lines*: gate and up projection are GEMMs of their own."""
    hidden = lines.dims[-1]

    def multiplied(x: Tensor, out: Dim, split: Dim) -> Tensor:
        return grouped_gemm(block, x, out, dims, split=split, reads=(offsets,))

    if block.lowering.is_eager:
        gate = multiplied(lines, dims.gate, dims.gate)
        opened = pointwise(block, "opened gate", gate)
        up = multiplied(lines, dims.up, dims.up)
        inner = pointwise(block, "activation", opened, up, last=dims.inner)
    else:
        with block.merged_gemm():
            gate, up = (multiplied(lines, each, each) for each in (dims.gate, dims.up))
        inner = activation(block, gate, up, parts=(dims.gate, dims.up), last=dims.inner)
    return multiplied(inner, hidden, dims.inner)


def _weighted(block: Block, shares: Tensor, rows: Tensor, dims: RoutedDims) -> Tensor:
    """Return the sum of a token's *rows* times their routing weights, in fp32 (``torch.bmm``).

    With so few experts a token, its time is its traffic.
    """
    hidden = rows.dims[-1]
    by_token = view(block, rows, dims.tokens, dims.chosen, hidden)
    wide = cast(block, by_token, "rows in fp32", STATISTIC_BYTES)
    out = wide.like("weighted", dims=(dims.tokens, hidden))
    work = product_work(shares, wide, out.dims)
    gradients = product_gradients(shares, wide, out)
    moves = block.traffic(wide, out)
    block.add([shares, wide], [out], gradients, work, moves, kind=Kind.OTHER)
    return cast(block, out, "experts out", block.width)
