"""Tensors with named dims, their placements on mesh axes, and collectives between placements.

Sizes are integers or columns of them: whatever is computed from a column is a column.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import ceil
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.layout import MeshAxis, Partial, Replicate, Split, redistribute

Size: TypeAlias = "int | NDArray[np.int64]"
Holds: TypeAlias = "bool | NDArray[np.bool_]"
Mesh: TypeAlias = Mapping[MeshAxis, Size]  # ranks of each axis; an axis of one rank is left out


@dataclass(frozen=True, eq=False, slots=True)
class Dim:
    """A named dim with its global size; a shard has at least *grain* (a head, for instance)."""

    name: str
    size: Size
    grain: Size = 1

    def split(self, ranks: Size) -> Size:
        """Return the local size on *ranks*: fewer key-value heads than ranks are replicated."""
        return larger(self.size // ranks, self.grain)


PARTIAL = Dim("partial", 0)  # stands in a placement where a tensor is a sum over the axis
Placement: TypeAlias = Mapping[
    MeshAxis, Dim
]  # of each axis the dim that it splits; else replicated


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """One rank's shard of a tensor.

    Args:
        name: Name.
        dims: Dims with global sizes.
        at: Placement.
        mesh: Ranks of each axis.
        width: Bytes of an element.
        base: Tensor that it is a view of.
        is_weight: Whether it is a parameter, which a pass neither allocates nor frees.
        scaled: Elements of a block that share a one-byte scale; 0 for no block scales.
    """

    name: str
    dims: tuple[Dim, ...]
    at: Placement
    mesh: Mesh
    width: int = 2
    base: "Tensor | None" = None
    is_weight: bool = False
    scaled: int = 0
    sizes: dict[Dim, Size] = field(init=False)
    numel: Size = field(init=False)
    nbytes: Size = field(init=False)  # on one rank; read at each event of a pass

    def __post_init__(self) -> None:
        sizes = {dim: dim.size for dim in self.dims}
        if len(sizes) != len(self.dims):
            raise ValueError(f"{self.name} has one dim twice")
        for axis, dim in self.at.items():
            if dim is not PARTIAL:
                sizes[dim] = larger(sizes[dim] // self.mesh[axis], dim.grain)
        numel = product_of(sizes.values())
        # Computed once: a walk reads them at each event, and the dataclass is frozen.
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "nbytes", with_scales(numel, self.width, self.scaled))

    @property
    def storage(self) -> "Tensor":
        """The tensor that owns the storage."""
        return self if self.base is None else self.base.storage

    def like(
        self,
        name: str,
        *,
        dims: tuple[Dim, ...] | None = None,
        at: Placement | None = None,
        width: int | None = None,
        base: "Tensor | None" = None,
        scaled: int = 0,
    ) -> "Tensor":
        """Return a new tensor with these dims, placement and width where no others are given.

        Block scales belong to a width: a new width has those of *scaled*.
        """
        return Tensor(
            name,
            self.dims if dims is None else dims,
            self.at if at is None else at,
            self.mesh,
            self.width if width is None else width,
            base,
            scaled=self.scaled if width is None else scaled,
        )


def with_scales(count: Size, width: int, scaled: int) -> Size:
    """Return the bytes of *count* elements of *width*, with a scale for every *scaled* of them.

    >>> with_scales(64, 1, 32), with_scales(64, 2, 0)
    (66, 128)
    """
    return count * width + (count * width // scaled if scaled else 0)


def larger(one: Size, other: Size) -> Size:
    """Return the element-wise maximum of two sizes."""
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    return np.maximum(one, other)


def smaller(one: Size, other: Size) -> Size:
    """Return the element-wise minimum of two sizes."""
    return one + other - larger(one, other)


def largest(sizes: Iterable[Size]) -> Size:
    """Return the element-wise maximum of *sizes*."""
    return reduce(larger, sizes)


def chosen(holds: Holds, one: Size, other: Size) -> Size:
    """Return *one* where *holds* is true, else *other* (``np.where``)."""
    if isinstance(holds, bool):
        return one if holds else other
    return np.where(holds, one, other)


def share(size: Size, fraction: float) -> Size:
    """Return *fraction* of a size, rounded up.

    >>> share(512, 0.15625), share(7, 0.5)
    (80, 4)
    """
    if fraction == 1:
        return size
    if isinstance(size, int):
        return ceil(size * fraction)
    return np.asarray(np.ceil(size * fraction), np.int64)


def rounded_up(size: Size, multiple: Size) -> Size:
    """Return *size* rounded up to a multiple of *multiple*."""
    return -(-size // multiple) * multiple


def column(sizes: Iterable[int]) -> Size:
    """Return a column of int64, exact up to 2 ** 63."""
    return np.array(list(sizes), np.int64)


def common(size: Size) -> int:
    """Return the one value that all rows of a size have."""
    return int(np.unique(size).item())


def several(size: Size) -> Size:
    """Return 1 where a size exceeds 1, else 0."""
    return min(size - 1, 1) if isinstance(size, int) else np.minimum(size - 1, 1)


def sum_of(sizes: Iterable[Size]) -> Size:
    """Return the sum of *sizes*."""
    result: Size = 0
    for each in sizes:
        result = result + each
    return result


def product_of(sizes: Iterable[Size]) -> Size:
    """Return the product of *sizes*."""
    result: Size = 1
    for each in sizes:
        result = result * each
    return result


def redistribute_collectives(
    source: Placement, target: Placement
) -> list[tuple[CollectiveOp, MeshAxis]]:
    """Return the collectives that redistribute between two placements; slicing needs none.

    >>> from meshwright.simulator.layout import Axis
    >>> rows = Dim("rows", 8)
    >>> [op.value for op, _ in redistribute_collectives({Axis.TP: PARTIAL}, {Axis.TP: rows})]
    ['reduce_scatter']
    >>> redistribute_collectives({}, {Axis.TP: rows})
    []
    """
    collectives = []
    for axis in dict.fromkeys((*source, *target)):
        one, other = source.get(axis), target.get(axis)
        change = None
        if one is not other:
            change = redistribute(_axis_placement(one, number=0), _axis_placement(other, number=1))
        if change is not None and change.op is not None:
            collectives.append((change.op, axis))
    return collectives


def _axis_placement(dim: Dim | None, *, number: int) -> Split | Replicate | Partial:
    """Return the placement on one axis; *number* tells two split dims apart."""
    if dim is None:
        return Replicate()
    return Partial() if dim is PARTIAL else Split(number)


def gradient_placement(at: Placement) -> Placement:
    """Return the placement of a tensor's gradient: replicated where the tensor is a partial sum."""
    return {axis: dim for axis, dim in at.items() if dim is not PARTIAL}


def replicated(at: Placement, over: MeshAxis) -> Placement:
    """Return *at* replicated *over* one axis."""
    return {axis: dim for axis, dim in at.items() if axis is not over}


def product_placement(one: Placement, other: Placement, out: tuple[Dim, ...]) -> Placement:
    """Return the placement of ``out = one x other``: a split contracted dim leaves a partial sum.

    Raises:
        ValueError: If an axis splits different dims, or one that only one operand has split.
    """
    placement: dict[MeshAxis, Dim] = {}
    for axis in dict.fromkeys((*one, *other)):
        dims = {at[axis] for at in (one, other) if axis in at}
        if len(dims) > 1:
            names = " and ".join(sorted(dim.name for dim in dims))
            raise ValueError(f"axis {axis} splits {names}: place an operand anew first")
        dim = dims.pop()
        if dim is not PARTIAL and dim not in out and not (axis in one and axis in other):
            raise ValueError(f"axis {axis} splits {dim.name} of one operand alone")
        placement[axis] = dim if dim in out else PARTIAL
    return placement
