"""Outputs of nccl-tests and traces of torch.profiler: what is read, and what is refused."""

import gzip
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshwright import main
from meshwright.hwprofiles import CollectiveOp, load_cluster, load_link
from meshwright.simulator import PlanError
from meshwright.validate.calibration import CalibrateOptions, run_calibrate
from meshwright.validate.calibration.rows.nccl_tests import PROGRAMS, read_nccl_tests
from meshwright.validate.traces import job_trace
from meshwright.validate.traces.job_trace import kind_of, read_job_trace

BUSBW, LATENCY_S = 200e9, 20e-6
HALF = "time   algbw   busbw #wrong"
UNITS = "(us)  (GB/s)  (GB/s)       "
COLUMNS = (
    f"# {'':60} out-of-place {'':10} in-place",
    f"#       size         count      type   redop    root     {HALF}     {HALF}",
    f"#        (B)    (elements)                               {UNITS}     {UNITS}",
)


def nccl_output(program: str | None, *, ranks: int = 4, hosts: int = 1, ratio: float = 1.5) -> str:
    """Return what a program of nccl-tests would print of a link of known constants."""
    lines = [] if program is None else [f"# Collective test starting: {program}"]
    lines.append(
        "# nThread 1 nGpus 1 minBytes 1024 maxBytes 1073741824 step: 4(factor) warmup iters: 5 "
        "iters: 20 agg iters: 1 validation: 1 graph: 0"
    )
    lines += ["#", "# Using devices"]
    lines += [
        f"#  Rank {rank:2d} Group  0 Pid {4000 + rank} on node{rank % hosts} device {rank:2d} "
        f"[0x{rank:02x}] NVIDIA H100 80GB HBM3"
        for rank in range(ranks)
    ]
    lines += ["#", *COLUMNS]
    for power in range(10, 31, 2):
        size = 2**power
        time_s = LATENCY_S + ratio * size / BUSBW
        cells = f"{time_s * 1e6:8.2f} {size / time_s / 1e9:7.2f} {0:7.2f}      0"
        lines.append(f"{size:12d} {size // 4:13d}     float     sum      -1 {cells} {cells}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 91.7"])


def saved(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("program", "op"), PROGRAMS.items())
def test_the_operation_is_read_from_the_head(
    program: str, op: CollectiveOp, tmp_path: Path
) -> None:
    run = read_nccl_tests(saved(tmp_path, "job-17.out", nccl_output(program)))
    assert run.op is op
    assert run.num_ranks == (2 if op is CollectiveOp.P2P else 4)
    assert run.device == "NVIDIA H100 80GB HBM3"
    assert [row.case.sizes[0] for row in run.rows] == [2**power for power in range(10, 31, 2)]
    assert run.rows[0].median_s == pytest.approx(LATENCY_S + 1.5 * 1024 / BUSBW, abs=1e-8)


def test_the_operation_is_read_from_the_name_of_the_file(tmp_path: Path) -> None:
    run = read_nccl_tests(saved(tmp_path, "allreduce-8gpu.txt", nccl_output(None)))
    assert run.op is CollectiveOp.ALL_REDUCE


def test_older_tables_without_a_root_are_read(tmp_path: Path) -> None:
    text = nccl_output("all_reduce_perf").replace("redop    root", "redop").replace("      -1", "")
    run = read_nccl_tests(saved(tmp_path, "old.txt", text))
    assert run.rows[-1].median_s == pytest.approx(LATENCY_S + 1.5 * 2**30 / BUSBW, rel=1e-4)


