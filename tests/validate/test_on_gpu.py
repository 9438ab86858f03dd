"""What only a GPU can show: ``pytest -m gpu`` is the first thing to run where there is one."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from meshwright.hwprofiles import Precision, load_cluster, load_stack  # noqa: E402
from meshwright.planner.reports.documents import json_text  # noqa: E402
from meshwright.planner.reports.plan_file import SavedPlan, plan_document  # noqa: E402
from meshwright.simulator import ModelSpec, ResolvedPlan, TrainingJob  # noqa: E402
from meshwright.validate.calibration import Accelerator, CalibrateOptions, run_calibrate  # noqa: E402
from meshwright.validate.calibration.measure import device_bench  # noqa: E402
from meshwright.validate.calibration.rows.cases import BenchmarkCase  # noqa: E402
from meshwright.validate.calibration.rows.row_file import FILE_NAME  # noqa: E402
from meshwright.validate.calibration.rows.rows import CaseGroup  # noqa: E402
from meshwright.validate.comparison.checks import compare_rank, has_failed  # noqa: E402
from meshwright.validate.device import attention_kernels  # noqa: E402
from meshwright.validate.device.memory import DeviceMemory  # noqa: E402
from meshwright.validate.launch import RunSpec, run_local  # noqa: E402
from meshwright.validate.probe.stage_probe import run_probe  # noqa: E402
from meshwright.validate.programs.fused import norms as fused_norms  # noqa: E402
from meshwright.validate.programs.fused import weight_gradients as fused_gradients  # noqa: E402
from meshwright.validate.ranks.prediction import predict_rank, without_dropout  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Drivers and libraries of a machine warn of what is theirs.
    pytest.mark.filterwarnings("default"),
]
BF16, FP32 = Precision.BF16, Precision.FP32
GPT = ModelSpec(
    name="tiny-gpt", num_layers=4, hidden_size=256, num_heads=4, vocab_size=2048, seq_len=256
)
LLAMA = ModelSpec(
    name="tiny-llama",
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=512,
    vocab_size=2048,
    seq_len=256,
    gated_mlp=True,
    positions="rotary",
    norm="rmsnorm",
    tied_embeddings=False,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    dropout=False,
)
GPU = torch.device("cuda", 0)
WHOLE = {"stages": (4,)}
PIPELINE = {"pp": 2, "stages": (2, 2)}


def saved_plan(
    stack: str, model: ModelSpec = GPT, precision: Precision = BF16, **fields: Any
) -> SavedPlan:
    profile = load_stack(stack)
    plan = ResolvedPlan(**({"attention": profile.attention} | WHOLE | fields))
    job = TrainingJob(model=model, global_batch_size=8 * plan.dp, seq_len=256, precision=precision)
    return SavedPlan(job=job, plan=plan, cluster=load_cluster("dgx-h200"), stack=profile)


STEPS = {
    "megatron gpt": saved_plan("megatron-core", zero_stage=1),
    "megatron llama": saved_plan("megatron-core", LLAMA, zero_stage=1),
    "2022": saved_plan("megatron-lm-2022"),
    "ddp": saved_plan("ddp"),
    "ddp fp32": saved_plan("ddp", LLAMA, FP32),
    "fsdp": saved_plan("fsdp", LLAMA, zero_stage=3),
    "titan": saved_plan("torchtitan@0.2", LLAMA, zero_stage=3),
}
PROBES = {
    "megatron": (
        saved_plan("megatron-core", tp=2, dp=2, zero_stage=1, sequence_parallel=True, **PIPELINE),
        5,
    ),
    "ddp": (saved_plan("ddp", dp=64), 17),
    "fsdp": (saved_plan("fsdp", LLAMA, dp=64, zero_stage=3), 3),
    "titan pipeline": (
        saved_plan("torchtitan@0.2", LLAMA, tp=2, dp=4, zero_stage=3, **PIPELINE),
        0,
    ),
}
SHAPES = {"many heads": (4, 4, 64, 64), "groups, odd sizes": (4, 2, 100, 36)}


@pytest.fixture(autouse=True)
def _own_numbers() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=GPU, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernels_of_attention_are_attention(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    heads, groups, tokens, width = shape
    query, gradient = (random(2, heads, tokens, width) for _ in range(2))
    key, value = (random(2, groups, tokens, width) for _ in range(2))
    inputs = [each.to(dtype) for each in (query, key, value)]
    out, log_sum_exp = attention_kernels.attention_forward(*inputs, causal=True)
    seen = attention_kernels.SavedAttention(*inputs, out, log_sum_exp)
    found = attention_kernels.attention_backward(gradient.to(dtype), seen, causal=True)
    on_host = [each.cpu().float() for each in inputs]
    wanted_out, wanted_sum = attention_kernels.attention_forward(*on_host, causal=True)
    kept = attention_kernels.SavedAttention(*on_host, wanted_out, wanted_sum)
    wanted = attention_kernels.attention_backward(gradient.cpu().float(), kept, causal=True)
    for got, true in zip(
        (out, log_sum_exp, *found), (wanted_out, wanted_sum, *wanted), strict=True
    ):
        assert got.shape == true.shape
        torch.testing.assert_close(got.cpu().float(), true, atol=5e-2, rtol=5e-2)


def test_this_pytorch_has_the_kernels_of_its_release() -> None:
    """A release that lacks one falls back to a slower way; here is where that is seen."""
    way = fused_gradients._accumulation(GPU, torch.bfloat16)
    assert way in fused_gradients.WAYS[:2]
    assert fused_norms._gpu_kernel(GPU, torch.bfloat16) is fused_norms.LIBRARY


def test_workspaces_of_libraries_are_no_tensors() -> None:
    memory = DeviceMemory(GPU)
    assert memory.peaks()["libraries"] > 0
    memory.forget_peaks()
    weight = random(1024, 1024).requires_grad_()
    (weight @ weight).sum().backward()
    most = memory.peaks()
    # The weight, a product, its gradient, two terms of that of the weight: 2 MiB each.
    assert 6 * 2**20 <= most["requested"] <= 14 * 2**20
    assert most["requested"] <= most["allocated"] <= most["reserved"]


@pytest.mark.parametrize("name", STEPS)
def test_one_gpu_counts_times_and_traces_its_steps(name: str, tmp_path: Path) -> None:
    saved = STEPS[name]
    plan = tmp_path / "plan.json"
    plan.write_text(json_text(plan_document(saved)), encoding="utf-8")
    outcome = run_local(
        RunSpec(plans=(plan,), backend="nccl", results=tmp_path / "results", num_steps=2), 1
    )
    assert outcome.failure is None, outcome.failure.report()
    measured = outcome.measurements[0][0]
    assert len(measured.step_times_s) == 2
    assert measured.losses[-1] < measured.losses[0] + 1  # no NaN is below anything
    assert {"allocated", "libraries", "requested", "reserved"} <= set(measured.allocator_bytes)
    assert (tmp_path / "results" / "plan-00" / "rank-00000.trace.json").is_file()
    checks = compare_rank(predict_rank(without_dropout(saved), 0), measured)
    assert not has_failed(checks), [each for each in checks if each.reason]


@pytest.mark.parametrize("name", PROBES)
def test_one_gpu_computes_a_stage_of_a_larger_plan(name: str) -> None:
    saved, rank = PROBES[name]
    report = run_probe(saved, rank, device="cuda", steps=2)
    for said_s, found in zip(report.predicted.passes_s, report.measured.stages, strict=True):
        assert 0 < said_s[0] < 1
        assert 0 < found.forward.least_s < 1
        assert 0 < found.backward.least_s < 1
    assert 0.5 < report.measured.peak_bytes / report.predicted.peak_bytes < 2
    assert report.measured.device == torch.cuda.get_device_name(GPU)


CASES = [
    BenchmarkCase(CaseGroup.LAUNCH, "add", BF16, (1,)),
    *(
        BenchmarkCase(CaseGroup.GEMM, op, BF16, (1024, 2048, 1024, 1))
        for op in ("forward", "dgrad", "wgrad")
    ),
    BenchmarkCase(CaseGroup.GEMM, "batched", BF16, (256, 256, 64, 16)),
    *(
        BenchmarkCase(CaseGroup.ATTENTION, op, BF16, (32, 1024, 64))
        for op in ("forward", "backward", "forward cudnn", "backward cudnn")
    ),
    *(
        BenchmarkCase(CaseGroup.MEMORY, op, BF16, (4096, 2048))
        for op in ("add", "norm", "gelu", "silu", "softmax", "dropout")
    ),
    *(
        BenchmarkCase(CaseGroup.OPTIMIZER, op, FP32, (2**22,))
        for op in ("adamw fused", "adamw foreach")
    ),
    *(
        BenchmarkCase(CaseGroup.COPY, op, BF16, (2**24,))
        for op in ("on device", "host to device", "device to host")
    ),
]


def test_one_gpu_is_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_bench, "device_cases", lambda *_: CASES)
    options = CalibrateOptions(device=Accelerator.CUDA, out=str(tmp_path), name="here")
    assert run_calibrate(options) == 0
    lines = (tmp_path / FILE_NAME).read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert len(rows) == len(CASES)
    times_s = {(row["group"], row["op"]): float(row["median_s"]) for row in rows}
    assert times_s["launch", "add"] < 2e-5
    assert times_s["gemm", "forward"] < 1e-3
    device = load_cluster(tmp_path / "here.toml").device
    assert {"sdpa-fa2", "te-cudnn"} <= set(device.flash)
