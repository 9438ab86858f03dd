"""Attention in one kernel, and with its scores in memory."""

from typing import NamedTuple

import numpy as np

from meshwright.simulator.graph.block import Block
from meshwright.simulator.graph.linear import product
from meshwright.simulator.graph.operators import FusedAttention, Gradient, Kind, Traffic
from meshwright.simulator.graph.pointwise import (
    STATISTIC_BYTES,
    copy,
    dropout,
    last_dim,
    view,
)
from meshwright.simulator.graph.tensors import Dim, Tensor


class Heads(NamedTuple):
    """What attention is over: heads and tokens that are seen; how scores are masked and dropped."""

    heads: Dim
    tokens: Dim
    causal: bool
    drops: bool


def flash(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return fused attention; backward reads all three, the output and a number a row."""
    width = query.dims[-1]
    parts = {axis: heads.heads if dim is width else dim for axis, dim in query.at.items()}
    dims = (*query.dims[:-1], heads.heads)
    rows = query.like("log-sum-exp", dims=dims, at=parts, width=STATISTIC_BYTES)
    wide, deep = width.grain, value.dims[-1].grain
    out = last_dim(query, "attention", Dim("attention", heads.heads.size * deep, deep))
    scores = rows.numel * heads.tokens.size
    read = (query, key, value, out, rows)
    # Backward makes the scores again and four products more (Dao 2023, arXiv 2307.08691, 4.1).
    backward = FusedAttention(scores, 3 * wide + 2 * deep)
    gradients = [
        Gradient(query, read, (backward,)),
        Gradient(key, read, at=key.at),
        Gradient(value, read, at=value.at),
    ]
    forward = FusedAttention(scores, wide + deep)
    return block.add([query, key, value], [out, rows], gradients, forward, kind=Kind.ATTENTION)


def scored(block: Block, query: Tensor, key: Tensor, value: Tensor, heads: Heads) -> Tensor:
    """Return attention whose scores lie in memory.

    Fewer keys and values than queries are copied for each query head of their group.
    """
    rows, batch, width = query.dims
    head = Dim("head", width.grain)
    seen = Dim("seen tokens", heads.tokens.size)
    held: list[Tensor] = []
    operands = []
    for x in (query, key, value):
        given = copy(block, x, f"repeated {x.name}", like=query) if _fewer(x, query) else x
        operands.append(_by_heads(block, given))
        held += [operands[-1], *([given] if given is x else [])]
    query, key, value = operands
    query = view(block, query, rows, batch, heads.heads, head, renamed=(width, heads.heads))
    key, value = (
        view(block, x, seen, batch, heads.heads, head, renamed=(x.dims[-1], heads.heads))
        for x in (key, value)
    )
    dims = (batch, heads.heads, rows, seen)
    scores = product(block, "scores", (query, key), *dims, kind=Kind.ATTENTION)
    weights = _weights(block, scores, heads)
    dims = (rows, batch, heads.heads, head)
    out = product(block, "values", (weights, value), *dims, kind=Kind.ATTENTION)
    out = copy(block, out, "attention")
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
    element = block.traffic(scores).nbytes
    forward = Traffic(element * (3 if heads.causal else 4) // 2)
    out = scores.like("probabilities")
    backward = Traffic(element * 4)
    block.add([scores], [out], [Gradient(scores, (out,), (backward,))], forward)
    if not heads.drops:
        return out
    dropped = (Traffic(2 * element + scores.numel), Traffic(element))
    return dropout(block, out, "attention dropout", dropped)
