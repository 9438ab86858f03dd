"""Branch and bound over partial layouts: those of a space that have to be laid out at all."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np

from meshwright.planner.bounds import PartialBounds
from meshwright.planner.footprint import PartialMemory, device_bytes_column
from meshwright.planner.search.alike import LONGER_FRACTION
from meshwright.planner.search.finalists import NEVER_PS, Finalists
from meshwright.planner.space import Cells, Column, Mask, Nodes, PartialLayouts, PartialSpace
from meshwright.simulator import CostModel
from meshwright.simulator.memory import Fragmentation, PeakBytes

# Layouts that are laid out first: the fastest few by their bounds within each of some levels of
# memory.  Better ones leave less for later; none changes the result.
NUM_LEVELS, FEW = 48, 8

# Where one of these is asked for, layers are of kinds that no bound of partial layouts knows.
OTHER_KINDS = ("recompute_layers", "expert_overlap", "offload_layers", "offload_modules")


class BestKnown(NamedTuple):
    """Simulated layouts, of which others are faster only with more memory.

    Args:
        device_bytes: Memory of each, ascending.
        step_ps: Their times, descending.
        slowest_ps: Time of a report's last row, and a margin: partial layouts whose bound is no
            longer are laid out.
    """

    device_bytes: Column
    step_ps: Column
    slowest_ps: int

    @classmethod
    def by(cls, finalists: Finalists, rows: Sequence[int], top: int) -> Self:
        """Return the times that simulated layouts which fit set, and the *rows* of a report.

        Args:
            finalists: Layouts that fit.
            rows: Simulated layouts, as a report lists them.
            top: Number of rows of a report.
        """
        runs, fitting = finalists.runs, {*finalists.indices.tolist()}
        known = [index for index in runs.step_ps if index in fitting]
        pairs = sorted((int(runs.device_bytes[each]), runs.step_ps[each]) for each in known)
        needed, times = np.array(pairs, np.int64).reshape(-1, 2).T
        slowest_ps = NEVER_PS
        if len(rows) >= top:  # what is folded into the last row may take a little longer
            slowest_ps = int(max(runs.step_ps[each] for each in rows) * (1 + LONGER_FRACTION))
        return cls(needed, np.minimum.accumulate(times), slowest_ps)

    def least_ps(self, device_bytes: Column) -> Column:
        """Return the least known time within so much memory; `NEVER_PS` where none is known."""
        # Within less memory than any simulated layout needs no time is known.
        times = np.append(NEVER_PS, self.step_ps)
        return np.asarray(times[np.searchsorted(self.device_bytes, device_bytes, side="right")])


class Bounded(NamedTuple):
    """Nodes with lower bounds of the time and of the device memory of their layouts."""

    nodes: Nodes
    step_ps: Column
    device_bytes: Column

    def chosen(self, mask: Mask) -> Self:
        """Return the nodes of a mask."""
        nodes = self.nodes._replace(rows=self.nodes.rows[mask])
        return type(self)(nodes, self.step_ps[mask], self.device_bytes[mask])


Chooses = Callable[[Column, Column], Mask]
"""Returns the mask of nodes to expand, from the bounds of their times and device memory."""


class Pruning:
    """Partial layouts of a space, with lower bounds of time and memory.

    ``rows`` are those that may fit, whatever they recompute.
    """

    def __init__(self, space: PartialSpace, costs: CostModel, limit_bytes: int) -> None:
        """Bound the memory of every partial layout, and the time of those that may fit."""
        self._space, self._costs, self._limit_bytes = space, costs, limit_bytes
        self._times, self._memory = PartialBounds(space, costs), PartialMemory(space, costs.blocks)
        families = [(each, each.offered.any(axis=(1, 2))) for each in space.families]
        self.rows = self._bounded(
            [
                Nodes(family, np.flatnonzero(offered), _choices(family))
                for family, offered in families
                if offered.any()
            ]
        )

    @staticmethod
    def bounds(space: PartialSpace) -> bool:
        """Whether there are bounds of a space's partial layouts."""
        limits = (each.limits for each in space.families)
        return not any(each.asks_for(name) for each in limits for name in OTHER_KINDS)

    def _bounded(self, parts: Sequence[Nodes]) -> list[Bounded]:
        """Return the bounds of nodes that may fit."""
        fitting_nodes, memory_bounds = [], []
        fragmentation, cluster = Fragmentation.of(self._costs.stack), self._costs.cluster
        for nodes, live in zip(parts, self._memory.of(parts, self._limit_bytes), strict=True):
            peaks = PeakBytes(live, fragmentation.least_reserved_parts(live))
            examples = nodes.examples(self._space, np.arange(len(live)))
            device_bytes = device_bytes_column(examples, cluster, peaks)
            may_fit = device_bytes <= self._limit_bytes
            if may_fit.any():
                fitting_nodes.append(nodes._replace(rows=nodes.rows[may_fit]))
                memory_bounds.append(device_bytes[may_fit])
        # Only nodes that may fit get bounds of time.
        return [*map(Bounded, fitting_nodes, self._times.of(fitting_nodes), memory_bounds)]

    @property
    def num_lacking(self) -> int:
        """Number of launchable layouts that need too much memory by the bounds alone."""
        every = sum(int(np.count_nonzero(each.told)) for each in self._space.families)
        kept = (each.nodes.family.told[each.nodes.rows] for each in self.rows)
        return every - sum(int(np.count_nonzero(told)) for told in kept)

    def below(self, rows: Sequence[Bounded]) -> list[Bounded]:
        """Return the nodes below some of `rows`, by recomputation, that may fit."""
        above = (each.nodes for each in rows if len(each.nodes.rows))
        return self._bounded([node for each in above for node in _below(each)])

    def first(self) -> list[Cells]:
        """Return the cells of a few layouts that may be best by their bounds."""
        return self._cells(_fewest_per_level)

    def left(self, best_known: BestKnown) -> list[Cells]:
        """Return the cells of all layouts that may be as good as any of a report, or better."""

        def chooses(step_ps: Column, device_bytes: Column) -> Mask:
            least_ps = np.maximum(best_known.slowest_ps, best_known.least_ps(device_bytes))
            return np.asarray(step_ps <= least_ps)

        return self._cells(chooses)

    def _cells(self, chooses: Chooses) -> list[Cells]:
        """Return the cells of each family that are left when rows and then choices are chosen."""
        # By rows first: those that are beaten whatever they recompute are not split further.
        below = self.below(_chosen(self.rows, chooses))
        kept = [each.nodes for each in _chosen(below, chooses)]
        found = []
        for family in self._space.families:
            parts = [np.zeros((3, 0), np.int64)]
            for each in kept:
                if each.family is family:
                    offered = family.offered[each.rows][:, each.choices]
                    row, choice, setting = np.nonzero(offered)
                    parts.append(np.stack([each.rows[row], each.choices[choice], setting]))
            found.append(tuple(np.concatenate(parts, axis=1)))
        return found


