"""One rank's stages of a plan, really computed without the others; seconds are never judged."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from meshwright.hwprofiles import Offload, Precision, load_cluster, load_stack
from meshwright.planner.reports.plan_file import SavedPlan
from meshwright.simulator import ModelSpec, PlanError, ResolvedPlan, TrainingJob, load_model
from meshwright.validate.counting.absent_ranks import fake_ranks
from meshwright.validate.probe.report import probe_table
from meshwright.validate.probe.stage_probe import (
    ProbeReport,
    Spread,
    predict_stage,
    probe_stage,
    run_probe,
    shortened,
)

STEPS = 2
GPT = ModelSpec(
    name="tiny-gpt", num_layers=4, hidden_size=64, num_heads=4, vocab_size=512, seq_len=64
)
PIPELINE = {"pp": 2, "stages": (2, 2)}
INTERLEAVED = {
    "pp": 2,
    "stages": (1, 1, 1, 1),
    "num_virtual_stages": 2,
    "schedule": "interleaved",
}


def saved_plan(stack: str, *, batch: int = 8, **fields: Any) -> SavedPlan:
    profile = load_stack(stack)
    plan = ResolvedPlan(**({"stages": (4,), "attention": profile.attention} | fields))
    job = TrainingJob(
        model=GPT, global_batch_size=batch * plan.dp, seq_len=64, precision=Precision.BF16
    )
    return SavedPlan(job=job, plan=plan, cluster=load_cluster("dgx-a100"), stack=profile)


CASES = {
    "megatron": (
        saved_plan("megatron-core", tp=2, dp=2, zero_stage=1, sequence_parallel=True, **PIPELINE),
        5,
    ),
    "megatron interleaved": (saved_plan("megatron-core", dp=4, zero_stage=1, **INTERLEAVED), 0),
    "ddp": (saved_plan("ddp", dp=64), 17),
    "fsdp": (saved_plan("fsdp", dp=64, zero_stage=3), 3),
    "titan pipeline": (saved_plan("torchtitan@0.2", dp=4, zero_stage=3, **PIPELINE), 0),
    "titan tensor parallel": (
        saved_plan("torchtitan@0.2", tp=2, dp=4, zero_stage=3, sequence_parallel=True),
        7,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[SavedPlan, ProbeReport]:
    saved, rank = CASES[request.param]
    return saved, run_probe(saved, rank, device="cpu", steps=STEPS)


def test_every_pass_of_every_virtual_stage_is_timed(case: tuple[SavedPlan, ProbeReport]) -> None:
    saved, report = case
    found = report.measured
    assert len(found.stages) == len(report.predicted.passes_s) == saved.plan.num_virtual_stages
    for stage in found.stages:
        for spread in (stage.forward, stage.backward):
            assert spread.num_samples == STEPS * found.num_microbatches
            assert 0 < spread.least_s <= spread.median_s <= spread.most_s
    assert found.update.num_samples == found.num_steps == STEPS
    assert found.world_size == saved.plan.world_size
    assert not dist.is_initialized()


def test_the_table_shows_each_quantity_with_its_spread(
    case: tuple[SavedPlan, ProbeReport],
) -> None:
    _, report = case
    console = Console(width=160, record=True)
    console.print(probe_table(report))
    text = console.export_text()
    assert "measured on cpu without communication" in text
    for index in range(len(report.measured.stages)):
        assert f"virtual stage {index}: backward" in text
    assert "optimizer step" in text
    assert "peak memory" in text


@pytest.mark.parametrize("name", ["megatron", "megatron interleaved", "ddp"])
def test_the_stage_needs_the_memory_that_is_predicted(name: str) -> None:
    saved, rank = CASES[name]
    # Shards are rounded up, norms keep statistics; of so small a model that is some of a percent.
    found = probe_stage(saved, rank, device="cpu", steps=1).peak_bytes
    assert found == pytest.approx(predict_stage(shortened(saved, rank), rank).peak_bytes, rel=0.01)


def test_communication_is_not_in_the_predicted_passes() -> None:
    alone = predict_stage(saved_plan("megatron-core"), 0)
    split = predict_stage(saved_plan("megatron-core", tp=4), 0)
    for whole_s, part_s in zip(alone.passes_s[0], split.passes_s[0], strict=True):
        assert part_s < whole_s


@pytest.mark.parametrize(
    ("fields", "rank", "expected"),
    [
        ({}, 0, 2),  # gradients of a second pass are added to those of the first
        (PIPELINE, 0, 3),
        (INTERLEAVED, 0, 4),  # rank 0 holds three passes of four
    ],
)
def test_no_more_microbatches_run_than_fill_the_memory(
    fields: dict[str, Any], rank: int, expected: int
) -> None:
    saved = saved_plan("megatron-core", batch=64, **fields)
    short = shortened(saved, rank)
    assert short.plan.num_microbatches(short.job) == expected
    assert predict_stage(short, rank) == predict_stage(saved, rank)


def test_what_is_received_is_random_and_what_is_reduced_is_kept() -> None:
    with fake_ranks(3, 8):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
        values = torch.ones(4)
        dist.all_reduce(values)
        assert values.equal(torch.ones(4))
        work = dist.irecv(values, src=2)
        assert work is not None
        work.wait()
        assert work.is_completed()
        assert not values.equal(torch.ones(4))
    assert not dist.is_initialized()


def test_a_spread_is_not_hidden() -> None:
    spread = Spread.of([4.0, 1.0, 2.0, 3.0])
    assert (spread.median_s, spread.least_s, spread.most_s) == (2.5, 1.0, 4.0)


def test_what_cannot_be_probed_is_refused() -> None:
    saved, rank = CASES["ddp"]
    with pytest.raises(PlanError, match=r"^rank=64 is out of range; allowed: 0 to 63$"):
        run_probe(saved, 64, device="cpu", steps=1)
    with pytest.raises(PlanError, match=r"^steps=0 is out of range; allowed: at least 1$"):
        run_probe(saved, rank, device="cpu", steps=0)
    sharded, _ = CASES["fsdp"]
    moved = replace(sharded, plan=replace(sharded.plan, offload=Offload.PARAMETERS))
    with pytest.raises(PlanError, match=r"^device=cpu has one memory, where offload=parameters"):
        probe_stage(moved, rank, device="cpu", steps=1)
    with pytest.raises(PlanError, match=r"^device=tpu is not here; allowed: cpu"):
        run_probe(saved, rank, device="tpu", steps=1)
    module = replace(saved, stack=load_stack("dataparallel"))
    with pytest.raises(PlanError, match=r"^stack dataparallel@1.6 has no stages to probe; allowed"):
        run_probe(module, rank, device="cpu", steps=1)
    huge = replace(
        saved,
        job=replace(saved.job, model=load_model("gpt3-175b")),
        plan=replace(saved.plan, stages=(96,)),
    )
    with pytest.raises(PlanError, match=r"^rank=17 needs [\d.]+ GiB by prediction, more than"):
        run_probe(huge, rank, device="cpu", steps=1)
