"""Result of a search: every simulated layout, the best ones, and the frontier."""

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster, StackProfile, counted
from meshwright.planner.changes import Change
from meshwright.planner.search.varied import SearchedFields
from meshwright.planner.search.verdict import Verdict
from meshwright.planner.space import Column
from meshwright.simulator import ResolvedPlan, StepResult, TrainingJob
from meshwright.simulator.account import Shown

MEMORY_CELLS, TIME_CELLS = 64, 48  # at most: few layouts have larger cells
# Layouts slower than so many times the least bound are counted, not placed.
SLOWEST_RATIO = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Density:
    """Histogram of feasible layouts over device memory and lower bound of the step's time.

    Args:
        memory_edges_bytes: Edges of cells, ascending; each holds its lower edge.
        time_edges_ps: The same of time.
        counts: Layouts in each cell: a row for each cell of time, in it one for each of memory.
        num_slower: Layouts whose bound lies beyond the last edge.
    """

    memory_edges_bytes: tuple[int, ...]
    time_edges_ps: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    num_slower: int


def layout_density(device_bytes: Column, bounds_ps: Column) -> Density | None:
    """Return the histogram of layouts with such memory and bounds; None of no layouts.

    >>> found = layout_density(np.array([100, 800, 800]), np.array([10, 20, 999]))
    >>> sum(map(sum, found.counts)), found.num_slower
    (2, 1)
    """
    if not len(bounds_ps):
        return None
    least_ps = int(bounds_ps.min())
    is_placed = bounds_ps <= SLOWEST_RATIO * least_ps
    memory_bytes, times_ps = device_bytes[is_placed], bounds_ps[is_placed]
    # No more cells than layouts: other cells would be empty.
    most = 2 * isqrt(len(times_ps))
    memory_edges = _edges(memory_bytes, min(MEMORY_CELLS, most))
    time_edges = _edges(times_ps, min(TIME_CELLS, most))
    counts, _, _ = np.histogram2d(times_ps, memory_bytes, bins=(time_edges, memory_edges))
    return Density(
        memory_edges_bytes=tuple(memory_edges.tolist()),
        time_edges_ps=tuple(time_edges.tolist()),
        counts=tuple(tuple(map(int, row)) for row in counts),
        num_slower=len(bounds_ps) - len(times_ps),
    )


def _edges(values: Column, num_cells: int) -> NDArray[np.int64]:
    """Return edges in equal ratios around *values*, in whole numbers."""
    edges = np.geomspace(int(values.min()), int(values.max()) + 1, num_cells + 1).round()
    edges = edges.astype(np.int64)
    return np.asarray(edges[np.append(True, edges[1:] > edges[:-1])], np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedPlan:
    """One layout that the search simulated, with its time and memory.

    Args:
        plan: The layout.
        step_ps: Simulated time of the step.
        peak_bytes: Live bytes of the fullest rank at its peak.
        device_bytes: The same with the allocator's rounding and the context.
        fits: Whether ``device_bytes`` is within the memory limit.
    """

    plan: ResolvedPlan
    step_ps: int
    peak_bytes: int
    device_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontierPoint:
    """A layout that no simulated one beats in both memory and time.

    Args:
        plan: The layout.
        step_ps: Simulated time of the step.
        device_bytes: Memory of the fullest device.
        proven: Whether no layout of the whole space, simulated or not, beats it.
        bound_gap_fraction: How much faster an unsimulated layout within its memory could be, as a
            share of its time; 0 where ``proven``.
    """

    plan: ResolvedPlan
    step_ps: int
    device_bytes: int
    proven: bool
    bound_gap_fraction: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearest:
    """The layout that misses the memory limit by least, where none fits.

    Args:
        plan: The layout.
        lacks_bytes: Device memory that it needs beyond the limit.
        changes: The cheapest changes that make it fit, the fastest first.
    """

    plan: ResolvedPlan
    lacks_bytes: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlaunchable:
    """A layout that is faster than the best one, and that the framework cannot express.

    Args:
        plan: The layout.
        step_ps: Simulated time of the step.
        device_bytes: Memory of the fullest device.
        refusals: Texts of the settings that the framework cannot express.
    """

    plan: ResolvedPlan
    step_ps: int
    device_bytes: int
    refusals: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SearchResult(Shown):
    """The outcome of a search over layouts.

    Args:
        job: Model, sequence length and batch.
        cluster: Hardware.
        stack: Software stack.
        num_gpus: Devices that every layout occupies.
        space_size: Layouts enumerated, before any rule.
        looked_at: Layouts of these that were laid out: the others cannot be among what is reported.
        feasible: Layouts that no rule rejected, of those that were laid out.
        simulated: Number of layouts that the engine ran.
        optimal: Whether the first plan is proven to be the fastest of the space.
        bound_gap_fraction: How much faster an unsimulated layout could still be, as a share
            of the first plan's time; 0 where ``optimal``.
        rejections: Layouts that each rule rejected, by reason; not of all is it known that they
            need too much memory where not all were laid out.
        varied: Fields of plans that were searched, and those that were fixed.
        plans: The fastest layouts that fit: the best first, then, by time, the simplest of those
            that are alike.
        like: Layouts that are folded into each of ``plans``; the best one, too, where a simpler
            one does as well (`search.alike`).
        evaluated: Every simulated layout.
        frontier: Memory against time, sorted by bytes; more bytes only for less time.
        num_below: Feasible layouts below the least memory that ``frontier`` came to, as they would
            take too many passes to simulate.
        density: The feasible layouts that were laid out by memory and lower bound of their times;
            None of none.
        nearest: The layout closest to fitting, where none fits.
        launcher: Framework and version whose files start each of ``plans``; empty for none.
        not_launched: Why no framework starts them; empty where one does, or none was wanted.
        unlaunchable: A faster layout that the framework cannot express, if there is one.
        verdict: Why nothing fits, with ways out; None where something does.
    """

    job: TrainingJob
    cluster: Cluster
    stack: StackProfile
    num_gpus: int
    space_size: int
    looked_at: int
    feasible: int
    simulated: int
    optimal: bool
    bound_gap_fraction: float
    rejections: dict[str, int]
    varied: SearchedFields
    plans: tuple[StepResult, ...]
    like: tuple[tuple[ResolvedPlan, ...], ...]
    evaluated: tuple[SimulatedPlan, ...]
    frontier: tuple[FrontierPoint, ...]
    density: Density | None
    num_below: int = 0
    nearest: Nearest | None = None
    launcher: str = ""
    not_launched: str = ""
    unlaunchable: Unlaunchable | None = None
    verdict: Verdict | None = None

    @property
    def is_counted(self) -> bool:
        """Whether all layouts were laid out: else at least ``feasible`` of them fit."""
        return self.looked_at == self.space_size

    @property
    def listed(self) -> range:
        """Indices of ``plans`` that stand for others: all but the best where it is folded."""
        best = self.plans[0].plan if self.plans else None
        is_folded = any(best in others for others in self.like)
        return range(int(is_folded), len(self.plans))

    def __repr__(self) -> str:
        """Return the search in a line: size, proof, and best step."""
        proof = "proven optimal" if self.optimal else f"within {self.bound_gap_fraction:.1%}"
        best = f"{proof}, {self.plans[0]!r}" if self.plans else "nothing fits"
        return f"<SearchResult of {counted(self.space_size, 'layout')}: {best}>"
