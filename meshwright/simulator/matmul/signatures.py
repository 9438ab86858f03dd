"""SBP signatures: placements under which an operator runs on every rank without communication.

A signature is one placement for each input and that of the output (OneFlow, arXiv:2110.15032:
split, broadcast, partial).  Three reasons make one legal: a dim that the
operator treats slice by slice may be split; a function linear in an input may get that input
as a partial sum, and a sum over a split dim leaves one; and every rank may do all the work.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

from meshwright.simulator.blocks import Gemm, MemoryBound
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Split,
    matmul_signatures,
    shard_shape,
)

Shape: TypeAlias = tuple[int, ...]
REPLICATED = "replicated"
_MATMUL_NAMES = (
    "data parallel",
    "model parallel (column)",
    "contraction split",
    "partial A",
    "partial B",
    REPLICATED,
)
# Dims of attention's tensors: [sequences, tokens, heads, width of a head].
_SEQUENCES, _TOKENS, _HEADS, _WIDTH = Split(0), Split(1), Split(2), Split(3)


class Linearity(StrEnum):
    """Inputs in which an element-wise function is linear."""

    NONE = "none"  # exp, maximum
    JOINT = "joint"  # all inputs together: add, scale by a constant
    EACH = "each"  # each input while the others stay: multiply


class Reduction(StrEnum):
    """Reduction over a dim."""

    SUM = "sum"
    MAX = "max"


class OperatorKind(StrEnum):
    """Kind of an operator, which decides its cost."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    LOOKUP = "lookup"
    TRAFFIC = "traffic"


class Signature(NamedTuple):
    """One legal combination of placements of inputs and output on one mesh axis."""

    name: str
    inputs: tuple[Placement, ...]
    out: Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedOperator:
    """An operator with global shapes and its legal signatures; made by the functions below."""

    name: str
    kind: OperatorKind
    inputs: tuple[Shape, ...]
    out: Shape
    signatures: tuple[Signature, ...]


class LocalShapes(NamedTuple):
    """Local shapes of an operator's inputs and output on one rank."""

    inputs: tuple[Shape, ...]
    out: Shape


def matmul(a: Shape, b: Shape) -> PlacedOperator:
    """Return ``C[m, n] = A[m, k] B[k, n]``.

    Raises:
        PlanError: If the inner sizes differ.

    >>> [each.name for each in matmul((4, 5), (5, 8)).signatures][:2]
    ['data parallel', 'model parallel (column)']
    """
    if a[1] != b[0]:
        raise PlanError(f"matmul of shapes {a} and {b}: inner sizes {a[1]} and {b[0]} differ")
    return PlacedOperator(
        name="matmul",
        kind=OperatorKind.MATMUL,
        inputs=(a, b),
        out=(a[0], b[1]),
        signatures=tuple(
            Signature(name, (each.a, each.b), each.out)
            for name, each in zip(_MATMUL_NAMES, matmul_signatures(), strict=True)
        ),
    )


def elementwise(
    shape: Shape, *, num_inputs: int = 1, linearity: Linearity = Linearity.NONE
) -> PlacedOperator:
    """Return an element-wise function of *num_inputs* tensors of one shape.

    >>> len(elementwise((4, 8)).signatures)
    3
    >>> [each.out for each in elementwise((4,), linearity=Linearity.JOINT).signatures]
    [S(0), R, P]
    """
    signatures = [*_sliced(range(len(shape)), num_inputs), _replicated(num_inputs)]
    # f(sum of parts) is the sum of f(part) where f is linear in all inputs together.
    if linearity is Linearity.JOINT:
        signatures.append(Signature("partial", (Partial(),) * num_inputs, Partial()))
    if linearity is Linearity.EACH:
        signatures += [_partial_input(index, num_inputs) for index in range(num_inputs)]
    return _traffic("elementwise", (shape,) * num_inputs, shape, signatures)


def reduction(shape: Shape, dim: int, *, op: Reduction) -> PlacedOperator:
    """Return the sum or the maximum along *dim*, which the output lacks.

    Slices along *dim* leave a partial sum; a partial maximum is no placement here.

    >>> [each.out for each in reduction((4, 8), 1, op=Reduction.SUM).signatures]
    [S(0), P, R, P]
    """
    _check_dim(shape, dim)
    signatures = [
        Signature(f"split dim {other}", (Split(other),), Split(other - (other > dim)))
        for other in range(len(shape))
        if other != dim
    ]
    if op is Reduction.SUM:
        signatures.append(Signature("contraction split", (Split(dim),), Partial()))
    signatures.append(_replicated(1))
    if op is Reduction.SUM:
        signatures.append(Signature("partial", (Partial(),), Partial()))
    return _traffic(op, (shape,), (*shape[:dim], *shape[dim + 1 :]), signatures)


