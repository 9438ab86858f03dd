"""Search: enumerate, price, prune with reasons, simulate best first, prove."""

from dataclasses import replace
from typing import Any, cast

from meshwright.hwprofiles import (
    Attention,
    Cluster,
    Offload,
    StackProfile,
    Strategy,
    load_cluster,
    load_stack,
)
from meshwright.planner.search.finalists import Progress, Proof, Runs
from meshwright.planner.search.frontier import num_below
from meshwright.planner.search.nearest import find_nearest, find_unlaunchable
from meshwright.planner.search.ranking import Ranked, rank_mesh
from meshwright.planner.search.result import SearchResult
from meshwright.planner.search.strategies import strategy_field
from meshwright.planner.search.varied import SearchedFields
from meshwright.planner.search.ways import SearchRequest, find_verdict
from meshwright.planner.space import (
    ACTIVATIONS,
    PartialSpace,
    Space,
    SpaceLimits,
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
from meshwright.simulator.memory import usable_bytes
from meshwright.simulator.step import activation_refusal, host_refusal

MAX_GPUS = 10_000_000
MOST_PLANS = 1000


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
    counts: bool = False,
) -> SearchResult:
    """Return the fastest layouts of *job* on *num_gpus*, the first of them proven.

    Layouts get their exact memory and a lower bound of their time; they are simulated in the order
    of the bound until the next bound is no better than the best simulated time.

    Args:
        job: Model, sequence length, global batch and precision.
        cluster: A cluster, or its name or path.
        stack: A software stack, or its name or path.
        num_gpus: Devices that every layout occupies.
        limits: Limits of the search; by default all that the launching framework can express.
        memory_limit_bytes: Limit of a device; by default all that processes can have.
        top: Layouts to report.
        progress: Called with the name of the work, the number done, and the total.
        explains: Whether to give reasons, where nothing fits, and to look for ways out.
        counts: Whether every layout is sized, to count exactly how many fit.

    Raises:
        PlanError: If *num_gpus* or *top* is out of range, or cluster or stack cannot run the job.
    """
    cluster, stack = load_cluster(cluster), load_stack(stack)
    _check_request(job, cluster, stack, num_gpus, limits, top)
    user_limits, tell = limits or SpaceLimits(), progress or (lambda _what, _done, _total: None)
    limits = with_kernels(job, user_limits, cluster, stack)
    tell("laying out the space", 0, 0)
    costs = CostModel(cluster, stack, num_gpus)
    if stack.strategy is Strategy.MESH:
        known = PartialSpace.of(job, stack, num_gpus, limits)
        ranked = rank_mesh(known, costs, memory_limit_bytes, top=top, counts=counts, tell=tell)
    else:
        field = strategy_field(job, cluster, stack, num_gpus, limits)
        ranked = Ranked.of(field, memory_limit_bytes, top, tell)
    _check_simulated(ranked)
    proof, runs = ranked.proof, ranked.field.runs
    space = runs.space
    result = SearchResult(
        job=job,
        cluster=cluster,
        stack=stack,
        num_gpus=num_gpus,
        space_size=ranked.space_size,
        looked_at=len(space),
        feasible=len(ranked.finalists.indices),
        simulated=len(runs.step_ps),
        optimal=proof.is_proven,
        bound_gap_fraction=_gap_fraction(proof, runs),
        rejections=ranked.rejections,
        varied=SearchedFields.of(space, user_limits, ranked.numbers),
        plans=tuple(runs.result(index, memory_limit_bytes) for index in ranked.rows),
        like=_alike(space, ranked.rows),
        evaluated=runs.evaluated(usable_bytes(cluster, memory_limit_bytes)),
        frontier=ranked.frontier,
        num_below=num_below(ranked.finalists, ranked.frontier),
        density=ranked.density,
        launcher="" if space.launcher is None else space.launcher.title,
        not_launched=launcher_of(job, stack, user_limits)[1],
        unlaunchable=find_unlaunchable(ranked.candidates, ranked.field, ranked.finalists, tell),
    )
    seeks = tell if explains else None
    return result if ranked.rows else _explained(result, ranked, user_limits, seeks)


def _check_simulated(ranked: Ranked) -> None:
    """Raise PlanError if all layouts that fit have too many passes to simulate."""
    if len(ranked.finalists.indices) and not ranked.proof.indices:
        space = ranked.field.runs.space
        raise PlanError(
            f"every layout that fits has more than {MAX_PASSES} stages x microbatches, too many to "
            f"simulate: global_batch_size={space.job.global_batch_size} is too large for "
            f"{space.num_gpus} GPUs"
        )


def _explained(
    result: SearchResult, ranked: Ranked, user_limits: SpaceLimits, tell: Progress | None
) -> SearchResult:
    """Return a search that found nothing with the nearest layout, a reason, and ways out.

    Without *tell* with the nearest layout alone.
    """
    job, cluster, candidates = result.job, result.cluster, ranked.candidates
    limit = candidates.memory_limit_bytes
    nearest = find_nearest(candidates, ranked.field, usable_bytes(cluster, limit), tell)
    result = replace(result, nearest=nearest)
    if tell is None:
        return result

    def again(stack: StackProfile, limits: SpaceLimits, num_gpus: int) -> SearchResult:
        # Or a search that finds nothing would explain itself without end.
        options = {"limits": limits, "memory_limit_bytes": limit, "top": 1, "explains": False}
        return search(job, cluster, stack, num_gpus, **cast("Any", options))

    request = SearchRequest(
        job=job,
        cluster=cluster,
        stack=result.stack,
        num_gpus=result.num_gpus,
        limits=user_limits,
        memory_limit_bytes=limit,
        again=again,
        progress=tell,
    )
    verdict = find_verdict(request, candidates.space, nearest, result.unlaunchable)
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


def _check_request(
    job: TrainingJob,
    cluster: Cluster,
    stack: StackProfile,
    num_gpus: int,
    limits: SpaceLimits | None,
    top: int,
) -> None:
    """Raise PlanError where a search is out of range, or cannot run on cluster or stack."""
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
    """Raise PlanError where a user asks for offloading to hosts of which nothing is known."""
    for offload in cast("tuple[Offload | None, ...]", limits.values("offload") or ()):
        if (refusal := host_refusal(offload or Offload.NONE, cluster)) is not None:
            raise PlanError(refusal)
    for name in ACTIVATIONS:
        for value in limits.values(name) or ():
            if (refusal := activation_refusal(ResolvedPlan.of({name: value}), cluster)) is not None:
                raise PlanError(refusal)


def _gap_fraction(proof: Proof, runs: Runs) -> float:
    """Return the share of the best time by which an unsimulated layout could be faster."""
    if proof.is_proven or proof.next_bound_ps is None or not proof.indices:
        return 0.0
    return 1 - proof.next_bound_ps / runs.step_ps[proof.indices[0]]
