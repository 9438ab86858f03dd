"""Routed experts of Megatron-Core, with expert tensor parallelism.

Tokens are permuted by expert, dispatched by all-to-all, gathered over expert tp, and on a rank with
several local experts sorted once more
(`MoEAlltoAllTokenDispatcher` of megatron/core/transformer/moe/token_dispatcher.py, core 0.16).
"""

from meshwright.hwprofiles import CollectiveOp, OffloadModule, RecomputeModule
from meshwright.simulator.blocks.parts.clamped import bounded, clamped
from meshwright.simulator.blocks.parts.feed_forward import Shared, gated
from meshwright.simulator.blocks.parts.routed_dims import RoutedDims
from meshwright.simulator.blocks.parts.routing import (
    INT32_BYTES,
    RowIndices,
    all_to_all_rows,
    drop_tokens,
    gather_rows,
    grouped_gemm,
    logits_of,
    normalised,
    permute,
    row_indices,
    score,
)
from meshwright.simulator.graph import (
    NUMBER_BYTES,
    STATISTIC_BYTES,
    Activation,
    Block,
    Dim,
    Gradient,
    Placement,
    Reads,
    Tensor,
    Traffic,
    Transfer,
    activation,
    biased,
    cast,
    common,
    last_dim,
    pass_through,
    place,
    pointwise,
    product,
    view,
)
from meshwright.simulator.layout import ExpertAxis
from meshwright.simulator.model import Experts


def megatron(
    block: Block, x: Tensor, experts: Experts, dims: RoutedDims, shared: Shared | None
) -> Tensor:
    """Return the output of shared and routed experts; the shared ones run first."""
    shared_output = None if shared is None else _shared_experts(block, x, shared)
    flat = dims.flat(block, x)
    shares = _routing_weights(block, flat, experts, dims)
    shares = (_gather_counts if dims.mesh.capacity is None else drop_tokens)(block, shares, dims)
    named: list[Tensor] = []
    if block.lowering.groups_experts:
        out = _fused_permutation(block, flat, shares, dims, experts)
    else:
        out, *named = _sequential_experts(block, flat, shares, dims, experts)
    out = view(block, out, *x.dims, renamed=(dims.tokens, x.dims[0]))
    if shared_output is not None:
        traffic = block.traffic(x, x, x)
        out = pass_through(block, [out, shared_output], out.like("all experts out"), traffic)
    block.hold(*named)
    return out


def _shared_experts(block: Block, x: Tensor, shared: Shared) -> Tensor:
    """Return the shared experts' output of all tokens, weighted by their gate if they have one."""
    with block.part(RecomputeModule.SHARED_EXPERTS), block.module(x):
        out = shared.write(block, x)
        return gated(block, x, out) if shared.has_gate else out


def _routing_weights(block: Block, flat: Tensor, experts: Experts, dims: RoutedDims) -> Tensor:
    """Return routing weights over all experts, most 0 (topk_routing_with_score_function)."""
    logits = logits_of(block, flat, dims, bias=experts.bias)
    few = (dims.tokens, dims.chosen)
    if experts.scores != "sigmoid":
        chosen, places = gather_rows(block, logits, "chosen logits", few)
        shares = cast(block, score(block, chosen), "shares cast", block.width)
    else:
        scores = cast(block, score(block, logits), "scores cast", block.width)
        shares, places = gather_rows(block, scores, "chosen scores", few)
        if not experts.weighs_inputs:  # with top-1 there is nothing to normalise
            shares = normalised(block, shares)
            shares = pointwise(block, "scaled shares", shares, reads=Reads.NOTHING)
    spread = logits.like("spread shares")
    traffic = block.traffic(shares, spread)
    return block.add([shares], [spread], [Gradient(shares, (places,), (traffic,))], traffic)