def embedding(num_tokens: int, *, vocab_size: int, hidden_size: int) -> PlacedOperator:
    """Return the embedding of *num_tokens* ids with a weight ``[vocab_size, hidden_size]``.

    With a vocabulary-parallel weight a rank yields zeros for ids of other ranks, to be summed
    (the vocabulary-parallel embedding of Shoeybi 2019, arXiv:1909.08053).

    >>> embedding(6, vocab_size=8, hidden_size=4).signatures[2]
    Signature(name='vocabulary split', inputs=(R, S(0)), out=P)
    """
    return PlacedOperator(
        name="embedding",
        kind=OperatorKind.LOOKUP,
        inputs=((num_tokens,), (vocab_size, hidden_size)),
        out=(num_tokens, hidden_size),
        signatures=(
            Signature("data parallel", (Split(0), Replicate()), Split(0)),
            Signature("model parallel (column)", (Replicate(), Split(1)), Split(1)),
            Signature("vocabulary split", (Replicate(), Split(0)), Partial()),
            # The lookup is linear in the weight, not in the ids.
            _partial_input(1, 2),
            _replicated(2),
        ),
    )


def softmax(shape: Shape, dim: int) -> PlacedOperator:
    """Return the softmax along *dim*: every other dim may be split.

    >>> [each.out for each in softmax((4, 8), 1).signatures]
    [S(0), R]
    """
    _check_dim(shape, dim)
    others = (each for each in range(len(shape)) if each != dim)
    return _traffic("softmax", (shape,), shape, [*_sliced(others, 1), _replicated(1)])


def layer_norm(shape: Shape) -> PlacedOperator:
    """Return the layer norm over the last dim, with a weight and a bias of its length.

    It is linear in weight and bias together.

    >>> layer_norm((4, 8)).signatures[0]
    Signature(name='split dim 0', inputs=(S(0), R, R), out=S(0))
    """
    _check_dim(shape, 0)
    last = len(shape) - 1
    signatures = [
        Signature(f"split dim {dim}", (Split(dim), Replicate(), Replicate()), Split(dim))
        for dim in range(last)
    ]
    signatures.append(_replicated(3))
    affine = (Replicate(), Partial(), Partial())
    signatures.append(Signature("partial weight and bias", affine, Partial()))
    return _traffic("layer norm", (shape, shape[last:], shape[last:]), shape, signatures)


def attention(num_sequences: int, seq_len: int, *, num_heads: int, head_dim: int) -> PlacedOperator:
    """Return attention of queries, keys and values ``[sequences, tokens, heads, head_dim]``.

    Heads and sequences do not see each other; each query token sees all keys; the result is
    linear in the values and treats their columns one by one.

    >>> [each.name for each in attention(2, 16, num_heads=4, head_dim=8).signatures][:2]
    ['data parallel', 'head parallel']
    """
    shape, whole = (num_sequences, seq_len, num_heads, head_dim), Replicate()
    return PlacedOperator(
        name="attention",
        kind=OperatorKind.ATTENTION,
        inputs=(shape,) * 3,
        out=shape,
        signatures=(
            Signature("data parallel", (_SEQUENCES,) * 3, _SEQUENCES),
            Signature("head parallel", (_HEADS,) * 3, _HEADS),
            Signature("query tokens split", (_TOKENS, whole, whole), _TOKENS),
            Signature("value columns split", (whole, whole, _WIDTH), _WIDTH),
            # Attention is linear in the values alone.
            _partial_input(2, 3),
            _replicated(3),
        ),
    )


def mesh_signatures(operator: PlacedOperator, num_axes: int) -> Iterator[tuple[Signature, ...]]:
    """Yield every choice of one signature per mesh axis; axes are independent.

    >>> len(list(mesh_signatures(softmax((4, 8), 1), 2)))
    4
    """
    return product(operator.signatures, repeat=num_axes)


