"""docs/agreement.md says what this version computes and counts."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from meshwright.hwprofiles import Attention, Offload, Precision, Recompute  # noqa: E402
from meshwright.planner.reports.plan_file import SavedPlan  # noqa: E402
from meshwright.simulator import PlanError  # noqa: E402
from meshwright.validate.agreement import (  # noqa: E402
    CLUSTER,
    HOST_HEAD,
    PLAN_HEAD,
    RANK_HEAD,
    AgreementPlan,
    chosen_plans,
    compare_plan,
    load_agreement_plans,
    plan_cells,
    table_head,
    table_row,
)
from meshwright.validate.ranks.members import usual_members  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "agreement.md").read_text(encoding="utf-8")
RANKS, ON_HOSTS = PAGE.split("\n## On the host\n")
PLANS = {plan.name: plan for plan in load_agreement_plans()}
SMALL = [name for name, plan in PLANS.items() if plan.size == "small"]
# Of the large ones: first, a middle of each number of layers, last; and one rank of another stack.
LARGE = {"gpt3 on 3072": (), "titan gpt3 on 3072": (3024,)}


def check_rows(name: str, ranks: tuple[int, ...] = ()) -> None:
    for found in compare_plan(PLANS[name], ranks):
        assert table_row(found.cells()) in PAGE.splitlines()
        if PLANS[name].saved().plan.offload is not Offload.NONE:
            assert table_row(found.host_cells()) in ON_HOSTS.splitlines()
        else:
            assert found.host_cells() == ()
        assert bool(found.failures()) <= bool(PLANS[name].note)


@pytest.mark.parametrize("name", SMALL)
def test_the_page_says_what_a_small_plan_shows(name: str) -> None:
    check_rows(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_the_page_says_what_ranks_of_3072_show(name: str) -> None:
    check_rows(name, LARGE[name])


def test_the_page_has_every_plan_and_rank() -> None:
    lines = PAGE.splitlines()
    for head in (PLAN_HEAD, RANK_HEAD, HOST_HEAD):
        assert table_head(head) in PAGE
    for plan in PLANS.values():
        assert table_row(plan_cells(plan)) in lines
        saved = plan.saved()
        wanted = plan.ranks or usual_members(saved)
        on_hosts = wanted if saved.plan.offload is not Offload.NONE else ()
        for section, expected in ((RANKS, wanted), (ON_HOSTS, on_hosts)):
            shown = re.findall(rf"^\| {re.escape(plan.name)} \| (\d+) \|", section, re.MULTILINE)
            assert tuple(int(rank) for rank in shown) == expected


def test_commands_of_the_page_are_those_of_plans() -> None:
    commands = re.findall(r"^meshwright (simulate .*) --out \S+$", PAGE, re.MULTILINE)
    assert len(commands) >= 3
    assert set(commands) <= {plan.command for plan in PLANS.values()}


def test_plans_span_what_programs_can_express() -> None:
    plans: list[SavedPlan] = [plan.saved() for plan in PLANS.values()]
    assert len(plans) >= 24
    assert {saved.stack.name for saved in plans} == {
        "ddp",
        "dataparallel",
        "fsdp",
        "torchtitan",
        "megatron-core",
        "megatron-lm-2021",
        "megatron-lm-2022",
    }
    assert {saved.plan.schedule for saved in plans} == {"gpipe", "1f1b", "interleaved"}
    assert {saved.plan.zero_stage for saved in plans} == {0, 1, 3}
    assert {saved.plan.recompute for saved in plans} == set(Recompute)
    assert {saved.plan.attention for saved in plans} == set(Attention)
    assert {saved.job.precision for saved in plans} >= {Precision.FP32, Precision.BF16}
    assert {saved.job.model.tied_embeddings for saved in plans} == {True, False}
    assert any(saved.plan.dp_shard for saved in plans)
    offloading = [saved for saved in plans if saved.plan.offload is Offload.PARAMETERS]
    assert {saved.stack.name for saved in offloading} == {"fsdp", "torchtitan"}
    assert any(saved.plan.reduce_precision for saved in plans)
    # 64 pipeline stages x 6 data-parallel hosts x 8 tensor-parallel GPUs, on two stacks.
    large = [saved for saved in plans if saved.plan.world_size == 3072]
    assert {(saved.plan.pp, saved.plan.dp, saved.plan.tp) for saved in large} == {(64, 6, 8)}
    assert {saved.stack.name for saved in large} == {"megatron-core", "torchtitan"}
    assert {saved.job.model.name for saved in large} == {"gpt3-175b", "megatron-1t"}


def test_a_name_that_is_no_plan_is_refused() -> None:
    with pytest.raises(PlanError, match=r"unknown plan 'hsdb'; nearest: hsdp"):
        chosen_plans(["hsdb"])
    assert chosen_plans(["hsdp"]) == (PLANS["hsdp"],)
    assert chosen_plans([]) == tuple(PLANS.values())


def test_a_plan_is_what_its_command_makes() -> None:
    plan = AgreementPlan(name="x", size="small", options="gpt2 --gpus 2", ranks=(), note="")
    assert plan.command == f"simulate gpt2 --gpus 2 --cluster {CLUSTER}"
    with pytest.raises(PlanError, match="--global-batch is missing; it is required"):
        plan.saved()