def _gather_counts(block: Block, shares: Tensor, dims: RoutedDims) -> Tensor:
    """All-gather the tokens per expert over ep and expert tp (preprocess of the dispatcher)."""
    axis = dims.mesh.group
    if axis not in block.mesh:
        return shares
    size = NUMBER_BYTES * dims.experts.size * block.mesh[axis]
    gathered = shares.like(shares.name, base=shares.storage)
    return pass_through(block, [shares], gathered, Transfer(CollectiveOp.ALL_GATHER, axis, size))


def _fused_permutation(
    block: Block, flat: Tensor, shares: Tensor, dims: RoutedDims, experts: Experts
) -> Tensor:
    """Return the experts' output by Transformer Engine's fused permutation.

    Tokens and routing weights are permuted by a row map of ``2 E + 1`` integers a token
    (transformer_engine/common/triton/permutation.py), and once more by chunks of each expert; the
    activation's kernel applies the weights (weighted_bias_swiglu_impl of core 0.16).
    """
    hidden = flat.dims[-1]
    at = dims.rows_at(flat)
    if dims.mesh.widens_shares:
        shares = cast(block, shares, "shares in fp32", STATISTIC_BYTES)
    entries = Dim("entries of a token", 2 * dims.experts.size + 1)
    row_map = shares.like("row map", dims=(dims.tokens, entries), width=INT32_BYTES)
    rows = permute(block, flat, "rows", (dims.rows, hidden), RowIndices(made=(row_map,)), at)
    weights = permute(block, shares, "weights of rows", (dims.rows,), RowIndices((row_map,)), at)
    permuted = rows
    arrived = [all_to_all_rows(block, each, dims) for each in (rows, weights)]
    rows, weights = _sorted_by_expert(block, arrived, dims)
    made = _grouped_mlp(block, rows, weights, dims, experts)
    made = _combined(block, made, rows, at, dims)
    block.hold(permuted, arrived[0])
    return permute(block, made, "experts out", flat.dims, RowIndices((row_map,)), flat.at)


def _grouped_mlp(
    block: Block, rows: Tensor, weights: Tensor, dims: RoutedDims, experts: Experts
) -> Tensor:
    """Return the experts' output of sorted *rows* by grouped GEMMs (TEGroupedMLP of core 0.16).

    In fp8 rows are padded to the GEMM's alignment, by a copy before and one after (Fp8Padding of
    Transformer Engine 1.12 to 2.9).  The activation may be discarded after the last GEMM.
    """
    hidden, permuted, bits = rows.dims[-1], rows, block.lowering.eight_bits
    pads = bits is not None and bits.pads_experts
    if pads:
        rows = permute(block, rows, "rows filled up", rows.dims)
    if experts.weighs_inputs:
        rows, weights = _weighted_rows(block, rows, weights, dims)
        block.hold(permuted)
    with block.part(OffloadModule.EXPERT_FC1):
        inner = grouped_gemm(block, rows, dims.first, dims, split=dims.first)
    if experts.bias:
        inner = _fused_bias(block, inner, dims)
    with block.part(RecomputeModule.MOE_ACT):
        activate = _fused_activation if experts.gated else _activation
        activated = activate(block, inner, weights, dims, experts)
    made = grouped_gemm(block, activated, hidden, dims, split=dims.inner)
    block.discard(RecomputeModule.MOE_ACT, activated)
    if pads:
        made = permute(block, made, "rows as they came", made.dims)
    if not experts.bias:
        return made
    if bits is not None and bits.fuses_expert_activation:
        return _fused_bias(block, made, dims, weights)
    out = _with_biases(block, made, weights, dims)
    block.hold(made)
    return out


