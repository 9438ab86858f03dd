"""Rows of a report: near-equal plans, folded into the simplest that does as well."""

from collections.abc import Collection
from dataclasses import dataclass, field

from meshwright.hwprofiles import StackProfile
from meshwright.planner.search.finalists import NEVER_PS, Finalists
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.simulator.layout import SEARCHED_FIELDS, stages_rule, without_defaults

# A simpler plan stands for others if it takes at most so much longer and so much more memory: less
# than a prediction is off on average (docs/accuracy.md).
LONGER_FRACTION = 0.01
LARGER_FRACTION = 0.02
# Simulations for the rows below the best: in some spaces thousands of layouts are near-equal.
MOST_RUNS = 200
# Sharp bounds for each row at once: in some spaces ten layouts are near-equal.
BOUNDS_A_ROW = 10


def complexity(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> tuple[int, ...]:
    """Return a sort key that is lower for a simpler plan, over all searched fields.

    A plan is simpler if fewer of its fields differ from the default, the stack's or the field's; of
    equally many, the one whose first differing column has the default, or the lower value.

    >>> from meshwright.hwprofiles import load_stack
    >>> from meshwright.simulator import load_model
    >>> job = TrainingJob(model=load_model("gpt2"), global_batch_size=8, seq_len=1024)
    >>> stack = load_stack("megatron-core")
    >>> plans = [ResolvedPlan(microbatch_size=size) for size in (1, 2)]
    >>> complexity(job, plans[0], stack) < complexity(job, plans[1], stack)
    True
    """
    # Defaults of these fields are the stack's.
    usual = {"zero_stage": stack.zero_stage, "attention": stack.attention, "stages": None}
    plan = without_defaults(job, stack, plan)
    codes = []
    for each in SEARCHED_FIELDS:
        if not each.declaration.axis:
            value = getattr(plan, each.name)
            if each.name == "stages":
                value = stages_rule(job, plan, stack)
            is_usual = value == usual.get(each.name, each.default)
            codes.append(0 if is_usual else 1 + each.code(value))
    return sum(code > 0 for code in codes), *codes


@dataclass
class Rows:
    """Layouts of a search that stand for near-equal ones.

    Layouts of the same degrees are near-equal if the simpler one takes at most `LONGER_FRACTION`
    longer and at most `LARGER_FRACTION` more memory. None stands for others and is folded itself,
    and none that is fast enough to be listed is folded into a row that is not: `rows_of`. A layout
    whose bound tells that it is folded is not simulated.
    """

    finalists: Finalists
    bounds_ps: dict[int, int] = field(default_factory=dict)
    places: dict[int, tuple[object, ...]] = field(default_factory=dict)
    complexities: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rows_of: dict[int, Collection[int]] = field(default_factory=dict)

    def best(self, top: int, max_passes: int) -> dict[int, list[int]]:
        """Return the best *top* rows: layouts that stand for others, with these.

        They are in the order of their own times; the fastest layout may be folded into another row
        than the first.

        Args:
            top: Number of rows.
            max_passes: Stop when all runs together have made so many passes, or after `MOST_RUNS`.
        """
        runs = self.finalists.runs
        rows: dict[int, list[int]] = {}
        # On top of the runs that the proof has made.
        most_runs = len(runs.step_ps) + MOST_RUNS

        def until_ps() -> int:
            return runs.step_ps[list(rows)[top - 1]] if len(rows) >= top else NEVER_PS

        for index, bound_ps in self.finalists.in_order(until_ps, BOUNDS_A_ROW * top):
            if bound_ps >= until_ps():
                break
            # Runs that the proof has made already are free.
            if index not in runs.step_ps and (
                runs.num_passes >= max_passes or len(runs.step_ps) >= most_runs
            ):
                break
            if runs.is_too_long(index):
                continue
            plan, space = runs.space.plan(index), runs.space
            self.bounds_ps[index] = bound_ps
            self.places[index] = *plan.degrees.values(), plan.parameter_server
            self.complexities[index] = complexity(space.job, plan, space.stack)
            rows = self._simulated()
        while misplaced := self._wrongly_folded(rows, top):
            listed = {*list(rows)[:top]}
            self.rows_of |= dict.fromkeys(misplaced, listed)
            rows = self._simulated()
        return dict(list(rows.items())[:top])

    def _wrongly_folded(self, rows: dict[int, list[int]], top: int) -> set[int]:
        """Return layouts faster than the last of the best *top*, folded into a row behind it."""
        listed = list(rows)[:top]
        last_ps = self.finalists.runs.step_ps[listed[-1]] if listed else 0
        behind = (alike for row, alike in rows.items() if row not in listed)
        return {index for alike in behind for index in alike if self._least_ps(index) < last_ps}

    def _simulated(self) -> dict[int, list[int]]:
        """Return the rows when all that stand for themselves have been simulated."""
        runs = self.finalists.runs
        while True:
            rows = self._folded()
            left = [index for index in rows if index not in runs.step_ps]
            if not left:
                return {index: rows[index] for index in sorted(rows, key=runs.rank)}
            # The simplest of each place first: it may stand for others, which then need no run.
            left.sort(key=lambda each: (self.complexities[each], each), reverse=True)
            for index in {self.places[each]: each for each in left}.values():
                runs.run(index)

    def _folded(self) -> dict[int, list[int]]:
        """Return the rows as known so far; layouts not simulated stand for nothing else."""
        runs = self.finalists.runs
        simulated: dict[object, list[int]] = {}
        stands_for: dict[int, int] = {}
        for index in sorted(self.places, key=lambda each: (self.complexities[each], each)):
            representatives = simulated.setdefault(self.places[index], [])
            listed = self.rows_of.get(index, representatives)
            candidates = (
                each for each in representatives if each in listed and self._is_like(index, each)
            )
            stands_for[index] = next(candidates, index)
            if stands_for[index] == index and index in runs.step_ps:
                representatives.append(index)
        rows: dict[int, list[int]] = {}
        for index in sorted(self.places, key=lambda each: (self._least_ps(each), each)):
            rows.setdefault(stands_for[index], []).append(index)
        return rows

    def _is_like(self, index: int, simpler: int) -> bool:
        """Return True if *simpler*, which was simulated, does as well as *index*."""
        runs = self.finalists.runs
        is_longer = runs.step_ps[simpler] > self._least_ps(index) * (1 + LONGER_FRACTION)
        device_bytes = runs.device_bytes
        is_larger = device_bytes[simpler] > device_bytes[index] * (1 + LARGER_FRACTION)
        return not is_longer and not is_larger

    def _least_ps(self, index: int) -> int:
        """Return the simulated time of a layout, or its bound."""
        return self.finalists.runs.step_ps.get(index, self.bounds_ps[index])
