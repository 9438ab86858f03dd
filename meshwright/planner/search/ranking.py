"""Ranking of a search's layouts: sized, bounded, simulated best first, with a proof."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import counted
from meshwright.planner.bounds import StepBounds
from meshwright.planner.footprint import device_bytes_column, host_bytes_column, peak_bytes
from meshwright.planner.search.alike import Rows
from meshwright.planner.search.finalists import Field, Finalists, Progress, Proof, Runs
from meshwright.planner.search.frontier import find_frontier
from meshwright.planner.search.pruning import BestKnown, Pruning
from meshwright.planner.search.result import Density, FrontierPoint
from meshwright.planner.search.varied import Numbers
from meshwright.planner.space import (
    LACKS_MEMORY,
    Candidates,
    Column,
    PartialSpace,
    ShapeTable,
    Space,
    apply_rules,
    cannot_be_expressed,
    lacks,
)
from meshwright.simulator import CostModel
from meshwright.simulator.memory import PeakBytes, usable_bytes

# Budgets of simulation in forward and backward passes: for the proof of the best layout (beyond
# it the gap is reported), for the runners-up, and for the frontier.
PROOF_PASSES = 20_000_000
RUNNER_UP_PASSES = 100_000
FRONTIER_PASSES = 1_000_000
# Bounds of partial layouts cost more than they save where there are no more layouts.
FEW_LAYOUTS = 1_000_000


class Ranked(NamedTuple):
    """Layouts of a search, ranked, with the proof of the best.

    Args:
        field: The layouts.
        candidates: Input of rules.
        finalists: Layouts that no rule takes out.
        rejections: Number of layouts that each rule takes out, by reason.
        density: Histogram of finalists, by bounds before any was sharpened.
        proof: Proof of the best layout.
        rows: The best layout, and those that stand for others, with all that each stands for.
        frontier: Pareto frontier of memory against time.
        space_size: Number of all layouts, laid out or not.
        numbers: Returns the numbers of a field in layouts that are offered and can be launched.
    """

    field: Field
    candidates: Candidates
    finalists: Finalists
    rejections: dict[str, int]
    density: Density | None
    proof: Proof
    rows: dict[int, list[int]]
    frontier: tuple[FrontierPoint, ...]
    space_size: int
    numbers: Numbers

    @classmethod
    def of(cls, field: Field, memory_limit_bytes: int | None, top: int, tell: Progress) -> Self:
        """Return the ranking when *top* rows and the frontier have been simulated."""
        runs, costs = field.runs, field.runs.costs
        tell(f"bounding the time of {counted(len(runs.space), 'layout')}", 0, 0)
        candidates = field.candidates(costs.cluster, memory_limit_bytes)
        left, rejections = apply_rules(candidates)
        indices = np.flatnonzero(left)
        finalists = Finalists(indices, field.bounds(indices), runs)
        density = finalists.density
        proof, rows = _rank(finalists, top, tell)
        best, most_passes = next(iter(rows), None), runs.num_passes + FRONTIER_PASSES
        frontier = find_frontier(finalists, best, max_passes=most_passes, tell=tell)
        space = runs.space
        launched = np.flatnonzero(~(lacks(space) | cannot_be_expressed(space)))

        def numbers(name: str) -> Column:
            return space.column(name)[launched]

        results = finalists, rejections, density, proof, rows, frontier, len(space), numbers
        return cls(field, candidates, *results)


def rank_mesh(
    known: PartialSpace,
    costs: CostModel,
    memory_limit_bytes: int | None,
    *,
    top: int,
    counts: bool,
    tell: Progress,
) -> Ranked:
    """Return the ranked layouts of a mesh of ranks; of many only those that may be best.

    A few that are best by their bounds are simulated first. A partial layout is excluded if one of
    them needs no more memory and is faster than any layout below it, and so is the last of *top*
    rows.

    Args:
        known: The partial layouts.
        costs: Cost model of cluster and stack.
        memory_limit_bytes: Limit of a device; by default all that processes can have.
        top: Rows of the report.
        counts: Whether every layout is to be sized, however bad.
        tell: Called with the name of the work, the number done, and the total.
    """
    limit_bytes = usable_bytes(costs.cluster, memory_limit_bytes)
    if counts or len(known) <= FEW_LAYOUTS or not Pruning.bounds(known):
        space, _ = known.layouts(known.every)
        return Ranked.of(mesh_field(space, costs, limit_bytes, tell), memory_limit_bytes, top, tell)
    tell(f"bounding partial layouts of {counted(len(known), 'layout')}", 0, 0)
    pruning = Pruning(known, costs, limit_bytes)
    few, order = known.layouts(pruning.first())
    first = Ranked.of(mesh_field(few, costs, limit_bytes, tell), memory_limit_bytes, top, tell)
    # None of the first few fits, or is short enough to simulate: no time to compare with.
    if not first.rows:
        return rank_mesh(known, costs, memory_limit_bytes, top=top, counts=True, tell=tell)
    best_known = BestKnown.by(first.finalists, [*first.rows], top)
    space, numbers = known.layouts(pruning.left(best_known))
    field = mesh_field(space, costs, limit_bytes, tell)
    field.runs.expect(first.field.runs, order, numbers)
    ranked = Ranked.of(field, memory_limit_bytes, top, tell)
    # Layouts that bounds excluded count with the rule that excluded them.
    lacking = ranked.rejections.get(LACKS_MEMORY, 0) + pruning.num_lacking
    by_memory = {LACKS_MEMORY: lacking} if lacking else {}
    rejections = ranked.rejections | known.rejections | by_memory
    return ranked._replace(rejections=rejections, space_size=len(known), numbers=known.numbers)


def mesh_field(space: Space, costs: CostModel, limit_bytes: int, tell: Progress) -> Field:
    """Return layouts of a mesh of ranks with exact memory, and bounds without a run.

    Memory is known for layouts that the stack offers, and exact up to *limit_bytes*.
    """
    tell(f"sizing the memory of {counted(len(space), 'layout')}", 0, 0)
    cluster, blocks = costs.cluster, costs.blocks
    offered = np.flatnonzero(~lacks(space))
    table = ShapeTable.of(space, offered)
    offered_peaks = peak_bytes(space, table, blocks, offered, most_bytes=limit_bytes, progress=tell)
    peaks = PeakBytes(*(np.zeros(len(space), np.int64) for _ in offered_peaks))
    for column, values in zip(peaks, offered_peaks, strict=True):
        column[offered] = values
    runs = Runs(space, costs, peaks, device_bytes_column(space, cluster, peaks))
    # Only layouts that fit need bounds of time.
    within = offered[peaks.live_bytes[offered] <= limit_bytes]
    bounds = StepBounds(space, table.of_layouts(within), costs)

    def needed_bytes(indices: Column) -> NDArray[np.int64]:
        live = peak_bytes(space, table, blocks, indices)
        return device_bytes_column(space, cluster, live, indices)

    fitting = offered[runs.device_bytes[offered] <= limit_bytes]
    hosts = host_bytes_column(space, table, cluster, blocks, fitting)
    return Field(runs, bounds.rough_bounds_ps, bounds.lower_bounds_ps, needed_bytes, hosts)


def _rank(finalists: Finalists, top: int, tell: Progress) -> tuple[Proof, dict[int, list[int]]]:
    """Return the proof of the best layout, and the best rows known after some more runs.

    Returns:
        The proof; the best layout, and those that stand for others, with all that each stands for.
    """
    runs = finalists.runs
    proof = finalists.fastest(1, PROOF_PASSES, tell)
    if top == 1 or not proof.indices:
        return proof, {index: [] for index in proof.indices}
    tell("simulating runners-up", 0, 0)
    rows = Rows(finalists).best(top, runs.num_passes + RUNNER_UP_PASSES)
    return proof, {proof.indices[0]: []} | rows
