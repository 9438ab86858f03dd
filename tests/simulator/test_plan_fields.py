"""Fields of a plan are declared once: what reads the declarations agrees with the plan itself."""

from dataclasses import fields, replace

import numpy as np
import pytest

from meshwright.hwprofiles import Attention, Precision, Recompute, load_stack
from meshwright.planner import SpaceLimits, enumerate_space
from meshwright.planner.options import LAYOUT, REPLICATION
from meshwright.planner.reports import plan_fields
from meshwright.simulator import PlanError, ResolvedPlan, TrainingJob, load_model
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
    names = [each.name for each in fields(ResolvedPlan)]
    assert [*PLAN_FIELDS] == names
    usual = [each for each in names if not PLAN_FIELDS[each].declaration.is_rare]
    assert [*plan_fields(ResolvedPlan())] == usual
    keys = {each.key for group in (LAYOUT, REPLICATION) for each in group.options}
    assert keys - {"bucket_size"} == {*PLAN_FIELDS, *SERVER_FIELDS} - {"parameter_server"}


def test_every_axis_has_a_field_and_one_takes_the_rest() -> None:
    degrees = ResolvedPlan(tp=2, cp=2).degrees
    assert [*degrees] == [axis for axis in PLAN_FIELDS if axis in set(Axis)]
    assert {*degrees} == {*AXES}
    assert {*AXES} - {*ResolvedPlan(tp=2).degrees} == {Axis.CP}, "told where it is not 1"
    assert sum(known.takes_rest for known in AXES.values()) == 1


LISTS = [each for each in SEARCHED_FIELDS if each.declaration.members]


@pytest.mark.parametrize("field", LISTS, ids=lambda field: field.name)
def test_a_column_of_lists_has_a_bit_for_each_member(field: PlanField) -> None:
    members = field.declaration.members
    for number in range(1 << len(members)):
        assert field.code(field.value(number)) == number
    assert [field.code((each,)) for each in members] == [1 << at for at in range(len(members))]


@pytest.mark.parametrize(
    "field",
    [each for each in SEARCHED_FIELDS if each not in LISTS],
    ids=lambda field: field.name,
)
def test_a_column_gives_back_the_values_of_its_field(field: PlanField) -> None:
    values = [*([None] if field.is_optional else []), *(field.choices or range(1, 9))]
    for code, value in enumerate(values):
        number = field.code(value)
        assert field.value(number) == value
        assert number == (code if field.choices or value is None else value)


@pytest.mark.parametrize("name", ["megatron-lm-2021", "ddp", "torchtitan@0.2", "deepspeed"])
def test_what_a_stack_lacks_is_the_same_for_a_plan_and_for_columns(name: str) -> None:
    stack = load_stack(name)
    limits = SpaceLimits(recompute=tuple(Recompute), max_microbatch_size=2, max_virtual_stages=2)
    job = replace(JOB, precision=stack.precisions[0])
    space = enumerate_space(job, stack, 8, limits)
    lacking = np.zeros(len(space), np.bool_)
    for gap in stack_gaps(stack, job):
        if gap.field in {each.name for each in SEARCHED_FIELDS}:
            lacking |= np.asarray(gap.lacks(space.column), np.bool_)
    assert 0 < lacking.sum() < len(space)
    for index, is_lacking in enumerate(lacking.tolist()):
        refusal = stack_refusal(job, space.plan(index), stack)
        assert (refusal is not None) == is_lacking, refusal


def test_what_a_stack_lacks_is_said_by_its_values() -> None:
    said = {gap.reason for gap in stack_gaps(load_stack("ddp"), JOB)}
    assert said >= {"tp > 1", "ep > 1", "schedule=interleaved", "sequence_parallel"}


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}])
def test_torchtitan_casts_nothing_without_shards(degrees: dict[str, int]) -> None:
    """``maybe_enable_amp``: "only supported when FSDP/HSDP/CP is enabled"."""
    stack, alone = (
        load_stack("torchtitan@0.2"),
        ResolvedPlan(attention=Attention.FLASH, zero_stage=3),
    )
    job = replace(JOB, precision=Precision.BF16)
    plan = replace(alone, sequence_parallel="tp" in degrees, **degrees)
    refusal = stack_refusal(job, plan, stack)
    assert refusal == (
        "dp=1 is not offered by stack torchtitan@0.2; "
        "allowed: more than 1 in bf16, 1 in fp32, as it computes then "
        "(maybe_enable_amp of torchtitan 0.2.2)"
    )
    assert stack_refusal(replace(job, precision=Precision.FP32), plan, stack) is None
    assert stack_refusal(job, replace(plan, dp=2), stack) is None
    assert stack_refusal(job, alone, stack) is None


def test_a_limit_of_no_searched_field_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"max_tpp is no field of a search; .*max_tp"):
        SpaceLimits(max_tpp=2)
