"""RoPE (rotary position embedding) of queries and keys."""

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
    pass_through,
    pointwise,
)
from meshwright.simulator.graph.tensors import Dim, Tensor


class RotaryFormula(StrEnum):
    """RoPE of a model's code: of the whole head (LLAMA), or of a part that is split off.

    NEOX and GLM4 rotate queries and keys before either is concatenated with its rest, PHI3 after;
    GLM4 rotates interleaved pairs, not halves.  Concatenated heads come before tokens.  TABLE is
    torchtitan's for Qwen3: the whole head, with a cos/sin cache that is cast from fp32.
    HALVES is gpt-oss, which rotates both halves apart and concatenates them, COMPLEX Llama 4 and
    torchtitan; INDEXED_COMPLEX torchtitan 0.3, whose layers index the cache by position ids, and
    INDEXED_COS_SIN its Qwen3: rotate_half in fp32.
    NEIGHBOURS is HALVES of interleaved pairs (DeepSeek-V3); CAST_COMPLEX is COMPLEX with each
    tensor cast back at once (DeepSeek-V2).
    """

    LLAMA = "llama"
    NEOX = "neox"
    PHI3 = "phi3"
    GLM4 = "glm4"
    TABLE = "table"
    HALVES = "halves"
    COMPLEX = "complex"
    INDEXED_COMPLEX = "looked up"
    INDEXED_COS_SIN = "looked up halves"
    NEIGHBOURS = "neighbours"
    CAST_COMPLEX = "cast complex"


class Rotary(NamedTuple):
    """RoPE options: rotated head dim (0: all), formula, and ``apart``: no fused kernel."""

    width: int = 0
    formula: RotaryFormula = RotaryFormula.LLAMA
    apart: bool = False


WHOLE_HEADS = Rotary()


def rotary(block: Block, *queries_keys: Tensor, how: Rotary = WHOLE_HEADS) -> list[Tensor]:
    """Return queries and keys with RoPE applied."""
    lowering, formula = block.lowering, how.formula
    angles = _cos_sin(block, queries_keys[0], how)
    if lowering.is_local or how.apart:
        rotated = [_megatron_rope(block, x, how.width) for x in queries_keys]
    # The rotation is linear: backward rotates the gradient back and reads the cache alone.
    elif not lowering.is_eager:
        rotated = [
            pointwise(block, f"rotated {x.name}", x, reads=Reads.NOTHING, beside=angles)
            for x in queries_keys
        ]
    elif formula is RotaryFormula.HALVES:
        rotated = [_split_halves_rope(block, x) for x in queries_keys]
    elif formula is RotaryFormula.NEIGHBOURS:
        rotated = [_split_halves_rope(block, x, by_slices=True) for x in queries_keys]
    elif formula is RotaryFormula.CAST_COMPLEX:
        rotated = _cast_complex_rope(block, queries_keys)
    elif formula is RotaryFormula.INDEXED_COS_SIN:
        rotated = _indexed_cos_sin_rope(block, queries_keys)
    elif formula is RotaryFormula.TABLE or (
        formula is RotaryFormula.LLAMA and lowering.uses_transformers_ops
    ):
        rotated = [_rotate_half_rope(block, x, *angles) for x in queries_keys]
    elif formula in {RotaryFormula.LLAMA, RotaryFormula.COMPLEX, RotaryFormula.INDEXED_COMPLEX}:
        is_looked_up = formula is RotaryFormula.INDEXED_COMPLEX
        rotated = _complex_rope(block, queries_keys, looked_up=is_looked_up)
    else:
        rotated = _partial_rope(block, queries_keys, how)
    block.hold(*queries_keys)
    return rotated


def _cos_sin(block: Block, x: Tensor, how: Rotary) -> tuple[Tensor, ...]:
    """Return the cos/sin cache as each layer saves it: 16-bit copies, or nothing.

    fully_shard casts a layer's arguments before its checkpoint, which saves them, and before
    compiled code (`cast_forward_inputs` of its MixedPrecisionPolicy, PyTorch 2.13).
    """
    if how.formula is not RotaryFormula.TABLE or x.width == STATISTIC_BYTES:
        return ()
    # The cast runs once per forward, outside of the checkpoint.
    with block.outside():
        return _cos_sin_cache(block, x, how)