def test_files_become_a_link_and_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        saved(tmp_path, "1.txt", nccl_output("all_reduce_perf")),
        saved(tmp_path, "2.txt", nccl_output("all_gather_perf", ratio=0.75)),
    ]
    out = tmp_path / "out"
    names = [str(path) for path in files]
    options = CalibrateOptions(nccl_tests=names, like="h100-sxm5-80gb", name="pod", out=str(out))
    assert run_calibrate(options) == 0
    link = load_link(out / "pod-link.toml")
    assert [(fact.op, fact.num_ranks) for fact in link.collectives] == [
        (CollectiveOp.ALL_GATHER, 4),
        (CollectiveOp.ALL_REDUCE, 4),
    ]
    for fact in link.collectives:  # the files round to 10 ns
        assert fact.busbw_bytes_per_s == pytest.approx(BUSBW, rel=0.002)
        assert fact.latency_s == pytest.approx(LATENCY_S, rel=0.002)
        assert "NVIDIA H100 80GB HBM3" in fact.source
    cluster = load_cluster(out / "pod.toml")
    assert (cluster.device.name, cluster.devices_per_node) == ("h100-sxm5-80gb", 4)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert "all_reduce, 4 ranks" in printed


def test_a_fit_without_scipy_says_what_to_install_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    names = [str(saved(tmp_path, "1.txt", nccl_output("all_reduce_perf")))]
    out = tmp_path / "out"
    options = CalibrateOptions(nccl_tests=names, like="h100-sxm5-80gb", name="pod", out=str(out))
    with pytest.raises(PlanError, match=r"meshwright\[calibrate\]"):
        run_calibrate(options)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.txt", nccl_output(None), "does not say its operation"),
        ("x.txt", nccl_output("all_reduce_perf", hosts=2), "ran on 2 hosts; allowed: one"),
        ("x.txt", nccl_output("all_reduce_perf", ranks=1), "lists 1 devices; allowed: 2 or more"),
        ("allreduce.txt", "# nThread 2 nGpus 4\nhello", "has no table"),
        (
            "x.txt",
            nccl_output("all_reduce_perf").split("  1024 ")[0],
            "has no row with a size and a time",
        ),
        ("x.txt", nccl_output("all_reduce_perf").replace("   20.01 ", "   soon "), "is no time"),
    ],
)
def test_what_is_no_such_output_is_refused(name: str, text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        read_nccl_tests(saved(tmp_path, name, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"missing.txt: no such file"):
        read_nccl_tests(tmp_path / "missing.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="binary: line 1: not UTF-8"):
        read_nccl_tests(tmp_path / "binary")


def test_two_files_of_one_operation_are_refused(tmp_path: Path) -> None:
    names = [str(saved(tmp_path, name, nccl_output("all_reduce_perf"))) for name in ("a", "b")]
    options = CalibrateOptions(nccl_tests=names, out=str(tmp_path / "out"))
    with pytest.raises(PlanError, match="are both of all_reduce over 4 ranks"):
        run_calibrate(options)
    assert not (tmp_path / "out").exists()


# A kernel: name, start and length in microseconds, stream.
STEP = (
    ("ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_tn", 0.0, 100.0, 7),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64>>", 100.0, 50.0, 7),
    ("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernel>", 150.0, 30.0, 7),
    ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", 180.0, 60.0, 7),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", 200.0, 100.0, 20),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 320.0, 20.0, 20),
    ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", 350.0, 40.0, 7),
)  # fmt: skip


def trace_events(kernels: Sequence[tuple[str, float, float, int]]) -> list[dict[str, object]]:
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "ts": 0.0, "dur": 900.0, "pid": 1},
    ]
    events += [
        {"ph": "X", "cat": "kernel", "name": name, "ts": 1e6 + start, "dur": length, "pid": 0,
         "tid": stream, "args": {"stream": stream, "device": 0}}
        for name, start, length, stream in kernels
    ]  # fmt: skip
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 1e6 + 390.0, "dur": 10.0}
    return [*events, copy]


def trace_text(kernels: Sequence[tuple[str, float, float, int]] = STEP) -> str:
    return json.dumps({"schemaVersion": 1, "traceEvents": trace_events(kernels)})


