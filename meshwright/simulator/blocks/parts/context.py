"""Attention of ranks that hold parts of the same sequences: by a ring, a gather, a swap or both.

What travels, what is kept and what lives meanwhile is as in Transformer Engine 2 with fp16 or bf16
attention (pytorch/attention/dot_product_attention/context_parallel.py), or as in PyTorch 2.13
(torch/distributed/tensor/experimental/_context_parallel/_attention.py).  Of causal attention each
rank has an early and a late part of the tokens, so that all have the same work in every step; of
corrections the last rank has most, and the others wait for it.
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
    handed_on,
    larger,
    last_dim,
    several,
    smaller,
)
from meshwright.simulator.layout import Axis, ContextAxis, MeshAxis

Attend = Callable[[Block, Tensor, Tensor, Tensor, Heads], Tensor]
PASSES_OF_SWAP = 4  # laid out by ranks before, and in order after: each is read and written


def context_parallel(
    block: Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: Heads,
    way: ContextParallel,
) -> Tensor:
    """Return attention of this rank's queries to the keys and values of all ranks.

    PyTorch's ring puts halves of rows together head by head, on all ranks but the last: what
    follows lays them out by tokens.
    """
    is_engines = block.lowering.copies_operands
    with block.autograd_node(fused=True):
        ways = _ENGINES if is_engines else _PYTORCHS
        out = ways[way](block, query, key, value, heads)
    return out if is_engines else copy(block, out, "attention by tokens", copies_back=False)


def _ring(
    block: Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: Heads,
    axis: MeshAxis = Axis.CP,
) -> Tensor:
    """Return attention to keys and values that go around in one tensor (AttnFuncWithCPAndKVP2P).

    Forward keeps what came last; from there backward sends them around again, with what has been
    summed of their gradients behind them: in the first step there is none, in the last no more than
    that.  All buffers and outputs of steps live until the outputs are put together.
    """
    ranks, result = heads.ranks, _result(query, value)
    pair = _pair(key, value)
    handed_on(block, [key, value], pair, block.traffic(pair, pair))
    steps, others = Dim("steps", ranks), Dim("other steps", ranks - 1)
    moves = [(pair.nbytes, ranks - 1)], [(pair.nbytes, 2), (2 * pair.nbytes, ranks - 2)]
    forward, backward = (
        [Exchange(CollectiveOp.P2P, axis, size, count) for size, count in each] for each in moves
    )
    of_queries, of_keys = block.traffic(query).nbytes, block.traffic(pair).nbytes
    # The first step's part is read and written, each other one is added to the sum.
    put_together = Traffic(block.traffic(result).nbytes * (3 * ranks - 1))
    # Beside a copy of the pair: of earlier tokens the first half of the keys has a gradient.
    summed = Traffic(of_queries * (3 * ranks - 1) + of_keys * (3 * (ranks + 1) // 2 + 2))
    lives = (
        [_times(pair, others), _times(result, steps)],
        [_times(pair, Dim("buffers", 3)), pair.like("gradients of a step"), query.like("step")],
    )
    beside = ContextParallelWork((*forward, put_together), (*backward, summed), lives)
    return attended(block, query, (pair,), heads, value.dims[-1].grain, beside)


def _gathered(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return attention to gathered keys and values (AttnFuncWithCPAndKVAllGather).

    They are put in order, and gathered again for backward, where all gradients live until the end:
    both halves of the queries attend to the tokens up to their own, from the first one that is in
    the window of any (get_kv_seq_info_after_all_gather).  Nothing runs meanwhile.
    """
    given = [
        x if x.base is None else copy(block, x, f"{x.name} apart", copies_back=False)
        for x in (key, value)
    ]
    every = Dim("ranks", heads.ranks)
    gathered = [_times(each, every) for each in given]
    # Both are put in order one after the other: the wider of them lives in both orders last.
    wider = max(range(2), key=lambda number: given[number].dims[-1].grain)
    moved = Traffic(sum(2 * block.traffic(each).nbytes for each in gathered))
    gathers, scatters = (
        [Transfer(op, Axis.CP, each.nbytes) for each in gathered]
        for op in (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER)
    )
    parts = _gradients_of_parts(given, gathered, query.dims[0], heads)
    # Gradients of all tokens are zeroed, added up of two parts, and put in the order of the ranks.
    added = parts if heads.window else gathered
    back = Traffic(5 * moved.nbytes // 2 + 3 * sum(block.traffic(each).nbytes for each in added))
    others = Dim("others", heads.ranks - 1)
    # Sums, of which the last ones are put in the order of the ranks; own parts count as what is
    # handed on, which is not there yet.
    sums = [gathered[wider].like("gradients"), _times(given[1 - wider], others)]
    parts.append(query.like("gradients of parts"))
    lives = (
        [*gathered, gathered[wider].like("not in order yet")],
        [*gathered, *sums, *parts, _times(given[wider], others)],
    )
    beside = ContextParallelWork((*gathers, moved), (*gathers, back, *scatters), lives)
    return attended(block, query, given, heads, value.dims[-1].grain, beside)


def _gradients_of_parts(
    given: list[Tensor], gathered: list[Tensor], own: Dim, heads: Heads
) -> list[Tensor]:
    """Return the gradients of the keys and values that each half of a rank's queries attends to.

    Without a window those of both halves are as many on all ranks: all tokens', and a half more.
    With one most on the last rank, whose tokens are in the middle.
    """
    half = own.size // 2
    if not heads.window:
        rows = Dim("half of the tokens", half)
        return [
            *(each.like("gradients of a part") for each in gathered),
            *(each.like("gradients of own", dims=(rows, *each.dims[1:])) for each in given),
        ]
    ends = half * heads.ranks, half * (heads.ranks + 1)
    ranges = [Dim("window", smaller(half + heads.window - 1, end)) for end in ends]
    return [
        each.like("gradients of a window", dims=(seen, *each.dims[1:]))
        for seen in ranges
        for each in given
    ]


def _rotated(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return attention to keys and values that go to the next rank by an all-to-all."""
    pair, others = _pair(key, value), heads.ranks - 1
    size, wide = pair.nbytes, _in_fp32_bytes(pair)
    forward = [_sent(size, others)]
    backward = [_sent(size, 1), _sent(size, others - 1, wide), _sent(wide, 1)]
    # What is attended to and what comes in meanwhile; of two ranks there is no more to come.
    received = Dim("received", 1 + several(others))
    return _in_fp32(block, (query, key, value), heads, (forward, backward), received)


def _gathered_once(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return attention to keys and values that are gathered beside the first step."""
    pair, ranks = _pair(key, value), heads.ranks
    gather = Exchange(CollectiveOp.ALL_GATHER, Axis.CP, pair.nbytes * ranks, 1)
    moves = [gather], [gather, _sent(_in_fp32_bytes(pair), ranks - 1)]
    return _in_fp32(block, (query, key, value), heads, moves, Dim("received", ranks))


def _sent(size: Size, steps: Size, beside: Size = 0) -> Exchange:
    return Exchange(CollectiveOp.ALL_TO_ALL, Axis.CP, size, steps, beside)


def _in_fp32_bytes(x: Tensor) -> Size:
    return x.like("in fp32", width=STATISTIC_BYTES).nbytes


def _in_fp32(
    block: Block,
    given: tuple[Tensor, Tensor, Tensor],
    heads: Heads,
    moves: tuple[list[Exchange], list[Exchange]],
    received: Dim,
) -> Tensor:
    """Return attention in steps whose outputs and gradients are summed in fp32, a kernel a sum.

    Gradients of keys and values go around in fp32, once more than there are other ranks: nothing is
    left to run beside the last time.
    """
    query, key, value = given
    pair, result, ranks = _pair(key, value), _result(query, value), heads.ranks
    last = _sent(_in_fp32_bytes(pair), 1)._replace(waits=True)
    of_queries, of_keys = block.traffic(query).nbytes, block.traffic(pair).nbytes
    # Bytes of an element, halved: a step's output is cast (6), and taken from the sum, multiplied
    # and taken from it again (32); gradients are zeroed (4), added (10), cast in the end (6), of
    # half of the keys beside a copy (13), and put into one tensor for each message (8 and 4).
    put_together = Traffic(block.traffic(result).nbytes * (19 * ranks - 13))
    summed = Traffic(of_queries * (5 * ranks + 5) + of_keys * (25 * ranks + 3) // 2)
    half = Dim("half of the tokens", query.dims[0].size // 2)
    got, kernels = _times(pair, received), Dim("kernels of a sum", larger(pair.numel, query.numel))
    lives = (
        [got, _times(result, Dim("outputs", 8)), _times(_rows(query, heads), Dim("numbers", 2))],
        [
            got,
            _times(pair, Dim("gradients", 7)),
            pair.like("gradients of earlier tokens", dims=(half, *pair.dims[1:])),
            _times(query, Dim("gradients", 2)),
            query.like("sum", dims=(kernels,), at={}),
        ],
    )
    beside = ContextParallelWork((*moves[0], put_together), (*moves[1], last, summed), lives)
    return attended(block, query, (key, value), heads, value.dims[-1].grain, beside)


def _rows(query: Tensor, heads: Heads) -> Tensor:
    """Return a number in fp32 of each row of scores."""
    width = query.dims[-1]
    at = {axis: heads.heads if dim is width else dim for axis, dim in query.at.items()}
    dims = (*query.dims[:-1], heads.heads)
    return query.like("numbers of rows", dims=dims, at=at, width=STATISTIC_BYTES)


def _pair(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values in one tensor, one behind the other: heads may differ in width."""
    one, other = key.dims[-1], value.dims[-1]
    both = Dim("keys and values", one.size + other.size, one.grain + other.grain)
    return last_dim(key, both.name, both)


def _result(query: Tensor, value: Tensor) -> Tensor:
    """Return what attention makes of a rank's queries: as many heads, as wide as values."""
    width, deep = query.dims[-1], value.dims[-1].grain
    return last_dim(query, "attention", Dim("attention", width.size // width.grain * deep, deep))


def _swapped(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return attention of some heads to all tokens (AttnFuncWithCPAndQKVOA2A).

    Backward keeps queries, keys and values as they were swapped, and the output before it was.
    """
    return _between_swaps(block, (query, key, value), heads, Axis.CP, flash)


def _ring_of_swaps(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return attention by a ring between swaps among neighbours (AttnFuncWithCPAndKVP2P, a2a+p2p).

    What goes around is as large as without swaps, and goes by fewer ranks.
    """

    def ring(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
        return _ring(block, query, key, value, heads, ContextAxis.OUTER)

    return _between_swaps(block, (query, key, value), heads, ContextAxis.INNER, ring)


def _between_swaps(
    block: Block,
    given: tuple[Tensor, Tensor, Tensor],
    heads: Heads,
    axis: MeshAxis,
    attend: Attend,
) -> Tensor:
    """Return what *attend* makes of some heads of the tokens of all ranks of *axis*."""
    ranks = heads.ranks if axis is Axis.CP else heads.inner
    query = given[0]
    every, few = Dim("all tokens", query.dims[0].size * ranks), heads.heads.size // ranks
    own = Dim("heads of a rank", few)
    within = heads._replace(heads=own, tokens=every, ranks=heads.ranks // ranks, inner=1)
    query_, key_, value_ = (_swap(block, x, every, ranks, axis) for x in given)
    out = attend(block, query_, key_, value_, within)
    whole = _result(query, given[2])
    return block.add(
        [out], [whole], [_swap_back(block, out, whole, axis)], *_work(block, whole, axis)
    )


def _swap(block: Block, x: Tensor, every: Dim, ranks: Size, axis: MeshAxis) -> Tensor:
    """Return *x* with the tokens of all ranks, of a part of its heads."""
    width = x.dims[-1]
    part = Dim(f"{width.name} of a rank", width.size // ranks, width.grain)
    at = {axis: part if dim is width else dim for axis, dim in x.at.items()}
    out = x.like(f"{x.name} swapped", dims=(every, x.dims[1], part), at=at)
    return block.add([x], [out], [_swap_back(block, x, out, axis)], *_work(block, x, axis))


def _swap_back(block: Block, x: Tensor, out: Tensor, axis: MeshAxis) -> Gradient:
    return Gradient(x, (), _work(block, out, axis), at=x.at)


def _work(block: Block, x: Tensor, axis: MeshAxis) -> tuple[Transfer, Traffic]:
    moved = Traffic(PASSES_OF_SWAP * block.traffic(x).nbytes)
    return Transfer(CollectiveOp.ALL_TO_ALL, axis, x.nbytes), moved


def _times(x: Tensor, count: Dim) -> Tensor:
    return x.like(f"{x.name} x {count.name}", dims=(*x.dims, count))


_ENGINES: dict[ContextParallel, Attend] = {
    ContextParallel.RING: _ring,
    ContextParallel.ALL_GATHER: _gathered,
    ContextParallel.ALL_TO_ALL: _swapped,
    ContextParallel.RING_OF_SWAPS: _ring_of_swaps,
}
_PYTORCHS: dict[ContextParallel, Attend] = {
    ContextParallel.RING: _rotated,
    ContextParallel.ALL_GATHER: _gathered_once,
}
