"""The search: enumerate, price, prune with reasons, simulate best first, prove."""

import numpy as np

from meshwright.hwprofiles import Cluster, StackProfile, Strategy
from meshwright.planner.bounds import StepBounds
from meshwright.planner.footprint import device_bytes_column, peak_bytes
from meshwright.planner.search.finalists import MAX_PASSES, Field, Finalists, Progress, Proof, Runs
from meshwright.planner.search.frontier import find_frontier
from meshwright.planner.search.nearest import find_nearest
from meshwright.planner.search.result import SearchResult
from meshwright.planner.search.strategies import strategy_field
from meshwright.planner.space import (
    Candidates,
    ShapeTable,
    SpaceLimits,
    apply_rules,
    enumerate_space,
)
from meshwright.simulator import CostModel, PlanError, TrainingJob
from meshwright.simulator.memory import usable_bytes

MAX_GPUS = 10_000_000
# How much may be simulated, in forward and backward passes: for the proof of the best layout
# (beyond it the gap is reported), for the runners-up, and for the frontier.
PROOF_PASSES = 20_000_000
RUNNER_UP_PASSES = 100_000
FRONTIER_PASSES = 100_000


def search(  # noqa: PLR0913 -- the public entry; what is optional is keyword-only
    job: TrainingJob,
    cluster: Cluster,
    stack: StackProfile,
    num_gpus: int,
    *,
    limits: SpaceLimits | None = None,
    memory_limit_bytes: int | None = None,
    top: int = 10,
    progress: Progress | None = None,
) -> SearchResult:
    """Return the fastest layouts of *job* on *num_gpus*, the first of them proven.

    Every layout gets its exact memory and a lower bound of its time; layouts are simulated in
    the order of the bound until the next bound is no better than the best simulated time.

    Args:
        job: What is trained.
        cluster: On what.
        stack: With what software.
        num_gpus: Devices that every layout occupies.
        limits: What of the space to search.
        memory_limit_bytes: What a device may use; by default its capacity less a margin.
        top: Layouts to report.
        progress: Called with what is being done, how much is done, and of how much.

    Raises:
        PlanError: If *num_gpus* or *top* is out of range, or cluster or stack cannot run the job.
    """
    _check_request(cluster, num_gpus, top)
    limits = limits or SpaceLimits()
    prepare = _mesh_field if stack.strategy is Strategy.MESH else strategy_field
    runs, lower_bounds_ps = prepare(job, cluster, stack, num_gpus, limits)
    candidates = Candidates(runs.space, cluster, runs.device_bytes, memory_limit_bytes)
    left, rejections = apply_rules(candidates)
    feasible = np.flatnonzero(left)
    finalists = Finalists.ordered(feasible, lower_bounds_ps(feasible), runs)
    proof, ranking = _rank(finalists, top, progress)
    frontier = find_frontier(
        finalists,
        proof.indices[0] if proof.is_proven else None,
        max_passes=runs.num_passes + FRONTIER_PASSES,
    )
    limit_bytes = usable_bytes(cluster, stack, memory_limit_bytes)
    return SearchResult(
        job=job,
        cluster=cluster,
        stack=stack,
        num_gpus=num_gpus,
        space_size=len(runs.space),
        feasible=len(feasible),
        simulated=len(runs.step_ps),
        optimal=proof.is_proven,
        bound_gap_fraction=_gap_fraction(proof, runs),
        rejections=rejections,
        plans=tuple(runs.result(index, memory_limit_bytes) for index in ranking),
        evaluated=runs.evaluated(limit_bytes),
        frontier=frontier,
        nearest=None if len(feasible) else find_nearest(candidates, limits, limit_bytes),
    )


def _mesh_field(
    job: TrainingJob, cluster: Cluster, stack: StackProfile, num_gpus: int, limits: SpaceLimits
) -> Field:
    """Return the layouts of a mesh of ranks: exact memory and bounds without a run."""
    space = enumerate_space(job, stack, num_gpus, limits)
    table = ShapeTable.of(space)
    costs = CostModel(cluster, stack, num_gpus)
    peaks = peak_bytes(space, table, costs.blocks)
    runs = Runs(space, costs, peaks, device_bytes_column(peaks, stack))
    return Field(runs, StepBounds(space, table, costs).lower_bounds_ps)


def _check_request(cluster: Cluster, num_gpus: int, top: int) -> None:
    if not 1 <= num_gpus <= MAX_GPUS:
        raise PlanError(f"gpus={num_gpus} is out of range; allowed 1 to {MAX_GPUS}")
    if not 1 <= top <= 1000:
        raise PlanError(f"top={top} is out of range; allowed 1 to 1000")
    if cluster.num_nodes is not None:
        most = cluster.num_nodes * cluster.devices_per_node
        if num_gpus > most:
            raise PlanError(f"gpus={num_gpus} is more than the {most} of {cluster.name}")


def _rank(
    finalists: Finalists, top: int, progress: Progress | None
) -> tuple[Proof, tuple[int, ...]]:
    """Return the proof of the best layout, and the best ones known after some more runs."""
    runs = finalists.runs
    proof = finalists.fastest(1, PROOF_PASSES, progress)
    if len(finalists.indices) and not proof.indices:
        raise PlanError(
            f"every layout that fits has more than {MAX_PASSES} stages x microbatches, too many to "
            f"simulate: global_batch_size={runs.space.job.global_batch_size} is too large for "
            f"{runs.space.num_gpus} GPUs"
        )
    if top == 1:
        return proof, proof.indices
    ranking = finalists.fastest(top, runs.num_passes + RUNNER_UP_PASSES, progress)
    return proof, ranking.indices


def _gap_fraction(proof: Proof, runs: Runs) -> float:
    if proof.is_proven or proof.next_bound_ps is None or not proof.indices:
        return 0.0
    return 1 - proof.next_bound_ps / runs.step_ps[proof.indices[0]]
