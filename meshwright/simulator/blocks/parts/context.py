"""Context-parallel attention: ring, all-gather, Ulysses (all-to-all) and hybrid ring.

Messages, saved and temporary tensors are those of Transformer Engine 2 with fp16 or bf16
attention (pytorch/attention/dot_product_attention/context_parallel.py), or of PyTorch 2.13
(torch/distributed/tensor/experimental/_context_parallel/_attention.py).  With causal
attention each rank has an early and a late chunk of the tokens, so that work is balanced in every
step; the last rank has most corrections of the output, and the others wait for it.
"""

from collections.abc import Callable

from meshwright.hwprofiles import CollectiveOp, ContextParallel
from meshwright.simulator.graph import (
    STATISTIC_BYTES,
    Block,
    ContextParallelWork,
    Dim,
    Exchange,
    Gradient,
    Heads,
    Size,
    Tensor,
    Traffic,
    Transfer,
    attended,
    copy,
    flash,
    larger,
    last_dim,
    pass_through,
    several,
    smaller,
)
from meshwright.simulator.layout import Axis, ContextAxis, MeshAxis

Attend = Callable[[Block, Tensor, Tensor, Tensor, Heads], Tensor]
PASSES_OF_PERMUTATION = 4  # permutations before and after the all-to-all, each read and written


def context_parallel(
    block: Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: Heads,
    cp_type: ContextParallel,
) -> Tensor:
    """Return attention of this rank's queries to the keys and values of all ranks.

    PyTorch's ring concatenates halves of rows heads first, on all ranks but the last: a copy brings
    the tokens first again.
    """
    is_engines = block.lowering.copies_operands
    with block.autograd_node(fused=True):
        attention_of = _ENGINES if is_engines else _PYTORCHS
        out = attention_of[cp_type](block, query, key, value, heads)
    return out if is_engines else copy(block, out, "attention by tokens", copies_back=False)


