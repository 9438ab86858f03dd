"""Predicted against measured, quantity by quantity, with a verdict and its reason."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isclose

from validate.measurement import ByteKind, CollectiveCount, RankMeasurement
from validate.prediction import RankPrediction

# Live bytes: what is left are gradients of single biases, scalars and rounding to shards; the
# largest difference in the documented table is half of this.
PEAK_TOLERANCE = 0.005
LOSS_TOLERANCE = 1e-5  # fp32 sums in another order: 1e-7 seen, and three steps apart


class Verdict(StrEnum):
    """What a comparison came to."""

    PASS = "pass"
    FAIL = "FAIL"
    REPORTED = "reported"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One quantity of one rank: what was said, what was found.

    Args:
        rank: Whose; None for the whole run.
        quantity: What is compared, unit included.
        predicted: Said by the simulator, as text.
        measured: Found in the run, as text.
        difference: Measured over predicted, less 1; None where there is no ratio.
        verdict: Whether they agree as they must.
        reason: Why not, or why they need not; empty for a plain pass.
    """

    rank: int | None
    quantity: str
    predicted: str
    measured: str
    difference: float | None
    verdict: Verdict
    reason: str = ""


def compare_rank(predicted: RankPrediction, measured: RankMeasurement) -> list[Check]:
    """Return the checks of one rank: FLOPs and collectives exact, peak bytes within 0.5 %."""
    return [
        _flops(predicted, measured),
        *_collectives(predicted, measured),
        _peak(predicted, measured),
        *_kinds(predicted, measured),
    ]


def has_failed(checks: Iterable[Check]) -> bool:
    """Return whether any check has failed."""
    return any(check.verdict is Verdict.FAIL for check in checks)


def compare_losses(rank: int, losses: Sequence[float], reference: Sequence[float]) -> Check:
    """Return whether the losses of each step are those of one process."""
    worst = max(
        (abs(ours / theirs - 1) for ours, theirs in zip(losses, reference, strict=True)),
        default=0.0,
    )
    agrees = all(
        isclose(ours, theirs, rel_tol=LOSS_TOLERANCE)
        for ours, theirs in zip(losses, reference, strict=True)
    )
    return Check(
        rank=rank,
        quantity=f"loss of {len(losses)} steps",
        predicted=_losses(reference),
        measured=_losses(losses),
        difference=worst,
        verdict=Verdict.PASS if agrees else Verdict.FAIL,
        reason="" if agrees else "the layout trains another model than one process does",
    )


def _losses(losses: Sequence[float]) -> str:
    return " ".join(f"{loss:.6f}" for loss in losses)


def _flops(predicted: RankPrediction, measured: RankMeasurement) -> Check:
    return _exact(measured.rank, "FLOPs", predicted.flops, measured.flops)


def _exact(rank: int, quantity: str, predicted: int, measured: int) -> Check:
    agrees = predicted == measured
    return Check(
        rank=rank,
        quantity=quantity,
        predicted=f"{predicted:,}",
        measured=f"{measured:,}",
        difference=measured / predicted - 1 if predicted else None,
        verdict=Verdict.PASS if agrees else Verdict.FAIL,
        reason="" if agrees else "must be equal",
    )


def _key(call: CollectiveCount) -> tuple[str, str, int, int]:
    return call.axis, call.op, call.num_ranks, call.size_bytes


def _collectives(predicted: RankPrediction, measured: RankMeasurement) -> list[Check]:
    """Return a check for each kind of call that either side has."""
    said = {_key(call): call.num_calls for call in predicted.collectives}
    found = {_key(call): call.num_calls for call in measured.collectives}
    return [
        _exact(measured.rank, _call_name(key), said.get(key, 0), found.get(key, 0))
        for key in sorted(said.keys() | found.keys())
    ]


def _call_name(key: tuple[str, str, int, int]) -> str:
    axis, op, num_ranks, size_bytes = key
    return f"{axis} {op} of {size_bytes:,} B over {num_ranks}"


def _peak(predicted: RankPrediction, measured: RankMeasurement) -> Check:
    difference = measured.peak_bytes / predicted.peak_bytes - 1
    agrees = abs(difference) <= PEAK_TOLERANCE
    return Check(
        rank=measured.rank,
        quantity="peak live bytes",
        predicted=f"{predicted.peak_bytes:,}",
        measured=f"{measured.peak_bytes:,}",
        difference=difference,
        verdict=Verdict.PASS if agrees else Verdict.FAIL,
        reason="" if agrees else f"must agree within {PEAK_TOLERANCE:.1%}",
    )


def _kinds(predicted: RankPrediction, measured: RankMeasurement) -> list[Check]:
    """Return what lived at the peak, kind by kind; the sum above is what must agree."""
    checks = []
    for kind in ByteKind:
        said, found = predicted.bytes_at_peak.get(kind, 0), measured.bytes_at_peak.get(kind, 0)
        checks.append(
            Check(
                rank=measured.rank,
                quantity=f"at the peak: {kind}",
                predicted=f"{said:,}",
                measured=f"{found:,}",
                difference=found / said - 1 if said else None,
                verdict=Verdict.REPORTED,
            )
        )
    return checks
