"""Queries and keys turned by the positions of their tokens."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from meshwright.simulator.graph.block import Block
from meshwright.simulator.graph.operators import Gradient, Traffic
from meshwright.simulator.graph.pointwise import (
    STATISTIC_BYTES,
    Reads,
    cast,
    cut,
    handed_on,
    pointwise,
)
from meshwright.simulator.graph.tensors import Dim, Tensor


class RotaryFormula(StrEnum):
    """How transformers turns heads: whole (LLAMA), or cut in what is turned and what is not.

    Of NEOX and GLM4 queries and keys are turned before either is put together, of PHI3 after; GLM4
    turns neighbours, not halves.  What is put together has its heads before its tokens.  TABLE is
    torchtitan's for Qwen3: whole, with cosines and sines that are cast from a table in fp32.
    HALVES is of gpt-oss, which makes both halves of a head by themselves and joins them, COMPLEX of
    Llama 4 and torchtitan; LOOKED_UP of torchtitan 0.3, whose layers look angles up by document,
    and LOOKED_UP_HALVES of its Qwen3: by halves in fp32.
    NEIGHBOURS is as HALVES, of neighbours (DeepSeek-V3); CAST_COMPLEX as COMPLEX, each tensor cast
    back at once (DeepSeek-V2).
    """

    LLAMA = "llama"
    NEOX = "neox"
    PHI3 = "phi3"
    GLM4 = "glm4"
    TABLE = "table"
    HALVES = "halves"
    COMPLEX = "complex"
    LOOKED_UP = "looked up"
    LOOKED_UP_HALVES = "looked up halves"
    NEIGHBOURS = "neighbours"
    CAST_COMPLEX = "cast complex"


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
    elif formula is RotaryFormula.NEIGHBOURS:
        turned = [_half_by_half(block, x, by_slices=True) for x in given]
    elif formula is RotaryFormula.CAST_COMPLEX:
        turned = _cast_one_by_one(block, given)
    elif formula is RotaryFormula.LOOKED_UP_HALVES:
        turned = _by_looked_up_halves(block, given)
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
    makes the conjugate numbers. Numbers that are *looked_up* are of each token and head, and are
    kept (`ComplexRoPE` of torchtitan 0.3, models/common/rope.py), as are those of each token of cut
    sequences.
    """
    places = given[0].dims[: -1 if looked_up else 1]
    angles = Dim("angles", given[0].dims[-1].grain)
    numbers = given[0].like("angles", dims=(*places, angles), at={}, width=STATISTIC_BYTES)
    kept = (numbers,) if looked_up or block.lowering.looks_up else ()
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


def _by_looked_up_halves(block: Block, given: Sequence[Tensor]) -> list[Tensor]:
    """Return heads turned by halves in fp32.

    Cosines and sines are one tensor; all lives until both are cast back (`CosSinRoPE` of torchtitan
    0.3, models/common/rope.py).
    """
    both = Dim("cosines and sines", 2 * given[0].dims[-1].grain)
    dims = (*given[0].dims[:-1], both)
    cos = given[0].like("cos", dims=dims, at={}, width=STATISTIC_BYTES)
    sin = cos.like("sin", base=cos.storage)
    block.add(given[:1], [cos, sin], [], Traffic(cos.nbytes))
    wide = [cast(block, x, f"{x.name} in fp32", STATISTIC_BYTES) for x in given]
    turned = [_by_halves(block, x, cos, sin) for x in wide]
    narrow = [cast(block, x, f"rotated {x.name}", block.width) for x in turned]
    block.hold(cos, *wide, *turned)
    return narrow


def _cast_one_by_one(block: Block, given: Sequence[Tensor]) -> list[Tensor]:
    """Return products with complex numbers in fp32, each cast back as it is there."""
    wide = [cast(block, x, f"{x.name} in fp32", STATISTIC_BYTES) for x in given]
    turned = []
    for x in wide:
        moved = Traffic(2 * x.nbytes)
        numbers = x.like("conjugate", dims=(x.dims[0], Dim("angles", x.dims[-1].grain)), at={})
        made = block.add(
            [x],
            [x.like(f"turned {x.name}")],
            [Gradient(x, (), (moved,))],
            moved,
            scratch=((), (numbers,)),
        )
        turned.append(cast(block, made, f"rotated {x.name}", block.width))
    block.hold(*wide)
    return turned


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
    turns = two
    if makes_angles:  # which are repeated for all heads; the half that changes sign is a slice
        one, turns = one._replace(strided=x.numel), two._replace(strided=x.numel // 2)
    slope = Gradient(x, tuple(read[:1]), (one,))
    outputs = [wide.like("along"), *made]
    along = block.add([x, *repeated[:1]], outputs, [slope], one, scratch=((), product))
    scratch = ((half,), (half if makes_angles else x,))
    turned = block.add([x], [x.like("turned")], [Gradient(x, (), (turns,))], turns, scratch=scratch)
    slope = Gradient(turned, tuple(read[1:]), (one,))
    inputs = [turned, *read[1:]]
    across = block.add(inputs, [wide.like("across")], [slope], one, scratch=((), product))
    return handed_on(block, [along, across], wide.like(f"rotated {x.name}"), two)


def _half_by_half(block: Block, x: Tensor, *, by_slices: bool = False) -> Tensor:
    """Return ``(a cos - b sin, b cos + a sin)`` of the halves a and b of each head, joined.

    Every other element may be such a half, cut *by_slices*.
    """
    whole, width = x.dims[-1], x.dims[-1].grain // 2
    halves = [Dim(f"{each} half", whole.size // 2, width) for each in ("first", "second")]
    first, second = cut(block, x, *halves, by_slices=by_slices)

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
