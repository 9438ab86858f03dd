"""Which switches make the best plan of a search faster, and what the search says of them."""

from typing import NamedTuple

from meshwright.planner import Change, SearchResult
from meshwright.planner.search import ONLY_ONE, UNEQUAL
from meshwright.planner.space import are_equal
from meshwright.simulator import CostModel, PlanError, simulate
from walking.switches import turned


class Faster(NamedTuple):
    """A plan that fits and is faster than the best one of a search.

    ``held`` is why the search has none like it, in the words in which it says so; empty where it
    does not.
    """

    change: Change
    held: str


class Walk(NamedTuple):
    """What came of turning every switch of the best plan of a search.

    Args:
        result: The search.
        num_simulated: Plans that its stack offers; the others are refused.
        faster: Those that are faster, the fastest first.
    """

    result: SearchResult
    num_simulated: int
    faster: list[Faster]

    @property
    def faults(self) -> list[Faster]:
        """What is faster than what was proven, with no word of it in what the search tells."""
        return [each for each in self.faster if not each.held]


def walk(result: SearchResult) -> Walk:
    """Simulate the best plan of *result* with each of its switches at every other value."""
    best, job, faster = result.plans[0], result.job, []
    costs, num_simulated = CostModel(result.cluster, result.stack, result.num_gpus), 0
    for fields, plan in turned(best):
        try:
            step = simulate(job, plan, result.cluster, result.stack, costs=costs)
        except PlanError:  # not offered
            continue
        num_simulated += 1
        if step.memory.fits and step.step_ps < best.step_ps:
            change = Change.of(best, step, fields)
            faster.append(Faster(change, _reason(result, change)))
    faster.sort(key=lambda each: each.change.step_ps)
    return Walk(result, num_simulated, faster)


def _reason(result: SearchResult, change: Change) -> str:
    """Return why the search has no such plan, if it says so."""
    held = (each for each in result.varied.held if each.reason != ONLY_ONE)
    known = [each.reason for each in held if each.name in change.fields]
    is_equal = are_equal(result.job.model.num_layers, change.plan.num_stages)
    for each in result.varied.left_out:
        value = change.fields.get(each.name)
        if value == each.value or (value is not None and each.value == UNEQUAL and not is_equal):
            known.append(each.reason)
    return next(iter(known), "")
