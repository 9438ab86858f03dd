"""Attention in one kernel, and with its scores in memory."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from meshwright.simulator.graph.block import Block
from meshwright.simulator.graph.linear import Scratch, product
from meshwright.simulator.graph.operators import FusedAttention, Gradient, Kind, Traffic, Work
from meshwright.simulator.graph.pointwise import (
    STATISTIC_BYTES,
    Reads,
    cast,
    copy,
    cut,
    dropout,
    handed_on,
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
        sinks: Each head has a learned score that no value belongs to.
        ranks: Context-parallel ranks that share the rows, and run as many steps.
        inner: Of them, neighbours that swap tokens for heads where the others are a ring.
    """

    heads: Dim
    tokens: Dim
    seen: int
    causal: bool
    drops: bool
    sinks: bool = False
    ranks: Size = 1
    inner: int = 1


class RotaryFormula(StrEnum):
    """How transformers turns heads: whole (LLAMA), or cut in what is turned and what is not.

    Of NEOX and GLM4 queries and keys are turned before either is put together, of PHI3 after; GLM4
    turns neighbours, not halves.  What is put together has its heads before its tokens.  TABLE is
    torchtitan's for Qwen3: whole, with cosines and sines that are cast from a table in fp32.
    HALVES is of gpt-oss, which makes both halves of a head by themselves and joins them, COMPLEX of
    Llama 4 and torchtitan; LOOKED_UP of torchtitan 0.3, whose layers look angles up by document.
    """

    LLAMA = "llama"
    NEOX = "neox"
    PHI3 = "phi3"
    GLM4 = "glm4"
    TABLE = "table"
    HALVES = "halves"
    COMPLEX = "complex"
    LOOKED_UP = "looked up"


class Rotary(NamedTuple):
    """How much of each head positions turn, 0: all, and how; ``apart``: in no kernel of its own."""

    width: int = 0
    formula: RotaryFormula = RotaryFormula.LLAMA
    apart: bool = False


WHOLE_HEADS = Rotary()


def rotary(block: Block, *given: Tensor, how: Rotary = WHOLE_HEADS) -> list[Tensor]:
    """Return queries and keys turned by their positions."""
    lowering, formula = block.lowering, how.formula
    angles = _angles(block, given[0], how)
    if lowering.is_local or how.apart:
        turned = [_beside_rest(block, x, how.width) for x in given]
    elif not lowering.is_eager:
        turned = [
            pointwise(block, f"rotated {x.name}", x, reads=Reads.NOTHING, beside=angles)
            for x in given
        ]
    elif formula is RotaryFormula.HALVES:
        turned = [_half_by_half(block, x) for x in given]
    elif formula is RotaryFormula.TABLE or (formula is RotaryFormula.LLAMA and lowering.spells_out):
        turned = [_by_halves(block, x, *angles) for x in given]
    elif formula in {RotaryFormula.LLAMA, RotaryFormula.COMPLEX, RotaryFormula.LOOKED_UP}:
        is_looked_up = formula is RotaryFormula.LOOKED_UP
        turned = _by_complex_numbers(block, given, looked_up=is_looked_up)
    else:
        turned = _by_parts(block, given, how)
    block.hold(*given)
    return turned


def _angles(block: Block, x: Tensor, how: Rotary) -> tuple[Tensor, ...]:
    """Return what each layer keeps of angles: copies of a table's in 16 bits, or nothing.

    fully_shard casts a layer's arguments ahead of its checkpoint, which keeps them, and of what is
    compiled (`cast_forward_inputs` of its MixedPrecisionPolicy, PyTorch 2.13).
    """
    if how.formula is not RotaryFormula.TABLE or x.width == STATISTIC_BYTES:
        return ()
    with block.outside():
        return _repeated_angles(block, x, how)


