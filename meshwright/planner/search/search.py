"""The search: enumerate, price, prune with reasons, simulate best first, prove."""

from dataclasses import replace
from typing import Any, cast

import numpy as np

from meshwright.hwprofiles import (
    Attention,
    Cluster,
    Offload,
    StackProfile,
    Strategy,
    counted,
    load_cluster,
    load_stack,
)
from meshwright.planner.bounds import StepBounds
from meshwright.planner.footprint import device_bytes_column, host_bytes_column, peak_bytes
from meshwright.planner.search.alike import Rows
from meshwright.planner.search.finalists import Field, Finalists, Progress, Proof, Runs
from meshwright.planner.search.frontier import find_frontier, num_below
from meshwright.planner.search.nearest import find_nearest, find_unlaunchable
from meshwright.planner.search.result import SearchResult
from meshwright.planner.search.strategies import strategy_field
from meshwright.planner.search.varied import Varied
from meshwright.planner.search.ways import Question, find_verdict
from meshwright.planner.space import (
    ACTIVATIONS,
    Candidates,
    Column,
    ShapeTable,
    Space,
    SpaceLimits,
    apply_rules,
    cannot_be_told,
    enumerate_space,
    lacks,
    launcher_of,
)
from meshwright.simulator import (
    MAX_PASSES,
    CostModel,
    ModelSpec,
    PlanError,
    ResolvedPlan,
    TrainingJob,
)
from meshwright.simulator.layout import attention_kernels, job_refusal
from meshwright.simulator.memory import PeakBytes, usable_bytes
from meshwright.simulator.step import activation_refusal, host_refusal

MAX_GPUS = 10_000_000
MOST_PLANS = 1000
# How much may be simulated, in forward and backward passes: for the proof of the best layout
# (beyond it the gap is reported), for the runners-up, and for the frontier.
PROOF_PASSES = 20_000_000
RUNNER_UP_PASSES = 100_000
FRONTIER_PASSES = 1_000_000


def search(  # noqa: PLR0913 -- the public entry; what is optional is keyword-only
    job: TrainingJob,
    cluster: Cluster | str,
    stack: StackProfile | str,
    num_gpus: int,
    *,
    limits: SpaceLimits | None = None,
    memory_limit_bytes: int | None = None,
    top: int = 10,
    progress: Progress | None = None,
    explains: bool = True,
) -> SearchResult:
    """Return the fastest layouts of *job* on *num_gpus*, the first of them proven.

    Layouts get their exact memory and a lower bound of their time; they are simulated in the order
    of the bound until the next bound is no better than the best simulated time.

    Args:
        job: What is trained.
        cluster: On what: a cluster, or the name or the path of one.
        stack: With what software, likewise.
        num_gpus: Devices that every layout occupies.
        limits: What of the space to search; by default what launches the stack can be told all.
        memory_limit_bytes: What a device may use; by default all that processes can have.
        top: Layouts to report.
        progress: Called with what is being done, how much is done, and of how much.
        explains: Whether to say, where nothing fits, why, and to look for ways out.

    Raises:
        PlanError: If *num_gpus* or *top* is out of range, or cluster or stack cannot run the job.
    """
    cluster, stack = load_cluster(cluster), load_stack(stack)
    _check_request(job, cluster, stack, num_gpus, limits, top)
    asked, tell = limits or SpaceLimits(), progress or (lambda _what, _done, _total: None)
    limits = with_kernels(job, asked, cluster, stack)
    limit_bytes = usable_bytes(cluster, memory_limit_bytes)
    field = _field(job, cluster, stack, num_gpus, limits, limit_bytes=limit_bytes, tell=tell)
    runs, space = field.runs, field.runs.space
    candidates = field.candidates(cluster, memory_limit_bytes)
    tell(f"bounding the time of {counted(len(space), 'layout')}", 0, 0)
    finalists, rejections = _finalists(field, candidates)
    density = finalists.density  # of the bounds before any is sharpened
    proof, ranking = _rank(finalists, top, tell)
    best, most_passes = next(iter(ranking), None), runs.num_passes + FRONTIER_PASSES
    frontier = find_frontier(finalists, best, max_passes=most_passes, tell=tell)
    result = SearchResult(
        job=job,
        cluster=cluster,
        stack=stack,
        num_gpus=num_gpus,
        space_size=len(space),
        feasible=len(finalists.indices),
        simulated=len(runs.step_ps),
        optimal=proof.is_proven,
        bound_gap_fraction=_gap_fraction(proof, runs),
        rejections=rejections,
        varied=Varied.of(space, asked, ~(lacks(space) | cannot_be_told(space))),
        plans=tuple(runs.result(index, memory_limit_bytes) for index in ranking),
        like=_alike(space, ranking),
        evaluated=runs.evaluated(limit_bytes),
        frontier=frontier,
        num_below=num_below(finalists, frontier),
        density=density,
        launcher="" if space.launcher is None else space.launcher.title,
        not_launched=launcher_of(job, stack, asked)[1],
        unlaunchable=find_unlaunchable(candidates, field, finalists, tell),
    )
    seeks = tell if explains else None
    return result if ranking else _explained(result, candidates, field, asked, seeks)


