"""What runs on GPUs alone, with stand-ins for the GPU: arguments, fallbacks, bytes, clocks."""

import ctypes
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.optim import optimizer as torch_optimizer  # noqa: E402

from meshwright.hwprofiles import Precision, load_cluster, load_stack  # noqa: E402
from meshwright.planner.reports.plan_file import SavedPlan  # noqa: E402
from meshwright.simulator import (  # noqa: E402
    ModelSpec,
    PlanError,
    ResolvedPlan,
    TrainingJob,
    count_parameters,
)
from meshwright.validate.calibration.fit.datasheet import known_device  # noqa: E402
from meshwright.validate.calibration.measure import stopwatch  # noqa: E402
from meshwright.validate.calibration.options import Accelerator  # noqa: E402
from meshwright.validate.calibration.rows.machine import Machine  # noqa: E402
from meshwright.validate.calibration.rows.rows import BenchmarkCase, CaseGroup  # noqa: E402
from meshwright.validate.counting.absent_ranks import fake_ranks  # noqa: E402
from meshwright.validate.counting.fake_cluster import fake_cluster  # noqa: E402
from meshwright.validate.counting.finished_work import done  # noqa: E402
from meshwright.validate.counting.oracle import RankOracle  # noqa: E402
from meshwright.validate.device import attention_kernels  # noqa: E402
from meshwright.validate.device import facts as driver  # noqa: E402
from meshwright.validate.device.attention_kernels import SavedAttention  # noqa: E402
from meshwright.validate.device.memory import DeviceMemory  # noqa: E402
from meshwright.validate.probe import stage_probe as probe  # noqa: E402
from meshwright.validate.programs.build import build_program  # noqa: E402
from meshwright.validate.programs.contract import weights  # noqa: E402
from meshwright.validate.programs.contract.request import ProgramRequest  # noqa: E402
from meshwright.validate.programs.fused import norms as fused_norms  # noqa: E402
from meshwright.validate.programs.fused import weight_gradients as fused_gradients  # noqa: E402
from meshwright.validate.programs.fused.autograd_function import first_that_works  # noqa: E402
from meshwright.validate.programs.fused.residual import bias_dropout_add  # noqa: E402
from meshwright.validate.programs.fused.rotary import rotate  # noqa: E402
from meshwright.validate.programs.fused.softmax import causal_softmax, softmax_backward  # noqa: E402
from meshwright.validate.programs.fused.swiglu import packed_swiglu_backward, swiglu  # noqa: E402
from meshwright.validate.programs.megatron import loss as vocabulary_loss  # noqa: E402
from meshwright.validate.programs.megatron.tensor_parallel import reduce_scatter  # noqa: E402
from meshwright.validate.runs.fake import run_counted  # noqa: E402
from meshwright.validate.runs.measure import communication_times  # noqa: E402

GPU = torch.device("cuda", 0)
HEADS, GROUPS, TOKENS, WIDTH = 4, 2, 12, 20  # neither width nor tokens are what kernels want
GPT = ModelSpec(
    name="tiny-gpt", num_layers=4, hidden_size=64, num_heads=4, vocab_size=512, seq_len=64
)


def saved_plan(stack: str, **fields: Any) -> SavedPlan:
    profile = load_stack(stack)
    plan = ResolvedPlan(**({"stages": (4,), "attention": profile.attention} | fields))
    job = TrainingJob(
        model=GPT, global_batch_size=8 * plan.dp, seq_len=64, precision=Precision.BF16
    )
    return SavedPlan(job=job, plan=plan, cluster=load_cluster("dgx-h200"), stack=profile)