def _by_complex_numbers(
    block: Block, given: Sequence[Tensor], *, looked_up: bool = False
) -> list[Tensor]:
    """Return products with complex numbers in fp32, as torchtitan writes them.

    All of them live until both are cast back (torchtitan/models/llama3/model/model.py); backward
    makes the conjugate numbers. Numbers that are *looked_up* are of each token, and are kept
    (`ComplexRoPE` of torchtitan 0.3, models/common/rope.py).
    """
    places = given[0].dims[: -1 if looked_up else 1]
    angles = Dim("angles", given[0].dims[-1].grain)
    numbers = given[0].like("angles", dims=(*places, angles), at={}, width=STATISTIC_BYTES)
    kept = (numbers,) if looked_up else ()
    if kept:
        block.add(given[:1], kept, [], Traffic(numbers.nbytes))
    wide = [cast(block, x, f"{x.name} in fp32", STATISTIC_BYTES) for x in given]
    turned = []
    for x in wide:
        slope, out = Gradient(x, kept, (Traffic(2 * x.nbytes),)), x.like(f"turned {x.name}")
        scratch = ((), (numbers.like("conjugate"),))
        turned.append(block.add([x, *kept], [out], [slope], Traffic(2 * x.nbytes), scratch=scratch))
    narrow = [cast(block, x, f"rotated {x.name}", block.width) for x in turned]
    block.hold(*kept, *wide, *turned)
    return narrow


def _by_parts(block: Block, given: Sequence[Tensor], how: Rotary) -> list[Tensor]:
    """Return each of *given* with a part of each head turned, and the rest behind it."""
    cuts = [_cut_heads(block, x, how.width) for x in given]
    repeated = _repeated_angles(block, given[0], how) if how.formula is RotaryFormula.GLM4 else ()
    if how.formula is RotaryFormula.PHI3:
        return [_together(block, x, _by_halves(block, part), rest) for x, part, rest in cuts]
    turned = [_by_halves(block, part, *repeated) for _, part, _ in cuts]
    return [
        _together(block, x, each, rest) for each, (x, _, rest) in zip(turned, cuts, strict=True)
    ]


def _beside_rest(block: Block, x: Tensor, width: int) -> Tensor:
    """Return *x* turned as Megatron-Core does it, which cuts off what has no positions.

    It does so where that is nothing, too: an empty view whose gradient is as large as *x*
    (core/models/common/embeddings/rope_utils.py).
    """
    if 0 < width < int(x.dims[-1].grain):
        _, part, rest = _cut_heads(block, x, width)
    else:
        part, rest = x, block.add([x], [x.like("rest", base=x.storage)], [Gradient(x)])
    return _together(block, x, _by_halves(block, part, makes_angles=True), rest)


def _repeated_angles(block: Block, x: Tensor, how: Rotary) -> tuple[Tensor, Tensor]:
    """Return cosines and sines that queries and keys share; those of GLM4 are of each sequence."""
    width = STATISTIC_BYTES if block.lowering.casts else x.width
    tokens = x.dims[:-1] if how.formula is RotaryFormula.GLM4 else x.dims[:1]
    dims = (*tokens, Dim("angles", how.width))
    cos, sin = (x.like(each, dims=dims, at={}, width=width) for each in ("cos", "sin"))
    block.add([x], [cos, sin], [])
    return cos, sin


