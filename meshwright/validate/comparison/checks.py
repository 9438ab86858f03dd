"""Predicted against measured, quantity by quantity, with a verdict and its reason."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from meshwright.simulator.layout import Axis
from meshwright.validate.ranks import (
    SEND,
    ByteKind,
    CollectiveCount,
    RankMeasurement,
    RankPrediction,
)

# Live bytes: what is left are gradients of single biases, scalars and rounding to shards; the
# largest difference in the documented table is half of this.
PEAK_TOLERANCE = 0.005
PEAK = "peak live bytes"
HOST_PEAK = "peak bytes on the host"
TO_DEVICE, TO_HOST = "bytes copied to the device", "bytes copied to the host"
ONE_MEMORY = "on CPUs device and host are one memory"
# Groups that programs tell apart and the simulator does not.
PREDICTED_AXES = {"replica": "dp", "batch": "dp", "table": "pp"}


class CheckVerdict(StrEnum):
    """Verdict of a comparison."""

    PASSED = "pass"
    FAILED = "FAIL"
    REPORTED = "reported"


class CheckUnit(StrEnum):
    """Unit of a quantity."""

    FLOPS = "FLOPs"
    CALLS = "calls"
    BYTES = "bytes"
    SECONDS = "s"
    NATS = "nats"
    UPDATES = "updates"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One quantity of one rank, or of the run: predicted and measured.

    Args:
        quantity: Name of the quantity.
        unit: Its unit.
        predicted: By the simulator, or by the reference program; None if neither has it.
        measured: Measured in the run.
        verdict: Whether they agree as they must.
        reason: Why not, or what a reader should know; empty for a plain pass.
    """

    quantity: str
    unit: CheckUnit
    predicted: float | None
    measured: float
    verdict: CheckVerdict = CheckVerdict.REPORTED
    reason: str = ""

    @property
    def difference_fraction(self) -> float | None:
        """Measured over predicted, less 1; None where there is no ratio."""
        return self.measured / self.predicted - 1 if self.predicted else None

    @property
    def is_exact(self) -> bool:
        """Whether nothing but equality passes."""
        return self.unit in (CheckUnit.FLOPS, CheckUnit.CALLS)


def compare_rank(predicted: RankPrediction, measured: RankMeasurement) -> list[Check]:
    """Return the checks of one rank: FLOPs, collectives and copies exact, peaks within 0.5 %."""
    return [
        _exact("FLOPs", CheckUnit.FLOPS, predicted.flops, measured.flops),
        *_collectives(predicted, measured),
        _peak(predicted, measured),
        *_kinds(predicted, measured),
        *_host(predicted, measured),
        *_allocator(predicted, measured),
        *(
            Check(
                quantity=f"{kind} kernels", unit=CheckUnit.SECONDS, predicted=None, measured=time_s
            )
            for kind, time_s in sorted(measured.collective_times_s.items())
        ),
    ]


def has_failed(checks: Iterable[Check]) -> bool:
    """Return True if any check has failed."""
    return any(check.verdict is CheckVerdict.FAILED for check in checks)


def _exact(quantity: str, unit: CheckUnit, predicted: int, measured: int) -> Check:
    agrees = predicted == measured
    return Check(
        quantity=quantity,
        unit=unit,
        predicted=predicted,
        measured=measured,
        verdict=CheckVerdict.PASSED if agrees else CheckVerdict.FAILED,
        reason="" if agrees else "must be equal",
    )


def _counted(calls: Iterable[CollectiveCount]) -> Counter[tuple[str, str, int, int]]:
    counts: Counter[tuple[str, str, int, int]] = Counter()
    for call in calls:
        axis = PREDICTED_AXES.get(call.axis, call.axis)
        counts[axis, call.op, call.num_ranks, call.size_bytes] += call.num_calls
    return counts


def _collectives(predicted: RankPrediction, measured: RankMeasurement) -> list[Check]:
    """Return a check for each kind of call in either count."""
    predicted_calls = _counted(predicted.collectives)
    measured_calls = _counted(measured.collectives)
    return [
        _exact(
            f"{axis} {op} of {size_bytes:,} B over {num_ranks}",
            CheckUnit.CALLS,
            predicted_calls[axis, op, num_ranks, size_bytes],
            measured_calls[axis, op, num_ranks, size_bytes],
        )
        for axis, op, num_ranks, size_bytes in sorted(
            predicted_calls.keys() | measured_calls.keys()
        )
    ]


