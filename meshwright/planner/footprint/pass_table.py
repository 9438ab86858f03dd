"""Peak candidates of ranks that run passes in one order, as counts of sizes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space import Column, row_slices
from meshwright.simulator import Phase, Schedule
from meshwright.simulator.memory import (
    NUM_SIZES,
    PassSize,
    PipelinePosition,
    RankOrder,
    RankPasses,
    pass_counts,
)
from meshwright.simulator.schedules import Action

# An interleaved order repeats itself with every group of g microbatches once its warm-up is over;
# warm-up takes fewer than (v + 1) g of the v m passes, so 3 g microbatches show every candidate.
# P2p buffers kept alive change once more, when the first pass after the warm-up is backward: fewer
# than 2 v g passes later; those alive until the step ends grow with each, but for the last group,
# which looks ahead to no other.
PERIODS = 3
MOST_ROUNDS = 2
PERIODS_OF_MESSAGES = 5
PERIODS_OF_UNITS = 4


class RolePasses(NamedTuple):
    """Passes of ranks, whatever their sizes.

    Args:
        schedule: Their order of passes.
        pp: Number of ranks of the pipeline.
        order: Properties that all of them share.
        holds_messages: Whether modules keep p2p buffers alive.
    """

    schedule: Schedule
    pp: int
    order: RankOrder
    holds_messages: bool = False

    def few_microbatches(self, pp_rank: int, num_microbatches: int) -> int:
        """Return the fewest microbatches that show the peak of so many.

        1F1B repeats itself once its warm-up is over. Backward passes of GPipe differ by equal
        steps. Where groups do not divide the microbatches the whole order is walked.
        """
        schedule, pp = self.schedule, self.pp
        if len(self.order.kinds) == 1:
            ahead = 0 if schedule.keeps_sent_buffers or schedule.runs_beside else pp - 1 - pp_rank
            # What was sent alone lives for as many backward passes as the warm-up has forward ones.
            ahead += ahead * self.order.keeps_units
            return min(ahead + 1 + len(Phase), num_microbatches)
        group = schedule.group(pp, num_microbatches)
        periods = PERIODS_OF_UNITS if self.order.keeps_units else PERIODS
        few = group * (PERIODS_OF_MESSAGES if self.holds_messages else periods)
        is_like = few < num_microbatches and not num_microbatches % group
        return few if is_like and schedule.group(pp, few) == group else num_microbatches

    def order_of(self, pp_rank: int, num_microbatches: int) -> RankOrder:
        """Return the order of a rank's passes, from which its counts follow."""
        place = PipelinePosition(pp_rank, self.pp) if self.holds_messages else None
        size = pp_rank, self.pp, num_microbatches, len(self.order.kinds)
        pairs, keeps_sent_buffers = self.schedule.pairs(*size), self.schedule.keeps_sent_buffers
        return self.order._replace(place=place, keeps_sent_buffers=keeps_sent_buffers, pairs=pairs)


class PassTable(NamedTuple):
    """Peak candidates of a rank: counts of each size of its virtual stages.

    ``columns`` are those of `pass_counts` that count at all, of sizes kind by kind, then of
    overlapped pairs of kinds. Each microbatch beyond *num_microbatches* adds ``growth`` to the
    candidate of a row; None is no growth.
    """

    columns: Column
    rows: NDArray[np.int64]
    growth: NDArray[np.int64] | None
    num_microbatches: int

    def most_dynamic(self, sizes: NDArray[np.int64], num_microbatches: Column) -> Column:
        """Return the largest dynamic bytes in the passes of ranks.

        Args:
            sizes: Sizes of the columns, a row for each rank.
            num_microbatches: Microbatches of each rank.
        """
        excluded, counts = num_microbatches - self.num_microbatches, self.rows
        if self.growth is not None and excluded.any():
            counts = np.concatenate([self.rows, self.growth], axis=1)
            sizes = np.concatenate([sizes, excluded[:, None] * sizes], axis=1)
        return max_weighted_sums(sizes, counts, np.zeros(1, np.int64))[:, 0]


def joined(tables: Sequence[PassTable]) -> tuple[Column, NDArray[np.int64], Column]:
    """Return the columns of some tables, their rows in these, and the first row of each table."""
    is_column = np.zeros(1 + max(int(table.columns[-1]) for table in tables), np.bool_)
    for table in tables:
        is_column[table.columns] = True
    columns = np.flatnonzero(is_column)
    rows = np.zeros((sum(len(table.rows) for table in tables), len(columns)), np.int64)
    starts, end = [], 0
    for table in tables:
        starts.append(end)
        end += len(table.rows)
        # One matrix for all tables, so that a single product serves all ranks.
        rows[starts[-1] : end, np.searchsorted(columns, table.columns)] = table.rows
    return columns, rows, np.array(starts, np.int64)


def pass_table(passes: RolePasses, pp_rank: int, num_microbatches: int) -> PassTable:
    """Return the candidates of a rank's peak, whatever its sizes.

    *num_microbatches* is as few as show them.
    """
    if len(passes.order.kinds) == 1:
        # GPipe is alike on all ranks, 1F1B where as many passes are ahead.
        alike = min(passes.pp - pp_rank, num_microbatches)
        if passes.schedule.keeps_sent_buffers:
            alike = min(passes.pp, 2)  # without a pipeline there is no schedule
        return _pass_table(passes._replace(pp=alike), 0, num_microbatches)
    return _pass_table(passes, pp_rank, num_microbatches)


