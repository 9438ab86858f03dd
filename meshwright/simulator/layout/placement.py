"""Placements of a tensor on one mesh axis, and the collectives of redistribution.

Three placements suffice: split along a dim, replicate, and partial sum (S, B and P in OneFlow,
arXiv:2110.15032; Shard, Replicate and Partial in PyTorch's DTensor). A matmul accepts a few
combinations of them, moving from one placement to another is a known collective, and a gradient
has the dual placement. Tensor parallelism, sequence parallelism and ZeRO follow from these.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.axes import nearest_divisor


@dataclass(frozen=True, slots=True, repr=False)
class Split:
    """Each rank of the axis holds one equal slice along tensor dim *dim*, in rank order.

    Raises:
        ValueError: If ``dim`` is negative: the algebra compares dims, so each needs one name.

    >>> Split(0)
    S(0)
    """

    dim: int

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"dim must be >= 0, got {self.dim}")

    def __repr__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True, repr=False)
class Replicate:
    """Each rank of the axis holds the whole tensor.

    >>> Replicate()
    R
    """

    def __repr__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, repr=False)
class Partial:
    """Each rank of the axis holds a summand of full shape; the tensor is their sum.

    >>> Partial()
    P
    """

    def __repr__(self) -> str:
        return "P"


Placement: TypeAlias = Split | Replicate | Partial
Placements: TypeAlias = tuple[Placement, ...]  # one for each axis of a mesh, outermost first

# None: each rank slices, keeps or zero-pads what it has, and nothing crosses the wire.
_REDISTRIBUTION_OPS: dict[tuple[type[Placement], type[Placement]], CollectiveOp | None] = {
    (Partial, Replicate): CollectiveOp.ALL_REDUCE,
    (Partial, Split): CollectiveOp.REDUCE_SCATTER,
    (Split, Replicate): CollectiveOp.ALL_GATHER,
    (Split, Split): CollectiveOp.ALL_TO_ALL,
    (Replicate, Split): None,  # every rank cuts out its own slice
    (Replicate, Partial): None,  # one rank keeps its copy, the others hold zeros
    (Split, Partial): None,  # every rank pads its slice with zeros
}

# Placement of optimizer states over data-parallel ranks, by ZeRO stage. Megatron's distributed
# optimizer splits one flat buffer, hence dim 0.
_OPTIMIZER_STATES: dict[int, Placement] = {
    0: Replicate(),
    1: Split(0),
    2: Split(0),
    3: Split(0),
}


class Redistribution(NamedTuple):
    """A change of placement: the collective that performs it, or None where it is free."""

    op: CollectiveOp | None
    source: Placement
    target: Placement

    def buffer_bytes(self, size_bytes: int, num_ranks: int) -> Fraction:
        """Return the larger of one rank's buffers before and after the change.

        This is what the cost of a collective calls its size: the full tensor, but for
        ``all_to_all``, where both sides hold one slice.

        Args:
            size_bytes: The full tensor, not a slice of it.
            num_ranks: Ranks of the mesh axis.

        Raises:
            PlanError: If ``num_ranks`` is below 1.

        >>> redistribute(Split(0), Split(1)).buffer_bytes(800, 4)
        Fraction(200, 1)
        """
        _check_num_ranks(num_ranks)
        is_split_throughout = isinstance(self.source, Split) and isinstance(self.target, Split)
        return Fraction(size_bytes, num_ranks if is_split_throughout else 1)

    def sent_bytes(self, size_bytes: int, num_ranks: int) -> Fraction:
        """Return the bytes one rank sends, exactly.

        With n ranks and a tensor of S bytes: ``(n - 1) / n * S`` for all_gather and reduce_scatter
        on a ring, twice that for all_reduce, which is one of each (Patarasuk and Yuan 2009,
        doi:10.1016/j.jpdc.2008.09.002). In all_to_all every rank cuts its slice of S/n into n
        blocks and sends n - 1 of them straight to their owners: ``(n - 1) / n**2 * S``; relaying
        them around a ring is not counted.

        Args:
            size_bytes: The full tensor, not a slice of it.
            num_ranks: Ranks of the mesh axis; 1 sends nothing.

        Raises:
            PlanError: If ``num_ranks`` is below 1.

        >>> redistribute(Partial(), Replicate()).sent_bytes(800, 4)
        Fraction(1200, 1)
        """
        buffer_bytes = self.buffer_bytes(size_bytes, num_ranks)
        if self.op is None:
            return Fraction(0)
        # An all-reduce is a reduce-scatter and an all-gather.
        num_passes = 2 if self.op is CollectiveOp.ALL_REDUCE else 1
        return num_passes * Fraction(num_ranks - 1, num_ranks) * buffer_bytes


class MatmulSignature(NamedTuple):
    """Placements under which ``C = A B`` needs no communication: of A, of B, and of C then."""

    a: Placement
    b: Placement
    out: Placement


class ZeroCommunication(NamedTuple):
    """Redistributions of data parallelism a step: gradients, and parameters after the update."""

    gradient: Redistribution
    parameters: Redistribution | None


def dual(placement: Placement) -> Placement:
    """Return the placement of a tensor's gradient, as backward produces it.

    Ranks that share a value each contribute to its gradient (R -> P); a summand receives the
    whole gradient of the sum (P -> R); a slice receives its slice.

    >>> dual(Replicate()), dual(Partial()), dual(Split(1))
    (P, R, S(1))
    """
    match placement:
        case Split():
            return placement
        case Replicate():
            return Partial()
        case Partial():
            return Replicate()


def redistribute(source: Placement, target: Placement) -> Redistribution | None:
    """Return the redistribution from *source* to *target*; None if they are the same.

    >>> redistribute(Partial(), Split(0)).op.value
    'reduce_scatter'
    >>> redistribute(Replicate(), Split(0)).op is None
    True
    """
    if source == target:
        return None
    return Redistribution(_REDISTRIBUTION_OPS[type(source), type(target)], source, target)


def matmul_signatures() -> tuple[MatmulSignature, ...]:
    """Return every signature of ``C[m, n] = A[m, k] B[k, n]`` (OneFlow, arXiv:2110.15032).

    In order: rows split (data parallel), columns split, contraction split, the product being
    linear in A and in B, and the same work on every rank.

    >>> matmul_signatures()[0]
    MatmulSignature(a=S(0), b=R, out=S(0))
    """
    return (
        MatmulSignature(Split(0), Replicate(), Split(0)),
        MatmulSignature(Replicate(), Split(1), Split(1)),
        MatmulSignature(Split(1), Split(0), Partial()),
        MatmulSignature(Partial(), Replicate(), Partial()),
        MatmulSignature(Replicate(), Partial(), Partial()),
        MatmulSignature(Replicate(), Replicate(), Replicate()),
    )


def local_shape(shape: tuple[int, ...], placement: Placement, *, num_ranks: int) -> tuple[int, ...]:
    """Return the shape one rank holds of a tensor of *shape*.

    Args:
        shape: The full tensor.
        placement: Its placement on the mesh axis.
        num_ranks: Ranks of the mesh axis.

    Raises:
        PlanError: If ``num_ranks`` is below 1, the tensor lacks the dim, or the slices are unequal.

    >>> local_shape((4, 5), Split(0), num_ranks=2)
    (2, 5)
    >>> local_shape((4, 5), Split(1), num_ranks=2)
    Traceback (most recent call last):
    meshwright.simulator.errors.PlanError: dim 1 of shape (4, 5) is not divisible by num_ranks=2; nearest: 1
    """  # noqa: E501
    _check_num_ranks(num_ranks)
    if not isinstance(placement, Split):
        return shape
    dim = placement.dim
    if dim >= len(shape):
        raise PlanError(f"placement {placement} needs a dim {dim}; shape {shape} has {len(shape)}")
    if shape[dim] % num_ranks:
        nearest = nearest_divisor(shape[dim], num_ranks)
        raise PlanError(
            f"dim {dim} of shape {shape} is not divisible by num_ranks={num_ranks}; "
            f"nearest: {nearest}"
        )
    return (*shape[:dim], shape[dim] // num_ranks, *shape[dim + 1 :])


def shard_shape(
    shape: tuple[int, ...], placements: Placements, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape one rank of a mesh holds of a tensor of *shape*.

    Two axes may split the same dim: the earlier one cuts it into slices, the later one each slice.

    Args:
        shape: The full tensor.
        placements: Its placement on each axis.
        sizes: Ranks of each axis.

    Raises:
        PlanError: If a size is below 1, the tensor lacks a dim, or slices are unequal.
        ValueError: If there is not one placement an axis.

    >>> shard_shape((8, 6), (Split(0), Split(0)), (2, 4)), shard_shape((8, 6), (Split(1),), (2,))
    ((1, 6), (8, 3))
    """
    for placement, num_ranks in zip(placements, sizes, strict=True):
        shape = local_shape(shape, placement, num_ranks=num_ranks)
    return shape