def input_placements(signatures: tuple[Signature, ...], index: int) -> Placements:
    """Return the placement of input *index* on each axis."""
    return tuple(each.inputs[index] for each in signatures)


def out_placements(signatures: tuple[Signature, ...]) -> Placements:
    """Return the placement of the output on each axis."""
    return tuple(each.out for each in signatures)


def local_shapes(
    operator: PlacedOperator, signatures: tuple[Signature, ...], sizes: tuple[int, ...]
) -> LocalShapes:
    """Return the local shapes under one signature per axis.

    Args:
        operator: The operator.
        signatures: One of its signatures for each mesh axis.
        sizes: Ranks of each axis.

    Raises:
        PlanError: If a dim is not divisible by the ranks that split it.

    >>> product = matmul((4, 5), (5, 8))
    >>> local_shapes(product, product.signatures[:1], (2,))
    LocalShapes(inputs=((2, 5), (5, 8)), out=(2, 8))
    """
    inputs = tuple(
        shard_shape(shape, input_placements(signatures, index), sizes)
        for index, shape in enumerate(operator.inputs)
    )
    return LocalShapes(inputs, shard_shape(operator.out, out_placements(signatures), sizes))


def local_work(
    operator: PlacedOperator, shapes: LocalShapes, element_bytes: int
) -> tuple[Gemm | MemoryBound, ...]:
    """Return the work of one rank: GEMMs, or the traffic of its tensors.

    Args:
        operator: The operator.
        shapes: Local shapes.
        element_bytes: Bytes of an element, the same in all tensors.

    >>> product = matmul((4, 5), (5, 8))
    >>> sum(each.flops for each in local_work(product, LocalShapes(((2, 5), (5, 8)), (2, 8)), 2))
    160
    """
    out_bytes = prod(shapes.out) * element_bytes
    match operator.kind:
        case OperatorKind.MATMUL:
            (m, k), (_, n) = shapes.inputs
            return (Gemm(operator.name, m=m, n=n, k=k),)
        case OperatorKind.ATTENTION:
            return _attention_work(shapes, element_bytes)
        case OperatorKind.LOOKUP:  # only the rows of the ids are read
            ids_bytes = prod(shapes.inputs[0]) * element_bytes
            return (MemoryBound(operator.name, ids_bytes + 2 * out_bytes),)
        case OperatorKind.TRAFFIC:
            read_bytes = sum(prod(shape) for shape in shapes.inputs) * element_bytes
            return (MemoryBound(operator.name, read_bytes + out_bytes),)


def _attention_work(shapes: LocalShapes, element_bytes: int) -> tuple[Gemm | MemoryBound, ...]:
    """Return unfused attention: GEMM of scores, softmax, GEMM of values, without a mask."""
    (num_sequences, num_queries, num_heads, head_dim), (_, num_keys, _, _), values = shapes.inputs
    batch = num_sequences * num_heads
    num_scores = batch * num_queries * num_keys
    return (
        Gemm("attention scores", m=num_queries, n=num_keys, k=head_dim, batch=batch),
        MemoryBound("softmax", 2 * num_scores * element_bytes),
        Gemm("attention values", m=num_queries, n=values[3], k=num_keys, batch=batch),
    )


def _traffic(
    name: str, inputs: tuple[Shape, ...], out: Shape, signatures: list[Signature]
) -> PlacedOperator:
    return PlacedOperator(
        name=name,
        kind=OperatorKind.TRAFFIC,
        inputs=inputs,
        out=out,
        signatures=tuple(signatures),
    )


def _sliced(dims: Iterator[int] | range, num_inputs: int) -> list[Signature]:
    return [Signature(f"split dim {dim}", (Split(dim),) * num_inputs, Split(dim)) for dim in dims]


def _replicated(num_inputs: int) -> Signature:
    return Signature(REPLICATED, (Replicate(),) * num_inputs, Replicate())


def _partial_input(index: int, num_inputs: int) -> Signature:
    """Return the signature of a function linear in input *index*."""
    inputs = tuple(Partial() if each == index else Replicate() for each in range(num_inputs))
    return Signature(f"partial input {index}", inputs, Partial())


def _check_dim(shape: Shape, dim: int) -> None:
    if not 0 <= dim < len(shape):
        raise PlanError(f"dim {dim} of shape {shape} does not exist; allowed 0 to {len(shape) - 1}")
