"""Routed experts of Hugging Face transformers, in PyTorch's operators.

On one rank `grouped_mm_experts_forward` of transformers/integrations/moe.py, 5.23; under expert
parallelism `AllToAllEP` of transformers/distributed/expert_parallel.py around it.
"""

from typing import NamedTuple

from meshwright.simulator.blocks.parts.clamped import clamped
from meshwright.simulator.blocks.parts.feed_forward import Shared, gated
from meshwright.simulator.blocks.parts.routed_dims import EXPERTS, RoutedDims
from meshwright.simulator.blocks.parts.routing import (
    INT32_BYTES,
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
    Block,
    Dim,
    Gradient,
    Placement,
    Reads,
    Tensor,
    activation,
    cast,
    pass_through,
    pointwise,
    view,
)
from meshwright.simulator.layout import ExpertAxis
from meshwright.simulator.model import Experts

MASK_BYTES = 1


def transformers(
    block: Block, x: Tensor, dims: RoutedDims, experts: Experts, shared: Shared | None
) -> Tensor:
    """Return the output of grouped and shared experts.

    Gated shared experts run first, their gate after the routed experts, with its output in a local
    variable.  Shared experts without a gate run last (`DeepseekV3MoE`).
    """
    flat, is_gated = dims.flat(block, x), shared is not None and shared.has_gate
    shared_output = shared.write(block, flat) if shared is not None and is_gated else None
    if experts.routed_in_full:
        logits = wide_logits(block, flat, dims)
        shares = _scaled_shares(block, logits, experts, dims)
    else:
        logits = logits_of(block, flat, dims, bias=experts.bias)
        shares = _shares(block, logits, experts, dims)
    run = _expert_parallel if dims.mesh.is_divided else _sorted
    with block.part(EXPERTS):
        result = run(block, flat, shares, dims, experts)
    if shared_output is not None:
        shared_output = gated(block, flat, shared_output)
        result = _sum_of_experts(block, result, shared_output)
        block.hold(shared_output)
    elif shared is not None:
        result = view(block, result, *x.dims)
        result = _sum_of_experts(block, result, shared.write(block, x))
    block.hold(logits, shares)
    return view(block, result, *x.dims)


def _sum_of_experts(block: Block, result: Tensor, shared_output: Tensor) -> Tensor:
    made = result.like("all experts out")
    return pass_through(block, [result, shared_output], made, block.traffic(made, made, made))


def _sorted(
    block: Block, flat: Tensor, shares: Tensor, dims: RoutedDims, experts: Experts
) -> Tensor:
    """Return the output of all experts, which are local."""
    hidden = flat.dims[-1]
    rows = gather_rows(block, flat, "rows", (dims.rows, hidden)).values
    shares = view(block, shares, dims.rows)
    order = row_indices(rows, "order of rows")
    weights = permute(block, shares, "weights of rows", (dims.rows,), RowIndices(made=(order,)))
    names, offsets = _counted(block, rows, dims)
    made = _grouped_mlp(block, rows, experts, dims, SortedRows(offsets, names[0]))
    wide = weighted_by(block, made, weights)
    inverse = _inverse(block, rows)
    wide = permute(block, wide, "rows of tokens", (dims.rows, hidden), RowIndices(read=(inverse,)))
    total = _summed(block, wide, dims, copies_back=True)
    result = cast(block, total, "experts out", block.width)
    block.hold(shares, order, wide, inverse, *names)
    return result


