"""Constants of a device from rows: the cost model's own functions, inverted by search."""

from collections.abc import Callable, Iterable
from math import exp, hypot, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import (
    PS_PER_S,
    CollectiveOp,
    Device,
    FlashKernels,
    GemmKernels,
    MemoryKernels,
    Precision,
    Source,
)
from meshwright.simulator.blocks import FlashAttention, Gemm, MemoryBound
from meshwright.simulator.costs import (
    ALIGNED_ELEMENTS,
    flash_attention_cost,
    gemm_cost,
    memory_bound_cost,
)
from meshwright.validate.calibration.rows import Accelerator, BenchmarkCase, CaseGroup, Row, median

# The attention kernels that are measured, under the names that stacks give them: PyTorch's own,
# and that of cuDNN, which Transformer Engine runs, too; and what their operations end in.
FLASH_KERNEL, CUDNN_KERNEL = "sdpa-fa2", "te-cudnn"
ENDINGS = {FLASH_KERNEL: "", CUDNN_KERNEL: " cudnn"}
# Errors beyond this count by their size, not its square: a few disturbed rows must not decide.
SOFT_ERROR = 0.1
# Regularisation towards the start, as much as one row of a 1 % error: it decides what no row shows.
PULL = 1e-4
MAX_PROLOGUE_K, MAX_HALF_RATE_INTENSITY = 4096.0, 512.0
MIN_FRACTION, MIN_ALIGNMENT = 0.005, 0.02
NUM_STARTS, MAX_STEPS, TOLERANCE = 3, 250, 1e-5
FIRST_SIMPLEX = 0.25  # a share of the limits' distance
Point = NDArray[np.float64]


class LaunchFloor(NamedTuple):
    """Launch time of a kernel: a lower bound on a GPU, an addition on a processor."""

    launch_s: float
    accelerator: Accelerator

    def apply(self, time_s: float) -> float:
        """Return the time of a call among back-to-back calls of its kind.

        >>> floor = LaunchFloor(5e-6, Accelerator.CUDA)
        >>> floor.apply(2e-6), floor.apply(8e-6)
        (5e-06, 8e-06)
        """
        if self.accelerator is Accelerator.CPU:
            return time_s + self.launch_s
        # A GPU runs a kernel while the host launches the next: the longer of both counts.
        return max(time_s, self.launch_s)


def launch_floor(rows: Iterable[Row], accelerator: Accelerator) -> LaunchFloor:
    """Return the launch floor of the rows of empty kernels; 0 without such rows."""
    times_s = [row.median_s for row in rows if row.case.group is CaseGroup.LAUNCH]
    return LaunchFloor(median(times_s) if times_s else 0.0, accelerator)


def modelled_s(case: BenchmarkCase, device: Device, floor: LaunchFloor) -> float | None:
    """Return the cost model's seconds for *case*, or None where it has none."""
    operator = case.operator
    match operator:
        case None:
            return None
        case Gemm():
            cost = gemm_cost(operator, device, case.precision)
        case FlashAttention():
            kernel = CUDNN_KERNEL if case.op.endswith(ENDINGS[CUDNN_KERNEL]) else FLASH_KERNEL
            if kernel not in device.flash:
                return None
            cost = flash_attention_cost(operator, device, case.precision, kernel)
        case MemoryBound():
            cost = memory_bound_cost(operator, device)
    return floor.apply(cost.time_ps / PS_PER_S)


def misfit(errors: list[float]) -> float:
    """Return the sum of squared log errors, softened where they are large.

    >>> round(misfit([0.01, -0.01]), 6)
    0.0002
    """
    # Pseudo-Huber loss: quadratic near 0, linear far out.
    return sum(2 * SOFT_ERROR * (hypot(SOFT_ERROR, error) - SOFT_ERROR) for error in errors)


def _errors(rows: list[Row], model: Callable[[BenchmarkCase], float | None]) -> list[float]:
    pairs = [(row.median_s, model(row.case)) for row in rows]
    return [log(modelled / measured) for measured, modelled in pairs if modelled]


class Bound(NamedTuple):
    """Where a number starts and may go."""

    start: float
    low: float
    high: float


