"""Fused (flash) attention, and unfused attention whose scores are materialized."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.graph.block import Block
from meshwright.simulator.graph.linear import Scratch, product
from meshwright.simulator.graph.operators import (
    FusedAttention,
    Gradient,
    Kind,
    Traffic,
    Transfer,
    Work,
)
from meshwright.simulator.graph.pointwise import (
    STATISTIC_BYTES,
    Reads,
    cast,
    copy,
    dropout,
    last_dim,
    pointwise,
    view,
)
from meshwright.simulator.graph.tensors import Dim, Size, Tensor
from meshwright.simulator.layout import Axis


class Heads(NamedTuple):
    """Shape of attention: heads, tokens, mask, dropout, sinks and context-parallel ranks.

    Args:
        heads: Query heads.
        tokens: Tokens of keys and values.
        seen: Keys a query attends to at most: fewer with a sliding window.
        causal: Whether the mask is causal.
        drops: Whether attention dropout is applied to the probabilities.
        sinks: Heads with a learned sink logit (gpt-oss), of all Ulysses ranks; None without sinks.
        ranks: Context-parallel ranks that split the query rows; a ring has as many steps.
        inner: Ranks of the inner all-to-all (Ulysses) group; the outer groups form a ring.
        window: Sliding window in tokens; 0 for full attention.
    """

    heads: Dim
    tokens: Dim
    seen: int
    causal: bool
    drops: bool
    sinks: Dim | None = None
    ranks: Size = 1
    inner: int = 1
    window: int = 0


def flash(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return flash attention; backward reads q, k, v, the output and a log-sum-exp a row."""
    return attended(block, query, (key, value), heads, value.dims[-1].grain)


class ContextParallelWork(NamedTuple):
    """Work and scratch tensors of context-parallel attention beside its kernel, by pass."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    scratch: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ())


NO_CONTEXT_PARALLEL = ContextParallelWork()


def attended(
    block: Block,
    query: Tensor,
    keys_values: Sequence[Tensor],
    heads: Heads,
    value_dim: Size,
    beside: ContextParallelWork = NO_CONTEXT_PARALLEL,
) -> Tensor:
    """Return fused attention of *query* to *keys_values*, two tensors or one of both.

    Args:
        block: Block to add the operator to.
        query: Queries of this rank.
        keys_values: Keys and values of this rank.
        heads: Shape of attention; *seen* counts tokens of all ranks.
        value_dim: Head dim of the values.
        beside: Communication and scratch of context parallelism.
    """
    width = query.dims[-1]
    parts = {axis: heads.heads if dim is width else dim for axis, dim in query.at.items()}
    dims = (*query.dims[:-1], heads.heads)
    # Flash attention saves one fp32 log-sum-exp per row in the place of the probabilities.
    rows = query.like("log-sum-exp", dims=dims, at=parts, width=STATISTIC_BYTES)
    head_dim = width.grain
    out = last_dim(query, "attention", Dim("attention", heads.heads.size * value_dim, value_dim))
    scores = rows.numel * heads.seen
    read = (query, *keys_values, out, rows)
    # Backward recomputes the scores and runs four more GEMMs (Dao 2023, arXiv 2307.08691, 4.1).
    backward = FusedAttention(scores, 3 * head_dim + 2 * value_dim, heads.ranks)
    gradients = [
        Gradient(query, read, (backward, *beside.backward)),
        *(Gradient(each, read, at=each.at) for each in keys_values),
    ]
    work = FusedAttention(scores, head_dim + value_dim, heads.ranks), *beside.forward
    inputs = [query, *keys_values]
    if heads.sinks is not None:
        sinks = _sinks(block, heads.sinks)
        inputs.append(sinks)
        # Without Ulysses a rank has all heads, and with them the whole gradient of the sinks.
        gathers = _sink_gradient_all_gather(sinks) if heads.sinks is not heads.heads else ()
        gradients.append(Gradient(sinks, read, gathers, at=sinks.at))
    return block.add(
        inputs, [out, rows], gradients, *work, kind=Kind.ATTENTION, scratch=beside.scratch
    )


def _sinks(block: Block, heads: Dim) -> Tensor:
    return block.weight("sinks", heads, at={Axis.TP: heads})


def _sink_gradient_all_gather(sinks: Tensor) -> tuple[Work, ...]:
    """Return the all-gather of the sinks' gradient: each Ulysses rank has it for its heads alone.

    The gradient is fp32 (flash_attn_a2a_communicate_softmax_offset, pytorch/attention/
    dot_product_attention/context_parallel.py of Transformer Engine 2.9).
    """
    of_all = sinks.like("gradient of sinks", width=STATISTIC_BYTES)
    return (Transfer(CollectiveOp.ALL_GATHER, Axis.CP, of_all.nbytes),)


def scored(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return unfused attention, with scores in memory.

    With grouped queries, keys and values are repeated for each query head.  Megatron-Core passes
    baddbmm a buffer that it keeps, and holds the scores until the output is there
    (core/transformer/dot_product_attention.py).
    """
    is_local = block.lowering.is_local
    rows, batch, width = query.dims
    head = Dim("head", width.grain)
    seen = Dim("seen tokens", heads.tokens.size)
    local_variables: list[Tensor] = []
    by_heads = []
    for x in (query, key, value):
        expanded = (
            copy(block, x, f"repeated {x.name}", like=query) if _has_fewer_heads(x, query) else x
        )
        by_heads.append(_heads_first(block, expanded))
        # The function's locals keep these alive until it returns.
        local_variables += [by_heads[-1], *([expanded] if expanded is x else [])]
    query, key, value = by_heads
    query = view(block, query, rows, batch, heads.heads, head, renamed=(width, heads.heads))
    key, value = (
        view(block, x, seen, batch, heads.heads, head, renamed=(x.dims[-1], heads.heads))
        for x in (key, value)
    )
    dims = (batch, heads.heads, rows, seen)
    # Autograd scales the gradients of baddbmm's alpha in kernels of their own.
    scaled = Scratch((), (key.like("unscaled gradient"),)) if is_local else None
    operands = query, key
    scores = product(block, "scores", operands, *dims, kind=Kind.ATTENTION, scratch=scaled)
    weights = _probabilities(block, scores, heads)
    dims = (rows, batch, heads.heads, head)
    out = product(block, "values", (weights, value), *dims, kind=Kind.ATTENTION)
    out = copy(block, out, "attention")
    if is_local:
        local_variables += [scores, weights]
        # baddbmm wants an input tensor even with beta=0: a global buffer, shared by all layers.
        block.buffers.append(scores.like("buffer of scores"))
    block.hold(*local_variables)
    return view(block, out, rows, batch, width, renamed=(heads.heads, width))