def _choices(family: PartialLayouts) -> Column:
    """Return the choices of a family that the stack runs in some layout."""
    return np.flatnonzero(family.offered.any(axis=(0, 2)))


def _below(nodes: Nodes) -> Iterator[Nodes]:
    """Yield nodes by recomputation, with the rows that have layouts."""
    modes = nodes.family.choices["recompute"][nodes.choices]
    for mode in np.unique(modes):
        choices = nodes.choices[modes == mode]
        has_layout = nodes.have(choices)
        if has_layout.any():
            yield Nodes(nodes.family, nodes.rows[has_layout], choices)


def _chosen(parts: Sequence[Bounded], chooses: Chooses) -> list[Bounded]:
    """Return the nodes of each of *parts* that are chosen among all."""
    bounds = [np.zeros((2, 0), np.int64)]
    bounds += [np.stack([each.step_ps, each.device_bytes]) for each in parts]
    mask = chooses(*np.concatenate(bounds, axis=1))
    ends = np.cumsum([len(each.step_ps) for each in parts])
    masks = np.split(mask, ends[:-1])
    return [each.chosen(own) for each, own in zip(parts, masks, strict=False)]


def _fewest_per_level(step_ps: Column, device_bytes: Column) -> Mask:
    """Return the mask of the `FEW` with the least bounds of time within some levels of memory."""
    found = np.zeros(len(step_ps), np.bool_)
    if not len(step_ps):
        return found
    order = np.argsort(step_ps, kind="stable")
    needed = device_bytes[order]
    for level in np.geomspace(max(int(needed.min()), 1), int(needed.max()), NUM_LEVELS):
        found[order[np.flatnonzero(needed <= level + 1)[:FEW]]] = True
    return found
