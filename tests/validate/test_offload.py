"""Plans that keep their shards on the host: device and host bytes apart, and the copies between."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils import backend_registration  # noqa: E402

from meshwright.hwprofiles import (  # noqa: E402
    Offload,
    Precision,
    Recompute,
    load_cluster,
    load_stack,
)
from meshwright.planner.reports.plan_file import SavedPlan  # noqa: E402
from meshwright.simulator import ModelSpec, PlanError, ResolvedPlan, TrainingJob  # noqa: E402
from meshwright.simulator.account.host_traffic import HostTraffic  # noqa: E402
from meshwright.validate.comparison.checks import (  # noqa: E402
    HOST_PEAK,
    PEAK,
    PEAK_TOLERANCE,
    TO_DEVICE,
    TO_HOST,
    CheckVerdict,
    compare_rank,
)
from meshwright.validate.comparison.report import closing_lines  # noqa: E402
from meshwright.validate.comparison.validation import Validation, rank_kinds  # noqa: E402
from meshwright.validate.counting.accelerator import (  # noqa: E402
    NAME,
    REGISTER,
    DummyAccelerator,
    dummy_accelerator,
)
from meshwright.validate.counting.oracle import RankOracle  # noqa: E402
from meshwright.validate.ranks.measurement import (  # noqa: E402
    ByteKind,
    RankMeasurement,
    read_measurement,
    write_measurement,
)
from meshwright.validate.ranks.prediction import predict_rank  # noqa: E402
from meshwright.validate.ranks.server_layout import num_processes  # noqa: E402
from meshwright.validate.runs.fake import (  # noqa: E402
    _measure,
    measure_fake,
)

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
# Of sizes at which the logits decide the peak; tensors have no data. Rows of the tables are not
# divisible by 7 ranks: the last shards are shorter.
GPT = ModelSpec(
    name="small-gpt", num_layers=2, hidden_size=448, num_heads=7, vocab_size=8192, seq_len=2048
)
BF16, FP32 = Precision.BF16, Precision.FP32


def saved_plan(stack: str, precision: Precision = BF16, batch: int = 8, **fields: Any) -> SavedPlan:
    profile = load_stack(stack)
    usual = {"dp": 4, "zero_stage": 3, "stages": (2,), "offload": Offload.PARAMETERS}
    plan = ResolvedPlan(attention=profile.attention, **(usual | fields))
    job = TrainingJob(model=GPT, global_batch_size=batch, seq_len=2048, precision=precision)
    return SavedPlan(job=job, plan=plan, cluster=load_cluster("dgx-a100"), stack=profile)


PLAIN = saved_plan("fsdp", microbatch_size=2)
CASES = {
    "titan accumulates, reduces once": (
        saved_plan("torchtitan@0.2", sync_each_microbatch=False, recompute=Recompute.FULL),
        0,
    ),
    "short shards": (saved_plan("torchtitan@0.2", FP32, 14, dp=7), 6),
    "hsdp": (saved_plan("fsdp", dp_shard=2, microbatch_size=2), 3),
    "titan in a pipeline": (saved_plan("torchtitan@0.2", dp=2, pp=2, stages=(1, 1)), 3),
}


def as_predicted(saved: SavedPlan, **changes: object) -> RankMeasurement:
    """Return what a rank shows that does as it is told."""
    said = predict_rank(saved, 0)
    measured = RankMeasurement(
        rank=0,
        world_size=num_processes(saved.plan, saved.stack),
        backend="nccl",
        flops=said.flops,
        collectives=said.collectives,
        peak_bytes=said.peak_bytes,
        bytes_at_peak=said.bytes_at_peak,
        host_bytes=said.host_bytes,
        host_traffic=said.host_traffic,
    )
    return replace(measured, **changes)


def failed(saved: SavedPlan, measured: RankMeasurement) -> list[str]:
    checks = compare_rank(predict_rank(saved, measured.rank), measured)
    return [check.quantity for check in checks if check.verdict is CheckVerdict.FAILED]


@pytest.fixture(scope="module")
def counted() -> Iterator[dict[str, Future[RankMeasurement]]]:
    """Counts of all cases, in one process of their own: PyTorch is imported once for them."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        yield {name: other.submit(_measure, saved, rank) for name, (saved, rank) in CASES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_and_copy_what_is_predicted(
    name: str, counted: dict[str, Future[RankMeasurement]]
) -> None:
    saved, rank = CASES[name]
    measured = counted[name].result()
    assert failed(saved, measured) == []
    assert measured.bytes_at_peak[ByteKind.PARAMETERS] == 0
    assert measured.bytes_at_peak[ByteKind.OPTIMIZER] == 0
    assert measured.rank == rank


SCRIPT = """
from meshwright import main

print("the script runs", flush=True)
job = ["gpt2", "--cluster", "dgx-a100", "--gpus", "2", "--global-batch", "2", "--seq-len", "64"]
assert main(["simulate", *job, "--stack", "fsdp", "--offload", "parameters", "--out", "o"]) == 0
raise SystemExit(main(["validate", "o/plan.json", "--backend", "fake"]))
"""


@pytest.mark.slow
def test_a_script_without_a_guard_counts_offloading_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.count("the script runs") == 1


def test_a_rank_is_counted_in_a_process_of_its_own() -> None:
    """Here backward has run before, and other plans are counted after: nothing has changed."""
    torch.ones(2, requires_grad=True).sum().backward()
    plain = replace(PLAIN, plan=replace(PLAIN.plan, offload=Offload.NONE))
    before = measure_fake(plain, 0)
    offloaded = measure_fake(PLAIN, 0)
    assert failed(PLAIN, offloaded) == []
    assert not hasattr(torch, NAME)
    after = measure_fake(plain, 0)
    assert after == before
    assert (after.host_bytes, after.host_traffic) == (0, HostTraffic(0, 0))
    assert (after.flops, after.collectives) == (offloaded.flops, offloaded.collectives)
    assert after.peak_bytes > offloaded.peak_bytes