class KernelsByHand:
    """PyTorch's attention operators of GPUs, computed by hand from what their schemas name."""

    def _scaled_dot_product_flash_attention(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = bound("_scaled_dot_product_flash_attention", args, kwargs)
        assert given["query"].shape[-1] % 8 == 0
        return attended(given)

    def _scaled_dot_product_flash_attention_backward(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        given = bound("_scaled_dot_product_flash_attention_backward", args, kwargs)
        assert given["grad_out"].shape[-1] % 8 == 0
        assert given["cum_seq_q"] is given["cum_seq_k"] is None
        assert (given["max_q"], given["max_k"]) == (TOKENS, TOKENS)
        return slopes(given)

    def _scaled_dot_product_efficient_attention(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        given = bound("_scaled_dot_product_efficient_attention", args, kwargs)
        assert given["key"].shape == given["query"].shape  # it knows no groups of heads
        assert given["compute_log_sumexp"]
        out, log_sum_exp = attended(given)
        return out, torch.nn.functional.pad(log_sum_exp, (0, 32 - TOKENS)), None, None

    def _scaled_dot_product_efficient_attention_backward(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        given = bound("_scaled_dot_product_efficient_attention_backward", args, kwargs)
        assert given["logsumexp"].shape[-1] == 32
        assert given["logsumexp"].is_contiguous()
        given["grad_out"] = given["grad_out_"]
        given["logsumexp"] = given["logsumexp"][..., :TOKENS]
        return (*slopes(given), None)


def bound(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name as the schema of an operator of this PyTorch has them."""
    schema = getattr(torch.ops.aten, name).default._schema
    given = dict(zip([each.name for each in schema.arguments], args, strict=False)) | kwargs
    for each in schema.arguments:
        assert each.name in given or each.has_default_value(), each.name
    return given


def scores_of(given: dict[str, Any]) -> Tensor:
    scale = given.get("scale") or 1 / sqrt(given["query"].shape[-1])
    heads = given["query"].shape[1]
    key = given["key"].repeat_interleave(heads // given["key"].shape[1], 1)
    scores = given["query"] @ key.transpose(-1, -2) * scale
    return scores + torch.full_like(scores[0, 0], float("-inf")).triu(1) * given["is_causal"]


def attended(given: dict[str, Any]) -> tuple[Tensor, ...]:
    scores = scores_of(given)
    heads = scores.shape[1]
    value = given["value"].repeat_interleave(heads // given["value"].shape[1], 1)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def slopes(given: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs = [given[name].detach().requires_grad_() for name in ("query", "key", "value")]
    again = given | dict(zip(("query", "key", "value"), inputs, strict=True))
    out, log_sum_exp = attended(again)
    torch.testing.assert_close(given["out"], out.detach())
    torch.testing.assert_close(given["logsumexp"], log_sum_exp.detach())
    return torch.autograd.grad(out, inputs, given["grad_out"])


@pytest.mark.parametrize("kernel", ["flash", "wide"])
def test_kernels_of_gpus_are_called_as_their_schemas_say(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, HEADS, TOKENS, WIDTH), *[(2, GROUPS, TOKENS, WIDTH)] * 2]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    gradient = torch.randn(shapes[0], generator=generator)
    wanted = attention_kernels.attention_forward(query, key, value, causal=True)
    wanted_slopes = attention_kernels.attention_backward(
        gradient, SavedAttention(query, key, value, *wanted), causal=True
    )
    monkeypatch.setattr(attention_kernels, "ATEN", KernelsByHand())
    forward = getattr(attention_kernels, f"{kernel}_forward")
    backward = getattr(attention_kernels, f"{kernel}_backward")
    found = forward(query, key, value, causal=True)
    found_slopes = backward(gradient, SavedAttention(query, key, value, *found), causal=True)
    for got, true in zip((*found, *found_slopes), (*wanted, *wanted_slopes), strict=True):
        torch.testing.assert_close(got, true, atol=1e-5, rtol=1e-5)


def on_gpu(dtype: torch.dtype) -> Tensor:
    """Stand for a query on a GPU."""
    return SimpleNamespace(is_cuda=True, dtype=dtype)  # type: ignore[return-value]


def test_a_gpu_takes_flash_attention_for_16_bit_and_another_kernel_for_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("flash_forward", "wide_forward"):
        monkeypatch.setattr(attention_kernels, name, lambda *_, name=name, **__: name)
    chosen = {
        dtype: attention_kernels.attention_forward(*[on_gpu(dtype)] * 3, causal=True)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }
    assert list(chosen.values()) == ["flash_forward", "flash_forward", "wide_forward"]


def test_a_way_that_is_missing_refused_or_wrong_is_passed_over() -> None:
    def missing() -> int:
        raise AttributeError("no such operator")

    def refused() -> int:
        raise NotImplementedError("not on this device")

    ways = [missing, refused, lambda: 1, lambda: 2, lambda: 3]
    assert first_that_works(ways, lambda way: way() == 2)() == 2
    assert first_that_works(ways[:3], lambda way: way() == 2)() == 1  # the last one is not tried


def test_weight_gradients_of_gpus_are_added_in_fp32_as_the_release_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def inside(place: Tensor, one: Tensor, other: Tensor, dtype: torch.dtype, out: Tensor) -> None:
        assert out is place
        place += one.to(dtype) @ other.to(dtype)

    def wide(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
        return one.to(dtype) @ other.to(dtype)

    def choice(**operators: Any) -> Callable[..., None]:
        found = {"baddbmm": SimpleNamespace(), "mm": SimpleNamespace()} | operators
        monkeypatch.setattr(fused_gradients, "ATEN", SimpleNamespace(**found))
        fused_gradients._accumulation.cache_clear()
        return fused_gradients._accumulation(torch.device("cpu"), torch.bfloat16)

    both = {"baddbmm": SimpleNamespace(dtype_out=inside), "mm": SimpleNamespace(dtype=wide)}
    assert choice(**both) is fused_gradients.add_inside
    # One that forgets what was there before is no way to accumulate.
    forgets = SimpleNamespace(dtype_out=lambda place, *_, out: out.zero_())
    assert choice(baddbmm=forgets, mm=both["mm"]) is fused_gradients.add_wide_product
    assert choice() is fused_gradients.add_product
    fused_gradients._accumulation.cache_clear()


def test_the_librarys_norm_is_taken_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, shape = fused_norms.PLAIN, [256]

    def forward(values: Tensor, size: list[int], weight: Tensor, epsilon: float) -> Any:
        assert size == shape
        return plain.forward(values, weight, epsilon)

    def backward(gradient: Tensor, values: Tensor, size: list[int], *rest: Any) -> Any:
        inverse, weight, mask = rest
        assert (size, mask) == (shape, [True, True])
        return plain.backward(gradient, values, weight, inverse)

    def choice(forward: Any, backward: Any) -> fused_norms.NormKernel:
        library = SimpleNamespace(_fused_rms_norm=forward, _fused_rms_norm_backward=backward)
        monkeypatch.setattr(fused_norms, "ATEN", library)
        fused_norms._gpu_kernel.cache_clear()
        return fused_norms._gpu_kernel(torch.device("cpu"), torch.bfloat16)

    assert choice(forward, backward) is fused_norms.LIBRARY
    assert choice(forward, lambda *_: (torch.zeros(3, 1, 256), torch.zeros(256))) is plain

    def narrow(*args: Any) -> Any:  # keeps its statistic in 16 bit: not what was declared
        normal, inverse = forward(*args)
        return normal, inverse.bfloat16()

    assert choice(narrow, backward) is plain
    fused_norms._gpu_kernel.cache_clear()


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


LARGE = (256, 512)
ACTIVATION_BYTES = 256 * 512 * 2
# A kernel, what it reads, and what it may have in memory besides: its output, in activations.
BODIES: dict[str, tuple[Callable[..., object], tuple[object, ...], float]] = {
    "swiglu": (swiglu._init_fn, (bf16(*LARGE), bf16(*LARGE)), 1),
    "swiglu backward": (packed_swiglu_backward._init_fn, (bf16(*LARGE), bf16(256, 1024)), 2),
    "rotary": (
        partial(rotate._init_fn, inverse=False),
        (bf16(64, 1, 4, 512), 0, 1e4, (0,), 512),
        1,
    ),
    "added": (bias_dropout_add._init_fn, (bf16(*LARGE), bf16(512), bf16(*LARGE), 0.0), 1),
    # Scaled scores, a mask of bytes for one head, and the output.
    "softmax": (partial(causal_softmax._init_fn, causal=True), (bf16(2, 256, 256), 0.5), 2.25),
    "softmax backward": (
        softmax_backward._init_fn,
        (bf16(2, 256, 256), bf16(2, 256, 256).abs(), 0.5),
        1,
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_16_bit_kernels_make_no_wide_copies(name: str) -> None:
    body, inputs, activations = BODIES[name]
    body(*inputs)  # tables of angles are kept
    oracle = RankOracle({})
    with oracle:
        body(*inputs)
    assert oracle.peak_bytes <= activations * ACTIVATION_BYTES


def test_losses_are_computed_in_parts_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 2, 32, generator=generator)
    local = torch.randint(32, (10, 2), generator=generator)
    outside = torch.rand(10, 2, generator=generator) < 0.3

    def passes() -> list[Tensor]:
        statistics = vocabulary_loss.softmax_statistics(logits, local, outside)
        own = logits.clone()
        losses = vocabulary_loss.logits_to_gradient(own, statistics.unsqueeze(0), local, outside)
        return [statistics, own, losses]

    whole = passes()
    assert len(list(vocabulary_loss._parts(logits))) == 1
    monkeypatch.setattr(vocabulary_loss, "PART_BYTES", 3 * 2 * 32 * 4)
    assert [part.start for part in vocabulary_loss._parts(logits)] == [0, 3, 6, 9]
    for got, wanted in zip(passes(), whole, strict=True):
        torch.testing.assert_close(got, wanted)


def test_batches_go_to_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    job = saved_plan("ddp").job
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: calls.append(("pin", None)) or self)
    to = Tensor.to

    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and args[0] == GPU:
            calls.append(("to", kwargs["non_blocking"]))
            return self
        return to(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", moved)
    weights.token_batch(job, 0, range(2), GPU)
    assert calls == [("pin", None), ("to", True)]
    calls.clear()
    weights.token_batch(job, 0, range(2))
    assert calls == []


def test_futures_of_tensors_on_gpus_name_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    class Future:
        def __init__(self, devices: list[str]) -> None:
            asked.append(devices)

        def set_result(self, result: object) -> None:
            self.result = result

    monkeypatch.setattr(torch.futures, "Future", Future)
    there = [SimpleNamespace(device=torch.device("cuda", index)) for index in (1, 0, 1)]
    done(there, there)  # type: ignore[arg-type] # stand-ins
    done([], [torch.ones(1)])
    assert asked == [["cuda:0", "cuda:1"], []]


def test_what_absent_ranks_would_reduce_is_this_ranks_own() -> None:
    whole = torch.arange(8.0)
    with fake_ranks(1, 4):
        part = torch.full((2,), float("nan"))
        assert reduce_scatter(part, whole, dist.group.WORLD).tolist() == [2.0, 3.0]
        swapped = torch.full((8,), float("nan"))
        dist.all_to_all_single(swapped, whole)
        assert swapped.equal(whole)
    with fake_ranks(0, 2):  # what was put in has been taken back
        part = torch.full((4,), float("nan"))
        assert reduce_scatter(part, whole, dist.group.WORLD).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_probe_leaves_the_formats_of_reductions_out() -> None:
    saved = saved_plan("ddp", dp=8, reduce_precision=Precision.BF16)
    assert probe.probe_stage(saved, 3, device="cpu", steps=1).peak_bytes > 0


@pytest.fixture
def _meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the meta device stand for a GPU: another device than the processor's."""
    known = torch_optimizer._get_fused_kernels_supported_devices
    supported = [*known(), "meta"]
    monkeypatch.setattr(torch_optimizer, "_get_fused_kernels_supported_devices", lambda: supported)


@pytest.mark.usefixtures("_meta_device")
@pytest.mark.parametrize("stack", ["megatron-core", "megatron-lm-2022"])
def test_a_program_leaves_nothing_on_the_processor(stack: str) -> None:
    saved = saved_plan(stack, tp=2, pp=2, dp=2, stages=(2, 2), sequence_parallel=True)
    saved = replace(saved, job=replace(saved.job, global_batch_size=4))
    found = []
    for device in ("cpu", "meta"):
        with fake_cluster(7, 8):
            program = build_program(
                ProgramRequest(
                    job=saved.job,
                    plan=saved.plan,
                    stack=saved.stack,
                    rank=7,
                    device=torch.device(device),
                    initialise=False,
                    num_microbatches=saved.plan.num_microbatches(saved.job),
                )
            )
            oracle = RankOracle(program.groups)
            with oracle:
                for _ in run_counted(program, oracle, 2):
                    pass  # an operator on tensors of two devices raises
            found.append((oracle.flops, oracle.collectives))
    assert found[0] == found[1]


class Allocator:
    """The statistics of a device: tensors over 32 MiB of workspaces."""

    def __init__(self) -> None:
        self.used: list[torch.device] = []
        self.now = dict.fromkeys(("allocated", "active", "requested", "reserved"), 32)
        self.most = {"allocated": 132, "active": 142, "requested": 122, "reserved": 200}
        self.forgotten = 0

    def statistics(self, _device: torch.device) -> dict[str, int]:
        both = (("current", self.now), ("peak", self.most))
        return {f"{n}_bytes.all.{when}": each[n] for when, each in both for n in each}

    def forget(self, _device: torch.device) -> None:
        self.forgotten += 1


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    found = Allocator()
    monkeypatch.setattr("meshwright.validate.device.memory._use_libraries", found.used.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", found.statistics)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.forget)
    return found


def test_peaks_of_tensors_are_without_the_workspaces_of_libraries(allocator: Allocator) -> None:
    memory = DeviceMemory(GPU)
    assert allocator.used == [GPU]
    memory.give_back()
    memory.forget_peaks()
    assert allocator.forgotten == 1
    assert memory.peaks() == {
        "allocated": 100,
        "active": 110,
        "requested": 90,
        "reserved": 200,
        "libraries": 32,
    }
    on_host = DeviceMemory(torch.device("cpu"))
    on_host.forget_peaks()
    assert on_host.peaks() == {}
    assert allocator.forgotten == 1


class Stream:
    """A GPU and the clock of its host: what is handed over takes the host *each_s*."""

    def __init__(self, each_s: float) -> None:
        self.each_s, self.now_s, self.waits_s = each_s, 0.0, []

    def sleep(self, cycles: int) -> None:
        self.waits_s.append(cycles / stopwatch.WAIT_CYCLES_PER_S)

    def call(self) -> None:
        self.now_s += self.each_s


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _other: "Event") -> float:
        return 2.0  # milliseconds


@pytest.mark.parametrize(
    ("each_s", "waits_s"),
    [(1e-5, [3e-4 + 1e-4]), (1e-3, [4e-4, 2e-2]), (1.0, [4e-4, stopwatch.MAX_LEAD_S])],
)
def test_a_gpu_waits_until_its_calls_are_handed_over(
    each_s: float, waits_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(each_s)
    monkeypatch.setattr(torch.cuda, "_sleep", stream.sleep)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: stream.now_s)
    assert stopwatch.elapsed_s(stream.call, GPU, 10) == pytest.approx(2e-4)
    assert stream.waits_s == pytest.approx(waits_s)


def test_a_case_that_a_gpu_cannot_run_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = (BenchmarkCase(CaseGroup.LAUNCH, "add", Precision.FP32, (size,)) for size in (1, 2))

    def make_call(case: BenchmarkCase, _device: torch.device) -> Callable[[], None]:
        def call() -> None:
            if case is bad:
                raise RuntimeError("No available kernel. Aborting execution.\nmore")

        return call

    monkeypatch.setattr(stopwatch, "make_call", make_call)
    monkeypatch.setattr(stopwatch, "elapsed_s", lambda *_: 1e-3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    rows = stopwatch.measure_batch([good, bad], GPU, 0)
    assert [row.case for row in rows] == [good]
    assert "num_elements=2 is not measured: No available kernel. Abort" in caplog.text


def test_memory_that_runs_out_in_a_probe_is_a_plain_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr(probe, "_run", run)
    with pytest.raises(PlanError, match="rank=0 ran out of memory on device=cpu, where") as caught:
        probe.probe_stage(saved_plan("ddp"), 0, device="cpu", steps=1)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("Tried to allocate 2 GiB.")


def test_a_stage_that_is_sharded_later_must_fit_on_the_host() -> None:
    saved = saved_plan("fsdp", dp=64, zero_stage=3)
    # The head has a copy of the table until both are tied.
    parameters = count_parameters(GPT) + 512 * 64
    assert probe._built_on_host_bytes(saved, 0) == 4 * parameters
    assert probe._built_on_host_bytes(saved_plan("ddp"), 0) == 0


def test_a_trace_without_kernels_loses_no_measurement(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1}
    trace.write_text(json.dumps({"traceEvents": [event]}), encoding="utf-8")
    assert communication_times(trace) == {}
    kernel = event | {"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum", "dur": 5}
    trace.write_text(json.dumps({"traceEvents": [event, kernel]}), encoding="utf-8")
    assert communication_times(trace) == {"nccl all_reduce": pytest.approx(5e-6)}


def test_the_drivers_version_is_read_or_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Module  580.65.06  Release Build\n", "utf-8")
    monkeypatch.setattr(driver, "VERSION_FILE", file)
    assert driver.driver_version() == "580.65.06"
    monkeypatch.setattr(driver, "VERSION_FILE", tmp_path / "none")
    status = 0

    class Library:
        def __init__(self, name: str) -> None:
            assert name == "libnvidia-ml.so.1"

        def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's name
            return status

        def nvmlSystemGetDriverVersion(self, text: Any, _length: int) -> int:  # noqa: N802
            text.value = b"570.1"
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert driver.driver_version() == "570.1"
    status = 9
    assert driver.driver_version() == "unknown"

    def missing(_name: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert driver.driver_version() == "unknown"


def test_an_h200_is_known_by_the_name_that_its_driver_gives_it() -> None:
    machine = Machine(
        accelerator=Accelerator.CUDA,
        device="NVIDIA H200",
        driver="580.65.06",
        versions="PyTorch 2.11.0",
        threads=1,
        num_sms=132,
        memory_bytes=150_110_011_392,  # what cudaMemGetInfo leaves of 143,771 MiB
    )
    found = known_device(machine, None)
    assert found is not None
    assert found.name == "h200-sxm"