def _with_biases(block: Block, made: Tensor, weights: Tensor, dims: RoutedDims) -> Tensor:
    """Return rows plus their experts' biases times the routing weights, in the rows' dtype.

    They are added expert by expert, and the results concatenated, all in the weights' dtype where
    that is wider (`_apply_bias` of TEGroupedMLP, core 0.16).  Backward concatenates the rows'
    gradient, and multiplies and sums for the bias and for the weights.
    """
    hidden = made.dims[-1]
    at: Placement = {ExpertAxis.EP: dims.experts}
    weight = block.weight(f"expert {hidden.name}.bias", dims.experts, hidden, at=at)
    wide = max(made.width, weights.width)
    added, joined = (
        made.like(name, width=wide) for name in ("rows with biases", "outputs with biases")
    )
    apart = made.like("weighed biases", width=wide)
    rows, weighed = Traffic(2 * made.nbytes), Traffic(2 * apart.nbytes, apart.numel)
    sums = weighed, Traffic(apart.nbytes)
    narrows = (Traffic(apart.nbytes + made.nbytes),) if wide > made.width else ()
    gradients = [
        Gradient(made, (), (*narrows, rows)),
        Gradient(weights, (weights,), sums, at=weights.at),
        Gradient(weight, (weights,), sums, at=weight.at),
    ]
    work = Traffic(apart.nbytes, apart.numel), Traffic(2 * apart.nbytes + made.nbytes)
    added = block.add([made, weights, weight], [added], gradients, *work)
    joined = pass_through(block, [added], joined, Traffic(added.nbytes + joined.nbytes))
    return cast(block, joined, "outputs cast", made.width)


def _fused_activation(
    block: Block, inner: Tensor, weights: Tensor, dims: RoutedDims, experts: Experts
) -> Tensor:
    """Return weighted SwiGLU in one kernel.

    Clamped gate and up are a copy of the GEMM's output, which stays.  With a fused activation in
    the grouped GEMMs, forward and backward, there is no traffic of its own.
    """
    bits = block.lowering.eight_bits
    is_free = bits is not None and bits.fuses_expert_activation
    if experts.activation == "clamped" and not is_free:
        parts = bounded(block, inner, (dims.gate, dims.up), by_slices=False)
        inner = pass_through(block, parts, inner.like("bounded"), block.traffic(inner, inner))
    out = last_dim(inner, "activation", dims.inner)
    traffic = () if is_free else (block.traffic(inner, out),)
    back = () if is_free else (block.traffic(inner, inner, out),)
    gradients = [Gradient(inner, (inner, weights), back, at=inner.at)]
    unused: tuple[Tensor, ...] = ()
    if experts.weighs_inputs:  # the kernel also makes the gradient of its weights, all ones
        unused = (weights.like("gradient of ones"),)
    else:
        gradients.append(Gradient(weights, (inner, weights), at=dims.partial(block)))
    return block.add([inner, weights], [out], gradients, *traffic, scratch=((), unused))


def _activation(
    block: Block, inner: Tensor, weights: Tensor, dims: RoutedDims, experts: Experts
) -> Tensor:
    """Return activations times routing weights, in a kernel of its own."""
    if experts.activation == "clamped":
        activated = clamped(block, inner, (dims.gate, dims.up), dims.inner, by_slices=False)
    else:
        kind = Activation.SQUARED_RELU if experts.activation == "squared relu" else Activation.GELU
        activated = activation(block, inner, parts=dims.parts, last=dims.inner, kind=kind)
    made = activated.like("weighted activation")
    traffic = block.traffic(activated, made)
    if experts.weighs_inputs:
        slope = Gradient(activated, (weights,), (traffic,))
        return block.add([activated, weights], [made], [slope], traffic)
    products = (made.like("gradient of weights"),)
    gradients = [
        Gradient(activated, (activated, weights), (traffic, traffic)),
        Gradient(weights, (activated, weights), at=dims.partial(block)),
    ]
    return block.add([activated, weights], [made], gradients, traffic, scratch=((), products))