def _expert_parallel(
    block: Block, flat: Tensor, shares: Tensor, dims: RoutedDims, experts: Experts
) -> Tensor:
    """Return the output of expert-parallel experts, after dispatch and combine.

    Received rows are sorted once more, and weighted by ones; routing weights apply after combine.
    They are cast like all arguments of an FSDP unit (`_cast_forward_inputs` of FSDPState,
    PyTorch 2.13), which the experts then are.
    """
    hidden = flat.dims[-1]
    shares = cast(block, shares, "shares of a unit", block.width)
    rows = gather_rows(block, flat, "rows", (dims.rows, hidden)).values
    order, sent = row_indices(rows, "order of rows"), offsets_like(flat, dims, NUMBER_BYTES)
    block.add([rows], [order, sent], [])
    got = exchange_counts(block, rows, offsets_like(flat, dims, NUMBER_BYTES))
    received = all_to_all_rows(block, rows, dims)
    ones = received.like("ones", dims=received.dims[:1])
    names = received, row_indices(received, "experts of rows"), ones
    block.add([received], [*names[1:]], [])
    block.hold(rows, sent, *got)
    made = _local_experts(block, received, ones, dims, experts)
    back = all_to_all_rows(block, made, dims, back=True)
    unsorted = permute(
        block, back, "rows of tokens", (dims.rows, hidden), RowIndices(read=(order,))
    )
    wide = weighted_by(block, unsorted, view(block, shares, dims.rows))
    total = _summed(block, wide, dims, copies_back=False)
    block.hold(order, *names, made, back, unsorted)
    return cast(block, total, "experts out", block.width)


def _inverse(block: Block, rows: Tensor) -> Tensor:
    """Return the inverse permutation of *rows*: recomputation stops at it, not at rows."""
    return block.add([rows], [row_indices(rows, "inverse order")], [])


def _summed(block: Block, wide: Tensor, dims: RoutedDims, *, copies_back: bool) -> Tensor:
    """Return the sums of each token's rows; backward expands the gradient, perhaps by a copy."""
    by_token = view(block, wide, dims.tokens, dims.chosen, wide.dims[-1])
    total = by_token.like("sums", dims=(dims.tokens, wide.dims[-1]))
    work, back = block.traffic(by_token, total), Gradient(by_token, passes_through=not copies_back)
    return block.add([by_token], [total], [back], work)


def _local_experts(
    block: Block, received: Tensor, ones: Tensor, dims: RoutedDims, experts: Experts
) -> Tensor:
    """Return the local experts' output of *received* rows, in their order.

    A mask zeroes rows of no local expert, though there are none, before the first GEMM and after
    each.
    """
    hidden = received.dims[-1]
    rows = gather_rows(block, received, "rows by expert", (dims.arrived, hidden)).values
    order, weights = row_indices(rows, "order by expert"), ones.like("weights of rows")
    block.add([ones], [weights, order], [])
    names, offsets = _counted(block, rows, dims)
    mask = rows.like("rows of no expert", dims=rows.dims[:1], width=MASK_BYTES)
    block.add([names[0]], [mask], [])
    cleared = pointwise(
        block, "cleared rows", rows, reads=Reads.NOTHING, in_place=True, beside=(mask,)
    )
    made = _grouped_mlp(block, cleared, experts, dims, SortedRows(offsets, names[0], mask))
    wide = pointwise(block, "weighted rows", made, reads=Reads.NOTHING, beside=(weights,))
    inverse = _inverse(block, rows)
    wide = permute(
        block, wide, "rows in order", (dims.arrived, hidden), RowIndices(read=(inverse,))
    )
    out = wide.like("sums of one row")
    out = pass_through(block, [wide], out, block.traffic(wide, out))
    block.hold(cleared, made, wide, order, *names)
    return out