def _peak(predicted: RankPrediction, measured: RankMeasurement) -> Check:
    """Return the check of the peak; gloo may hold more."""
    kept_bytes = _gloo_bytes(predicted) if measured.backend == "gloo" else 0
    # The device of gloo is the host: offloaded tensors stay in the same memory.
    if predicted.host_bytes and measured.backend == "gloo":
        return _joint_peak(predicted, measured, kept_bytes)
    tolerance_bytes = PEAK_TOLERANCE * predicted.peak_bytes
    excess_bytes = measured.peak_bytes - predicted.peak_bytes
    least_bytes = -tolerance_bytes - predicted.spread_bytes
    agrees = least_bytes <= excess_bytes <= tolerance_bytes + kept_bytes
    allowed = usual = f"{PEAK_TOLERANCE:.1%}"
    if predicted.spread_bytes:
        allowed += f", {predicted.spread_bytes:,} bytes that ranks with first tokens hold less"
    if kept_bytes:
        allowed += f" and {kept_bytes:,} bytes that gloo may hold"
    return Check(
        quantity=PEAK,
        unit=CheckUnit.BYTES,
        predicted=predicted.peak_bytes,
        measured=measured.peak_bytes,
        verdict=CheckVerdict.PASSED if agrees else CheckVerdict.FAILED,
        reason="" if agrees and allowed == usual else f"must agree within {allowed}",
    )


def _joint_peak(predicted: RankPrediction, measured: RankMeasurement, kept_bytes: int) -> Check:
    """Return the check of the joint peak of device and host, where both are one memory.

    The two peaks are at different times, so that it may well hold less.
    """
    both_bytes = predicted.peak_bytes + predicted.host_bytes
    agrees = measured.peak_bytes <= both_bytes * (1 + PEAK_TOLERANCE) + kept_bytes
    return Check(
        quantity=PEAK,
        unit=CheckUnit.BYTES,
        predicted=both_bytes,
        measured=measured.peak_bytes,
        verdict=CheckVerdict.PASSED if agrees else CheckVerdict.FAILED,
        reason=f"{ONE_MEMORY}, which holds at most what both do",
    )


def _host(predicted: RankPrediction, measured: RankMeasurement) -> list[Check]:
    """Return the checks of host peak and copies, where tensors are offloaded to another memory."""
    if not predicted.host_bytes or measured.backend == "gloo":
        return []
    predicted_bytes, measured_bytes = predicted.host_bytes, measured.host_bytes
    agrees = abs(measured_bytes - predicted_bytes) <= PEAK_TOLERANCE * predicted_bytes
    peak = Check(
        quantity=HOST_PEAK,
        unit=CheckUnit.BYTES,
        predicted=predicted_bytes,
        measured=measured_bytes,
        verdict=CheckVerdict.PASSED if agrees else CheckVerdict.FAILED,
        reason="" if agrees else f"must agree within {PEAK_TOLERANCE:.1%}",
    )
    copies = zip((TO_DEVICE, TO_HOST), predicted.host_traffic, measured.host_traffic, strict=True)
    return [peak, *(_exact(name, CheckUnit.BYTES, *sizes) for name, *sizes in copies)]


def _gloo_bytes(predicted: RankPrediction) -> int:
    """Return the most bytes that gloo holds beyond the program's own.

    It says only when it is waited for that a message has left (`is_completed` is false until
    then, torch 2.13), so that all that a step sends lives to its end; and its threads may let go
    of the buffer of a collective, an activation's, a moment after the call.
    """
    calls = predicted.collectives
    sent_bytes = sum(
        call.size_bytes * call.num_calls
        for call in calls
        if call.op == SEND and call.axis == Axis.PP
    )
    return sent_bytes + max((call.size_bytes for call in calls if call.axis == Axis.TP), default=0)


def _kinds(predicted: RankPrediction, measured: RankMeasurement) -> list[Check]:
    """Return the bytes at the peak by kind, reported only: their sum is checked."""
    return [
        Check(
            quantity=f"at the peak: {kind}",
            unit=CheckUnit.BYTES,
            predicted=predicted.bytes_at_peak.get(kind, 0),
            measured=measured.bytes_at_peak.get(kind, 0),
        )
        for kind in ByteKind
    ]


def _allocator(predicted: RankPrediction, measured: RankMeasurement) -> list[Check]:
    """Return the peaks of the device's allocator; workspaces of kernels are in it.

    "requested" is what tensors ask for, "allocated" what they get, rounded up to blocks.
    """
    predicted_bytes = {
        "allocated": predicted.peak_bytes,
        "requested": predicted.peak_bytes,
        "reserved": predicted.reserved_bytes,
    }
    return [
        Check(
            quantity=f"allocator: {name}",
            unit=CheckUnit.BYTES,
            predicted=predicted_bytes.get(name),
            measured=size_bytes,
        )
        for name, size_bytes in sorted(measured.allocator_bytes.items())
    ]
