"""Plans that are alike: those that a simpler one does as well as are folded into it."""

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
# Layouts that are simulated for the rows below the best: of some spaces thousands are alike.
MOST_RUNS = 200
# Layouts for each row that get sharp bounds at once: of some spaces ten are alike.
BOUNDS_A_ROW = 10


def complexity(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> tuple[int, ...]:
    """Return a key that is less for a simpler plan, of all fields that are searched.

    A plan is simpler if fewer of its fields differ from what is usual, the stack's or the field's
    default; of as many, that whose first differing column is usual, or less.

    >>> from meshwright.hwprofiles import load_stack
    >>> from meshwright.simulator import load_model
    >>> job = TrainingJob(model=load_model("gpt2"), global_batch_size=8, seq_len=1024)
    >>> stack = load_stack("megatron-core")
    >>> plans = [ResolvedPlan(microbatch_size=size) for size in (1, 2)]
    >>> complexity(job, plans[0], stack) < complexity(job, plans[1], stack)
    True
    """
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
    """Layouts of a search that stand for those that are alike.

    Layouts of the same degrees are alike, if the simpler one takes at most `LONGER_FRACTION` longer
    and at most `LARGER_FRACTION` more memory.  None stands for others and is folded itself, and
    none that is fast enough to be listed into a row that is not: `rows_of`.
    A layout whose bound tells that it is folded is not simulated.
    """

    finalists: Finalists
    bounds_ps: dict[int, int] = field(default_factory=dict)
    places: dict[int, tuple[object, ...]] = field(default_factory=dict)
    complexities: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rows_of: dict[int, Collection[int]] = field(default_factory=dict)

    def best(self, top: int, max_passes: int) -> dict[int, list[int]]:
        """Return the best *top* rows: layouts that stand for others, with these.

        They are in the order of their own times; the fastest layout may be among those of another
        than the first.

        Args:
            top: How many.
            max_passes: Stop when all runs together have made so many passes, or after `MOST_RUNS`.
        """
        runs = self.finalists.runs
        rows: dict[int, list[int]] = {}
        most_runs = len(runs.step_ps) + MOST_RUNS

        def until_ps() -> int:
            return runs.step_ps[list(rows)[top - 1]] if len(rows) >= top else NEVER_PS

        for index, bound_ps in self.finalists.in_order(until_ps, BOUNDS_A_ROW * top):
            if bound_ps >= until_ps():
                break
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
        while hidden := self._hidden(rows, top):
            listed = {*list(rows)[:top]}
            self.rows_of |= dict.fromkeys(hidden, listed)
            rows = self._simulated()
        return dict(list(rows.items())[:top])

    def _hidden(self, rows: dict[int, list[int]], top: int) -> set[int]:
        """Return those faster than the last of the best *top* that a row behind it stands for."""
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
        """Return the rows as they are known; what was not simulated stands for nothing else."""
        runs = self.finalists.runs
        simulated: dict[object, list[int]] = {}
        stands_for: dict[int, int] = {}
        for index in sorted(self.places, key=lambda each: (self.complexities[each], each)):
            own = simulated.setdefault(self.places[index], [])
            listed = self.rows_of.get(index, own)
            alike = (each for each in own if each in listed and self._is_like(index, each))
            stands_for[index] = next(alike, index)
            if stands_for[index] == index and index in runs.step_ps:
                own.append(index)
        rows: dict[int, list[int]] = {}
        for index in sorted(self.places, key=lambda each: (self._least_ps(each), each)):
            rows.setdefault(stands_for[index], []).append(index)
        return rows

    def _is_like(self, index: int, simpler: int) -> bool:
        """Return whether *simpler*, which was simulated, does as well as *index*."""
        runs = self.finalists.runs
        is_longer = runs.step_ps[simpler] > self._least_ps(index) * (1 + LONGER_FRACTION)
        device_bytes = runs.device_bytes
        is_larger = device_bytes[simpler] > device_bytes[index] * (1 + LARGER_FRACTION)
        return not is_longer and not is_larger

    def _least_ps(self, index: int) -> int:
        return self.finalists.runs.step_ps.get(index, self.bounds_ps[index])
