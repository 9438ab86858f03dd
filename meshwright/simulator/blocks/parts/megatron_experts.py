"""Routed experts as Megatron-Core dispatches and runs them, with an axis that splits widths.

Tokens are sorted by expert on their own rank and sent to the ranks with these experts, all ranks of
an expert gather each other's, and a rank with several experts sorts them once more
(`MoEAlltoAllTokenDispatcher` of megatron/core/transformer/moe/token_dispatcher.py, core 0.16).
"""

from meshwright.hwprofiles import CollectiveOp, OffloadModule, RecomputeModule
from meshwright.simulator.blocks.parts.clamped import bounded, clamped
from meshwright.simulator.blocks.parts.feed_forward import Shared, gated
from meshwright.simulator.blocks.parts.routed_dims import RoutedDims
from meshwright.simulator.blocks.parts.routing import (
    INT32_BYTES,
    Numbers,
    dropped,
    exchanged,
    grouped,
    logits_of,
    moved,
    normalised,
    numbers,
    score,
    taken,
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
    handed_on,
    last_dim,
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
    """Return what shared and routed experts make of tokens: the shared ones run first."""
    beside = None if shared is None else _of_all(block, x, shared)
    flat = dims.flat(block, x)
    shares = _shares(block, flat, experts, dims)
    shares = (_told if dims.mesh.capacity is None else dropped)(block, shares, dims)
    named: list[Tensor] = []
    if block.lowering.groups_experts:
        out = _fused(block, flat, shares, dims, experts)
    else:
        out, *named = _sequential(block, flat, shares, dims, experts)
    out = view(block, out, *x.dims, renamed=(dims.tokens, x.dims[0]))
    if beside is not None:
        out = handed_on(block, [out, beside], out.like("all experts out"), block.traffic(x, x, x))
    block.hold(*named)
    return out


def _of_all(block: Block, x: Tensor, shared: Shared) -> Tensor:
    """Return what shared experts make of all tokens, weighed where they have a gate."""
    with block.part(RecomputeModule.SHARED_EXPERTS), block.module(x):
        out = shared.write(block, x)
        return gated(block, x, out) if shared.has_gate else out


def _shares(block: Block, flat: Tensor, experts: Experts, dims: RoutedDims) -> Tensor:
    """Return each token's shares of all experts: most are 0 (topk_routing_with_score_function)."""
    logits = logits_of(block, flat, dims, bias=experts.bias)
    few = (dims.tokens, dims.chosen)
    if experts.scores != "sigmoid":
        chosen, places = taken(block, logits, "chosen logits", few)
        shares = cast(block, score(block, chosen), "shares cast", block.width)
    else:
        scores = cast(block, score(block, logits), "scores cast", block.width)
        shares, places = taken(block, scores, "chosen scores", few)
        if not experts.weighs_inputs:  # of one expert a token there is nothing to divide by
            shares = normalised(block, shares)
            shares = pointwise(block, "scaled shares", shares, reads=Reads.NOTHING)
    spread = logits.like("spread shares")
    traffic = block.traffic(shares, spread)
    return block.add([shares], [spread], [Gradient(shares, (places,), (traffic,))], traffic)


def _told(block: Block, shares: Tensor, dims: RoutedDims) -> Tensor:
    """Tell all ranks that share the experts how many rows each has for each of them."""
    axis = dims.mesh.told
    if axis not in block.mesh:
        return shares
    size = NUMBER_BYTES * dims.experts.size * block.mesh[axis]
    told = shares.like(shares.name, base=shares.storage)
    return handed_on(block, [shares], told, Transfer(CollectiveOp.ALL_GATHER, axis, size))


def _fused(
    block: Block, flat: Tensor, shares: Tensor, dims: RoutedDims, experts: Experts
) -> Tensor:
    """Return what experts make of tokens in Transformer Engine's kernels.

    Tokens are sorted, with their shares, by a map of ``2 E + 1`` numbers a token
    (transformer_engine/common/triton/permutation.py), and once more by chunks of each expert; the
    activation's kernel weighs what it makes (weighted_bias_swiglu_impl of core 0.16).
    """
    hidden = flat.dims[-1]
    at = dims.rows_at(flat)
    if dims.mesh.widens_shares:
        shares = cast(block, shares, "shares in fp32", STATISTIC_BYTES)
    entries = Dim("entries of a token", 2 * dims.experts.size + 1)
    row_map = shares.like("row map", dims=(dims.tokens, entries), width=INT32_BYTES)
    rows = moved(block, flat, "rows", (dims.rows, hidden), Numbers(made=(row_map,)), at)
    weights = moved(block, shares, "weights of rows", (dims.rows,), Numbers((row_map,)), at)
    given = rows
    arrived = [exchanged(block, each, dims) for each in (rows, weights)]
    rows, weights = _sorted(block, arrived, dims)
    made = _multiplied(block, rows, weights, dims, experts)
    made = _returned(block, made, rows, at, dims)
    block.hold(given, arrived[0])
    return moved(block, made, "experts out", flat.dims, Numbers((row_map,)), flat.at)


def _multiplied(
    block: Block, rows: Tensor, weights: Tensor, dims: RoutedDims, experts: Experts
) -> Tensor:
    """Return what experts make of sorted *rows* in grouped products (TEGroupedMLP of core 0.16).

    In 8 bits their numbers are filled up to what a product takes, by a copy there and one back
    (Fp8Padding of Transformer Engine 1.12 to 2.9).  The last product may give up what it reads.
    """
    hidden, given, bits = rows.dims[-1], rows, block.lowering.eight_bits
    fills_up = bits is not None and bits.pads_experts
    if fills_up:
        rows = moved(block, rows, "rows filled up", rows.dims)
    if experts.weighs_inputs:
        rows, weights = _weighed(block, rows, weights, dims)
        block.hold(given)
    with block.part(OffloadModule.EXPERT_FC1):
        inner = grouped(block, rows, dims.first, dims, split=dims.first)
    if experts.bias:
        inner = _in_product(block, inner, dims)
    with block.part(RecomputeModule.MOE_ACT):
        opens = _opened_at_once if experts.gated else _opened
        opened = opens(block, inner, weights, dims, experts)
    made = grouped(block, opened, hidden, dims, split=dims.inner)
    block.discard(RecomputeModule.MOE_ACT, opened)
    if fills_up:
        made = moved(block, made, "rows as they came", made.dims)
    if not experts.bias:
        return made
    if bits is not None and bits.fuses_expert_activation:
        return _in_product(block, made, dims, weights)
    out = _with_biases(block, made, weights, dims)
    block.hold(made)
    return out


def _with_biases(block: Block, made: Tensor, weights: Tensor, dims: RoutedDims) -> Tensor:
    """Return rows with the weighed biases of their experts, in the format of rows.

    They are added to the rows of each expert by themselves, which are put together again.  A bias
    times its rows' weights, the sum and what puts the parts together are in the format of weights
    where that is wider (`_apply_bias` of TEGroupedMLP, core 0.16).  Backward puts the parts of the
    rows' gradient together, and multiplies and sums for a bias and for the weights.
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
    joined = handed_on(block, [added], joined, Traffic(added.nbytes + joined.nbytes))
    return cast(block, joined, "outputs cast", made.width)


def _opened_at_once(
    block: Block, inner: Tensor, weights: Tensor, dims: RoutedDims, experts: Experts
) -> Tensor:
    """Return weighed activations, which one kernel makes of a gate and a value.

    What is bounded is a copy beside the product, which keeps it.  Where the products open what
    they make, and backward what they take, nothing is read or written for it beside them.
    """
    bits = block.lowering.eight_bits
    is_free = bits is not None and bits.fuses_expert_activation
    if experts.activation == "clamped" and not is_free:
        parts = bounded(block, inner, (dims.gate, dims.up), by_slices=False)
        inner = handed_on(block, parts, inner.like("bounded"), block.traffic(inner, inner))
    out = last_dim(inner, "activation", dims.inner)
    traffic = () if is_free else (block.traffic(inner, out),)
    back = () if is_free else (block.traffic(inner, inner, out),)
    gradients = [Gradient(inner, (inner, weights), back, at=inner.at)]
    unused: tuple[Tensor, ...] = ()
    if experts.weighs_inputs:  # the kernel makes the gradient of ones, too
        unused = (weights.like("gradient of ones"),)
    else:
        gradients.append(Gradient(weights, (inner, weights), at=dims.partial(block)))
    return block.add([inner, weights], [out], gradients, *traffic, scratch=((), unused))


def _opened(
    block: Block, inner: Tensor, weights: Tensor, dims: RoutedDims, experts: Experts
) -> Tensor:
    """Return activations, and weights times them in a kernel of its own."""
    if experts.activation == "clamped":
        opened = clamped(block, inner, (dims.gate, dims.up), dims.inner, by_slices=False)
    else:
        kind = Activation.SQUARED_RELU if experts.activation == "squared relu" else Activation.GELU
        opened = activation(block, inner, parts=dims.parts, last=dims.inner, kind=kind)
    made = opened.like("weighted activation")
    traffic = block.traffic(opened, made)
    if experts.weighs_inputs:
        slope = Gradient(opened, (weights,), (traffic,))
        return block.add([opened, weights], [made], [slope], traffic)
    twice = (made.like("gradient of weights"),)
    gradients = [
        Gradient(opened, (opened, weights), (traffic, traffic)),
        Gradient(weights, (opened, weights), at=dims.partial(block)),
    ]
    return block.add([opened, weights], [made], gradients, traffic, scratch=((), twice))


def _in_product(
    block: Block, made: Tensor, dims: RoutedDims, weights: Tensor | None = None
) -> Tensor:
    """Return what a grouped product made with the bias of each expert, which its kernel adds.

    Last ones are times *weights*, and one kernel makes the gradients of both; the first's come out
    of the kernel that opens backward (`BackwardGroupedMLP` of Transformer Engine 2.16).
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


def _weighed(
    block: Block, rows: Tensor, weights: Tensor, dims: RoutedDims
) -> tuple[Tensor, Tensor]:
    """Return *rows* times their weights, before experts, and ones in the place of these."""
    made, twice = rows.like("weighed rows"), rows.like("gradient of weights")
    traffic = block.traffic(rows, made)
    read = (weights, rows)
    gradients = [
        Gradient(weights, read, at=dims.partial(block)),
        Gradient(rows, read, (traffic, traffic)),
    ]
    made = block.add([weights, rows], [made], gradients, traffic, scratch=((), (twice,)))
    ones = weights.like("ones")
    block.add([made], [ones], [])
    return made, ones


def _sorted(block: Block, arrived: list[Tensor], dims: RoutedDims) -> list[Tensor]:
    """Return rows and weights of all ranks of an expert in the order of a rank's experts."""
    found = []
    for each in arrived:
        whole: Placement = {axis: dim for axis, dim in each.at.items() if dim is not dims.arrived}
        found.append(place(block, each, whole))
    if dims.mesh.has_one:
        return found
    names = "sorted rows", "sorted weights"
    return [moved(block, x, name, x.dims) for x, name in zip(found, names, strict=True)]


def _returned(
    block: Block,
    outputs: Tensor,
    rows: Tensor,
    at: Placement,
    dims: RoutedDims,
    counts: tuple[Tensor, ...] = (),
) -> Tensor:
    """Return what experts made of *rows* on the ranks that these came from, in their order.

    Numbers of rows by expert, *counts*, are put in the order of ranks for it.
    """
    made = outputs
    if not dims.mesh.has_one:
        turned = tuple(each.like(each.name) for each in counts)
        made = moved(block, made, "unsorted rows", made.dims, Numbers(turned=turned))
    lies = {axis: dims.arrived if dim is dims.rows else dim for axis, dim in at.items()}
    made = place(block, made, lies)
    block.hold(outputs, rows)
    return exchanged(block, made, dims, back=True)


def _sequential(
    block: Block, flat: Tensor, shares: Tensor, dims: RoutedDims, experts: Experts
) -> list[Tensor]:
    """Return what experts make of tokens one after the other, each in products of its own.

    The dispatcher has names for all shares, the mask of those that are not 0 and the rows of each
    expert; that it remembers them until its next pass is not counted (SequentialMLP of
    megatron/core/transformer/moe/experts.py).  Behind the result comes what has a name until the
    layer's own pass is over (custom_forward of MoELayer.forward, core 0.16).
    """
    hidden, at = flat.dims[-1], dims.rows_at(flat)
    mask, turned = (shares.like(name, width=1) for name in ("mask", "mask by expert"))
    by_expert, counts = shares.like("shares by expert"), _counts(block, shares, dims)
    views = [by_expert, mask, turned, *counts]
    block.add([shares], views, [Gradient(shares, passes_through=True)])
    known = Numbers((by_expert, turned))
    weights = moved(block, by_expert, "weights of rows", (dims.rows,), known, at)
    order = numbers(flat.like("rows", dims=(dims.rows, hidden), at=at), "order of rows")
    given = moved(block, flat, "rows", (dims.rows, hidden), Numbers(made=(order,)), at)
    arrived = [exchanged(block, each, dims) for each in (given, weights)]
    rows, sent = _sorted(block, arrived, dims)
    read = _weighed(block, rows, sent, dims) if experts.weighs_inputs else (rows, sent)
    num = common(dims.num_local)  # shapes with others are other structures
    part = Dim("rows of an expert", dims.arrived.size // num)
    parts = [_rows(block, each, part, num) for each in read]
    outs = [_expert(block, row, own, dims, experts) for row, own in zip(*parts, strict=True)]
    made = outs[0].like("outputs", dims=(dims.arrived, hidden))
    made = handed_on(block, outs, made, block.traffic(made, made))
    block.hold(*outs, *read)
    made = _returned(block, made, rows, at, dims, counts if dims.mesh.told in block.mesh else ())
    out = moved(block, made, "experts out", flat.dims, Numbers((order,)), flat.at)
    return [out, given, *arrived, made, shares, mask, *counts]


def _counts(block: Block, shares: Tensor, dims: RoutedDims) -> tuple[Tensor, ...]:
    """Return how many rows a rank with several experts gets for each, from each other rank."""
    if dims.mesh.has_one:
        return ()
    ranks = block.mesh.get(dims.mesh.told, 1) // dims.mesh.ranks
    told = Dim("own experts by rank", dims.experts.size * ranks)
    return (shares.like("rows of experts", dims=(told,), at={}, width=NUMBER_BYTES),)


def _rows(block: Block, x: Tensor, own: Dim, num: int) -> list[Tensor]:
    """Return views of each expert's rows; their gradients are put together again."""
    dims = (own, *x.dims[1:])
    views = [x.like(f"{x.name} of an expert", dims=dims, base=x.storage) for _ in range(num)]
    block.add([x], views, [Gradient(x)])
    return views


def _expert(block: Block, x: Tensor, weights: Tensor, dims: RoutedDims, experts: Experts) -> Tensor:
    """Return what one expert makes of its rows: an MLP that weighs its activations."""
    hidden = x.dims[-1]
    first = Dim("gate and up" if experts.gated else "up", dims.first.size)
    inner = _linear(block, x, first, first, dims)
    if experts.bias:
        inner = biased(block, inner, "expert gate and up")
    made = _opened(block, inner, weights, dims, experts)
    out = _linear(block, made, hidden, dims.inner, dims)
    return _with_bias(block, out, weights) if experts.bias else out


def _with_bias(block: Block, out: Tensor, weights: Tensor) -> Tensor:
    """Return an expert's outputs with its bias, weighed, added in place."""
    hidden = out.dims[-1]
    vector = block.weight(f"expert {hidden.name}.bias", hidden)
    spread = out.like("weighed bias")
    twice = tuple(out.like("gradient of bias") for _ in range(2))
    work = block.traffic(out)
    gradients = [
        Gradient(vector, (weights,), (work,), at={}),
        Gradient(weights, (weights,), (work,), at=weights.at),
    ]
    spread = block.add([weights, vector], [spread], gradients, work, scratch=((), twice))
    made = out.like("outputs with bias", base=out.storage)
    return handed_on(block, [out, spread], made, block.traffic(out, out, out))


def _linear(block: Block, x: Tensor, out: Dim, split: Dim, dims: RoutedDims) -> Tensor:
    """Return the product of one expert's rows with its own weight, of which a dim is split."""
    at = {dims.mesh.split_on: split}
    weight = block.weight(f"expert {out.name}.weight", out, x.dims[-1], at=at)
    return product(block, out.name, (x, weight), x.dims[0], out)
