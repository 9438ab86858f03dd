"""Trace of a job that ran: device time by kind of kernel, and overlapped communication.

The file is what torch.profiler's ``export_chrome_trace`` writes: the JSON Object Format of
Chromium's Trace Event Format, times in microseconds, kernels in the category "kernel".
"""

import re
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from meshwright.hwprofiles import MEGA, FileKind, shown_path
from meshwright.simulator import PlanError

# An hour of kernels is some hundred megabytes. Profilers write infinities where a rate has none.
TRACE_FILE = FileKind(
    title="torch.profiler trace",
    most_bytes=10**9,
    error=PlanError,
    is_packed=True,
    is_exact=False,
)
DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
# What a kernel's name contains, most telling first: attention libraries are built of the
# same templates as products, so they come before them.
KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("nccl all_reduce", re.compile(r"nccl.*all_?reduce", re.IGNORECASE)),
    ("nccl all_gather", re.compile(r"nccl.*all_?gather", re.IGNORECASE)),
    ("nccl reduce_scatter", re.compile(r"nccl.*reduce_?scatter", re.IGNORECASE)),
    ("nccl broadcast", re.compile(r"nccl.*broadcast", re.IGNORECASE)),
    ("nccl all_to_all", re.compile(r"nccl.*all_?to_?all", re.IGNORECASE)),
    ("nccl send_recv", re.compile(r"nccl.*send_?recv", re.IGNORECASE)),
    ("nccl other", re.compile(r"nccl", re.IGNORECASE)),
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)),
    ("optimizer", re.compile(r"adam|multi_tensor_apply|multitensor|lamb", re.IGNORECASE)),
    (
        "gemm",
        re.compile(r"gemm|gemv|nvjet|xmma|cutlass|wgmma|cublas|splitk", re.IGNORECASE),
    ),
)
COMMUNICATION = "nccl "
Spans = list[tuple[float, float]]


class KindTime(NamedTuple):
    """Kernels of one kind: how many, their seconds, and the part of all kernels' seconds."""

    kind: str
    num_kernels: int
    time_s: float
    share_fraction: float


class JobTrace(NamedTuple):
    """Device time of a job.

    Args:
        kinds: Kernels by kind, the longest first.
        span_s: From the start of the first kernel to the end of the last.
        compute_s: In which some kernel computes, or copies.
        communication_s: In which some collective or message runs.
        overlap_s: In which both do.
    """

    kinds: tuple[KindTime, ...]
    span_s: float
    compute_s: float
    communication_s: float
    overlap_s: float

    @property
    def exposed_comm_s(self) -> float:
        """Communication that no computation overlaps."""
        return self.communication_s - self.overlap_s

    @property
    def idle_s(self) -> float:
        """In which no kernel runs."""
        return self.span_s - (self.compute_s + self.communication_s - self.overlap_s)


class Kernel(NamedTuple):
    """One event of the device, seconds."""

    kind: str
    start_s: float
    end_s: float


def kind_of(name: str, category: str = "kernel") -> str:
    """Return the kind of a kernel.

    >>> kind_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'nccl reduce_scatter'
    >>> kind_of("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernel>")
    'memory-bound'
    """
    if category != "kernel":
        return "copy"
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "memory-bound")


def read_job_trace(path: Path) -> JobTrace:
    """Return the device times of a job from its trace, gzipped or not.

    Raises:
        PlanError: If the file is no such trace, or has no kernel of a device; one line.
    """
    shown = shown_path(path)
    data = TRACE_FILE.read_json(path)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise PlanError(f"--trace {shown} has no traceEvents; allowed: a torch.profiler trace")
    kernels = [kernel for event in events if (kernel := _kernel(event, shown)) is not None]
    if not kernels:
        raise PlanError(
            f"--trace {shown} has no kernel of a device; allowed: a trace recorded with "
            "ProfilerActivity.CUDA"
        )
    return summarise(kernels)


def _kernel(event: object, shown: str) -> Kernel | None:
    if not isinstance(event, dict) or event.get("ph") != "X":
        return None
    category = str(event.get("cat", "")).lower()
    if category not in DEVICE_CATEGORIES:
        return None
    try:
        start_s, length_s = float(event["ts"]) / MEGA, float(event["dur"]) / MEGA
    except (KeyError, TypeError, ValueError, OverflowError):
        raise PlanError(f"--trace {shown} has a kernel without ts and dur") from None
    if not (isfinite(start_s) and isfinite(start_s + length_s) and length_s >= 0):
        raise PlanError(
            f"--trace {shown} has a kernel of ts={event['ts']!r:.40} and dur={event['dur']!r:.40}; "
            "allowed: finite times, none below 0"
        )
    return Kernel(kind_of(str(event.get("name", "")), category), start_s, start_s + length_s)


def summarise(kernels: list[Kernel]) -> JobTrace:
    """Return the sums of *kernels* by kind, and how communication and computation overlap.

    >>> trace = summarise([Kernel("gemm", 0, 4), Kernel("nccl all_reduce", 3, 6)])
    >>> trace.overlap_s, trace.exposed_comm_s, trace.idle_s
    (1.0, 2.0, 0.0)
    """
    total_s = sum(each.end_s - each.start_s for each in kernels)
    kinds = []
    for kind in sorted({each.kind for each in kernels}):
        times_s = [each.end_s - each.start_s for each in kernels if each.kind == kind]
        share = sum(times_s) / total_s if total_s else 0.0
        kinds.append(KindTime(kind, len(times_s), sum(times_s), share))
    compute = union(kernels, communication=False)
    communication = union(kernels, communication=True)
    return JobTrace(
        kinds=tuple(sorted(kinds, key=lambda each: (-each.time_s, each.kind))),
        span_s=max(each.end_s for each in kernels) - min(each.start_s for each in kernels),
        compute_s=_length(compute),
        communication_s=_length(communication),
        overlap_s=_common(compute, communication),
    )


def union(kernels: Iterable[Kernel], *, communication: bool) -> Spans:
    """Return the times in which some kernel communicates, or some does not; in order."""
    chosen = [each for each in kernels if each.kind.startswith(COMMUNICATION) == communication]
    spans: Spans = []
    for each in sorted(chosen, key=lambda kernel: kernel.start_s):
        if spans and each.start_s <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], each.end_s))
        else:
            spans.append((each.start_s, each.end_s))
    return spans


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def _common(left: Spans, right: Spans) -> float:
    """Return the overlap of two ordered lists of spans, in seconds."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        shared = min(left[i][1], right[j][1]) - max(left[i][0], right[j][0])
        total += max(0, shared)
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