def _explained(
    result: SearchResult,
    candidates: Candidates,
    field: Field,
    asked: SpaceLimits,
    tell: Progress | None,
) -> SearchResult:
    """Return a search that found nothing with the layout that is nearest, why, and ways out.

    Without *tell* with the first of these alone.
    """
    job, cluster, limit = result.job, result.cluster, candidates.memory_limit_bytes
    nearest = find_nearest(candidates, field, usable_bytes(cluster, limit), tell)
    result = replace(result, nearest=nearest)
    if tell is None:
        return result

    def again(stack: StackProfile, limits: SpaceLimits, num_gpus: int) -> SearchResult:
        found = {"limits": limits, "memory_limit_bytes": limit, "top": 1, "explains": False}
        return search(job, cluster, stack, num_gpus, **cast("Any", found))

    question = Question(
        job=job,
        cluster=cluster,
        stack=result.stack,
        num_gpus=result.num_gpus,
        limits=asked,
        memory_limit_bytes=limit,
        again=again,
        progress=tell,
    )
    verdict = find_verdict(question, candidates.space, nearest, result.unlaunchable)
    return replace(result, verdict=verdict)


def _alike(space: Space, ranking: dict[int, list[int]]) -> tuple[tuple[ResolvedPlan, ...], ...]:
    """Return the plans that are folded into each of *ranking*."""
    return tuple(
        tuple(space.plan(each) for each in alike if each != index)
        for index, alike in ranking.items()
    )


def with_kernels(
    job: TrainingJob, limits: SpaceLimits, cluster: Cluster, stack: StackProfile
) -> SpaceLimits:
    """Return *limits* with the attention kernels that the devices have, if none is asked for."""
    has_kernel = stack.flash_kernel in cluster.device.flash
    is_asked = limits.values("attention") is not None
    if is_asked or has_kernel or not isinstance(job.model, ModelSpec):
        return limits
    offered = attention_kernels(job, stack)
    kernels = tuple(each for each in offered if each is not Attention.FLASH)
    return limits.pinned(attention=kernels or (stack.attention,))


def _finalists(field: Field, candidates: Candidates) -> tuple[Finalists, dict[str, int]]:
    """Return the layouts that no rule takes out, and how many each takes out."""
    left, rejections = apply_rules(candidates)
    indices = np.flatnonzero(left)
    return Finalists(indices, field.bounds(indices), field.runs), rejections