@lru_cache(maxsize=4096)
def _pass_table(passes: RolePasses, pp_rank: int, num_microbatches: int) -> PassTable:
    schedule, num_stages = passes.schedule, len(passes.order.kinds)
    order = passes.order_of(pp_rank, num_microbatches)
    ran = _rank_passes(schedule, pp_rank, passes.pp, num_microbatches, num_stages)
    counts, growth = pass_counts(order, ran), _growth(passes, order, ran.actions)
    num_sizes = order.num_kinds * NUM_SIZES
    if passes.holds_messages:  # what is live after a pass is, and more, in the one behind it
        counts, growth = counts[::2], growth[::2]
    columns = np.flatnonzero(counts.any(axis=0))
    counts = counts[:, columns]
    workspaces = counts[:, (columns % NUM_SIZES >= PassSize.FORWARD) | (columns >= num_sizes)]
    workspace_numbers = np.where(workspaces.any(axis=1), 1 + workspaces.argmax(axis=1), 0)
    # Only rows with one workspace and one growth are comparable count by count.
    candidates = _pareto_rows(counts, 3 * workspace_numbers + growth)  # growth is one of three
    if not growth.any():
        return PassTable(columns, counts[candidates], None, num_microbatches)
    # Of a GPipe rank what it keeps, of others what they have sent.
    each = np.zeros((3, order.width), np.int64)
    each[1, PassSize.SAVED] = 1
    for kind in passes.order.kinds:
        each[2, [NUM_SIZES * kind + PassSize.OUTPUT, NUM_SIZES * kind + PassSize.GRADIENT]] += 1
    grown = each[growth[candidates]][:, columns]
    return PassTable(columns, counts[candidates], grown, num_microbatches)


@lru_cache(maxsize=2048)
def _rank_passes(
    schedule: Schedule, pp_rank: int, pp: int, num_microbatches: int, num_stages: int
) -> RankPasses:
    """Return the passes of a rank, whatever its virtual stages are."""
    return RankPasses.of(schedule.rank_actions(pp_rank, pp, num_microbatches, num_stages))


def _growth(passes: RolePasses, order: RankOrder, actions: Sequence[Action]) -> Column:
    """Return the growth of each row with an excluded microbatch: 0 none, 1 a pass, 2 messages."""
    growth = np.zeros((len(actions), 2), np.int64)
    if not passes.schedule.keeps_sent_buffers or passes.pp == 1:
        return growth.ravel()
    if len(order.kinds) == 1:
        growth[:-1] = 1
        growth[-1] = 2 * order.keeps_units
    elif order.keeps_units:
        forward = [place for place, each in enumerate(actions) if each.phase is Phase.FORWARD]
        growth[forward[-min(len(forward), 2 * passes.pp * len(order.kinds))] :] = 2
    return growth.ravel()


def max_weighted_sums(
    sizes: NDArray[np.int64], counts: NDArray[np.int64], starts: Column
) -> NDArray[np.int64]:
    """Return the largest weighted sum of *sizes*, a row for each rank, with a row of *counts*.

    The maximum is over the rows from each of *starts* to the next one, in a column each. BLAS
    multiplies matrices of floats ten times as fast as NumPy those of integers; below 2 ** 53 floats
    are exact.
    """
    most = np.abs(counts).max(axis=0) @ np.abs(sizes).max(axis=0, initial=0).astype(np.float64)
    if most >= 2**53:
        return np.maximum.reduceat(sizes @ counts.T, starts, axis=1)
    # OpenBLAS uses one thread up to 2 ** 18 multiplications; others would wait in a loop.
    num_rows = max(2, 2**17 // max(1, counts.size))
    weights = counts.T.astype(np.float64)
    found = np.empty((len(sizes), len(starts)), np.int64)
    for rows in row_slices(len(sizes), num_rows):
        product = sizes[rows].astype(np.float64) @ weights
        found[rows] = np.maximum.reduceat(product, starts, axis=1)
    return found


def _pareto_rows(kept: NDArray[np.int64], alike: Column) -> Column:
    """Return the rows of *kept* that no other one of those *alike* reaches in every count.

    Nor is there one between two others: while passes of one virtual stage are saved and those of
    another one are freed, the counts move in even steps, and an end of these has most bytes.
    """
    left = _ends_of_steps(kept, alike)
    # The fullest of those alike first: none that comes later reaches it.
    left = left[np.lexsort((-kept[left].sum(axis=1), alike[left]))]
    found = []
    for _ in range(MOST_ROUNDS):
        group = alike[left]
        is_first = np.ones(len(left), np.bool_)
        is_first[1:] = group[1:] != group[:-1]
        fullest = left[is_first]
        found.append(fullest)
        is_reached = (kept[left] <= kept[fullest[is_first.cumsum() - 1]]).all(axis=1)
        left = left[~is_reached]
        if not len(left):
            break
    # More rounds would take longer than the few moments that they leave out.
    return np.concatenate([*found, left])


def _ends_of_steps(kept: NDArray[np.int64], alike: Column) -> Column:
    """Return the rows of *kept* where even steps from one of those *alike* to the next end."""
    order = np.argsort(alike, kind="stable")
    steps, goes_on = np.diff(kept[order], axis=0), np.diff(alike[order]) == 0
    is_between = (steps[1:] == steps[:-1]).all(axis=1) & goes_on[1:] & goes_on[:-1]
    is_end = np.concatenate([[True], ~is_between, [True]])[: len(order)]
    return np.asarray(order[is_end], np.int64)
