"""Best-first simulation: in the order of the bounds, until no other layout can be faster."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster
from meshwright.planner.search.result import Density, SimulatedPlan, layout_density
from meshwright.planner.space import Candidates, Column, Space
from meshwright.simulator import (
    MAX_PASSES,
    BuiltStep,
    CostModel,
    StepResult,
    StepTimes,
    TooManyTasksError,
    account,
    build_step,
    simulate,
    simulate_folded,
)
from meshwright.simulator.memory import PeakBytes

# Layouts whose bounds are sharpened at a time where one is looked for; doubled each time.
FIRST_BOUNDS = 4
NEVER_PS = 2**63 - 1

Progress = Callable[[str, int, int], None]


# The fastest runs, of so many passes in all, are kept whole to be reported without another run:
# at most fifty megabytes.
MOST_KEPT_PASSES = 500_000


@dataclass
class Runs:
    """Simulated layouts of a search; each is run once, but for long ones to report."""

    space: Space
    costs: CostModel
    peaks: PeakBytes[Column]
    device_bytes: Column
    step_ps: dict[int, int] = field(default_factory=dict)
    kept: dict[int, tuple[BuiltStep, StepTimes]] = field(default_factory=dict)
    num_passes: int = 0
    too_long: set[int] = field(default_factory=set)
    earlier: dict[int, tuple[BuiltStep, StepTimes]] = field(default_factory=dict)

    def run(self, index: int) -> int:
        """Return the simulated step time of layout *index*."""
        if index not in self.step_ps:
            if index in self.earlier:
                built, times = self.earlier[index]
            else:
                built = build_step(self.space.job, self.space.plan(index), self.costs)
                times = simulate_folded(built.work)
            self.step_ps[index] = times.step_ps
            self.num_passes += times.num_passes
            self._keep(index, built, times)
        return self.step_ps[index]

    def expect(self, others: "Runs", numbers: Column, own: Column) -> None:
        """Take over the kept runs of *others* for the same layouts here.

        Args:
            others: Runs of some layouts.
            numbers: Number of each of these layouts.
            own: Numbers of the layouts here, ascending.
        """
        for index, run in others.kept.items():
            place = int(np.searchsorted(own, numbers[index]))
            if place < len(own) and own[place] == numbers[index]:
                self.earlier[place] = run

    def _keep(self, index: int, built: BuiltStep, times: StepTimes) -> None:
        """Keep a run; drop the slowest ones beyond `MOST_KEPT_PASSES`."""
        self.kept[index] = built, times
        passes = sum(kept.num_passes for _, kept in self.kept.values())
        # A report shows the fastest: the slowest runs are dropped first.
        for slowest in sorted(self.kept, key=self.rank, reverse=True):
            if passes <= MOST_KEPT_PASSES:
                return
            passes -= self.kept.pop(slowest)[1].num_passes

    def result(self, index: int, memory_limit_bytes: int | None) -> StepResult:
        """Return the full result of layout *index*."""
        if index in self.kept:
            return account(
                *self.kept[index],
                self.costs,
                memory_limit_bytes,
                peak=PeakBytes(*(int(column[index]) for column in self.peaks)),
            )
        return simulate(
            self.space.job,
            self.space.plan(index),
            self.costs.cluster,
            self.costs.stack,
            memory_limit_bytes=memory_limit_bytes,
            costs=self.costs,
        )

    def is_too_long(self, index: int) -> bool:
        """Whether layout *index* has too many passes to simulate, which only a run may tell."""
        stages = self.space.column("pp")[index] * self.space.column("num_virtual_stages")[index]
        # Many passes may still fold into few periods, which only a run tells.
        is_long = stages * self.space.num_microbatches[index] > MAX_PASSES
        if is_long and index not in self.too_long:
            try:
                self.run(index)
            except TooManyTasksError as error:
                self.too_long.add(index)
                self.num_passes += error.num_passes
        return index in self.too_long

    def rank(self, index: int) -> tuple[int, int, int]:
        """Return the key by which simulated layouts are ordered: time, then memory."""
        return self.step_ps[index], int(self.device_bytes[index]), index

    def evaluated(self, limit_bytes: int) -> tuple[SimulatedPlan, ...]:
        """Return the simulated layouts in the order of the space."""
        return tuple(
            SimulatedPlan(
                plan=self.space.plan(index),
                step_ps=self.step_ps[index],
                peak_bytes=int(self.peaks.live_bytes[index]),
                device_bytes=int(self.device_bytes[index]),
                fits=int(self.device_bytes[index]) <= limit_bytes,
            )
            for index in sorted(self.step_ps)
        )


Bound = Callable[[NDArray[np.int64]], Column]


@dataclass
class Bounds:
    """Lower bounds of layouts: rough ones of all, sharp ones of those that a search reaches.

    ``sharp_ps`` computes the sharp ones; None where there are none.
    """

    bounds_ps: Column
    sharp_ps: Bound | None
    is_sharp: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        """Mark all bounds as rough, unless there are no sharp ones."""
        self.is_sharp = np.full(len(self.bounds_ps), self.sharp_ps is None)

    def sharpen(self, indices: NDArray[np.int64]) -> None:
        """Compute the sharp bounds of *indices*."""
        rough = indices[~self.is_sharp[indices]]
        if len(rough) and self.sharp_ps is not None:
            self.bounds_ps[rough] = np.maximum(self.bounds_ps[rough], self.sharp_ps(rough))
            self.is_sharp[rough] = True


class Field(NamedTuple):
    """Layouts of a search, simulated on demand, with the functions of their lower bounds.

    ``needed_bytes`` gives the exact device memory of layouts for which only a bound above the limit
    is known; None where all of it is exact. ``host_bytes`` is the host memory of layouts that fit
    on devices; None where none offloads.
    """

    runs: Runs
    rough_ps: Bound
    sharp_ps: Bound | None = None
    needed_bytes: Bound | None = None
    host_bytes: Column | None = None

    def candidates(self, cluster: Cluster, memory_limit_bytes: int | None) -> Candidates:
        """Return the input of rules."""
        runs = self.runs
        needed = runs.device_bytes, memory_limit_bytes, self.host_bytes
        return Candidates(runs.space, cluster, *needed)

    def bounds(self, indices: NDArray[np.int64]) -> Bounds:
        """Return the bounds of *indices*; those of other layouts are meaningless."""
        bounds_ps = np.zeros(len(self.runs.space), np.int64)
        bounds_ps[indices] = self.rough_ps(indices)
        return Bounds(bounds_ps, self.sharp_ps)


@dataclass(frozen=True, slots=True)
class Proof:
    """Fastest known layouts of a set, with what their bounds prove.

    Args:
        indices: Simulated layouts, best first, as many as were asked for.
        next_bound_ps: Least bound of layouts not simulated; None where none is left.
        is_proven: Whether the first of ``indices`` is the fastest of the set.
    """

    indices: tuple[int, ...]
    next_bound_ps: int | None
    is_proven: bool


@dataclass(frozen=True)
class Finalists:
    """Layouts that are simulated in the order of bound, then memory."""

    indices: NDArray[np.int64]
    bounds: Bounds
    runs: Runs

    @property
    def density(self) -> Density | None:
        """Histogram of their memory and bounds."""
        chosen = self.indices
        return layout_density(self.runs.device_bytes[chosen], self.bounds.bounds_ps[chosen])

    def within(self, most_bytes: int) -> "Finalists":
        """Return the layouts that need at most *most_bytes* of device memory."""
        chosen = self.runs.device_bytes[self.indices] <= most_bytes
        return Finalists(self.indices[chosen], self.bounds, self.runs)

    def in_order(
        self, until_ps: Callable[[], int], count: int = FIRST_BOUNDS
    ) -> Iterator[tuple[int, int]]:
        """Yield layouts by ascending bound, which is sharpened before that.

        Args:
            until_ps: Returns the bound from which on layouts are not needed, as known by then.
            count: Layouts whose bounds are sharpened at once; doubled each time.
        """
        left, bounds_ps = self.indices, self.bounds.bounds_ps
        while len(left):
            rough = bounds_ps[left]
            most = np.partition(rough, count)[count] if count < len(left) else rough.max()
            most = min(most, max(until_ps(), rough.min()))  # which may grow again
            near = left[rough <= most]
            self.bounds.sharpen(near)
            # Sharpened bounds may exceed those of layouts that are still rough: these come first.
            near = near[bounds_ps[near] <= most]
            order = np.lexsort((near, self.runs.device_bytes[near], bounds_ps[near]))
            yield from zip(near[order].tolist(), bounds_ps[near[order]].tolist(), strict=True)
            is_done = np.zeros(len(bounds_ps), np.bool_)
            is_done[near] = True
            left, count = left[~is_done[left]], 2 * count

    def fastest(self, count: int, max_passes: int, progress: Progress | None = None) -> Proof:
        """Return the *count* fastest layouts, simulating no more than that takes.

        A layout with too many passes is not simulated; its bound stays part of the proof.

        Args:
            count: Number of layouts.
            max_passes: Stop when all runs together have made so many passes.
            progress: Called after each run.
        """
        best: list[int] = []
        skipped_ps: list[int] = []

        def until_ps() -> int:
            return self.runs.step_ps[best[-1]] if len(best) == count else NEVER_PS

        for position, (index, bound_ps) in enumerate(self.in_order(until_ps), 1):
            if len(best) == count and bound_ps >= self.runs.step_ps[best[-1]]:
                return self._proof(best, [*skipped_ps, bound_ps])
            if self.runs.is_too_long(index):
                skipped_ps.append(bound_ps)
                continue
            if index not in self.runs.step_ps and self.runs.num_passes >= max_passes:
                return self._proof(best, [*skipped_ps, bound_ps])
            self.runs.run(index)
            best = sorted([*best, index], key=self.runs.rank)[:count]
            if progress is not None:
                known_ps = self.bounds.bounds_ps[self.indices]
                done = np.count_nonzero(known_ps < self.runs.step_ps[best[0]])
                progress("simulating finalists", position, int(done))
        return self._proof(best, skipped_ps)

    def _proof(self, best: list[int], bounds_ps: list[int]) -> Proof:
        """Return the proof, given the *bounds_ps* of layouts not simulated."""
        next_bound_ps = min(bounds_ps, default=None)
        proven = bool(best) and (
            next_bound_ps is None or next_bound_ps >= self.runs.step_ps[best[0]]
        )
        return Proof(tuple(best), next_bound_ps, proven)