def _fused_bias(
    block: Block, made: Tensor, dims: RoutedDims, weights: Tensor | None = None
) -> Tensor:
    """Return a grouped GEMM's output with each expert's bias, added in its epilogue.

    The second GEMM's bias is times *weights*, and one kernel makes both gradients; the first's
    comes out of the fused activation's backward (`BackwardGroupedMLP` of Transformer Engine 2.16).
    """
    out, bits = made.dims[-1], block.lowering.eight_bits
    is_free = weights is None and bits is not None and bits.fuses_expert_activation
    split: Placement = {dims.mesh.split_on: out} if weights is None else {}
    at: Placement = {ExpertAxis.EP: dims.experts, **split}
    vector = block.weight(f"expert {out.name}.bias", dims.experts, out, at=at)
    read = () if weights is None else (weights,)
    summed = () if is_free else (block.traffic(made),)
    slopes = [
        Gradient(made, passes_through=True),
        *(Gradient(each, read, at=each.at) for each in read),
    ]
    slopes.append(Gradient(vector, read, summed, at=vector.at))
    outputs = [made.like(made.name, base=made.storage)]
    return block.add([made, *read, vector], outputs, slopes)


def _weighted_rows(
    block: Block, rows: Tensor, weights: Tensor, dims: RoutedDims
) -> tuple[Tensor, Tensor]:
    """Return *rows* times their routing weights, before experts, and ones as weights after them."""
    made, products = rows.like("weighed rows"), rows.like("gradient of weights")
    traffic = block.traffic(rows, made)
    read = (weights, rows)
    gradients = [
        Gradient(weights, read, at=dims.partial(block)),
        Gradient(rows, read, (traffic, traffic)),
    ]
    made = block.add([weights, rows], [made], gradients, traffic, scratch=((), (products,)))
    ones = weights.like("ones")
    block.add([made], [ones], [])
    return made, ones


def _sorted_by_expert(block: Block, arrived: list[Tensor], dims: RoutedDims) -> list[Tensor]:
    """Return rows and weights gathered over expert tp and sorted by local expert."""
    gathered = []
    for each in arrived:
        whole: Placement = {axis: dim for axis, dim in each.at.items() if dim is not dims.arrived}
        gathered.append(place(block, each, whole))
    if dims.mesh.has_one:
        return gathered
    names = "sorted rows", "sorted weights"
    return [permute(block, x, name, x.dims) for x, name in zip(gathered, names, strict=True)]


def _combined(
    block: Block,
    outputs: Tensor,
    rows: Tensor,
    at: Placement,
    dims: RoutedDims,
    counts: tuple[Tensor, ...] = (),
) -> Tensor:
    """Return the experts' output on the tokens' ranks; *counts* (tokens per expert) reorder it."""
    made = outputs
    if not dims.mesh.has_one:
        reordered = tuple(each.like(each.name) for each in counts)
        made = permute(block, made, "unsorted rows", made.dims, RowIndices(temporary=reordered))
    lies = {axis: dims.arrived if dim is dims.rows else dim for axis, dim in at.items()}
    made = place(block, made, lies)
    block.hold(outputs, rows)
    return all_to_all_rows(block, made, dims, back=True)


