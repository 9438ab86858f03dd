"""Each framework's own program as a rank, against what is predicted of it and was recorded."""

from collections.abc import Iterator
from functools import cache

import pytest
from witnesses.counting import count_rank

from meshwright.validate.comparison import Check
from meshwright.validate.outside import (
    OutsideCount,
    OutsidePlan,
    Quantity,
    compare_outside,
    differing,
    load_outside_counts,
    load_outside_plans,
)

PLANS = {plan.name: plan for plan in load_outside_plans()}
LIVE = [plan for plan in PLANS.values() if plan.size == "live"]


# A plan is counted once: all tests of a file run in one process.
@cache
def counted(name: str) -> tuple[OutsideCount, ...]:
    return tuple(count_rank(PLANS[name], rank) for rank in PLANS[name].counted_ranks())


@cache
def compared(name: str) -> list[list[Check]]:
    return compare_outside(PLANS[name], (each.measured for each in counted(name)))


def comparisons() -> Iterator[object]:
    for plan in LIVE:
        for quantity in Quantity:
            marks = []
            if quantity in plan.differs:
                marks.append(pytest.mark.xfail(strict=True, reason=plan.note))
            yield pytest.param(plan, quantity, marks=marks, id=f"{plan.name}-{quantity}")


@pytest.mark.parametrize(("plan", "quantity"), comparisons())
def test_a_rank_does_what_is_predicted(plan: OutsidePlan, quantity: Quantity) -> None:
    failed = [
        (count.measured.rank, check)
        for count, checks in zip(counted(plan.name), compared(plan.name), strict=True)
        for check in differing(checks).get(quantity, ())
    ]
    assert not failed


@pytest.mark.parametrize("plan", LIVE, ids=lambda plan: plan.name)
def test_what_was_recorded_is_what_is_counted(plan: OutsidePlan) -> None:
    recorded = [each.row() for each in load_outside_counts() if each.plan == plan.name]
    assert recorded == [each.row() for each in counted(plan.name)]


def test_every_plan_was_recorded() -> None:
    recorded = {(each.plan, each.measured.rank) for each in load_outside_counts()}
    assert recorded == {(p.name, rank) for p in PLANS.values() for rank in p.counted_ranks()}
