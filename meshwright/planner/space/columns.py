"""Columns of whole numbers over layouts, one a row."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = NDArray[np.int64]
MOST_KEY = 2**62
MOST_PLACES = 8


def combinations(choices: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return all combinations of one number of each of *choices*, the first changing last.

    Returns:
        The numbers: ``[choices, combinations]``.

    >>> combinations([[1, 2], [7], [3, 4]]).tolist()
    [[1, 1, 2, 2], [7, 7, 7, 7], [3, 4, 3, 4]]
    """
    block_size = prod(map(len, choices))
    codes = np.empty((len(choices), block_size), np.int64)
    for row, numbers in zip(codes, choices, strict=True) if block_size else ():
        block_size //= len(numbers)
        row.reshape(-1, len(numbers), block_size)[:] = np.array(numbers, np.int64)[:, None]
    return codes


def distinct(columns: list[Column]) -> tuple[Column, Column]:
    """Return one row of each distinct combination of *columns*, and the combination of each row.

    >>> distinct([np.array([3, 1, 3]), np.array([0, 1, 0])])[1].tolist()
    [1, 0, 1]
    """
    key = np.zeros(len(columns[0]), np.int64)
    columns = [column for column in columns if not is_constant(column)]
    sizes = [int(column.max()) + 1 for column in columns]
    # The key would overflow 64 bits: ranks of values take less room than values.
    if prod(sizes) > MOST_KEY:
        columns = [_distinct(column)[1] for column in columns]
        sizes = [int(column.max()) + 1 for column in columns]
    for column, size in zip(columns, sizes, strict=True):
        key *= size
        key += column
    if prod(sizes) > MOST_PLACES * (len(key) + 1):
        return _distinct(key)
    # A place for each key there could be takes less time than sorting.
    places = np.full(prod(sizes), -1)
    places[key[::-1]] = np.arange(len(key))[::-1]
    found = np.flatnonzero(places >= 0)
    first = places[found]
    places[found] = np.arange(len(found))
    return first, places[key]


def _distinct(key: Column) -> tuple[Column, Column]:
    """Return the same as `distinct` of a single key, however large."""
    # A stable sort, so that the first row of each is the first in order.
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    is_first = np.ones(len(key), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    member = np.empty(len(key), np.int64)
    member[order] = np.cumsum(is_first) - 1
    return order[is_first], member


def is_constant(column: Column) -> bool:
    """Return True if all numbers of *column* are equal, or it is empty."""
    if not len(column) or column.strides == (0,):
        return True
    # Most columns that vary do so between their ends.
    return bool(column[0] == column[-1] and column.min() == column.max())


def chosen_rows(column: Column, rows: Column) -> Column:
    """Return the numbers of *column* in *rows*; a constant column stays a broadcast one."""
    # Most fields have one value in all layouts, which is kept once.
    is_kept_once = len(column) and is_constant(column)
    return np.broadcast_to(column[0], rows.shape) if is_kept_once else column[rows]


def joined_columns(parts: Sequence[Column]) -> Column:
    """Return the concatenation of *parts*; equal constants stay a broadcast column.

    >>> joined_columns([np.array([1, 2]), np.array([3])]).tolist()
    [1, 2, 3]
    """
    parts, count = [each for each in parts if len(each)], sum(map(len, parts))
    if parts and all(is_constant(each) and each[0] == parts[0][0] for each in parts):
        return np.broadcast_to(parts[0][0], (count,))
    return np.concatenate([np.zeros(0, np.int64), *parts])


def row_slices(count: int, most: int) -> Iterator[slice]:
    """Yield slices of *count* rows, of *most* each, whose intermediates stay in caches.

    >>> [*row_slices(5, 3)]
    [slice(0, 3, None), slice(3, 6, None)]
    """
    for start in range(0, count, most):
        yield slice(start, start + most)