def _field(  # noqa: PLR0913 -- what a search is of
    job: TrainingJob,
    cluster: Cluster,
    stack: StackProfile,
    num_gpus: int,
    limits: SpaceLimits,
    *,
    limit_bytes: int,
    tell: Progress,
) -> Field:
    """Return the layouts; those of a mesh of ranks with exact memory and bounds without a run.

    Memory is known of what the stack offers, and exact of what *limit_bytes* may hold.
    """
    tell("laying out the space", 0, 0)
    if stack.strategy is not Strategy.MESH:
        return strategy_field(job, cluster, stack, num_gpus, limits)
    space = enumerate_space(job, stack, num_gpus, limits)
    tell(f"sizing the memory of {counted(len(space), 'layout')}", 0, 0)
    offered = np.flatnonzero(~lacks(space))
    table, costs = ShapeTable.of(space, offered), CostModel(cluster, stack, num_gpus)
    found = peak_bytes(space, table, costs.blocks, offered, most_bytes=limit_bytes, progress=tell)
    peaks = PeakBytes(*(np.zeros(len(space), np.int64) for _ in found))
    for column, own in zip(peaks, found, strict=True):
        column[offered] = own
    runs = Runs(space, costs, peaks, device_bytes_column(space, cluster, peaks))
    within = offered[peaks.live_bytes[offered] <= limit_bytes]
    bounds = StepBounds(space, table.of_layouts(within), costs)

    def needed_bytes(indices: Column) -> Column:
        live = peak_bytes(space, table, costs.blocks, indices)
        return device_bytes_column(space, cluster, live, indices)

    fitting = offered[runs.device_bytes[offered] <= limit_bytes]
    hosts = host_bytes_column(space, table, cluster, costs.blocks, fitting)
    return Field(runs, bounds.rough_bounds_ps, bounds.lower_bounds_ps, needed_bytes, hosts)


def _check_request(
    job: TrainingJob,
    cluster: Cluster,
    stack: StackProfile,
    num_gpus: int,
    limits: SpaceLimits | None,
    top: int,
) -> None:
    if limits is not None:
        _check_hosts(limits, cluster)
    if not 1 <= num_gpus <= MAX_GPUS:
        raise PlanError(f"gpus={num_gpus} is out of range; allowed 1 to {MAX_GPUS}")
    if not 1 <= top <= MOST_PLANS:
        raise PlanError(f"top={top} is out of range; allowed 1 to {MOST_PLANS}")
    if cluster.num_nodes is not None:
        most = cluster.num_nodes * cluster.devices_per_node
        if num_gpus > most:
            raise PlanError(f"gpus={num_gpus} is more than the {most} of {cluster.name}")
    refusal = job_refusal(job, stack)
    if refusal is not None:
        raise PlanError(refusal)


def _check_hosts(limits: SpaceLimits, cluster: Cluster) -> None:
    """Raise PlanError where the user wants something on hosts of which nothing is known."""
    for offload in cast("tuple[Offload | None, ...]", limits.values("offload") or ()):
        if (refusal := host_refusal(offload or Offload.NONE, cluster)) is not None:
            raise PlanError(refusal)
    for name in ACTIVATIONS:
        for value in limits.values(name) or ():
            if (refusal := activation_refusal(ResolvedPlan.of({name: value}), cluster)) is not None:
                raise PlanError(refusal)


def _rank(finalists: Finalists, top: int, tell: Progress) -> tuple[Proof, dict[int, list[int]]]:
    """Return the proof of the best layout, and the best rows known after some more runs.

    Returns:
        The proof; the best layout, and those that stand for others, with all that each stands for.
    """
    runs = finalists.runs
    proof = finalists.fastest(1, PROOF_PASSES, tell)
    if len(finalists.indices) and not proof.indices:
        raise PlanError(
            f"every layout that fits has more than {MAX_PASSES} stages x microbatches, too many to "
            f"simulate: global_batch_size={runs.space.job.global_batch_size} is too large for "
            f"{runs.space.num_gpus} GPUs"
        )
    if top == 1 or not proof.indices:
        return proof, {index: [] for index in proof.indices}
    tell("simulating runners-up", 0, 0)
    rows = Rows(finalists).best(top, runs.num_passes + RUNNER_UP_PASSES)
    return proof, {proof.indices[0]: []} | rows


def _gap_fraction(proof: Proof, runs: Runs) -> float:
    if proof.is_proven or proof.next_bound_ps is None or not proof.indices:
        return 0.0
    return 1 - proof.next_bound_ps / runs.step_ps[proof.indices[0]]
