"""Ways out of a search that found nothing, each searched or simulated."""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.hwprofiles import (
    Allocator,
    Cluster,
    ProfileError,
    StackProfile,
    format_bytes,
    list_clusters,
    load_cluster,
    load_stack,
    with_facts,
)
from meshwright.planner.changes import MOST_CHANGES, Change, more_devices
from meshwright.planner.search.finalists import Progress
from meshwright.planner.search.result import Nearest, SearchResult, Unlaunchable
from meshwright.planner.search.verdict import (
    Cause,
    Layouts,
    Verdict,
    Way,
    memory_line,
    refusal_line,
    undivided_line,
)
from meshwright.planner.space import COLUMNS, Space, SpaceLimits
from meshwright.simulator import (
    ModelSpec,
    PlanError,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    simulate,
)
from meshwright.simulator.layout import PLAN_FIELDS, other_stacks

SAME = ""
# Options of something else than a plan, and the number of ways shown for each, and for plans.
OTHERS = {"--stack": 2, "--gpus": 1, "--cluster": 1, "--seq-len": 1, SAME: MOST_CHANGES}
LEAST_TOKENS = 512  # of a sequence that is worth naming
# Expandable segments leave no fragments where memory is short. PyTorch 2.1 brought them: stacks of
# older ones are those that nothing launches.
ALLOCATOR = "allocator=expandable"
EXPANDABLE = "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """A search as it was asked, with the function that searches again.

    ``again`` takes a stack, limits and a number of devices.
    """

    job: TrainingJob
    cluster: Cluster
    stack: StackProfile
    num_gpus: int
    limits: SpaceLimits
    memory_limit_bytes: int | None
    again: Callable[[StackProfile, SpaceLimits, int], SearchResult]
    progress: Progress

    def step(self, plan: ResolvedPlan, **others: Any) -> StepResult | None:  # noqa: ANN401
        """Return the simulated step of *plan* with *others* changed; None if it cannot run."""
        names = ("job", "cluster", "stack", "memory_limit_bytes")
        arguments = {name: getattr(self, name) for name in names} | others
        try:
            return simulate(plan=plan, **arguments)
        except PlanError:
            return None

    def fitting(
        self,
        options: str,
        plan: ResolvedPlan,
        *,
        note: str = "",
        **others: Any,  # noqa: ANN401
    ) -> Iterator[Way]:
        """Yield *plan* with *options*, if it fits then."""
        self.progress(f"simulating {options}", 0, 0)
        step = self.step(plan, **others)
        if step is not None and step.memory.fits:
            yield Way(
                options=options,
                num_gpus=plan.world_size,
                step_ps=step.step_ps,
                device_bytes=step.memory.device_bytes,
                note=note,
            )

    def way(
        self,
        options: str,
        *,
        stack: StackProfile | None = None,
        limits: SpaceLimits | None = None,
        num_gpus: int | None = None,
        note: str = "",
    ) -> Iterator[Way]:
        """Yield the fastest layout of a search with such *options*, if one fits."""
        self.progress(f"searching with {options}", 0, 0)
        gpus = num_gpus or self.num_gpus
        try:
            result = self.again(stack or self.stack, limits or self.limits, gpus)
        # Another stack, or number of devices, may not run the job at all.
        except (PlanError, ProfileError):
            return
        for best in result.plans[:1]:
            yield Way(
                options=options,
                num_gpus=gpus,
                step_ps=best.step_ps,
                device_bytes=best.memory.device_bytes,
                note=note,
            )


def find_verdict(
    request: SearchRequest, space: Space, nearest: Nearest | None, unlaunchable: Unlaunchable | None
) -> Verdict:
    """Return the verdict of a search that found nothing, with the cheapest ways out.

    Args:
        request: The search as it was asked.
        space: The layouts.
        nearest: Layout that lacks least memory.
        unlaunchable: Layout that fits and that the framework cannot express.
    """
    layouts = Layouts.of(space)
    text, undivided = undivided_line(space, request.limits)
    if layouts.cause is Cause.UNDIVIDED:
        ways = [*_without_pins(request, COLUMNS), *_near_devices(request)]
    elif layouts.cause is Cause.MEMORY:
        lacks_bytes = None if nearest is None else nearest.lacks_bytes
        limit = request.memory_limit_bytes
        text = memory_line(layouts, request.cluster, limit, lacks_bytes)
        ways = [*_any_layout(request, unlaunchable), *_of_memory(request, nearest)]
        ways += _without_pins(request, COLUMNS)
        if layouts.refused.any():
            ways += _of_stacks(request, other_stacks(request.job, None, request.stack))
    else:
        text = refusal_line(layouts)
        ways = [*_of_refusal(request, layouts)]
    return Verdict(
        cause=layouts.cause,
        text=text,
        layouts=layouts.counts(undivided),
        rules=layouts.rules(),
        ways=tuple(_cheapest(ways)),
    )


def _cheapest(ways: Sequence[Way]) -> Iterator[Way]:
    """Yield the cheapest ways of each kind: fewest options, then on the same devices, by time.

    Of other stacks there are two, of other devices, clusters and sequences one each.
    """
    kept = dict.fromkeys(OTHERS, 0)
    for way in sorted(ways, key=_price):
        other = next((name for name in OTHERS if name in way.options), SAME)
        kept[other] += 1
        if kept[other] <= OTHERS[other]:
            yield way


def _price(way: Way) -> tuple[int, int, int]:
    """Return the sort key of ways: options, whether devices or job differ, time."""
    others = ("--gpus", "--cluster", "--seq-len")
    place = next((1 + each for each, name in enumerate(others) if name in way.options), 0)
    return way.options.count("--"), place, way.step_ps


def _without_pins(request: SearchRequest, names: Container[str]) -> Iterator[Way]:
    """Yield searches without one of the options that pin a field of *names*."""
    limits = request.limits
    for name in filter(names.__contains__, COLUMNS):
        field, is_pinned = PLAN_FIELDS[name], len(limits.values(name) or ()) == 1
        if is_pinned or limits.most(name) is not None:
            option = (field.option if is_pinned else field.limit).replace("_", "-")
            yield from request.way(f"without --{option}", limits=limits.without(name))


def _near_devices(request: SearchRequest) -> Iterator[Way]:
    """Yield searches on the nearest whole numbers of nodes."""
    node, gpus = request.cluster.devices_per_node, request.num_gpus
    below = gpus // node * node
    for number in sorted({below, below + node} - {0, gpus}):
        yield from request.way(f"--gpus {number}", num_gpus=number)


def _any_layout(request: SearchRequest, unlaunchable: Unlaunchable | None) -> Iterator[Way]:
    """Yield the layout that no framework can express, if it fits."""
    if unlaunchable is not None:
        yield Way(
            options="--any",
            num_gpus=request.num_gpus,
            step_ps=unlaunchable.step_ps,
            device_bytes=unlaunchable.device_bytes,
            note="; ".join(unlaunchable.refusals),
        )


def _of_refusal(request: SearchRequest, layouts: Layouts) -> Iterator[Way]:
    """Yield ways around a refusal of the stack, or a gap of the framework."""
    plan, gaps = layouts.blocking()
    limits, launcher = request.limits, layouts.space.launcher
    yield from _without_pins(request, {name for _, gap, _ in gaps for name in gap.fields})
    if layouts.cause is Cause.INEXPRESSIBLE and launcher is not None:
        note = "which no framework starts as it stands"
        yield from request.way("--any", limits=limits.launched_by(None), note=note)
        for name in request.stack.launched_by:
            if name != launcher.framework.name:
                yield from request.way(f"--for {name}", limits=limits.launched_by(name))
    yield from _of_stacks(request, other_stacks(request.job, plan, request.stack))


def _of_stacks(request: SearchRequest, names: Sequence[str]) -> Iterator[Way]:
    """Yield searches with other stacks."""
    limits = request.limits.launched_by()
    for name in names:
        yield from request.way(f"--stack {name}", stack=load_stack(name), limits=limits)


def _of_memory(request: SearchRequest, nearest: Nearest | None) -> Iterator[Way]:
    """Yield changes of the nearest layout, and of its hardware, that make it fit."""
    if nearest is None:  # what fits on devices is too much for hosts
        return
    limit_bytes, tell = request.memory_limit_bytes, request.progress
    smallest = request.step(nearest.plan)
    changes = nearest.changes
    if smallest is not None and not any("gpus" in each.fields for each in changes):
        changes = (*changes, *more_devices(smallest, limit_bytes, tell)[:1])
    yield from map(_changed, changes)
    if smallest is None:
        return
    seq_len = request.job.seq_len // 2
    while isinstance(request.job.model, ModelSpec) and seq_len >= LEAST_TOKENS:
        job = replace(request.job, seq_len=seq_len)
        found = [*request.fitting(f"--seq-len {seq_len}", nearest.plan, job=job)]
        yield from found
        # The longest halving that fits is named, no shorter one.
        seq_len = 0 if found else seq_len // 2
    yield from _of_hardware(request, smallest)


def _changed(change: Change) -> Way:
    """Return a change of a plan as a way out."""
    notes = [f"{change.slower_fraction:+.1%} time", *filter(None, [change.crossing])]
    return Way(
        options=change.options,
        num_gpus=change.plan.world_size,
        step_ps=change.step_ps,
        device_bytes=change.device_bytes,
        note=", ".join(notes),
    )


def _of_hardware(request: SearchRequest, smallest: StepResult) -> Iterator[Way]:
    """Yield a device without the user's limit, else a larger one, and expandable segments."""
    plan, needed, cluster = smallest.plan, smallest.memory.device_bytes, request.cluster
    clusters = [cluster] if request.memory_limit_bytes else map(load_cluster, list_clusters())
    larger = [each for each in clusters if each.device.usable_bytes >= needed]
    same_nodes = [each for each in larger if each.devices_per_node == cluster.devices_per_node]
    # The smallest device that is large enough comes first.
    for other in sorted(same_nodes or larger, key=lambda each: each.device.usable_bytes):
        note = f"{other.device.name} has {format_bytes(other.device.usable_bytes)}"
        options = "without --memory-limit" if other is cluster else f"--cluster {other.name}"
        ways = request.fitting(options, plan, note=note, cluster=other, memory_limit_bytes=None)
        found = [*ways]
        yield from found
        if found:
            break
    if request.stack.allocator == Allocator.FIXED and request.stack.launched_by:
        _, stack = with_facts(cluster, request.stack, [ALLOCATOR])
        yield from request.fitting(f"--set {ALLOCATOR}", plan, stack=stack, note=EXPANDABLE)