def minimum(function: Callable[[Point], float], bounds: list[Bound]) -> Point:
    """Return the point where *function* is lowest, by the simplex method of Nelder and Mead (1965).

    It needs no derivatives: the cost model has steps, one for each wave of tiles.  The search
    starts again from where it ended, as a simplex may collapse before it is there.

    >>> bowl = lambda point: float((point[0] - 3) ** 2 + (point[1] + 1) ** 2)
    >>> minimum(bowl, [Bound(0, -5, 5), Bound(0, -5, 5)]).round(2).tolist()
    [3.0, -1.0]
    """
    from scipy.optimize import minimize  # noqa: PLC0415 - of an extra; files are read without it

    start, low, high = np.array(bounds, dtype=np.float64).T
    width = high - low
    best = (start - low) / width

    def inside(share: Point) -> float:
        return function(low + width * np.clip(share, 0.0, 1.0))

    # The limits are clipped here: SciPy's would draw the first simplex itself.
    limits = {"maxiter": MAX_STEPS, "xatol": TOLERANCE, "fatol": np.inf}
    for turn in range(NUM_STARTS):
        side = FIRST_SIMPLEX / 2**turn
        corners = best + np.diag(np.where(best + side <= 1, side, -side))
        options = limits | {"initial_simplex": np.vstack([best, corners])}
        best = np.clip(minimize(inside, best, method="Nelder-Mead", options=options).x, 0.0, 1.0)
    return np.asarray(low + width * best)


class Choice(NamedTuple):
    """Number to fit, searched on a scale on which equal steps matter equally."""

    bound: Bound
    value: Callable[[float], float]

    @classmethod
    def fraction(cls, start: float, low: float = MIN_FRACTION) -> "Choice":
        """Return a fraction of 1, searched by its logarithm."""
        return cls(Bound(log(min(1.0, max(start, low))), log(low), 0.0), exp)

    @classmethod
    def size(cls, start: float, high: float) -> "Choice":
        """Return a number from 0 on, searched by log(1 + value)."""
        value = min(max(start, 0.0), high)
        return cls(Bound(log(1 + value), 0.0, log(1 + high)), lambda place: exp(place) - 1)


def _search(
    choices: dict[str, Choice],
    rows: list[Row],
    model: Callable[[dict[str, float], BenchmarkCase], float],
) -> dict[str, float]:
    """Return the values that fit *rows* best, four significant digits."""
    names = list(choices)
    starts = np.array([choices[name].bound.start for name in names])

    def values(point: Point) -> dict[str, float]:
        return {name: choices[name].value(float(x)) for name, x in zip(names, point, strict=True)}

    def function(point: Point) -> float:
        chosen = values(point)
        errors = _errors(rows, lambda case: model(chosen, case))
        return misfit(errors) + PULL * float(((point - starts) ** 2).sum())

    best = values(minimum(function, [choices[name].bound for name in names]))
    return {name: float(f"{value:.4g}") for name, value in best.items()}


def fit_memory(rows: list[Row], device: Device, floor: LaunchFloor) -> MemoryKernels:
    """Return *device*'s memory kernels with the share of the bandwidth that *rows* reach."""
    used = [row for row in rows if isinstance(row.case.operator, MemoryBound)]

    def model(chosen: dict[str, float], case: BenchmarkCase) -> float:
        changed = _with(device, memory=device.memory.model_copy(update=chosen))
        return modelled_s(case, changed, floor) or 0.0

    start = {"bandwidth_fraction": Choice.fraction(device.memory.bandwidth_fraction)}
    return device.memory.model_copy(update=_search(start, used, model) if used else {})


def fit_gemm(rows: list[Row], device: Device, floor: LaunchFloor) -> GemmKernels:
    """Return *device*'s GEMM constants fitted to *rows*.

    What no row shows keeps its value: the loss of misaligned sizes without such sizes, and
    partial waves on a device of one processor, where each tile is a wave.

    Args:
        rows: All rows; GEMMs are taken from them.
        device: Peaks, bandwidth fraction and where the search starts.
        floor: Launch time of a kernel.
    """
    used = [row for row in rows if row.case.group is CaseGroup.GEMM]
    if not used:
        return device.gemm
    old = device.gemm
    choices = {
        "plateau_fraction": Choice.fraction(old.plateau_fraction),
        "prologue_k": Choice.size(old.prologue_k, MAX_PROLOGUE_K),
        "half_rate_intensity": Choice.size(old.half_rate_intensity, MAX_HALF_RATE_INTENSITY),
    }
    if device.num_sms > 1:
        bound = Bound(old.partial_wave_fraction, 0.0, 1.0)
        choices["partial_wave_fraction"] = Choice(bound, lambda place: place)
    if any(_shows_misalignment(row.case) for row in used):
        # The rows are of plain products, which a device may tell apart from those of attention.
        of_linear = old.misaligned_linear_fraction
        key = "misaligned_fraction" if of_linear is None else "misaligned_linear_fraction"
        choices[key] = Choice.fraction(of_linear or old.misaligned_fraction, MIN_ALIGNMENT)

    def model(chosen: dict[str, float], case: BenchmarkCase) -> float:
        changed = _with(device, gemm=old.model_copy(update=chosen))
        return modelled_s(case, changed, floor) or 0.0

    return old.model_copy(update=_search(choices, used, model))