def _p2p_ring(
    block: Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: Heads,
    axis: MeshAxis = Axis.CP,
) -> Tensor:
    """Return ring attention, with keys and values in one p2p tensor (AttnFuncWithCPAndKVP2P).

    Forward saves the last keys and values received; backward sends them around again, with their
    accumulated gradients: the first step has none of these, the last has them alone.  All buffers
    and outputs of steps live until the outputs are corrected and summed.
    """
    ranks, result = heads.ranks, _attention_output(query, value)
    key_value = _key_value(key, value)
    pass_through(block, [key, value], key_value, block.traffic(key_value, key_value))
    steps, others = Dim("steps", ranks), Dim("other steps", ranks - 1)
    # Backward's first message is keys and values alone, its last one gradients alone.
    moves = (
        [(key_value.nbytes, ranks - 1)],
        [(key_value.nbytes, 2), (2 * key_value.nbytes, ranks - 2)],
    )
    forward, backward = (
        [Exchange(CollectiveOp.P2P, axis, size, count) for size, count in each] for each in moves
    )
    query_bytes, key_value_bytes = block.traffic(query).nbytes, block.traffic(key_value).nbytes
    # The first step's output is read and written, each other one is added to the sum.
    put_together = Traffic(block.traffic(result).nbytes * (3 * ranks - 1))
    # Beside a copy of keys and values: for earlier ranks' tokens only their first half has a
    # gradient.
    summed = Traffic(query_bytes * (3 * ranks - 1) + key_value_bytes * (3 * (ranks + 1) // 2 + 2))
    scratch = (
        [_times(key_value, others), _times(result, steps)],
        [
            _times(key_value, Dim("buffers", 3)),
            key_value.like("gradients of a step"),
            query.like("step"),
        ],
    )
    beside = ContextParallelWork((*forward, put_together), (*backward, summed), scratch)
    return attended(block, query, (key_value,), heads, value.dims[-1].grain, beside)


def _all_gather_kv(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return attention to all-gathered keys and values (AttnFuncWithCPAndKVAllGather).

    They are reordered, and gathered again in backward, where all gradients live until the end: both
    chunks of the queries attend to tokens up to their own, from the first in any query's sliding
    window (get_kv_seq_info_after_all_gather).  The collectives are exposed.
    """
    keys_values = [
        x if x.base is None else copy(block, x, f"{x.name} apart", copies_back=False)
        for x in (key, value)
    ]
    all_ranks = Dim("ranks", heads.ranks)
    gathered = [_times(each, all_ranks) for each in keys_values]
    # Keys and values are reordered one after the other: the wider exists twice last.
    wider = max(range(2), key=lambda number: keys_values[number].dims[-1].grain)
    moved = Traffic(sum(2 * block.traffic(each).nbytes for each in gathered))
    gathers, scatters = (
        [Transfer(op, Axis.CP, each.nbytes) for each in gathered]
        for op in (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER)
    )
    parts = _chunk_gradients(keys_values, gathered, query.dims[0], heads)
    # Gradients of all tokens are zeroed, summed over two chunks, and reordered by rank.
    added = parts if heads.window else gathered
    back = Traffic(5 * moved.nbytes // 2 + 3 * sum(block.traffic(each).nbytes for each in added))
    other_ranks = Dim("others", heads.ranks - 1)
    # Sums, the last of which are reordered by rank; this rank's shard counts as the output, which
    # does not exist yet.
    sums = [gathered[wider].like("gradients"), _times(keys_values[1 - wider], other_ranks)]
    parts.append(query.like("gradients of parts"))
    scratch = (
        [*gathered, gathered[wider].like("not in order yet")],
        [*gathered, *sums, *parts, _times(keys_values[wider], other_ranks)],
    )
    beside = ContextParallelWork((*gathers, moved), (*gathers, back, *scatters), scratch)
    return attended(block, query, keys_values, heads, value.dims[-1].grain, beside)


def _chunk_gradients(
    keys_values: list[Tensor], gathered: list[Tensor], local_tokens: Dim, heads: Heads
) -> list[Tensor]:
    """Return the gradients of keys and values for both chunks of a rank's queries.

    Without a sliding window their sizes add up to all tokens and a half chunk on every rank; with
    one the last rank, whose tokens are in the middle, has most.
    """
    half = local_tokens.size // 2
    if not heads.window:
        rows = Dim("half of the tokens", half)
        return [
            *(each.like("gradients of a part") for each in gathered),
            *(each.like("gradients of own", dims=(rows, *each.dims[1:])) for each in keys_values),
        ]
    ends = half * heads.ranks, half * (heads.ranks + 1)
    ranges = [Dim("window", smaller(half + heads.window - 1, end)) for end in ends]
    return [
        each.like("gradients of a window", dims=(seen, *each.dims[1:]))
        for seen in ranges
        for each in keys_values
    ]


def _all_to_all_ring(
    block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads
) -> Tensor:
    """Return PyTorch's ring attention, whose rotation is an all-to-all."""
    key_value, others = _key_value(key, value), heads.ranks - 1
    size, wide = key_value.nbytes, _fp32_bytes(key_value)
    forward = [_sent(size, others)]
    backward = [_sent(size, 1), _sent(size, others - 1, wide), _sent(wide, 1)]
    # The current keys and values and those being received; with two ranks nothing more comes.
    received = Dim("received", 1 + several(others))
    return _summed_in_fp32(block, (query, key, value), heads, (forward, backward), received)


def _all_gather_ring(
    block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads
) -> Tensor:
    """Return PyTorch's ring attention, whose rotation is an all-gather in the first step."""
    key_value, ranks = _key_value(key, value), heads.ranks
    gather = Exchange(CollectiveOp.ALL_GATHER, Axis.CP, key_value.nbytes * ranks, 1)
    moves = [gather], [gather, _sent(_fp32_bytes(key_value), ranks - 1)]
    return _summed_in_fp32(block, (query, key, value), heads, moves, Dim("received", ranks))


def _sent(size: Size, steps: Size, beside: Size = 0) -> Exchange:
    return Exchange(CollectiveOp.ALL_TO_ALL, Axis.CP, size, steps, beside)


def _fp32_bytes(x: Tensor) -> Size:
    return x.like("in fp32", width=STATISTIC_BYTES).nbytes


def _summed_in_fp32(
    block: Block,
    queries_keys_values: tuple[Tensor, Tensor, Tensor],
    heads: Heads,
    moves: tuple[list[Exchange], list[Exchange]],
    received: Dim,
) -> Tensor:
    """Return ring attention whose outputs and gradients are summed in fp32, a kernel a sum.

    Gradients of keys and values go around in fp32, once more than there are other ranks: the last
    message overlaps nothing.
    """
    query, key, value = queries_keys_values
    key_value, result, ranks = _key_value(key, value), _attention_output(query, value), heads.ranks
    last = _sent(_fp32_bytes(key_value), 1)._replace(waits=True)
    query_bytes, key_value_bytes = block.traffic(query).nbytes, block.traffic(key_value).nbytes
    # Bytes of an element, halved: a step's output is cast (6), and taken from the sum, multiplied
    # and taken from it again (32); gradients are zeroed (4), added (10), cast in the end (6), of
    # half of the keys beside a copy (13), and put into one tensor for each message (8 and 4).
    put_together = Traffic(block.traffic(result).nbytes * (19 * ranks - 13))
    summed = Traffic(query_bytes * (5 * ranks + 5) + key_value_bytes * (25 * ranks + 3) // 2)
    half = Dim("half of the tokens", query.dims[0].size // 2)
    receive_buffers, kernels = (
        _times(key_value, received),
        Dim("kernels of a sum", larger(key_value.numel, query.numel)),
    )
    scratch = (
        [
            receive_buffers,
            _times(result, Dim("outputs", 8)),
            _times(_log_sum_exp(query, heads), Dim("numbers", 2)),
        ],
        [
            receive_buffers,
            _times(key_value, Dim("gradients", 7)),
            key_value.like("gradients of earlier tokens", dims=(half, *key_value.dims[1:])),
            _times(query, Dim("gradients", 2)),
            query.like("sum", dims=(kernels,), at={}),
        ],
    )
    beside = ContextParallelWork((*moves[0], put_together), (*moves[1], last, summed), scratch)
    return attended(block, query, (key, value), heads, value.dims[-1].grain, beside)


def _log_sum_exp(query: Tensor, heads: Heads) -> Tensor:
    """Return the fp32 log-sum-exp of each row of scores."""
    width = query.dims[-1]
    at = {axis: heads.heads if dim is width else dim for axis, dim in query.at.items()}
    dims = (*query.dims[:-1], heads.heads)
    return query.like("numbers of rows", dims=dims, at=at, width=STATISTIC_BYTES)


def _key_value(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values concatenated; their head dims may differ."""
    one, other = key.dims[-1], value.dims[-1]
    both = Dim("keys and values", one.size + other.size, one.grain + other.grain)
    return last_dim(key, both.name, both)


def _attention_output(query: Tensor, value: Tensor) -> Tensor:
    """Return the output of attention: the queries' heads with the values' head dim."""
    width, deep = query.dims[-1], value.dims[-1].grain
    return last_dim(query, "attention", Dim("attention", width.size // width.grain * deep, deep))


def _ulysses(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return Ulysses attention: a rank's heads over all tokens (AttnFuncWithCPAndQKVOA2A).

    Saved are q, k and v after the all-to-all, and the output before it.
    """
    return _between_all_to_alls(block, (query, key, value), heads, Axis.CP, flash)


def _hybrid_ring(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return hybrid ring attention: all-to-all among neighbours, a ring of the groups (a2a+p2p).

    Messages of the ring are as large as without the all-to-all, and fewer
    (AttnFuncWithCPAndKVP2P).
    """

    def ring(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
        return _p2p_ring(block, query, key, value, heads, ContextAxis.OUTER)

    return _between_all_to_alls(block, (query, key, value), heads, ContextAxis.INNER, ring)


def _between_all_to_alls(
    block: Block,
    queries_keys_values: tuple[Tensor, Tensor, Tensor],
    heads: Heads,
    axis: MeshAxis,
    attend: Attend,
) -> Tensor:
    """Return *attend* on a rank's heads and all tokens of *axis*, between two all-to-alls."""
    ranks = heads.ranks if axis is Axis.CP else heads.inner
    query = queries_keys_values[0]
    all_tokens, num_local_heads = (
        Dim("all tokens", query.dims[0].size * ranks),
        heads.heads.size // ranks,
    )
    local_heads = Dim("heads of a rank", num_local_heads)
    within = heads._replace(
        heads=local_heads, tokens=all_tokens, ranks=heads.ranks // ranks, inner=1
    )
    query_, key_, value_ = (
        _all_to_all(block, x, all_tokens, ranks, axis) for x in queries_keys_values
    )
    out = attend(block, query_, key_, value_, within)
    whole = _attention_output(query, queries_keys_values[2])
    return block.add(
        [out],
        [whole],
        [_all_to_all_back(block, out, whole, axis)],
        *_all_to_all_work(block, whole, axis),
    )


def _all_to_all(block: Block, x: Tensor, all_tokens: Dim, ranks: Size, axis: MeshAxis) -> Tensor:
    """Return *x* after the all-to-all: all tokens of the group, a rank's share of the heads."""
    width = x.dims[-1]
    part = Dim(f"{width.name} of a rank", width.size // ranks, width.grain)
    at = {axis: part if dim is width else dim for axis, dim in x.at.items()}
    out = x.like(f"{x.name} swapped", dims=(all_tokens, x.dims[1], part), at=at)
    return block.add(
        [x], [out], [_all_to_all_back(block, x, out, axis)], *_all_to_all_work(block, x, axis)
    )


def _all_to_all_back(block: Block, x: Tensor, out: Tensor, axis: MeshAxis) -> Gradient:
    return Gradient(x, (), _all_to_all_work(block, out, axis), at=x.at)


def _all_to_all_work(block: Block, x: Tensor, axis: MeshAxis) -> tuple[Transfer, Traffic]:
    moved = Traffic(PASSES_OF_PERMUTATION * block.traffic(x).nbytes)
    return Transfer(CollectiveOp.ALL_TO_ALL, axis, x.nbytes), moved


def _times(x: Tensor, count: Dim) -> Tensor:
    return x.like(f"{x.name} x {count.name}", dims=(*x.dims, count))


_ENGINES: dict[ContextParallel, Attend] = {
    ContextParallel.RING: _p2p_ring,
    ContextParallel.ALL_GATHER: _all_gather_kv,
    ContextParallel.ALL_TO_ALL: _ulysses,
    ContextParallel.HYBRID_RING: _hybrid_ring,
}
_PYTORCHS: dict[ContextParallel, Attend] = {
    ContextParallel.RING: _all_to_all_ring,
    ContextParallel.ALL_GATHER: _all_gather_ring,
}
