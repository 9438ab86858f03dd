"""Costs: times with their source of evidence, and totals by category."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from operator import add
from typing import NamedTuple

from meshwright.hwprofiles import Source, to_ps


class Cost(NamedTuple):
    """Time of one operator in integer picoseconds, and the source of evidence for it."""

    time_ps: int
    source: Source

    @classmethod
    def from_seconds(cls, time_s: float, source: Source) -> "Cost":
        """Return the cost of *time_s*, rounded once to picoseconds."""
        return cls(to_ps(time_s), source)


class Category(StrEnum):
    """Category of a step's time breakdown."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    KERNEL_LAUNCH = "kernel_launch"
    HOST = "host"
    RECOMPUTE = "recompute"
    TP_COMM = "tp_comm"
    CP_COMM = "cp_comm"
    EP_COMM = "ep_comm"
    PP_COMM = "pp_comm"
    DP_COMM = "dp_comm"
    HOST_COPY = "host_copy"
    OPTIMIZER = "optimizer"
    STEP_OVERHEAD = "step_overhead"
    BUBBLE = "bubble"


COMMUNICATION = (
    Category.TP_COMM,
    Category.CP_COMM,
    Category.EP_COMM,
    Category.PP_COMM,
    Category.DP_COMM,
    Category.HOST_COPY,
)

_CATEGORY_INDEX = {category: index for index, category in enumerate(Category)}
_SOURCE_INDEX = {source: index for index, source in enumerate(Source)}
_ZERO_CATEGORIES = (0,) * len(Category)
_ZERO_SOURCES = (0,) * len(Source)


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """A total in picoseconds, by `Category` and by `Source`; both add up to it."""

    time_ps: int = 0
    by_category_ps: tuple[int, ...] = _ZERO_CATEGORIES
    by_source_ps: tuple[int, ...] = _ZERO_SOURCES

    @classmethod
    def total(cls, costs: Iterable[tuple[Category, Cost]]) -> "PhaseCost":
        """Return the sum of costs with their categories."""
        categories, sources = list(_ZERO_CATEGORIES), list(_ZERO_SOURCES)
        for category, cost in costs:
            categories[_CATEGORY_INDEX[category]] += cost.time_ps
            sources[_SOURCE_INDEX[cost.source]] += cost.time_ps
        return cls(sum(categories), tuple(categories), tuple(sources))

    def __add__(self, other: "PhaseCost") -> "PhaseCost":
        """Return the sum, part by part."""
        return PhaseCost(
            self.time_ps + other.time_ps,
            tuple(map(add, self.by_category_ps, other.by_category_ps)),
            tuple(map(add, self.by_source_ps, other.by_source_ps)),
        )

    def __mul__(self, count: int) -> "PhaseCost":
        """Return *count* times the cost."""
        return PhaseCost(
            self.time_ps * count,
            tuple([part * count for part in self.by_category_ps]),
            tuple([part * count for part in self.by_source_ps]),
        )

    def category_ps(self, category: Category) -> int:
        """Return the picoseconds of *category*."""
        return self.by_category_ps[_CATEGORY_INDEX[category]]

    def source_ps(self, source: Source) -> int:
        """Return the picoseconds that rest on *source*."""
        return self.by_source_ps[_SOURCE_INDEX[source]]