def _cut_heads(block: Block, x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    whole = x.dims[-1]
    heads = whole.size // whole.grain
    widths = width, whole.grain - width
    parts = [Dim(whole.name, heads * each, each) for each in widths]
    turned, rest = cut(block, x, *parts, by_slices=True)
    return x, turned, rest


def _together(block: Block, x: Tensor, turned: Tensor, rest: Tensor) -> Tensor:
    both = [Gradient(each, hands_on=True, at=each.at) for each in (turned, rest)]
    out = x.like(f"rotated {x.name}", width=turned.width)
    return block.add([turned, rest], [out], both, block.traffic(x, x))


def _by_halves(block: Block, x: Tensor, *repeated: Tensor, makes_angles: bool = False) -> Tensor:
    """Return ``x cos + (-second half, first half) sin``, perhaps of cosines that are kept.

    Megatron-Core makes cosines and sines for each tensor; those of transformers are there before,
    and in fp32 under autocast.
    """
    lowering, angles = block.lowering, (x.dims[0], Dim("angles", x.dims[-1].grain))
    names = ("cos", "sin") if makes_angles else ()
    made = [x.like(f"{x.name} {each}", dims=angles, at={}) for each in names]
    read = made or repeated
    width = STATISTIC_BYTES if lowering.casts else x.width
    wide, half = x.like("wide", width=width), x.like("half", width=x.width // 2)
    product = (wide,) if width > x.width else ()
    one, two = block.traffic(x, x), block.traffic(x, x, x)
    slope = Gradient(x, tuple(read[:1]), (one,))
    outputs = [wide.like("along"), *made]
    along = block.add([x, *repeated[:1]], outputs, [slope], one, scratch=((), product))
    scratch = ((half,), (half if makes_angles else x,))
    turned = block.add([x], [x.like("turned")], [Gradient(x, (), (two,))], two, scratch=scratch)
    slope = Gradient(turned, tuple(read[1:]), (one,))
    inputs = [turned, *read[1:]]
    across = block.add(inputs, [wide.like("across")], [slope], one, scratch=((), product))
    return handed_on(block, [along, across], wide.like(f"rotated {x.name}"), two)


def _half_by_half(block: Block, x: Tensor) -> Tensor:
    """Return ``(a cos - b sin, b cos + a sin)`` of the halves a and b of each head, joined."""
    whole, width = x.dims[-1], x.dims[-1].grain // 2
    halves = [Dim(f"{each} half", whole.size // 2, width) for each in ("first", "second")]
    first, second = cut(block, x, *halves)

    def times(part: Tensor, name: str) -> Tensor:
        return pointwise(block, f"{part.name} by {name}", part, reads=Reads.NOTHING)

    def added(one: Tensor, other: Tensor, *, negates: bool) -> Tensor:
        moved = block.traffic(one, one, other)
        slopes = [
            Gradient(one, hands_on=True),
            Gradient(other, (), (block.traffic(other, other),) * negates, hands_on=not negates),
        ]
        return block.add([one, other], [one.like(f"turned {one.name}")], slopes, moved)

    one = added(times(first, "cos"), times(second, "sin"), negates=True)
    two = added(times(second, "cos"), times(first, "sin"), negates=False)
    both = [Gradient(each, hands_on=True, at=each.at) for each in (one, two)]
    return block.add([one, two], [x.like(f"rotated {x.name}")], both, block.traffic(x, x))


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
    if heads.sinks:
        inputs.append(_sinks(block, heads))
        gradients.append(Gradient(inputs[-1], read, at=inputs[-1].at))
    return block.add(
        inputs, [out, rows], gradients, *work, kind=Kind.ATTENTION, scratch=beside.scratch
    )


def _sinks(block: Block, heads: Heads) -> Tensor:
    return block.weight("sinks", heads.heads, at={Axis.TP: heads.heads})


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
    if heads.sinks:
        return _beside_sinks(block, scores, heads)
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


def _beside_sinks(block: Block, scores: Tensor, heads: Heads) -> Tensor:
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
    sink = _sinks(block, heads)
    slopes = [Gradient(masked, hands_on=True), Gradient(sink, at=sink.at)]
    joined = block.add([masked, sink], [joined], slopes, once)
    both = pointwise(block, "probabilities and sinks", joined, reads=Reads.OUTPUT)
    block.hold(joined)
    own = both.like("probabilities in fp32", dims=scores.dims, base=both.storage)
    own = block.add([both], [own], [Gradient(both)])
    out = cast(block, own, "probabilities", scores.width)
    block.hold(wide)
    return dropout(block, out, "attention dropout") if heads.drops else out