def _sequential_experts(
    block: Block, flat: Tensor, shares: Tensor, dims: RoutedDims, experts: Experts
) -> list[Tensor]:
    """Return the output of sequential experts, each with GEMMs of its own.

    Beyond its pass the dispatcher's routing weights, map and tokens per expert are not counted
    (SequentialMLP of megatron/core/transformer/moe/experts.py).  After the output come tensors in
    local variables until the layer returns (custom_forward of MoELayer.forward, core 0.16).
    """
    hidden, at = flat.dims[-1], dims.rows_at(flat)
    mask, mask_by_expert = (shares.like(name, width=1) for name in ("mask", "mask by expert"))
    by_expert, counts = shares.like("shares by expert"), _tokens_per_expert(block, shares, dims)
    views = [by_expert, mask, mask_by_expert, *counts]
    block.add([shares], views, [Gradient(shares, passes_through=True)])
    indices_by_expert = RowIndices((by_expert, mask_by_expert))
    weights = permute(block, by_expert, "weights of rows", (dims.rows,), indices_by_expert, at)
    order = row_indices(flat.like("rows", dims=(dims.rows, hidden), at=at), "order of rows")
    permuted = permute(block, flat, "rows", (dims.rows, hidden), RowIndices(made=(order,)), at)
    arrived = [all_to_all_rows(block, each, dims) for each in (permuted, weights)]
    rows, sent = _sorted_by_expert(block, arrived, dims)
    read = _weighted_rows(block, rows, sent, dims) if experts.weighs_inputs else (rows, sent)
    num = common(dims.num_local)  # another number of experts is another structure
    part = Dim("rows of an expert", dims.arrived.size // num)
    parts = [_rows(block, each, part, num) for each in read]
    outs = [_expert(block, row, weight, dims, experts) for row, weight in zip(*parts, strict=True)]
    made = outs[0].like("outputs", dims=(dims.arrived, hidden))
    made = pass_through(block, outs, made, block.traffic(made, made))
    block.hold(*outs, *read)
    made = _combined(block, made, rows, at, dims, counts if dims.mesh.group in block.mesh else ())
    out = permute(block, made, "experts out", flat.dims, RowIndices((order,)), flat.at)
    return [out, permuted, *arrived, made, shares, mask, *counts]


def _tokens_per_expert(block: Block, shares: Tensor, dims: RoutedDims) -> tuple[Tensor, ...]:
    """Return tokens per local expert and sending rank, on a rank with several experts."""
    if dims.mesh.has_one:
        return ()
    ranks = block.mesh.get(dims.mesh.group, 1) // dims.mesh.ranks
    local_experts = Dim("own experts by rank", dims.experts.size * ranks)
    return (shares.like("rows of experts", dims=(local_experts,), at={}, width=NUMBER_BYTES),)


def _rows(block: Block, x: Tensor, expert_rows: Dim, num: int) -> list[Tensor]:
    """Return views of each expert's rows (``torch.split``); backward concatenates."""
    dims = (expert_rows, *x.dims[1:])
    views = [x.like(f"{x.name} of an expert", dims=dims, base=x.storage) for _ in range(num)]
    block.add([x], views, [Gradient(x)])
    return views


def _expert(block: Block, x: Tensor, weights: Tensor, dims: RoutedDims, experts: Experts) -> Tensor:
    """Return one expert's output: an MLP with weighted activations."""
    hidden = x.dims[-1]
    first = Dim("gate and up" if experts.gated else "up", dims.first.size)
    inner = _linear(block, x, first, first, dims)
    if experts.bias:
        inner = biased(block, inner, "expert gate and up")
    made = _activation(block, inner, weights, dims, experts)
    out = _linear(block, made, hidden, dims.inner, dims)
    return _with_bias(block, out, weights) if experts.bias else out


def _with_bias(block: Block, out: Tensor, weights: Tensor) -> Tensor:
    """Return an expert's output plus its weighted bias, in place."""
    hidden = out.dims[-1]
    vector = block.weight(f"expert {hidden.name}.bias", hidden)
    spread = out.like("weighed bias")
    products = tuple(out.like("gradient of bias") for _ in range(2))
    work = block.traffic(out)
    gradients = [
        Gradient(vector, (weights,), (work,), at={}),
        Gradient(weights, (weights,), (work,), at=weights.at),
    ]
    spread = block.add([weights, vector], [spread], gradients, work, scratch=((), products))
    made = out.like("outputs with bias", base=out.storage)
    return pass_through(block, [out, spread], made, block.traffic(out, out, out))


def _linear(block: Block, x: Tensor, out: Dim, split: Dim, dims: RoutedDims) -> Tensor:
    """Return one expert's linear layer, whose weight is split over expert tp."""
    at = {dims.mesh.split_on: split}
    weight = block.weight(f"expert {out.name}.weight", out, x.dims[-1], at=at)
    return product(block, out.name, (x, weight), x.dims[0], out)
