"""Attention in one kernel, and with its scores in memory."""

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
    """What attention is over, and how scores are masked and dropped.

    Args:
        heads: Of the queries.
        tokens: That keys and values are there of.
        seen: How many of them a query sees at most: fewer where there is a window.
        causal: Only earlier ones.
        drops: Probabilities are dropped.
        sinks: Heads of which each has a learned score that no value belongs to, those of all ranks
            that swap tokens for heads; None where there is none.
        ranks: Context-parallel ranks that share the rows, and run as many steps.
        inner: Of them, neighbours that swap tokens for heads where the others are a ring.
        window: Tokens that a query sees at most where that is not all; 0 where it is.
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
    """Return fused attention; backward reads all three, the output and a number a row."""
    return attended(block, query, (key, value), heads, value.dims[-1].grain)


class Beside(NamedTuple):
    """What goes with attention to tokens of other ranks: work and short-lived tensors of a pass."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    scratch: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ())


NOTHING_BESIDE = Beside()


def attended(
    block: Block,
    query: Tensor,
    given: Sequence[Tensor],
    heads: Heads,
    deep: Size,
    beside: Beside = NOTHING_BESIDE,
) -> Tensor:
    """Return fused attention of *query* to what is *given*, keys and values or one tensor of both.

    Args:
        block: Where it is written down.
        query: Rows of this rank.
        given: Tokens of this rank.
        heads: What it is over; *seen* counts tokens of all ranks.
        deep: Width of a head's values.
        beside: What else it runs.
    """
    width = query.dims[-1]
    parts = {axis: heads.heads if dim is width else dim for axis, dim in query.at.items()}
    dims = (*query.dims[:-1], heads.heads)
    rows = query.like("log-sum-exp", dims=dims, at=parts, width=STATISTIC_BYTES)
    wide = width.grain
    out = last_dim(query, "attention", Dim("attention", heads.heads.size * deep, deep))
    scores = rows.numel * heads.seen
    read = (query, *given, out, rows)
    # Backward makes the scores again and four products more (Dao 2023, arXiv 2307.08691, 4.1).
    backward = FusedAttention(scores, 3 * wide + 2 * deep, heads.ranks)
    gradients = [
        Gradient(query, read, (backward, *beside.backward)),
        *(Gradient(each, read, at=each.at) for each in given),
    ]
    work = FusedAttention(scores, wide + deep, heads.ranks), *beside.forward
    inputs = [query, *given]
    if heads.sinks is not None:
        sinks = _sinks(block, heads.sinks)
        inputs.append(sinks)
        gathers = _gathers_gradient(sinks) if heads.sinks is not heads.heads else ()
        gradients.append(Gradient(sinks, read, gathers, at=sinks.at))
    return block.add(
        inputs, [out, rows], gradients, *work, kind=Kind.ATTENTION, scratch=beside.scratch
    )


def _sinks(block: Block, heads: Dim) -> Tensor:
    return block.weight("sinks", heads, at={Axis.TP: heads})


def _gathers_gradient(sinks: Tensor) -> tuple[Work, ...]:
    """Return what gives each context-parallel rank, which has some heads, the gradient of all.

    It is of fp32 (flash_attn_a2a_communicate_softmax_offset, pytorch/attention/
    dot_product_attention/context_parallel.py of Transformer Engine 2.9).
    """
    of_all = sinks.like("gradient of sinks", width=STATISTIC_BYTES)
    return (Transfer(CollectiveOp.ALL_GATHER, Axis.CP, of_all.nbytes),)


