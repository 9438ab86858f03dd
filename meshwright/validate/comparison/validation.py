"""Validation of a plan: checks of its ranks, equal ones grouped, and of the run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.planner.reports import SavedPlan
from meshwright.validate.comparison.checks import (
    PEAK,
    Check,
    CheckVerdict,
    compare_rank,
    has_failed,
)
from meshwright.validate.launch import rank_words
from meshwright.validate.ranks import (
    RankMeasurement,
    member_kind,
    predict_members,
    representative_members,
)

MOST_SHOWN = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class RankKind:
    """Ranks with equal predictions and equal counts.

    Args:
        ranks: Ranks, in order.
        shown: The one farthest from its predicted peak.
        checks: Those of that one.
    """

    ranks: tuple[int, ...]
    shown: int
    checks: tuple[Check, ...]

    @property
    def title(self) -> str:
        """The ranks, and whose numbers stand for them."""
        words = rank_words(self.ranks)
        return words if len(self.ranks) == 1 else f"{words}, shown: {self.shown}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Prediction of a plan against the measurements of its ranks.

    Args:
        saved: The plan as it was run and predicted.
        backend: "fake", "gloo" or "nccl".
        num_microbatches: Microbatches of the plan; those that ran are the plan's as it was run.
        measurements: Of each rank that was run.
        kinds: Checks of ranks, by kind.
        run_checks: Checks of the run as a whole.
    """

    saved: SavedPlan
    backend: str
    num_microbatches: int
    measurements: Mapping[int, RankMeasurement]
    kinds: tuple[RankKind, ...]
    run_checks: tuple[Check, ...] = ()

    @property
    def num_microbatches_run(self) -> int:
        """Microbatches of the steps that were counted."""
        return self.saved.plan.num_microbatches(self.saved.job)

    @property
    def agrees(self) -> bool:
        """Whether nothing has failed."""
        return not any(True for _ in self.failures())

    def failures(self) -> Iterator[tuple[str, Check]]:
        """Yield each check that failed, with the words for whose it is."""
        for kind in self.kinds:
            yield from ((rank_words(kind.ranks), each) for each in _failed(kind.checks))
        yield from (("the run", each) for each in _failed(self.run_checks))

    def shown_kinds(self) -> list[RankKind]:
        """Return the kinds to print: those that fail, and one for each kind of stage."""
        usual = {member_kind(self.saved, rank) for rank in representative_members(self.saved)}
        fake = self.backend == "fake"
        return [
            kind
            for kind in self.kinds
            if fake or has_failed(kind.checks) or member_kind(self.saved, kind.shown) in usual
        ][:MOST_SHOWN]

    def others(self) -> tuple[int, ...]:
        """Return the ranks of the kinds that are not printed."""
        shown = self.shown_kinds()
        return tuple(rank for kind in self.kinds if kind not in shown for rank in kind.ranks)


def _failed(checks: tuple[Check, ...]) -> list[Check]:
    return [check for check in checks if check.verdict is CheckVerdict.FAILED]


def rank_kinds(
    saved: SavedPlan, measurements: Mapping[int, RankMeasurement]
) -> tuple[RankKind, ...]:
    """Return the checks of all measured ranks, equal ones grouped.

    Raises:
        PlanError: If the plan cannot be simulated.
    """
    predictions = predict_members(saved, sorted(measurements))
    groups: dict[tuple[object, ...], dict[int, tuple[Check, ...]]] = {}
    for rank, prediction in predictions.items():
        checks = tuple(compare_rank(prediction, measurements[rank]))
        # Exact quantities by value, others by verdict: peaks of equal ranks may differ.
        key = tuple(
            (each.quantity, each.predicted, each.measured if each.is_exact else each.verdict)
            for each in checks
        )
        groups.setdefault(key, {})[rank] = checks
    return tuple(_kind(members) for members in groups.values())


def _kind(members: Mapping[int, tuple[Check, ...]]) -> RankKind:
    def distance(rank: int) -> float:
        (peak,) = (each for each in members[rank] if each.quantity == PEAK)
        return abs(peak.difference_fraction or 0.0)

    shown = max(members, key=distance)
    return RankKind(ranks=tuple(members), shown=shown, checks=members[shown])
