"""The cheapest changes of a plan that make it fit: single ones, pairs, layouts, more devices."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from meshwright.hwprofiles import Recompute, RecomputeMethod, Strategy
from meshwright.planner.bounds import StepBounds
from meshwright.planner.changes.change import Change, most_tp
from meshwright.planner.changes.switches import Fields, switched, switches
from meshwright.planner.footprint import device_bytes_column, least_state_bytes, peak_bytes
from meshwright.planner.space import (
    COLUMNS,
    SWITCHES,
    Column,
    ShapeTable,
    Space,
    SpaceLimits,
    askable_values,
    enumerate_space,
    lacks,
)
from meshwright.simulator import CostModel, ModelSpec, PlanError, ResolvedPlan, StepResult, simulate
from meshwright.simulator.layout import (
    AXES,
    PLAN_FIELDS,
    SEARCHED_FIELDS,
    Axis,
    ExpertAxis,
    stages_rule,
    without_defaults,
)
from meshwright.simulator.memory import usable_bytes

Progress = Callable[[str, int, int], None]
MOST_CHANGES = 4
MOST_PAIRS = 12
# Passes that all changes together may simulate, some seconds: a plan of usual size has a thousand.
MOST_PASSES = 400_000
REST = {axis.value for axis, known in AXES.items() if known.takes_rest}
NO_LIMIT = 2**62
GPU_MULTIPLES = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Trials:
    """Changes of a plan, simulated as long as the budget of passes lasts."""

    before: StepResult
    memory_limit_bytes: int | None
    costs: CostModel
    progress: Progress | None = None
    num_passes: int = 0
    num_trials: int = 0

    def change(self, plan: ResolvedPlan, fields: Fields) -> tuple[Change, bool] | None:
        """Return the change of *fields*, which make *plan*, and whether it fits.

        Returns:
            None where `step` has none.
        """
        after = self.step(plan)
        return None if after is None else (Change.of(self.before, after, fields), after.memory.fits)

    def step(self, plan: ResolvedPlan) -> StepResult | None:
        """Return the simulated step of *plan*.

        Returns:
            None where stack or job do not go with it, or the budget is spent.
        """
        before = self.before
        num_passes = plan.num_stages * plan.num_microbatches(before.job)
        if before.stack.strategy is not Strategy.MESH:
            num_passes *= plan.dp
        if self.num_passes + num_passes > MOST_PASSES:
            return None
        # A cost model is of one world size.
        costs = self.costs if plan.world_size == before.plan.world_size else None
        try:
            after = simulate(
                before.job,
                plan,
                before.cluster,
                before.stack,
                memory_limit_bytes=self.memory_limit_bytes,
                costs=costs,
            )
        except PlanError:
            return None
        self.num_passes += num_passes
        self.num_trials += 1
        if self.progress is not None:
            self.progress("simulating changes", self.num_trials, 0)
        return after

    def all_of(self, wanted: Iterable[Fields]) -> Iterator[tuple[Change, bool]]:
        """Yield the changes of each of *wanted* that the plan allows."""
        before = self.before
        for fields in wanted:
            try:
                plan, differing = switched(before, fields)
            # A value that contradicts the rest of the plan is no change.
            except PlanError:
                continue
            change = None if plan == before.plan else self.change(plan, differing)
            if change is not None:
                yield change


def cheapest_changes(
    before: StepResult, memory_limit_bytes: int | None = None, progress: Progress | None = None
) -> tuple[Change, ...]:
    """Return up to four changes that make a plan fit, the fastest first.

    They are single fields; where none is enough, pairs of those that save most; where no pair is,
    the layouts with the fewest differences on the same devices; else on more devices. Tensor
    parallelism crosses nodes only where nothing else makes the plan fit, and says so.

    Args:
        before: The plan as it was simulated.
        memory_limit_bytes: Memory limit of a device, as it was simulated.
        progress: Called after each simulation.

    Returns:
        Nothing where the plan fits, or where nothing was found.
    """
    if before.memory.fits:
        return ()
    costs = CostModel(before.cluster, before.stack, before.plan.world_size)
    trials = Trials(before, memory_limit_bytes, costs, progress)
    singles = list(trials.all_of(switches(before.plan, before.stack)))
    singles += trials.all_of(_fewest_layers(trials))
    singles += _widest_moments(trials)
    inside = [each for each in singles if not each[0].crossing]
    return _of_layout(trials, inside, most_tp(before)) or _of_layout(trials, singles, NO_LIMIT)


def _of_layout(trials: Trials, singles: list[tuple[Change, bool]], tp: int) -> tuple[Change, ...]:
    """Return the fastest of *singles* that fit, else of pairs, else of layouts of up to *tp*."""
    found = _fastest(singles) or _fastest(trials.all_of(_pairs(singles)))
    if found or trials.before.stack.strategy is not Strategy.MESH:
        return found
    for multiple in GPU_MULTIPLES:
        found = _fastest(_layouts(trials, multiple * trials.before.plan.world_size, tp))
        if found:
            return found
    return ()


def more_devices(
    before: StepResult, memory_limit_bytes: int | None = None, progress: Progress | None = None
) -> tuple[Change, ...]:
    """Return the fastest layouts that fit on the smallest multiple of the devices."""
    if before.stack.strategy is not Strategy.MESH:
        return ()
    costs = CostModel(before.cluster, before.stack, before.plan.world_size)
    trials = Trials(before, memory_limit_bytes, costs, progress)
    for multiple in GPU_MULTIPLES[1:]:
        found = _fastest(_layouts(trials, multiple * before.plan.world_size, most_tp(before)))
        if found:
            return found
    return ()


def _widest_moments(trials: Trials) -> Iterator[tuple[Change, bool]]:
    """Yield other formats of Adam's moments, the widest first, up to the first that fits."""
    before, name = trials.before, "moment_precision"
    _, *formats = askable_values(PLAN_FIELDS[name], before.job, before.stack)
    for each in formats if before.plan.moment_precision is None else ():
        for change, fits in trials.all_of([{name: each}]):
            yield change, fits
            if fits:
                return