def _counted(block: Block, rows: Tensor, dims: RoutedDims) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the local variables of sorting *rows*, expert ids first, and the experts' offsets.

    Tokens per expert are counted on int32 ids (``histc``).
    """
    local_experts = Dim("own experts", dims.num_local)
    each = rows.like("rows of experts", dims=(local_experts,), at={}, width=INT32_BYTES)
    offsets = each.like("starts of experts")
    names = row_indices(rows, "sorted"), row_indices(rows, "counted", INT32_BYTES), each
    block.add([rows], [*names, offsets], [])
    return names, offsets


def _scaled_shares(block: Block, logits: Tensor, experts: Experts, dims: RoutedDims) -> Tensor:
    """Return scaled routing weights (routed_scaling_factor).

    DeepSeek-V3 normalises them, DeepSeek-V2 does not; V2 masks the scores of other groups, V3 masks
    copies that it frees once it has chosen (`DeepseekV2TopkRouter` and
    `DeepseekV3TopkRouter` of transformers 5.23).
    """
    few = dims.tokens, dims.chosen
    scores = pointwise(block, "expert scores", logits, reads=Reads.OUTPUT)
    if experts.leaves_shares and experts.num_groups > 1:
        mask = scores.like("experts of other groups", width=MASK_BYTES)
        block.add([scores], [mask], [])
        scores = pointwise(block, "cleared scores", scores, reads=Reads.NOTHING, beside=(mask,))
    shares = gather_rows(block, scores, "shares", few).values
    if not experts.leaves_shares:
        shares = normalised(block, shares, in_place=True)
    return pointwise(block, "scaled shares", shares, reads=Reads.NOTHING)


def _shares(block: Block, logits: Tensor, experts: Experts, dims: RoutedDims) -> Tensor:
    """Return routing weights, in the dtype that multiplies the experts' output."""
    few = dims.tokens, dims.chosen
    if experts.scores == "softmax of chosen":
        chosen = gather_rows(block, logits, "chosen logits", few).values
        return pointwise(block, "shares", chosen, reads=Reads.OUTPUT)
    scores = score(block, logits)
    shares = gather_rows(block, scores, "shares", few).values
    shares = normalised(block, shares, in_place=True)
    return cast(block, shares, "shares cast", block.width) if experts.casts_shares else shares


class SortedRows(NamedTuple):
    """Index tensors of sorted rows.

    Args:
        offsets: Offsets of each expert's rows.
        expert_ids: Expert id of each row.
        mask: Rows of no local expert, under expert parallelism.
    """

    offsets: Tensor
    expert_ids: Tensor
    mask: Tensor | None = None


def _grouped_mlp(
    block: Block, rows: Tensor, experts: Experts, dims: RoutedDims, sorted_rows: SortedRows
) -> Tensor:
    """Return the experts' output of sorted *rows*.

    A local variable keeps the gathered biases until those of the next GEMM replace them.
    """
    hidden, parts, both = rows.dims[-1], (dims.gate, dims.up), dims.first
    offsets, expert_ids, mask = sorted_rows
    first = [_biases(block, rows, both, dims, expert_ids)] if experts.bias else []
    inner = grouped_gemm(block, rows, both, dims, split=both, reads=(offsets,))
    inner = _zeroed_rows(block, _add_biases(block, inner, *first), mask)
    if experts.activation == "clamped":
        inner = clamped(block, inner, parts, dims.inner, by_slices=True)
    else:
        inner = activation(block, inner, parts=parts, last=dims.inner)
    second = [_biases(block, rows, hidden, dims, expert_ids)] if experts.bias else []
    block.hold(*first)
    made = grouped_gemm(block, inner, hidden, dims, split=dims.inner, reads=(offsets,))
    made = _zeroed_rows(block, _add_biases(block, made, *second), mask)
    block.hold(*second)
    return made


def _zeroed_rows(block: Block, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return *x* with the rows of *mask* zeroed, if there is one."""
    if mask is None:
        return x
    return pointwise(block, f"{x.name} cleared", x, reads=Reads.NOTHING, beside=(mask,))


def _biases(block: Block, rows: Tensor, out: Dim, dims: RoutedDims, of: Tensor) -> Tensor:
    """Return the bias of each row's expert, gathered by expert id."""
    at: Placement = {ExpertAxis.EP: dims.experts}
    weight = block.weight(f"expert {out.name}.bias", dims.experts, out, at=at)
    made = rows.like(f"{out.name} biases", dims=(rows.dims[0], out), width=block.width)
    traffic = block.traffic(made, made)
    back = Gradient(weight, (of,), (traffic,), at=weight.at)
    return block.add([weight], [made], [back], traffic)


def _add_biases(block: Block, x: Tensor, *biases: Tensor) -> Tensor:
    """Return *x* plus *biases*, if any, in place."""
    for each in biases:
        out = x.like(f"{x.name} biased", base=x.storage)
        x = pass_through(block, [x, each], out, block.traffic(x, x, each))
    return x