def test_what_differs_on_the_host_is_found() -> None:
    said = predict_rank(PLAIN, 0)
    assert failed(PLAIN, as_predicted(PLAIN)) == []
    most = int(PEAK_TOLERANCE * said.host_bytes)
    for sign in (-1, 1):
        near, far = (said.host_bytes + sign * (most + more) for more in (0, 1))
        assert failed(PLAIN, as_predicted(PLAIN, host_bytes=near)) == []
        assert failed(PLAIN, as_predicted(PLAIN, host_bytes=far)) == [HOST_PEAK]
    into, out = said.host_traffic
    one_more = HostTraffic(into + 1, out + 1)
    assert failed(PLAIN, as_predicted(PLAIN, host_traffic=one_more)) == [TO_DEVICE, TO_HOST]


def test_one_memory_holds_at_most_what_both_do() -> None:
    said = predict_rank(PLAIN, 0)
    both = said.peak_bytes + said.host_bytes
    nothing = {"backend": "gloo", "host_bytes": 0, "host_traffic": HostTraffic(0, 0)}
    for size_bytes in (said.peak_bytes, both):
        assert failed(PLAIN, as_predicted(PLAIN, peak_bytes=size_bytes, **nothing)) == []
    above = as_predicted(PLAIN, peak_bytes=both * (1 + 2 * PEAK_TOLERANCE), **nothing)
    assert failed(PLAIN, above) == [PEAK]
    measurements = {0: as_predicted(PLAIN, peak_bytes=both, **nothing)}
    validation = Validation(
        saved=PLAIN,
        backend="gloo",
        num_microbatches=1,
        measurements=measurements,
        kinds=rank_kinds(PLAIN, measurements),
    )
    assert closing_lines(validation)[-1] == (
        "all exact quantities agree, on CPUs device and host are one memory: peak live bytes are "
        "at most those of both"
    )


def test_bytes_of_the_host_are_read_as_they_were_written(tmp_path: Path) -> None:
    measured = as_predicted(PLAIN)
    write_measurement(measured, tmp_path / "rank.json")
    assert read_measurement(tmp_path / "rank.json") == measured
    assert measured.host_bytes > 0 < measured.host_traffic.to_host_bytes


def test_device_and_host_are_counted_apart() -> None:
    """Tensors of PyTorch's device without data stand for those of another place."""
    oracle = RankOracle({}, torch.device("meta"))
    memories = oracle.memories
    with oracle:
        here = torch.ones(100)
        there = here.to("meta")
        half = here.to("meta", torch.bfloat16)
        assert (oracle.live_bytes, memories.host.live_bytes) == (400 + 200, 400)
        assert memories.traffic == HostTraffic(800, 0)
        oracle.start_step()
        assert memories.traffic == HostTraffic(0, 0)
        there.copy_(here)
        torch.ones(7, dtype=torch.long).to("meta")  # token ids are left out
        assert memories.traffic == HostTraffic(400, 0)
        oracle.mark(here, ByteKind.PARAMETERS)
        assert memories.host.bytes_at_peak()[ByteKind.PARAMETERS] == 400
        assert oracle.bytes_at_peak[ByteKind.PARAMETERS] == 0
        del there, half
        assert oracle.live_bytes == 0
        assert memories.host.peak_bytes == 400 + 56
        assert memories.host.largest_at_peak(1)[0].size_bytes == 400


def test_on_a_cpu_all_is_the_devices() -> None:
    oracle = RankOracle({})
    with oracle:
        tensor = torch.ones(100)
        copy = tensor.to(torch.bfloat16)
        assert oracle.live_bytes == tensor.nbytes + copy.nbytes
    assert oracle.memories.host.peak_bytes == 0
    assert oracle.memories.traffic == HostTraffic(0, 0)


def test_a_release_that_takes_no_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(backend_registration, REGISTER, raising=False)
    says = rf"^torch \S+ has no {REGISTER}, .*; allowed: a later release, or --backend gloo$"
    with pytest.raises(PlanError, match=says):
        dummy_accelerator()


def test_the_device_does_nothing_in_order() -> None:
    device = DummyAccelerator()
    assert (device.is_available(), device.is_initialized()) == (True, True)
    assert (device.device_count(), device.current_device()) == (1, 0)
    stream = device.Stream(priority=-1)
    assert stream.priority == -1
    stream.wait_stream(device.current_stream())
    with device.stream(stream):
        event = stream.record_event()
    for moment in (event, device.Event()):
        moment.record(stream)
        moment.wait()
        moment.synchronize()
        stream.wait_event(moment)
    state = device.get_rng_state()
    assert state.nbytes == 16
    device.set_rng_state(state)


OF_A_PROCESS = """
import torch
from meshwright.validate.counting.accelerator import dummy_accelerator
from meshwright.validate.counting.fake_cluster import fake_cluster

device = dummy_accelerator()
assert dummy_accelerator() == device
with fake_cluster(3, 8):
    weight = torch.ones(4, 4, device=device, requires_grad=True)
    (weight @ weight).sum().backward()
    work = torch.distributed.all_reduce(weight.grad, async_op=True)
    work.wait()
    print(weight.grad.device, weight.grad.to("cpu").device)
assert torch.ones(2, requires_grad=True).sum().backward() is None
"""


def test_a_process_gets_one_device_beside_the_host() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", OF_A_PROCESS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (run.stdout, run.returncode) == (f"{NAME}:0 cpu\n", 0), run.stderr[-4000:]
