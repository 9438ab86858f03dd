"""What fake ranks of a plan count, against what the simulator says of them."""

from meshwright.planner.reports.plan_file import SavedPlan
from meshwright.simulator import ResolvedPlan
from meshwright.validate.comparison.checks import Check, CheckVerdict, compare_rank
from meshwright.validate.ranks.prediction import default_ranks, predict_ranks
from meshwright.validate.runs.fake import measure_fakes


def failed_on_fakes(case: SavedPlan) -> list[Check]:
    """Return the checks that fail, of one rank of each kind."""
    ranks = default_ranks(case.plan)
    predicted = predict_ranks(case, ranks)
    checks = [
        [*compare_rank(predicted[measured.rank], measured)]
        for measured in measure_fakes(case, ranks)
    ]
    assert len(checks) == len(ranks)
    assert all(checks)
    return [each for own in checks for each in own if each.verdict is CheckVerdict.FAILED]


def counted_ranks(plan: ResolvedPlan) -> tuple[int, ...]:
    """Return the ranks that are counted where all run: one of each kind, and the last of all axes.

    What is between differs from the first by its place alone, and runs beside them.
    """
    return tuple(sorted({*default_ranks(plan), plan.world_size - 1}))
