"""Explanation of a simulated plan: critical path, resources, neighbours and memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.hwprofiles import (
    DEFAULT_STACK,
    Cluster,
    StackProfile,
    Strategy,
    load_cluster,
    load_stack,
    with_facts,
)
from meshwright.planner.changes import Change, Fields, Trials, neighbours, switched
from meshwright.planner.compare import time_terms
from meshwright.planner.explain.memory import MemoryTerm, memory_products
from meshwright.planner.explain.resources import RESOURCES, Resource, resource_changes
from meshwright.planner.search import Progress
from meshwright.simulator import (
    BuiltStep,
    CostModel,
    ParallelPlan,
    PlanError,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    account,
    build_step,
    check_plan,
    resolve,
    simulate,
    simulate_folded,
)
from meshwright.simulator.account import CriticalPath, critical_path


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Effect of a tenth more of a resource: the same plan, simulated with ``changes``.

    ``step_ps`` is that step; ``changes`` are facts as ``--set`` takes them.
    """

    resource: Resource
    changes: tuple[str, ...]
    step_ps: int
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """A plan one change away.

    Args:
        change: What is changed, and what it comes to.
        fits: Whether it fits.
        more_ps: What it spends more than the plan, by term; adds up to the difference.
    """

    change: Change
    fits: bool
    more_ps: Mapping[str, int]

    @property
    def costliest(self) -> tuple[str, int]:
        """Term that changes most in the direction of the whole, and its picoseconds."""
        total = sum(self.more_ps.values())
        # Of a faster plan the term that saves most, of a slower one the term that costs most.
        sign = -1 if total < 0 else 1
        return max(self.more_ps.items(), key=lambda item: sign * item[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Causes of the time and the memory of a step.

    Args:
        step: The simulated step.
        path: Its critical path; None where its ranks are no mesh.
        gains: By resource.
        neighbours: Plans one change away, the fastest first.
        memory: The fullest rank's live bytes as products.
        roomier: The fastest neighbour that fits only with a tenth more memory, if it is faster.
    """

    step: StepResult
    path: CriticalPath | None
    gains: tuple[Gain, ...]
    neighbours: tuple[Neighbour, ...]
    memory: tuple[MemoryTerm, ...]
    roomier: Neighbour | None


def explain(
    job: TrainingJob,
    plan: ParallelPlan | ResolvedPlan,
    cluster: Cluster | str,
    stack: StackProfile | str = DEFAULT_STACK,
    *,
    memory_limit_bytes: int | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Return the explanation of the time and the memory of *plan*.

    Args:
        job: What is trained.
        plan: How it is laid out; what it does not say is as the stack does it.
        cluster: On what: a cluster, or the name or the path of one.
        stack: With what software, likewise.
        memory_limit_bytes: What a device may use; by default all that processes can have.
        progress: Called with what is being done, how much is done, and of how much.

    Raises:
        PlanError: If the plan can never run.
    """
    tell = progress or (lambda _what, _done, _total: None)
    tell("simulating", 0, 0)
    cluster, stack = load_cluster(cluster), load_stack(stack)
    plan = resolve(job, cluster, stack, plan)
    check_plan(job, plan, cluster, stack)
    # One model of costs for the step and its neighbours: they share operators.
    costs = CostModel(cluster, stack, plan.world_size)
    built: BuiltStep | None = None
    if stack.strategy is Strategy.MESH:
        built = build_step(job, plan, costs)
        # Folded: one representative is run for the equal ranks of each pipeline rank.
        times = simulate_folded(built.work)
        step = account(built, times, costs, memory_limit_bytes)
        path = critical_path(built, times)
    else:
        step = simulate(job, plan, cluster, stack, memory_limit_bytes=memory_limit_bytes)
        path = None
    gains = tuple(_gains(step, memory_limit_bytes, tell))
    near = _neighbours(step, memory_limit_bytes, costs, tell)
    return Explanation(
        step=step,
        path=path,
        gains=gains,
        neighbours=near,
        memory=memory_products(step, built, costs),
        roomier=_roomier(step, near, memory_limit_bytes),
    )


def _gains(step: StepResult, memory_limit_bytes: int | None, tell: Progress) -> Iterator[Gain]:
    """Yield the gain of each resource that the cluster and the stack have."""
    for number, resource in enumerate(RESOURCES):
        tell("simulating a tenth more of each resource", number, len(RESOURCES))
        changes = resource_changes(resource, step.job, step.cluster, step.stack)
        # The same plan on a better machine, not the best plan for it.
        cluster, stack = with_facts(step.cluster, step.stack, changes)
        after = simulate(step.job, step.plan, cluster, stack, memory_limit_bytes=memory_limit_bytes)
        yield Gain(
            resource=resource, changes=changes, step_ps=after.step_ps, fits=after.memory.fits
        )


def _neighbours(
    step: StepResult, memory_limit_bytes: int | None, costs: CostModel, tell: Progress
) -> tuple[Neighbour, ...]:
    """Return the plans one change away that can run at all, the fastest first."""
    trials = Trials(step, memory_limit_bytes, costs)
    seen, reachable = {step.plan}, []
    changes = list(neighbours(step.plan, step.stack))
    for number, fields in enumerate(changes):
        tell("simulating neighbours", number, len(changes))
        changed = _changed(step, fields)
        after = None if changed is None or changed[0] in seen else trials.step(changed[0])
        if changed is None or after is None:
            continue
        # Two changes may come to the same plan.
        seen.add(changed[0])
        if (after.step_ps, after.memory.peak_bytes) == (step.step_ps, step.memory.peak_bytes):
            continue  # it says what the stack does anyway
        terms, changed_terms = time_terms(step), time_terms(after)
        more_ps = {name: changed_terms[name] - terms[name] for name in terms}
        change = Change.of(step, after, changed[1])
        reachable.append(Neighbour(change=change, fits=after.memory.fits, more_ps=more_ps))
    return tuple(sorted(reachable, key=lambda each: (each.change.step_ps, each.change.options)))


def _changed(step: StepResult, fields: Fields) -> tuple[ResolvedPlan, Fields] | None:
    try:
        return switched(step, fields)
    except PlanError:
        return None


def _roomier(
    step: StepResult, near: tuple[Neighbour, ...], memory_limit_bytes: int | None
) -> Neighbour | None:
    """Return the fastest neighbour that fits only with a tenth more memory."""
    # A limit that the user sets does not grow with the device.
    if memory_limit_bytes is not None:
        return None
    parts = step.job, step.cluster, step.stack
    changes = resource_changes(Resource.MEMORY_CAPACITY, *parts)
    cluster, _ = with_facts(step.cluster, step.stack, changes)
    usable = cluster.device.usable_bytes
    faster = (
        each
        for each in near
        if not each.fits
        and each.change.device_bytes <= usable
        and each.change.step_ps < step.step_ps
    )
    return next(faster, None)
