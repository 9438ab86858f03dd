"""Plans whose counts are recorded: frameworks that no environment here has, or large worlds."""

import pytest

from meshwright.validate.outside import (
    OutsidePlan,
    compare_outside,
    differing,
    load_outside_counts,
    load_outside_plans,
)

COUNTS = load_outside_counts()
RECORDED = [plan for plan in load_outside_plans() if plan.size == "recorded"]


@pytest.mark.parametrize("plan", RECORDED, ids=lambda plan: plan.name)
def test_a_plan_is_predicted_as_it_was_counted(plan: OutsidePlan) -> None:
    counted = [each.measured for each in COUNTS if each.plan == plan.name]
    failed = [differing(checks) for checks in compare_outside(plan, iter(counted))]
    assert len(failed) == len(plan.counted_ranks())
    assert {quantity for each in failed for quantity in each} == set(plan.differs), failed