def _complex_rope(
    block: Block, queries_keys: Sequence[Tensor], *, looked_up: bool = False
) -> list[Tensor]:
    """Return RoPE by complex multiplication in fp32 (``freqs_cis``), as torchtitan writes it.

    All tensors live until both are cast back (torchtitan/models/llama3/model/model.py); backward
    makes the conjugate.  A *looked_up* cache is expanded to each token and head, and saved
    (`ComplexRoPE` of torchtitan 0.3, models/common/rope.py); so is that of each token under
    context parallelism.
    """
    places = queries_keys[0].dims[: -1 if looked_up else 1]
    angles = Dim("angles", queries_keys[0].dims[-1].grain)
    numbers = queries_keys[0].like("angles", dims=(*places, angles), at={}, width=STATISTIC_BYTES)
    kept = (numbers,) if looked_up or block.lowering.indexes_rope_cache else ()
    if kept:
        block.add(queries_keys[:1], kept, [], Traffic(numbers.nbytes))
    wide = [cast(block, x, f"{x.name} in fp32", STATISTIC_BYTES) for x in queries_keys]
    rotated = []
    for x in wide:
        slope, out = Gradient(x, kept, (Traffic(2 * x.nbytes),)), x.like(f"turned {x.name}")
        scratch = ((), (numbers.like("conjugate"),))
        rotated.append(
            block.add([x, *kept], [out], [slope], Traffic(2 * x.nbytes), scratch=scratch)
        )
    narrow = [cast(block, x, f"rotated {x.name}", block.width) for x in rotated]
    block.hold(*kept, *wide, *rotated)
    return narrow


def _indexed_cos_sin_rope(block: Block, queries_keys: Sequence[Tensor]) -> list[Tensor]:
    """Return RoPE by rotate_half in fp32, with an indexed cos/sin cache.

    Cosines and sines are one tensor; all tensors live until both are cast back (`CosSinRoPE` of
    torchtitan 0.3, models/common/rope.py).
    """
    both = Dim("cosines and sines", 2 * queries_keys[0].dims[-1].grain)
    dims = (*queries_keys[0].dims[:-1], both)
    cos = queries_keys[0].like("cos", dims=dims, at={}, width=STATISTIC_BYTES)
    sin = cos.like("sin", base=cos.storage)
    block.add(queries_keys[:1], [cos, sin], [], Traffic(cos.nbytes))
    wide = [cast(block, x, f"{x.name} in fp32", STATISTIC_BYTES) for x in queries_keys]
    rotated = [_rotate_half_rope(block, x, cos, sin) for x in wide]
    narrow = [cast(block, x, f"rotated {x.name}", block.width) for x in rotated]
    block.hold(cos, *wide, *rotated)
    return narrow


def _cast_complex_rope(block: Block, queries_keys: Sequence[Tensor]) -> list[Tensor]:
    """Return RoPE by complex multiplication in fp32, each tensor cast back at once."""
    wide = [cast(block, x, f"{x.name} in fp32", STATISTIC_BYTES) for x in queries_keys]
    rotated = []
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
        rotated.append(cast(block, made, f"rotated {x.name}", block.width))
    block.hold(*wide)
    return rotated


def _partial_rope(block: Block, queries_keys: Sequence[Tensor], how: Rotary) -> list[Tensor]:
    """Return partial RoPE: the rotated part of each head, concatenated with its rest."""
    cuts = [_split_heads(block, x, how.width) for x in queries_keys]
    cache = _cos_sin_cache(block, queries_keys[0], how) if how.formula is RotaryFormula.GLM4 else ()
    if how.formula is RotaryFormula.PHI3:
        return [
            _concatenated(block, x, _rotate_half_rope(block, part), rest) for x, part, rest in cuts
        ]
    rotated = [_rotate_half_rope(block, part, *cache) for _, part, _ in cuts]
    return [
        _concatenated(block, x, each, rest)
        for each, (x, _, rest) in zip(rotated, cuts, strict=True)
    ]


def _megatron_rope(block: Block, x: Tensor, width: int) -> Tensor:
    """Return RoPE of *x* as Megatron-Core applies it, which slices off the rest of each head.

    It slices even an empty rest: a view whose gradient is as large as *x*
    (core/models/common/embeddings/rope_utils.py).
    """
    if 0 < width < int(x.dims[-1].grain):
        _, part, rest = _split_heads(block, x, width)
    else:
        part, rest = x, block.add([x], [x.like("rest", base=x.storage)], [Gradient(x)])
    return _concatenated(block, x, _rotate_half_rope(block, part, makes_angles=True), rest)