def _shows_misalignment(case: BenchmarkCase) -> bool:
    sizes = case.sizes[:3]
    return case.precision is not Precision.FP32 and any(size % ALIGNED_ELEMENTS for size in sizes)


def attention_rows(rows: Iterable[Row], kernel: str) -> list[Row]:
    """Return the rows of one attention kernel."""
    ops = {f"{way}{ENDINGS[kernel]}" for way in ("forward", "backward")}
    return [row for row in rows if row.case.group is CaseGroup.ATTENTION and row.case.op in ops]


def fit_flash(
    rows: list[Row], device: Device, floor: LaunchFloor, kernel: str = FLASH_KERNEL
) -> FlashKernels | None:
    """Return the fractions of peak that a kernel reaches; None unless both passes were measured."""
    used = attention_rows(rows, kernel)
    if len({row.case.op for row in used}) != 2:
        return None
    kernels = FlashKernels(
        forward_fraction=0.3, backward_fraction=0.3, kind=Source.FITTED, source="-"
    )

    def model(chosen: dict[str, float], case: BenchmarkCase) -> float:
        flash = {kernel: kernels.model_copy(update=chosen)}
        return modelled_s(case, _with(device, flash=flash), floor) or 0.0

    found: dict[str, float] = {}
    for op in ("forward", "backward"):
        name = f"{op}_fraction"
        of_op = [row for row in used if row.case.op.startswith(op)]
        found |= _search({name: Choice.fraction(0.3)}, of_op, model)
    return kernels.model_copy(update=found)


def _with(device: Device, **changes: object) -> Device:
    return device.model_copy(update=changes)


class LinkFit(NamedTuple):
    """Bus bandwidth and start-up time of one operation."""

    busbw_bytes_per_s: float
    latency_s: float

    def time_s(self, case: BenchmarkCase) -> float:
        """Return the seconds of a collective."""
        return self.latency_s + case.work / self.busbw_bytes_per_s


def fit_collective(rows: list[Row]) -> LinkFit:
    """Return latency and bus bandwidth fitted to rows of one operation and group size.

    >>> from meshwright.validate.calibration.collectives.job import collective
    >>> cases = [collective("broadcast", 4**power, 2) for power in range(5, 15)]
    >>> rows = [Row(case, each, each, each, 1) for case in cases
    ...         for each in [1e-5 + case.work / 1e10]]
    >>> fit_collective(rows)
    LinkFit(busbw_bytes_per_s=10000000000.0, latency_s=1e-05)
    """
    largest = max(rows, key=lambda row: row.case.size_bytes)
    smallest = min(rows, key=lambda row: row.case.size_bytes)
    rate, start_s = log(largest.rate), log(smallest.median_s)

    def values(point: Point) -> LinkFit:
        return LinkFit(exp(float(point[0])), exp(float(point[1])))

    def function(point: Point) -> float:
        link = values(point)
        return misfit(_errors(rows, link.time_s))

    # Within a factor of 100 of the first guess; logarithms keep both positive.
    far = log(100.0)
    found = values(
        minimum(
            function,
            [Bound(rate, rate - far, rate + far), Bound(start_s, start_s - far, start_s + far)],
        )
    )
    return LinkFit(float(f"{found.busbw_bytes_per_s:.4g}"), float(f"{found.latency_s:.4g}"))


def by_operation(rows: Iterable[Row]) -> dict[tuple[CollectiveOp, int], list[Row]]:
    """Return the rows of collectives by operation and number of ranks, sorted."""
    found: dict[tuple[CollectiveOp, int], list[Row]] = {}
    for row in rows:
        if row.case.group is CaseGroup.COLLECTIVE:
            found.setdefault((CollectiveOp(row.case.op), row.case.sizes[1]), []).append(row)
    return dict(sorted(found.items()))
