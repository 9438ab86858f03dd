"""Fields of a plan are declared once: what reads the declarations agrees with the plan itself."""

from dataclasses import fields, replace

import numpy as np
import pytest

from meshwright.hwprofiles import Recompute, load_stack
from meshwright.planner import SpaceLimits, enumerate_space
from meshwright.planner.options import LAYOUT, REPLICATION
from meshwright.planner.reports import plan_fields
from meshwright.simulator import ParallelPlan, PlanError, TrainingJob, load_model
from meshwright.simulator.layout import (
    AXES,
    PLAN_FIELDS,
    SEARCHED_FIELDS,
    SERVER_FIELDS,
    Axis,
    PlanField,
    stack_gaps,
    stack_refusal,
)

JOB = TrainingJob(model=load_model("gpt2"), global_batch_size=16, seq_len=1024)


def test_every_field_is_declared_written_and_has_an_option() -> None:
    names = [each.name for each in fields(ParallelPlan)]
    assert [*PLAN_FIELDS] == names == [*plan_fields(ParallelPlan())]
    keys = {each.key for group in (LAYOUT, REPLICATION) for each in group.options}
    assert keys - {"bucket_size"} == {*PLAN_FIELDS, *SERVER_FIELDS} - {"parameter_server"}


def test_every_axis_has_a_field_and_one_takes_the_rest() -> None:
    assert [*ParallelPlan().degrees] == [axis for axis in PLAN_FIELDS if axis in set(Axis)]
    assert {*ParallelPlan().degrees} == {*AXES}
    assert sum(known.takes_rest for known in AXES.values()) == 1


@pytest.mark.parametrize("field", SEARCHED_FIELDS, ids=lambda field: field.name)
def test_a_column_gives_back_the_values_of_its_field(field: PlanField) -> None:
    for code, value in enumerate(field.choices or range(1, 9)):
        number = field.code(value)
        assert field.value(number) == value
        assert number == (code if field.choices else value)


@pytest.mark.parametrize("name", ["megatron-lm-2021", "ddp", "torchtitan", "deepspeed"])
def test_what_a_stack_lacks_is_the_same_for_a_plan_and_for_columns(name: str) -> None:
    stack = load_stack(name)
    limits = SpaceLimits(recompute=tuple(Recompute), max_microbatch_size=2, max_virtual_stages=2)
    space = enumerate_space(JOB, stack, 8, limits)
    lacking = np.zeros(len(space), np.bool_)
    for gap in stack_gaps(stack):
        if gap.field in {each.name for each in SEARCHED_FIELDS}:
            lacking |= np.asarray(gap.lacks(space.column), np.bool_)
    assert 0 < lacking.sum() < len(space)
    for index, is_lacking in enumerate(lacking.tolist()):
        refusal = stack_refusal(
            replace(JOB, precision=stack.precisions[0]), space.plan(index), stack
        )
        assert (refusal is not None) == is_lacking, refusal


def test_a_limit_of_no_searched_field_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"max_tpp is no field of a search; .*max_tp"):
        SpaceLimits(max_tpp=2)
