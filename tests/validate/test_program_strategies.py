"""Replicas of one process, and parameter servers: what they train, copy, send and hold."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from link_bytes import module_link_bytes, server_link_bytes, sharded_worker_bytes

from meshwright.hwprofiles import Precision, Recompute, load_cluster, load_stack
from meshwright.planner.reports.plan_file import SavedPlan
from meshwright.simulator import ModelSpec, ParameterServer, PlanError, ResolvedPlan, TrainingJob
from meshwright.validate.counting.fake_cluster import fake_cluster
from meshwright.validate.counting.oracle import RankOracle
from meshwright.validate.programs.build import build_program
from meshwright.validate.programs.contract.request import ProgramRequest
from meshwright.validate.programs.contract.weights import token_batch
from meshwright.validate.programs.pytorch.loss import LossOfMicrobatch
from meshwright.validate.programs.pytorch.reference import reference_losses
from meshwright.validate.programs.strategies.data_parallel_module import (
    LibraryReplicas,
    build_data_parallel_module,
)
from meshwright.validate.ranks.measurement import ByteKind, CollectiveCount
from meshwright.validate.ranks.members import SERVERS, predict_member
from meshwright.validate.ranks.server_layout import ServerLayout, num_processes
from meshwright.validate.runs.devices import measure_devices
from meshwright.validate.runs.fake import run_counted

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
NUM_STEPS = 3
MODULE, SERVER = "dataparallel", "parameter-server"
GPT = ModelSpec(
    name="tiny-gpt", num_layers=2, hidden_size=32, num_heads=4, vocab_size=512, seq_len=16
)
# Elements: the tables, the final norm; of a layer its norms, weights and biases.
PARAMETERS = (512 + 16 + 2) * 32 + 2 * (12 * 32**2 + 13 * 32)


def job_of(batch: int = 8, precision: Precision = Precision.FP32, tokens: int = 16) -> TrainingJob:
    return TrainingJob(model=GPT, global_batch_size=batch, seq_len=tokens, precision=precision)


def plan_of(dp: int, servers: ParameterServer | None = None, **fields: Any) -> ResolvedPlan:
    return ResolvedPlan(dp=dp, stages=(2,), parameter_server=servers, **fields)


def saved_plan(stack: str, job: TrainingJob, plan: ResolvedPlan) -> SavedPlan:
    return SavedPlan(job=job, plan=plan, cluster=load_cluster("dgx-a100"), stack=load_stack(stack))


def request_of(saved: SavedPlan, rank: int = 0, *, initialise: bool = False) -> ProgramRequest:
    return ProgramRequest(
        job=saved.job,
        plan=saved.plan,
        stack=saved.stack,
        rank=rank,
        device=torch.device("cpu"),
        initialise=initialise,
        num_microbatches=saved.plan.num_microbatches(saved.job),
        dropout=0.0 if initialise else 0.1,
    )


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return reference_losses(job_of(), NUM_STEPS)


@pytest.mark.parametrize(
    ("dp", "fields"), [(1, {}), (2, {"microbatch_size": 2}), (4, {"recompute": Recompute.FULL})]
)
def test_replicas_of_one_process_train_as_one(
    dp: int, fields: dict[str, Any], alone: list[float]
) -> None:
    saved = saved_plan(MODULE, job_of(), plan_of(dp, **fields))
    program = build_data_parallel_module(request_of(saved, initialise=True))
    found = [mean(loss.item() for loss in program.run_step(step)) for step in range(NUM_STEPS)]
    assert found == pytest.approx(alone, abs=1e-5)


def test_copies_made_by_hand_give_the_gradients_of_the_library() -> None:
    saved = saved_plan(MODULE, job_of(), plan_of(2))
    by_hand, library = (
        build_data_parallel_module(request_of(saved, initialise=True)) for _ in range(2)
    )
    library._pass = LibraryReplicas(library._request, library.stage, LossOfMicrobatch(4))
    batch = token_batch(saved.job, 0, range(2))
    for program in (by_hand, library):
        program._pass(*batch)
    for one, other in zip(by_hand.stage.parameters(), library.stage.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    ("dp", "passes", "precision"), [(2, 1, Precision.FP32), (4, 2, Precision.FP16)]
)
def test_each_device_computes_and_copies_what_the_simulator_says(
    dp: int, passes: int, precision: Precision
) -> None:
    saved = saved_plan(MODULE, job_of(dp * passes, precision), plan_of(dp))
    measured = measure_devices(saved)
    for device, found in enumerate(measured):
        said = predict_member(saved, device)
        assert found.collectives == said.collectives
        assert found.flops == said.flops
    weights = {"parameter broadcast", "gradient reduction"}
    crossing = sum(
        each.size_bytes * each.num_calls for each in measured[0].collectives if each.axis in weights
    )
    assert crossing == module_link_bytes(4 * PARAMETERS, dp, passes)


# Tied and learned, untied and grouped; in the one the blocks are most of a pass, or the logits.
WIDER = ModelSpec(
    name="wider-gpt", num_layers=2, hidden_size=256, num_heads=4, vocab_size=512, seq_len=256
)
LLAMA = WIDER.model_copy(
    update={
        "name": "wider-llama",
        "num_kv_heads": 2,
        "vocab_size": 8192,
        "norm": "rmsnorm",
        "positions": "rotary",
        "gated_mlp": True,
        "tied_embeddings": False,
        "dropout": False,
    }
)


@pytest.mark.parametrize(
    ("model", "recompute", "precision", "tokens"),
    [
        (WIDER, Recompute.NONE, Precision.FP32, 16),
        (WIDER, Recompute.FULL, Precision.FP16, 256),
        (LLAMA, Recompute.NONE, Precision.FP16, 256),
    ],
)
def test_each_device_holds_what_the_simulator_says(
    model: ModelSpec, precision: Precision, recompute: Recompute, tokens: int
) -> None:
    job = TrainingJob(model=model, global_batch_size=6, seq_len=tokens, precision=precision)
    saved = saved_plan(MODULE, job, plan_of(3, recompute=recompute))
    for device, found in enumerate(measure_devices(saved)):
        said = predict_member(saved, device)
        assert found.flops == said.flops
        # What is left are statistics of norms, biases' casts, and AdamW's counts of steps.
        assert found.peak_bytes == pytest.approx(said.peak_bytes, rel=0.001)


def test_device_0_gathers_the_logits_of_all() -> None:
    saved = saved_plan(MODULE, job_of(8), plan_of(4))
    found, said = measure_devices(saved)[0], predict_member(saved, 0)
    for kind in ByteKind:
        assert found.bytes_at_peak[kind] == pytest.approx(said.bytes_at_peak[kind], rel=0.005)
    logits = 4 * 16 * 512 * 4
    assert CollectiveCount("gather", "recv", 2, logits // 4, 6) in found.collectives


def test_one_process_has_one_rank_and_needs_its_devices() -> None:
    saved = saved_plan(MODULE, job_of(), plan_of(4))
    with pytest.raises(
        PlanError, match=r"^rank=1 of stack dataparallel@1.6 does not exist; allowed"
    ):
        build_program(request_of(saved, rank=1))
    with pytest.raises(PlanError, match=r"^dp=99 needs as many devices .* allowed here: at most"):
        build_program(replace(request_of(saved), plan=plan_of(99), device=torch.device("cuda")))
    assert num_processes(saved.plan, saved.stack) == 1


@pytest.mark.parametrize("on_workers", [False, True])
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 1), (4, 3), (3, 5)])
def test_each_worker_meets_each_server_once(
    *, workers: int, servers: int, on_workers: bool
) -> None:
    layout = ServerLayout(workers, workers if on_workers else servers, on_workers)
    met = [
        (worker, server)
        for turn in range(layout.num_servers)
        for server in range(layout.num_servers)
        for worker in layout.workers_in_turn(server, turn)
    ]
    assert sorted(met) == [(w, s) for w in range(workers) for s in range(layout.num_servers)]
    if on_workers:  # one at a time, itself last
        last = [layout.server_in_turn(worker, workers - 1) for worker in range(workers)]
        assert last == list(range(workers))


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ((1, False), Precision.FP16),
        ((3, False), Precision.FP32),
        (("all", False), Precision.FP16),
        ((2, True), Precision.FP32),
    ],
)
def test_workers_and_servers_send_what_the_simulator_says(
    options: tuple[Any, bool], precision: Precision
) -> None:
    servers, asynchronous = options
    server = ParameterServer(servers=servers, asynchronous=asynchronous)
    saved = saved_plan(SERVER, job_of(6, precision), plan_of(3, server))
    processes = num_processes(saved.plan, saved.stack)
    for rank in sorted({2, processes - 1}):  # the last worker, and the last server
        oracle = counted(saved, rank, processes)
        said = predict_member(saved, rank)
        assert oracle.collectives == said.collectives
        assert oracle.flops == said.flops
        assert oracle.peak_bytes == pytest.approx(said.peak_bytes, rel=0.01)  # 2 KB of statistics


def counted(saved: SavedPlan, rank: int, processes: int) -> RankOracle:
    with fake_cluster(rank, processes):
        program = build_program(request_of(saved, rank))
        oracle = RankOracle(program.groups)
        with oracle:
            for _ in run_counted(program, oracle, 2):
                pass
    return oracle


def test_asynchronous_servers_on_workers_are_refused() -> None:
    server = ParameterServer(servers="all", asynchronous=True)
    saved = saved_plan(SERVER, job_of(), plan_of(2, server))
    with (
        fake_cluster(0, 2),
        pytest.raises(PlanError, match="has no PyTorch program; allowed: a number of servers"),
    ):
        build_program(request_of(saved))


CASES = {
    "two servers": ParameterServer(servers=2),
    "all": ParameterServer(servers="all"),
    "own pace": ParameterServer(servers=2, asynchronous=True),
    "slow worker": ParameterServer(asynchronous=True, slow_worker=30.0),
}
IN_STEP = ("two servers", "all")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each process showed, by case."""
    folder = tmp_path_factory.mktemp("servers")
    asked = {name: (job_of(), plan_of(2, servers)) for name, servers in CASES.items()}
    (folder / "cases").write_bytes(pickle.dumps(asked))
    script = Path(__file__).with_name("server_ranks.py")
    run = subprocess.run(
        [sys.executable, "-W", "error", script, folder / "cases", folder / "result.json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    shown: dict[str, list[dict[str, Any]]] = json.loads((folder / "result.json").read_text())
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_STEP)
def test_workers_in_step_train_as_one_process(
    name: str, trained: dict[str, list[dict[str, Any]]], alone: list[float]
) -> None:
    workers = [rank["losses"] for rank in trained[name][:2]]
    found = [mean(mean(losses) for losses in step) for step in zip(*workers, strict=True)]
    assert found == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_real_bytes_are_those_of_the_closed_forms(trained: dict[str, list[dict[str, Any]]]) -> None:
    size_bytes = 4 * PARAMETERS
    moved = sum(
        size * calls
        for server in trained["two servers"][2:]
        for _, op, _, size, calls in server["collectives"]
        if op != "all_reduce"
    )
    assert moved == server_link_bytes(size_bytes, 2)
    for worker in trained["all"]:
        sent = sum(
            size * calls for axis, op, _, size, calls in worker["collectives"] if op == "send"
        )
        assert sent == sharded_worker_bytes(size_bytes, 2)
    norms = [each for each in trained["two servers"][2]["collectives"] if each[1] == "all_reduce"]
    assert norms == [[SERVERS, "all_reduce", 2, 4, 1]]


@pytest.mark.slow
def test_staleness_counts_the_updates_between_pull_and_push(
    trained: dict[str, list[dict[str, Any]]],
) -> None:
    for server in trained["own pace"][2:]:
        staleness = dict(server["staleness"])
        assert sum(staleness.values()) == len(server["arrivals"]) == 2 * NUM_STEPS
        assert sorted(server["arrivals"]) == [0] * NUM_STEPS + [1] * NUM_STEPS
        # Of two workers one is stale by the rounds that the other has made meanwhile.
        assert staleness == expected_staleness(server["arrivals"])


def expected_staleness(arrivals: list[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for index, worker in enumerate(arrivals):
        before = [at for at in range(index) if arrivals[at] == worker]
        stale = index - (before[-1] + 1 if before else 0)
        counts[stale] = counts.get(stale, 0) + 1
    return counts


@pytest.mark.slow
def test_a_slow_worker_does_not_hold_up_the_other(trained: dict[str, list[dict[str, Any]]]) -> None:
    server = trained["slow worker"][2]
    # The quick one has finished all its rounds before the slow one's second.
    assert server["arrivals"][-2:] == [1, 1]
    assert dict(server["staleness"])[0] >= NUM_STEPS - 1