def test_kernels_are_grouped_and_overlap_is_told(tmp_path: Path) -> None:
    trace = read_job_trace(saved(tmp_path, "trace.json", trace_text()))
    times_us = {each.kind: (each.num_kernels, round(each.time_s * 1e6, 3)) for each in trace.kinds}
    assert times_us == {
        "gemm": (2, 160.0),
        "nccl all_reduce": (1, 100.0),
        "attention": (1, 50.0),
        "optimizer": (1, 40.0),
        "memory-bound": (1, 30.0),
        "nccl all_gather": (1, 20.0),
        "copy": (1, 10.0),
    }
    assert sum(each.share_fraction for each in trace.kinds) == pytest.approx(1.0)
    # The all-reduce runs from 200 to 300, the product beside it until 240.
    assert trace.overlap_s == pytest.approx(40e-6, rel=1e-6)
    assert trace.exposed_comm_s == pytest.approx(80e-6, rel=1e-6)
    assert trace.span_s == pytest.approx(400e-6, rel=1e-6)
    assert trace.idle_s == pytest.approx(30e-6, rel=1e-6)


def test_a_compressed_trace_and_a_bare_list_are_read_alike(tmp_path: Path) -> None:
    plain = read_job_trace(saved(tmp_path, "trace.json", trace_text()))
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(trace_text().encode()))
    assert read_job_trace(packed) == plain
    bare = saved(tmp_path, "bare.json", json.dumps(trace_events(STEP)))
    assert read_job_trace(bare) == plain


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "nccl send_recv"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl broadcast"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "nccl other"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "gemm"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float>", "memory-bound"),
    ],
)  # fmt: skip
def test_kernels_are_known_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"hello", "not valid JSON"),
        (b"\x1f\x8bbroken", "not a whole gzip file"),
        (b"\x1f\x8b" + gzip.compress(b"[]", mtime=0)[2:-4], "not a whole gzip file"),
        (b"\xff\xfe", "not UTF-8"),
        (b"{}", "has no traceEvents"),
        (b"7", "has no traceEvents"),
        (trace_text(()).replace("gpu_memcpy", "cpu_op").encode(), "has no kernel of a device"),
        (trace_text().replace('"dur": 50.0', '"dur": "long"').encode(), "without ts and dur"),
        (trace_text().replace('"dur": 50.0', '"dur": -50.0').encode(), "none below 0"),
        (trace_text().replace('"dur": 50.0', '"dur": NaN').encode(), "finite times"),
        (gzip.compress(b"[" + b" " * 6000, mtime=0), "too large for a torch.profiler trace"),
    ],
)
def test_what_is_no_trace_is_refused(
    content: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    small = job_trace.TRACE_FILE._replace(most_bytes=5000)
    monkeypatch.setattr(job_trace, "TRACE_FILE", small)
    with pytest.raises(PlanError, match=says) as caught:
        read_job_trace(path)
    assert "\n" not in str(caught.value)


def test_a_trace_alone_is_shown_and_written_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path, "trace.json", trace_text())
    assert run_calibrate(CalibrateOptions(trace=[str(path)])) == 0
    printed = capsys.readouterr().out
    assert "communication exposed  80 us, 20.0%" in printed
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    assert run_calibrate(CalibrateOptions(trace=[str(path)], out="out")) == 0
    table = (tmp_path / "out" / "trace-1.csv").read_text(encoding="utf-8").splitlines()
    assert table[1].startswith("gemm,2,0.00016,")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("bomb", "unpacks to more than 300 times its size"),
        ("pipe", "no regular file"),
        ("folder", "no regular file"),
        ("/dev/zero", "no regular file"),
    ],
)
def test_what_would_not_end_is_refused_as_a_trace_within_a_second(
    kind: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(kind) if kind.startswith("/") else tmp_path / kind
    if kind == "bomb":
        path.write_bytes(gzip.compress(bytes(10**7)) * 400)  # 4 GB in 4 MB
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    before_s = time.process_time()
    assert main(["calibrate", "--trace", str(path)]) == 2
    assert time.process_time() - before_s < 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), says in err) == ("", 1, True)