def zero_communication(zero_stage: int) -> ZeroCommunication:
    """Return the redistributions of data parallelism a step, from the optimizer state's placement.

    Parameters are replicated, so their gradients are partial sums. A rank updates the part whose
    optimizer state it holds: it needs the gradient there, and the others need the result.

    Args:
        zero_stage: 0 (state replicated) or 1 to 3 (state split; ZeRO, arXiv:1910.02054); 2 splits
            the gradient, too, and 3 the parameters, which changes when and how often.

    Raises:
        PlanError: If ``zero_stage`` is another number.

    >>> zero_communication(0).gradient.op.value
    'all_reduce'
    >>> zero_communication(1).parameters.op.value
    'all_gather'
    """
    if zero_stage not in _OPTIMIZER_STATES:
        nearest = min(_OPTIMIZER_STATES, key=lambda stage: abs(stage - zero_stage))
        raise PlanError(f"zero_stage={zero_stage} is not 0, 1, 2 or 3; nearest: {nearest}")
    optimizer_state = _OPTIMIZER_STATES[zero_stage]
    gradient = redistribute(dual(Replicate()), optimizer_state)
    assert gradient is not None, "an optimizer state is never a partial sum"
    return ZeroCommunication(gradient, redistribute(optimizer_state, Replicate()))


def _check_num_ranks(num_ranks: int) -> None:
    if num_ranks < 1:
        raise PlanError(f"num_ranks must be >= 1, got {num_ranks}")
