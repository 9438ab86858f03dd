"""What a rank of a real run measures, in one process and in the terms of the report."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.hwprofiles import Precision, load_cluster, load_stack
from meshwright.planner.reports.plan_file import SavedPlan
from meshwright.simulator import ModelSpec, ResolvedPlan, TrainingJob
from meshwright.validate.comparison.checks import (
    PEAK,
    PEAK_TOLERANCE,
    Check,
    CheckUnit,
    CheckVerdict,
    compare_rank,
    has_failed,
)
from meshwright.validate.comparison.run_checks import loss_check, run_losses, time_checks
from meshwright.validate.comparison.validation import rank_kinds
from meshwright.validate.ranks.measurement import (
    ByteKind,
    CollectiveCount,
    RankMeasurement,
    read_measurement,
    write_measurement,
)
from meshwright.validate.ranks.prediction import (
    capped,
    default_ranks,
    predict_rank,
    predict_ranks,
    without_dropout,
)

GPT = ModelSpec(
    name="tiny-gpt", num_layers=4, hidden_size=64, num_heads=4, vocab_size=512, seq_len=64
)
LAYOUT = ResolvedPlan(pp=2, stages=(2, 2))


def saved(plan: ResolvedPlan = LAYOUT, precision: Precision = Precision.FP32) -> SavedPlan:
    job = TrainingJob(model=GPT, global_batch_size=8, seq_len=64, precision=precision)
    return SavedPlan(
        job=job,
        plan=plan,
        cluster=load_cluster("localhost-cpu"),
        stack=load_stack("megatron-core"),
    )


def as_predicted(rank: int, **changes: object) -> RankMeasurement:
    """Return what a rank shows that does as it is told."""
    said = predict_rank(saved(), rank)
    measured = RankMeasurement(
        rank=rank,
        world_size=2,
        backend="nccl",
        flops=said.flops,
        collectives=said.collectives,
        peak_bytes=said.peak_bytes,
        bytes_at_peak=said.bytes_at_peak,
        step_times_s=(0.2, 0.1, 0.3),
        versions={"device": "some device"},
    )
    return replace(measured, **changes)


def verdicts(measured: RankMeasurement) -> dict[str, CheckVerdict]:
    checks = compare_rank(predict_rank(saved(), measured.rank), measured)
    return {
        check.quantity: check.verdict for check in checks if check.verdict is CheckVerdict.FAILED
    }


def test_a_measurement_is_read_as_it_was_written(tmp_path: Path) -> None:
    measured = as_predicted(
        1, losses=(5.5, 5.25), allocator_bytes={"reserved": 3}, collective_times_s={"nccl": 0.5}
    )
    write_measurement(measured, tmp_path / "rank.json")
    assert read_measurement(tmp_path / "rank.json") == measured


def test_what_was_predicted_agrees() -> None:
    checks = compare_rank(predict_rank(saved(), 0), as_predicted(0))
    assert not has_failed(checks)
    assert {check.difference_fraction for check in checks} <= {0.0, None}


def test_one_call_or_flop_more_fails() -> None:
    said = predict_rank(saved(), 0)
    first, *others = said.collectives
    more = first._replace(num_calls=first.num_calls + 1)
    assert list(verdicts(as_predicted(0, flops=said.flops + 1))) == ["FLOPs"]
    assert len(verdicts(as_predicted(0, collectives=(more, *others)))) == 1
    stranger = CollectiveCount("other", "all_reduce", 2, 4, 1)
    names = verdicts(as_predicted(0, collectives=(*said.collectives, stranger)))
    assert list(names) == ["other all_reduce of 4 B over 2"]


def test_names_of_groups_that_the_simulator_does_not_tell_apart() -> None:
    said = predict_rank(saved(), 0)
    renamed = tuple(
        call._replace(axis="table") if (call.axis, call.op) == ("pp", "all_reduce") else call
        for call in said.collectives
    )
    assert renamed != said.collectives
    assert verdicts(as_predicted(0, collectives=renamed)) == {}


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_peak_may_differ_by_its_tolerance(sign: int) -> None:
    said = predict_rank(saved(), 0)
    most = math.floor(PEAK_TOLERANCE * said.peak_bytes)
    assert verdicts(as_predicted(0, peak_bytes=said.peak_bytes + sign * most)) == {}
    beyond = as_predicted(0, peak_bytes=said.peak_bytes + sign * (most + 1))
    assert list(verdicts(beyond)) == [PEAK]


def test_gloo_may_keep_what_it_sends() -> None:
    said = predict_rank(saved(), 0)
    (sent_bytes,) = (
        call.size_bytes * call.num_calls for call in said.collectives if call.op == "send"
    )
    assert sent_bytes == 8 * 64 * 64 * 4  # 8 microbatches of 64 tokens of width 64 in fp32
    kept = as_predicted(0, peak_bytes=said.peak_bytes + sent_bytes)
    assert list(verdicts(kept)) == [PEAK]
    assert verdicts(replace(kept, backend="gloo")) == {}
    assert list(verdicts(replace(kept, backend="gloo", peak_bytes=2 * said.peak_bytes))) == [PEAK]


def test_gloo_may_let_go_of_an_activation_late() -> None:
    plan = replace(LAYOUT, tp=2, pp=1, stages=(4,))
    said = predict_rank(saved(plan), 0)
    largest_bytes = 64 * 64 * 4
    late = replace(
        as_predicted(0),
        backend="gloo",
        flops=said.flops,
        collectives=said.collectives,
        peak_bytes=said.peak_bytes + largest_bytes,
    )
    assert not has_failed(compare_rank(said, late))
    assert has_failed(compare_rank(said, replace(late, backend="nccl")))


def test_allocator_and_kernels_are_reported_not_judged() -> None:
    measured = as_predicted(
        0,
        allocator_bytes={"active": 5, "allocated": 10, "reserved": 20},
        collective_times_s={"nccl send_recv": 0.25},
    )
    said = predict_rank(saved(), 0)
    rows = {each.quantity: each for each in compare_rank(said, measured)}
    assert rows["allocator: allocated"].predicted == said.peak_bytes
    assert rows["allocator: reserved"].predicted == said.reserved_bytes > said.peak_bytes
    assert rows["allocator: active"].predicted is None
    assert rows["nccl send_recv kernels"].measured == 0.25
    assert verdicts(measured) == {}


def test_ranks_that_say_the_same_are_one_kind() -> None:
    plan = replace(LAYOUT, dp=2)
    predictions = predict_ranks(saved(plan), range(4))
    assert predictions == {rank: predict_rank(saved(plan), rank) for rank in range(4)}
    found = {
        rank: RankMeasurement(
            rank=rank,
            world_size=4,
            backend="nccl",
            flops=said.flops,
            collectives=said.collectives,
            peak_bytes=said.peak_bytes + rank,
            bytes_at_peak=said.bytes_at_peak,
        )
        for rank, said in predictions.items()
    }
    first, last = rank_kinds(saved(plan), found)
    assert (first.ranks, first.shown, first.title) == ((0, 1), 1, "ranks 0-1, shown: 1")
    assert (last.ranks, last.shown) == ((2, 3), 3)
    odd = {**found, 0: replace(found[0], flops=1)}
    assert [kind.ranks for kind in rank_kinds(saved(plan), odd)] == [(0,), (1,), (2, 3)]


def test_capped_steps_scale_exactly() -> None:
    long = replace(saved(), job=replace(saved().job, global_batch_size=63))
    few = capped(long)
    assert few.plan.num_microbatches(few.job) == 3
    for rank in default_ranks(long.plan):
        whole, part = predict_rank(long, rank), predict_rank(few, rank)
        assert whole.flops == 21 * part.flops
        assert whole.peak_bytes == part.peak_bytes


def check_of_losses(
    losses: list[float], plan: ResolvedPlan = LAYOUT, precision: Precision = Precision.FP32
) -> Check:
    return loss_check(saved(plan, precision), losses, [6.0, 5.0])


def test_losses_must_be_equal_in_fp32_alone() -> None:
    assert check_of_losses([6.0, 5.00001, 4.0]).verdict is CheckVerdict.PASSED
    wrong = check_of_losses([6.0, 5.01, 4.0])
    assert (wrong.verdict, wrong.quantity) == (
        CheckVerdict.FAILED,
        "loss, step 2, the farthest of 2",
    )
    near = check_of_losses([6.0, 5.01], precision=Precision.BF16)
    assert (near.verdict, near.reason) == (
        CheckVerdict.REPORTED,
        "losses in bf16 are within 2% of one process",
    )
    far = check_of_losses([6.0, 7.0], precision=Precision.BF16)
    assert "beyond 2%" in far.reason
    padded = replace(LAYOUT, tp=8, pp=1, stages=(4,))  # 128 rows a rank: 1,024 of them
    assert check_of_losses([6.1, 5.1], padded).reason == (
        "the vocabulary is padded to 1,024 rows, for one process to 512"
    )


def test_the_loss_of_a_run_is_the_mean_of_those_that_report() -> None:
    ranks = [
        as_predicted(0),
        as_predicted(1, losses=(4.0, 2.0)),
        as_predicted(1, losses=(2.0, 1.0)),
    ]
    assert run_losses(ranks) == [3.0, 1.5]


def test_times_are_beside_the_prediction_and_no_gate() -> None:
    ranks = [as_predicted(0), as_predicted(1, step_times_s=(0.4, 0.4, 0.4))]
    middle, spread, slowest = time_checks(saved(), 0.1, ranks)
    assert (middle.predicted, middle.measured) == (0.1, pytest.approx(0.35))
    assert spread.predicted is None
    assert spread.measured == pytest.approx(0.225)  # 0.4 - 0.175, exclusive quartiles of six
    assert (slowest.measured, slowest.quantity) == (0.4, "step time, slowest rank (1)")
    assert {each.verdict for each in (middle, spread, slowest)} == {CheckVerdict.REPORTED}
    assert middle.unit is CheckUnit.SECONDS
    assert "predicted for localhost-cpu, measured on some device" in middle.reason


def test_real_runs_train_without_dropout() -> None:
    assert saved().job.model.dropout
    assert not without_dropout(saved()).job.model.dropout


def test_bytes_are_of_every_kind() -> None:
    assert set(predict_rank(saved(), 0).bytes_at_peak) == set(ByteKind)