def _heads_first(block: Block, x: Tensor) -> Tensor:
    """Return *x* as [batch, heads, tokens]: with more than one sequence PyTorch copies."""
    batch = x.sizes[x.dims[1]]
    # Megatron-Core keeps tokens first, so that baddbmm reads a view.
    if block.lowering.fuses_redistribute or not np.all(batch > 1):
        return x
    return copy(block, x, f"{x.name} by heads", copies_back=False)


def _has_fewer_heads(x: Tensor, query: Tensor) -> bool:
    """Return True if *x* has fewer heads on a rank than *query*; alike in all rows of a column."""
    return bool(np.all(x.numel < query.numel))


def _probabilities(block: Block, scores: Tensor, heads: Heads) -> Tensor:
    """Return the attention probabilities, after dropout.

    Causal masking skips half of the reads: softmax 1/2 read + 1 write; dropout reads the
    probabilities, writes them and a mask byte; backward 2 reads and 3 writes of half rows.
    """
    if heads.sinks is not None:
        return _softmax_with_sinks(block, scores, heads, heads.sinks)
    element = block.traffic(scores).nbytes
    forward = Traffic(element * (3 if heads.causal else 4) // 2)
    out = scores.like("probabilities")
    backward = Traffic(element * 4)
    in_place = block.lowering.is_local  # Apex' scaled masked softmax overwrites the gradient
    slope = Gradient(scores, (out,), (backward,), passes_through=in_place)
    block.add([scores], [out], [slope], forward)
    if not heads.drops:
        return out
    dropped = (Traffic(2 * element + scores.numel), Traffic(element))
    return dropout(block, out, "attention dropout", dropped)


def _softmax_with_sinks(block: Block, scores: Tensor, heads: Heads, sinks: Dim) -> Tensor:
    """Return the fp32 softmax over scores and a sink logit per row, without the sink column.

    No fused softmax supports sinks: scores are masked in place, a column is concatenated and
    sliced off again (`SoftmaxOne` of megatron/core/fusions/fused_softmax.py, core 0.16).
    """
    batch, head, rows, seen = scores.dims
    wide = cast(block, scores, "scores in fp32", STATISTIC_BYTES)
    mask = scores.like("mask", dims=(rows, seen), at={}, width=1)
    masked, once = wide.like("masked", base=wide.storage), Traffic(2 * wide.nbytes)
    block.add([wide], [masked, mask], [Gradient(wide, (mask,), (once,))], once)
    columns = Dim("seen tokens and a sink", seen.size + 1)
    joined = wide.like("scores and sinks", dims=(batch, head, rows, columns))
    sink = _sinks(block, sinks)
    slopes = [Gradient(masked, passes_through=True), Gradient(sink, at=sink.at)]
    joined = block.add([masked, sink], [joined], slopes, once)
    both = pointwise(block, "probabilities and sinks", joined, reads=Reads.OUTPUT)
    block.hold(joined)
    probabilities = both.like("probabilities in fp32", dims=scores.dims, base=both.storage)
    probabilities = block.add([both], [probabilities], [Gradient(both)])
    out = cast(block, probabilities, "probabilities", scores.width)
    block.hold(wide)
    return dropout(block, out, "attention dropout") if heads.drops else out