def _cos_sin_cache(block: Block, x: Tensor, how: Rotary) -> tuple[Tensor, Tensor]:
    """Return the cos/sin cache that queries and keys share; GLM4's is per sequence."""
    width = STATISTIC_BYTES if block.lowering.casts else x.width
    tokens = x.dims[:-1] if how.formula is RotaryFormula.GLM4 else x.dims[:1]
    dims = (*tokens, Dim("angles", how.width))
    cos, sin = (x.like(each, dims=dims, at={}, width=width) for each in ("cos", "sin"))
    block.add([x], [cos, sin], [])
    return cos, sin


def _split_heads(block: Block, x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    whole = x.dims[-1]
    heads = whole.size // whole.grain
    widths = width, whole.grain - width
    parts = [Dim(whole.name, heads * each, each) for each in widths]
    rotated, rest = cut(block, x, *parts, by_slices=True)
    return x, rotated, rest


def _concatenated(block: Block, x: Tensor, rotated: Tensor, rest: Tensor) -> Tensor:
    both = [Gradient(each, passes_through=True, at=each.at) for each in (rotated, rest)]
    out = x.like(f"rotated {x.name}", width=rotated.width)
    return block.add([rotated, rest], [out], both, block.traffic(x, x))


def _rotate_half_rope(
    block: Block, x: Tensor, *cache: Tensor, makes_angles: bool = False
) -> Tensor:
    """Return ``x cos + rotate_half(x) sin``, with a shared cos/sin cache if given.

    Megatron-Core computes cosines and sines for each tensor; transformers has them before, in
    fp32 under autocast.
    """
    lowering, angles = block.lowering, (x.dims[0], Dim("angles", x.dims[-1].grain))
    names = ("cos", "sin") if makes_angles else ()
    made = [x.like(f"{x.name} {each}", dims=angles, at={}) for each in names]
    read = made or cache
    width = STATISTIC_BYTES if lowering.casts else x.width
    wide, half = x.like("wide", width=width), x.like("half", width=x.width // 2)
    product = (wide,) if width > x.width else ()
    one, two = block.traffic(x, x), block.traffic(x, x, x)
    turns = two
    if makes_angles:  # which are repeated for all heads; the half that changes sign is a slice
        one, turns = one._replace(strided=x.numel), two._replace(strided=x.numel // 2)
    slope = Gradient(x, tuple(read[:1]), (one,))
    outputs = [wide.like("along"), *made]
    along = block.add([x, *cache[:1]], outputs, [slope], one, scratch=((), product))
    scratch = ((half,), (half if makes_angles else x,))
    rotated = block.add(
        [x], [x.like("turned")], [Gradient(x, (), (turns,))], turns, scratch=scratch
    )
    slope = Gradient(rotated, tuple(read[1:]), (one,))
    inputs = [rotated, *read[1:]]
    across = block.add(inputs, [wide.like("across")], [slope], one, scratch=((), product))
    return pass_through(block, [along, across], wide.like(f"rotated {x.name}"), two)


def _split_halves_rope(block: Block, x: Tensor, *, by_slices: bool = False) -> Tensor:
    """Return ``(a cos - b sin, b cos + a sin)`` of the halves a and b of each head, concatenated.

    *by_slices* the halves are interleaved (even and odd elements).
    """
    whole, width = x.dims[-1], x.dims[-1].grain // 2
    halves = [Dim(f"{each} half", whole.size // 2, width) for each in ("first", "second")]
    first, second = cut(block, x, *halves, by_slices=by_slices)

    def times(part: Tensor, name: str) -> Tensor:
        return pointwise(block, f"{part.name} by {name}", part, reads=Reads.NOTHING)

    def added(one: Tensor, other: Tensor, *, negates: bool) -> Tensor:
        moved = block.traffic(one, one, other)
        slopes = [
            Gradient(one, passes_through=True),
            Gradient(
                other, (), (block.traffic(other, other),) * negates, passes_through=not negates
            ),
        ]
        return block.add([one, other], [one.like(f"turned {one.name}")], slopes, moved)

    one = added(times(first, "cos"), times(second, "sin"), negates=True)
    two = added(times(second, "cos"), times(first, "sin"), negates=False)
    both = [Gradient(each, passes_through=True, at=each.at) for each in (one, two)]
    return block.add([one, two], [x.like(f"rotated {x.name}")], both, block.traffic(x, x))
