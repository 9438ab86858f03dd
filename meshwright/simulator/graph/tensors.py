"""Named dims, where tensors lie on mesh axes, and what a change of place communicates.

Sizes are whole numbers, or columns of them: what is derived from a column is a column.
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
    """A named dim of the whole model; a rank that has a part of it has at least *grain*."""

    name: str
    size: Size
    grain: Size = 1

    def split(self, ranks: Size) -> Size:
        """Return what one of *ranks* holds: fewer key-value heads than ranks are copied."""
        return larger(self.size // ranks, self.grain)


PARTIAL = Dim("partial", 0)  # stands in a placement where a tensor is a sum over the axis
Placement: TypeAlias = Mapping[
    MeshAxis, Dim
]  # of each axis the dim that it splits; else replicated


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """One rank's part of a tensor.

    Args:
        name: What it is.
        dims: Of the whole model.
        at: Where it lies.
        mesh: Ranks of each axis.
        width: Bytes of an element.
        base: The tensor whose storage it looks into.
        is_weight: Whether it is a parameter, which a pass neither makes nor frees.
        scaled: Elements that share a scale of one byte beside them; 0 where there is none.
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
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "nbytes", with_scales(numel, self.width, self.scaled))

    @property
    def storage(self) -> "Tensor":
        """The tensor whose bytes these are."""
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
        """Return a new tensor with these dims, this place and width where no others are given.

        Scales go with a width.
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
    """Return the bytes of *count* elements of *width*, and of a scale for every *scaled* of them.

    >>> with_scales(64, 1, 32), with_scales(64, 2, 0)
    (66, 128)
    """
    return count * width + (count * width // scaled if scaled else 0)


def larger(one: Size, other: Size) -> Size:
    """Return the larger of two sizes, one by one where they are columns."""
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    return np.maximum(one, other)


def smaller(one: Size, other: Size) -> Size:
    """Return the smaller of two sizes, one by one where they are columns."""
    return one + other - larger(one, other)


def largest(sizes: Iterable[Size]) -> Size:
    """Return the largest of some sizes, one by one where they are columns."""
    return reduce(larger, sizes)


def chosen(holds: Holds, one: Size, other: Size) -> Size:
    """Return *one* where something *holds*, else *other*."""
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
    """Return the next multiple of *multiple*."""
    return -(-size // multiple) * multiple


def column(sizes: Iterable[int]) -> Size:
    """Return a column of whole numbers: what is derived from it is as exact, up to 2 ** 63."""
    return np.array(list(sizes), np.int64)


def common(size: Size) -> int:
    """Return the number that all rows of a size have."""
    return int(np.unique(size).item())


def several(size: Size) -> Size:
    """Return 1 where a size is more than 1, else 0."""
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


def changes(source: Placement, target: Placement) -> list[tuple[CollectiveOp, MeshAxis]]:
    """Return the collectives between two placements; cutting out a slice needs none.

    >>> from meshwright.simulator.layout import Axis
    >>> rows = Dim("rows", 8)
    >>> [op.value for op, _ in changes({Axis.TP: PARTIAL}, {Axis.TP: rows})]
    ['reduce_scatter']
    >>> changes({}, {Axis.TP: rows})
    []
    """
    found = []
    for axis in dict.fromkeys((*source, *target)):
        one, other = source.get(axis), target.get(axis)
        change = None
        if one is not other:
            change = redistribute(_placed(one, number=0), _placed(other, number=1))
        if change is not None and change.op is not None:
            found.append((change.op, axis))
    return found


def _placed(dim: Dim | None, *, number: int) -> Split | Replicate | Partial:
    """Return how an axis holds what it splits along *dim*: the *number* tells two dims apart."""
    if dim is None:
        return Replicate()
    return Partial() if dim is PARTIAL else Split(number)


def gradient_place(at: Placement) -> Placement:
    """Return where the gradient of a tensor has to lie: each summand has that of the sum."""
    return {axis: dim for axis, dim in at.items() if dim is not PARTIAL}


def replicated(at: Placement, over: MeshAxis) -> Placement:
    """Return *at* with nothing split, or left in parts, *over* one axis."""
    return {axis: dim for axis, dim in at.items() if axis is not over}


def product_place(one: Placement, other: Placement, out: tuple[Dim, ...]) -> Placement:
    """Return where ``out = one x other`` lies: a split dim that is summed away leaves parts.

    Raises:
        ValueError: If an axis splits different dims, or one that only one operand has split.
    """
    place: dict[MeshAxis, Dim] = {}
    for axis in dict.fromkeys((*one, *other)):
        dims = {at[axis] for at in (one, other) if axis in at}
        if len(dims) > 1:
            names = " and ".join(sorted(dim.name for dim in dims))
            raise ValueError(f"axis {axis} splits {names}: place an operand anew first")
        dim = dims.pop()
        if dim is not PARTIAL and dim not in out and not (axis in one and axis in other):
            raise ValueError(f"axis {axis} splits {dim.name} of one operand alone")
        place[axis] = dim if dim in out else PARTIAL
    return place
