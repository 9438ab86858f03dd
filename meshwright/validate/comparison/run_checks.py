"""Checks of a real run as a whole: losses, step times and staleness."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isclose
from statistics import fmean, median, quantiles

from meshwright.hwprofiles import Precision
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import AsyncRun
from meshwright.simulator.model import padded_vocab_size
from meshwright.validate.comparison.checks import Check, CheckUnit, CheckVerdict
from meshwright.validate.ranks import RankMeasurement

LOSS_TOLERANCE = 1e-5  # fp32 sums in another order: 1e-7 seen, and three steps apart
# Two runs of 16-bit arithmetic part by its rounding, 2**-8 of a value in bf16: not a gate.
NEAR_TOLERANCE = 0.02


def run_losses(measurements: Iterable[RankMeasurement]) -> list[float]:
    """Return the loss of each step: the mean over the data-parallel ranks that report one."""
    reported = [each.losses for each in measurements if each.losses]
    return [fmean(losses) for losses in zip(*reported, strict=True)]


def loss_check(saved: SavedPlan, losses: Sequence[float], reference: Sequence[float]) -> Check:
    """Return the check of the first losses against one process: the step farthest off.

    They must be in fp32, where the layout needs no more padding of the vocabulary than one
    process does: padded rows take part in the loss.

    Args:
        saved: The plan.
        losses: Of the run, by step.
        reference: Of one process, of the first steps.
    """
    pairs = list(zip(losses, reference, strict=False))
    step, (ours, theirs) = max(enumerate(pairs), key=lambda each: abs(each[1][0] - each[1][1]))
    is_equal = isclose(ours, theirs, rel_tol=LOSS_TOLERANCE)
    is_near = isclose(ours, theirs, rel_tol=NEAR_TOLERANCE)
    model, precision = saved.job.transformer, saved.job.precision
    multiple = saved.stack.vocabulary_multiple
    here, alone = (padded_vocab_size(model, tp, multiple) for tp in (saved.plan.tp, 1))
    verdict, reason = CheckVerdict.REPORTED, ""
    if precision is not Precision.FP32:
        word = "within" if is_near else "beyond"
        reason = f"losses in {precision} are {word} {NEAR_TOLERANCE:.0%} of one process"
    elif here != alone:
        reason = f"the vocabulary is padded to {here:,} rows, for one process to {alone:,}"
    elif is_equal:
        verdict = CheckVerdict.PASSED
    else:
        verdict = CheckVerdict.FAILED
        reason = "the layout trains another model than one process does"
    return Check(
        quantity=f"loss, step {step + 1}, the farthest of {len(pairs)}",
        unit=CheckUnit.NATS,
        predicted=theirs,
        measured=ours,
        verdict=verdict,
        reason=reason,
    )


def last_loss_check(losses: Sequence[float]) -> Check:
    """Return the loss of the last step; its reason states that of the first."""
    return Check(
        quantity=f"loss, step {len(losses)}",
        unit=CheckUnit.NATS,
        predicted=None,
        measured=losses[-1],
        reason=f"the loss of step 1 is {losses[0]:.6f}",
    )


def time_checks(
    saved: SavedPlan, predicted_s: float, measurements: Sequence[RankMeasurement]
) -> list[Check]:
    """Return step times against the prediction, reported only: median, spread, slowest.

    Args:
        saved: The plan; names the cluster that the prediction is for.
        predicted_s: Seconds of a step by the simulator.
        measurements: Of all ranks.
    """
    every_s = [time_s for each in measurements for time_s in each.step_times_s]
    middle_s = median(every_s)
    devices = sorted({each.versions.get("device", "unknown") for each in measurements})
    slowest = max(measurements, key=lambda each: median(each.step_times_s))
    # Quantiles take two values or more.
    lower_s, _, upper_s = quantiles(every_s, n=4) if len(every_s) > 1 else [middle_s] * 3
    reason = f"time is predicted for {saved.cluster.name}, measured on {', '.join(devices)}"
    num_steps = len(measurements[0].step_times_s)

    rows = (
        (f"step time, median of {num_steps} steps", predicted_s, middle_s),
        ("step time, interquartile range", None, upper_s - lower_s),
        (f"step time, slowest rank ({slowest.rank})", predicted_s, median(slowest.step_times_s)),
    )
    return [
        Check(
            quantity=name,
            unit=CheckUnit.SECONDS,
            predicted=predicted,
            measured=measured,
            reason=reason,
        )
        for name, predicted, measured in rows
    ]


def staleness_checks(rounds: AsyncRun, measurements: Iterable[RankMeasurement]) -> list[Check]:
    """Return the staleness of asynchronous workers' gradients, reported only.

    Predicted is the share of updates that so many others came before, of as many as were seen;
    the clock of the machine decides which comes first.

    Args:
        rounds: Prediction of the simulator.
        measurements: Of all ranks.
    """
    measured: Counter[int] = Counter()
    for each in measurements:
        measured.update(dict(each.staleness))
    num_measured, num_predicted = sum(measured.values()), sum(rounds.staleness.values())
    return [
        Check(
            quantity=f"updates after {late} of others",
            unit=CheckUnit.UPDATES,
            predicted=num_measured * rounds.staleness.get(late, 0) / num_predicted,
            measured=measured[late],
            reason="which gradient comes first is up to the machine: staleness is no gate",
        )
        for late in sorted(measured.keys() | rounds.staleness.keys())
    ]