def _fewest_layers(trials: Trials) -> Iterator[Fields]:
    """Yield the fewest first layers of each stage to recompute, where not all have to be."""
    before, mode = trials.before, Recompute.FULL
    plan = before.plan
    if RecomputeMethod.BLOCK not in before.stack.recompute_methods or plan.recompute is mode:
        return
    fixed = {"recompute": mode, "recompute_modules": ()}
    numbers = range(1, max(plan.stages))

    def fits(number: int) -> bool:
        """Return True if so many layers are enough: with more a step needs no more memory."""
        fields = {**fixed, "recompute_layers": number}
        found = [fits for _, fits in trials.all_of([fields])]
        return any(found)

    if numbers and fits(numbers[-1]):
        fewest = numbers[bisect_left(numbers[:-1], x=True, key=fits)]  # the last is known to
        changed = {name: value for name, value in fixed.items() if value != getattr(plan, name)}
        yield {**changed, "recompute_layers": fewest}


def _fastest(tried: Iterable[tuple[Change, bool]]) -> tuple[Change, ...]:
    """Return the fastest of the changes that make the plan fit, one of equally fast ones."""
    fitting = [change for change, fits in tried if fits]
    fitting.sort(key=lambda each: (each.step_ps, len(each.fields), each.device_bytes))
    # Of equal times the change with fewest fields and least memory, which is the first.
    by_time = {each.step_ps: each for each in reversed(fitting)}
    return tuple(by_time[step_ps] for step_ps in sorted(by_time))[:MOST_CHANGES]


def _pairs(singles: list[tuple[Change, bool]]) -> Iterator[Fields]:
    """Yield pairs of the changes that save memory, those that save most together first."""
    saving = [change for change, _ in singles if change.saved_bytes > 0]
    pairs = [
        (first, second)
        for first, second in combinations(saving, 2)
        if first.fields.keys() & second.fields.keys() <= REST
    ]
    pairs.sort(key=lambda pair: -pair[0].saved_bytes - pair[1].saved_bytes)
    for first, second in pairs[:MOST_PAIRS]:
        yield {**first.fields, **second.fields}


def _layouts(trials: Trials, num_gpus: int, tp: int) -> Iterator[tuple[Change, bool]]:
    """Yield the layouts of up to *tp* on *num_gpus* devices that fit with the fewest changes."""
    before = trials.before
    plan, cluster, stack = before.plan, before.cluster, before.stack
    nodes = -(-num_gpus // cluster.devices_per_node)
    if cluster.num_nodes is not None and nodes > cluster.num_nodes:
        return
    limit_bytes = usable_bytes(cluster, trials.memory_limit_bytes)
    # No layout of so few devices can fit: nothing is laid out.
    if least_state_bytes(before.job, stack, plan, num_gpus) > limit_bytes:
        return
    names = ("attention", *SWITCHES) if isinstance(before.job.model, ModelSpec) else SWITCHES
    plan = without_defaults(before.job, stack, plan)
    kept = {name: (getattr(plan, name),) for name in names}
    kept["stages"] = (stages_rule(before.job, plan, stack) or stack.stage_split,)
    space = enumerate_space(before.job, stack, num_gpus, SpaceLimits(**kept))
    chosen = [each for each in SEARCHED_FIELDS if each.name not in {*REST, *kept}]
    codes = {each.name: each.code(getattr(plan, each.name)) for each in chosen}
    differences = sum(space.column(name) != code for name, code in codes.items())
    widest = np.maximum(space.column(Axis.TP), space.column(ExpertAxis.ETP))
    offered = np.flatnonzero(~lacks(space) & (widest <= tp))
    for index in _nearest(trials, space, offered, np.asarray(differences, np.int64)):
        changed = space.plan(index)
        fields: dict[str, object] = {} if num_gpus == plan.world_size else {"gpus": num_gpus}
        for name in COLUMNS:
            if name not in kept and getattr(changed, name) != getattr(before.plan, name):
                fields[name] = getattr(changed, name)
        change = trials.change(changed, fields)
        if change is not None:
            yield change


def _nearest(trials: Trials, space: Space, offered: Column, differences: Column) -> list[int]:
    """Return those *offered* that fit with the fewest *differences*, the lowest bound first."""
    cluster, stack = trials.before.cluster, space.stack
    limit_bytes = usable_bytes(cluster, trials.memory_limit_bytes)
    table, costs = ShapeTable.of(space, offered), CostModel(cluster, stack, space.num_gpus)
    fitting = np.zeros(0, np.int64)
    # Layouts with more differences are not looked at where enough fit with fewer.
    for number in np.unique(differences[offered]).tolist():
        equally_near = offered[differences[offered] == number]
        live = peak_bytes(space, table, trials.costs.blocks, equally_near, most_bytes=limit_bytes)
        device_bytes = device_bytes_column(space, cluster, live, equally_near)
        fitting = np.concatenate([fitting, equally_near[device_bytes <= limit_bytes]])
        if len(fitting) >= MOST_CHANGES:
            break
    bounds_ps = StepBounds(space, table.of_layouts(fitting), costs).lower_bounds_ps(fitting)
    order = np.lexsort((bounds_ps, differences[fitting]))[:MOST_CHANGES]
    return [int(index) for index in fitting[order]]
