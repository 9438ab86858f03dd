"""Facts of a device before the fit: a built-in datasheet, or the best rates of its own rows."""

import re
from collections.abc import Iterable

from meshwright.hwprofiles import (
    Device,
    GemmKernels,
    MemoryKernels,
    Precision,
    Source,
    list_devices,
    load_device,
    parse_flops_per_s,
)
from meshwright.simulator import PlanError
from meshwright.simulator.blocks import MemoryBound
from meshwright.validate.calibration.rows import Accelerator, CaseGroup, Machine, Row

# A driver keeps some of the memory, and names sizes in other units than a datasheet.
CAPACITY_TOLERANCE = 0.10
# Where the search for the constants of an unknown device starts.
START_PROLOGUE_K, START_INTENSITY, START_PARTIAL_WAVE, START_MISALIGNED = 100.0, 40.0, 0.5, 0.5


def known_device(machine: Machine, like: str | None) -> Device | None:
    """Return the built-in device whose datasheet holds for *machine*, if there is one.

    Without *like*, a GPU is matched by the first word of a device's name, its number of
    multiprocessors and its memory; two that match are told apart by the words they share.

    Raises:
        ProfileError: If there is no device *like*.
    """
    if like is not None:
        return load_device(like)
    if machine.accelerator is Accelerator.CPU:
        return None
    spoken = _words(machine.device)
    found = []
    for name in list_devices():
        device = load_device(name)
        words = _words(name)
        gap = abs(machine.memory_bytes / device.memory_capacity_bytes - 1)
        # A built-in name begins with the model, which the driver's name contains.
        same = name.split("-")[0] in spoken and device.num_sms == machine.num_sms
        if same and gap < CAPACITY_TOLERANCE:
            found.append((len(words & spoken), -gap, name))
    return load_device(max(found)[2]) if found else None


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


def read_peak(text: str | None) -> float | None:
    """Return ``--peak`` in FLOP/s.

    Raises:
        PlanError: If it is no rate of more than 0.
    """
    if text is None:
        return None
    try:
        peak = parse_flops_per_s(text)
    except ValueError as error:
        raise PlanError(f"--peak: {error}") from None
    if peak <= 0:
        raise PlanError(f"--peak {text!r} is nothing; allowed: more than 0 FLOP/s")
    return peak


def starting_device(
    machine: Machine,
    rows: Iterable[Row],
    name: str,
    *,
    known: Device | None,
    peak: dict[Precision, float],
) -> Device:
    """Return the device to fit: its peaks and limits, and constants to start from.

    Args:
        machine: Machine that was measured.
        rows: Where there is no datasheet, the best rates of these are the peaks.
        name: Of the new profile.
        known: The datasheet.
        peak: Peaks that go before both.

    Raises:
        PlanError: If neither datasheet, rows nor user give a peak or the bandwidth.
    """
    rows = list(rows)
    if known is not None:
        peaks = dict(known.peak_flops_per_s) | peak
        return known.model_copy(
            update={
                "name": name,
                "title": f"{machine.device}, calibrated",
                "peak_flops_per_s": peaks,
                "source": f"peaks and limits of {known.name}: {known.source}",
            }
        )
    peaks = _best_rates(rows) | peak
    moved = [row.rate for row in rows if isinstance(row.case.operator, MemoryBound)]
    if not peaks or not moved:
        raise PlanError(
            "too little was measured for a profile; allowed: more --budget-seconds, "
            "or --like DEVICE for its datasheet"
        )
    return _unknown_device(machine, name, peaks, max(moved), given=bool(peak))


def _best_rates(rows: list[Row]) -> dict[Precision, float]:
    best: dict[Precision, float] = {}
    for row in rows:
        if row.case.group is CaseGroup.GEMM:
            precision = row.case.precision
            best[precision] = max(best.get(precision, 0.0), row.rate)
    return best


def _unknown_device(
    machine: Machine, name: str, peaks: dict[Precision, float], rate: float, *, given: bool
) -> Device:
    on_gpu = machine.accelerator is Accelerator.CUDA
    count = "1 thread" if machine.threads == 1 else f"{machine.threads} threads"
    threads = "" if on_gpu else f", {count} a process"
    return Device(
        name=name,
        title=f"{machine.device}{threads}, calibrated",
        memory_capacity_bytes=machine.memory_bytes,
        memory_bandwidth_bytes_per_s=_rounded(rate),
        num_sms=machine.num_sms,
        peak_flops_per_s={key: _rounded(value) for key, value in peaks.items()},
        gemm=GemmKernels(
            plateau_fraction=1.0,
            prologue_k=START_PROLOGUE_K,
            half_rate_intensity=START_INTENSITY,
            partial_wave_fraction=START_PARTIAL_WAVE if on_gpu else 0.0,
            misaligned_fraction=START_MISALIGNED if on_gpu else 1.0,
            kind=Source.EXTRAPOLATED,
            source="chosen; not measured",
        ),
        memory=MemoryKernels(
            bandwidth_fraction=1.0, kind=Source.EXTRAPOLATED, source="chosen; not measured"
        ),
        flash={},
        source=("peak given by --peak" if given else "peak: best measured product")
        + "; bandwidth: best measured memory-bound operator; memory and multiprocessors as the "
        "driver or operating system gives them",
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