def scored(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return attention whose scores lie in memory.

    Fewer keys and values than queries are copied for each query head of their group.  Megatron-Core
    multiplies into a buffer that it keeps, which baddbmm copies, and holds the scores until values
    are there (core/transformer/dot_product_attention.py).
    """
    is_local = block.lowering.is_local
    rows, batch, width = query.dims
    head = Dim("head", width.grain)
    seen = Dim("seen tokens", heads.tokens.size)
    held: list[Tensor] = []
    by_heads = []
    for x in (query, key, value):
        given = copy(block, x, f"repeated {x.name}", like=query) if _fewer(x, query) else x
        by_heads.append(_by_heads(block, given))
        held += [by_heads[-1], *([given] if given is x else [])]
    query, key, value = by_heads
    query = view(block, query, rows, batch, heads.heads, head, renamed=(width, heads.heads))
    key, value = (
        view(block, x, seen, batch, heads.heads, head, renamed=(x.dims[-1], heads.heads))
        for x in (key, value)
    )
    dims = (batch, heads.heads, rows, seen)
    # A product that baddbmm scales has gradients that are scaled in kernels of their own.
    scaled = Scratch((), (key.like("unscaled gradient"),)) if is_local else None
    operands = query, key
    scores = product(block, "scores", operands, *dims, kind=Kind.ATTENTION, scratch=scaled)
    weights = _weights(block, scores, heads)
    dims = (rows, batch, heads.heads, head)
    out = product(block, "values", (weights, value), *dims, kind=Kind.ATTENTION)
    out = copy(block, out, "attention")
    if is_local:
        held += [scores, weights]
        block.buffers.append(scores.like("buffer of scores"))
    block.hold(*held)
    return view(block, out, rows, batch, width, renamed=(heads.heads, width))


def _by_heads(block: Block, x: Tensor) -> Tensor:
    """Return *x* with the heads before the tokens: of several sequences, batch first, a copy."""
    batch = x.sizes[x.dims[1]]
    if block.lowering.fuses_places or not np.all(batch > 1):
        return x
    return copy(block, x, f"{x.name} by heads", copies_back=False)


def _fewer(x: Tensor, query: Tensor) -> bool:
    """Return whether *x* has fewer heads on a rank than *query*: in a column all have, or none."""
    return bool(np.all(x.numel < query.numel))


def _weights(block: Block, scores: Tensor, heads: Heads) -> Tensor:
    """Return the softmax of the scores, and what dropout leaves of it.

    Causal masking skips half of the reads: softmax 1/2 read + 1 write; dropout reads the
    probabilities, writes them and a mask byte; backward 2 reads and 3 writes of half rows.
    """
    if heads.sinks is not None:
        return _beside_sinks(block, scores, heads, heads.sinks)
    element = block.traffic(scores).nbytes
    forward = Traffic(element * (3 if heads.causal else 4) // 2)
    out = scores.like("probabilities")
    backward = Traffic(element * 4)
    in_place = block.lowering.is_local  # the kernel of Apex writes over the gradient it gets
    slope = Gradient(scores, (out,), (backward,), hands_on=in_place)
    block.add([scores], [out], [slope], forward)
    if not heads.drops:
        return out
    dropped = (Traffic(2 * element + scores.numel), Traffic(element))
    return dropout(block, out, "attention dropout", dropped)


def _beside_sinks(block: Block, scores: Tensor, heads: Heads, sinks: Dim) -> Tensor:
    """Return the softmax of scores and a sink each row, without the sinks, made in fp32.

    No kernel of its own knows sinks: scores are masked in place, and a column is put beside them
    and cut off again (`SoftmaxOne` of megatron/core/fusions/fused_softmax.py, core 0.16).
    """
    batch, head, rows, seen = scores.dims
    wide = cast(block, scores, "scores in fp32", STATISTIC_BYTES)
    mask = scores.like("mask", dims=(rows, seen), at={}, width=1)
    masked, once = wide.like("masked", base=wide.storage), Traffic(2 * wide.nbytes)
    block.add([wide], [masked, mask], [Gradient(wide, (mask,), (once,))], once)
    columns = Dim("seen tokens and a sink", seen.size + 1)
    joined = wide.like("scores and sinks", dims=(batch, head, rows, columns))
    sink = _sinks(block, sinks)
    slopes = [Gradient(masked, hands_on=True), Gradient(sink, at=sink.at)]
    joined = block.add([masked, sink], [joined], slopes, once)
    both = pointwise(block, "probabilities and sinks", joined, reads=Reads.OUTPUT)
    block.hold(joined)
    own = both.like("probabilities in fp32", dims=scores.dims, base=both.storage)
    own = block.add([both], [own], [Gradient(both)])
    out = cast(block, own, "probabilities", scores.width)
    block.hold(wide)
    return dropout(block, out, "attention dropout") if heads.drops else out
