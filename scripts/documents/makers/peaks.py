"""The tables of docs/accuracy.md on memory: published peaks, and what devices hold beside."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from statistics import fmean, median

from documents.makers import accuracy
from documents.tables import table
from meshwright.hwprofiles import format_bytes
from meshwright.simulator.memory import PARTS
from meshwright.validate.published import (
    AllocatorFractions,
    MemoryKind,
    PeakComparison,
    PublishedReserve,
    Quantity,
    allocator_fractions,
    compare_peak,
    load_excluded_peaks,
    load_published_peaks,
    load_published_reserves,
    load_published_runs,
)

HEAD = ("model", "tp x pp x cp", "attention, layers", "rows", "mean abs", "median", "worst")
EXCLUDED_HEAD = ("rows", "why left out")
RESERVE_HEAD = ("series", "rows", "mean", "least", "most", "fitted on the others", "runs accepted")
REFUSED_HEAD = ("run", "needs", "processes can have", "beyond it")
KIND_HEAD = ("source", "rows", "mean abs", "median", "more than 5 % under")
GOLDEN = "Megatron-LM's own tests"


@cache
def compared_peaks() -> tuple[PeakComparison, ...]:
    """Return every recorded peak beside its prediction, computed once."""
    return tuple(map(compare_peak, load_published_peaks()))


def published_peaks() -> str:
    """Return errors by layout, then of all rows."""
    groups: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for each in compared_peaks():
        groups[_group(each)].append(each.error_fraction)
    rows = [(*group, *_cells(errors)) for group, errors in sorted(groups.items())]
    every = [error for errors in groups.values() for error in errors]
    return table(HEAD, [*rows, ("all", "", "", *_cells(every))], rule=" --- ")


def excluded_peaks() -> str:
    """Return how many peaks are left out, by reason."""
    counts = Counter(row.reason for row in load_excluded_peaks())
    rows = [(count, reason) for reason, count in counts.most_common()]
    return table(EXCLUDED_HEAD, rows, rule=" --- ")


def _group(each: PeakComparison) -> tuple[str, str, str]:
    row = each.row
    kind = "Megatron's own" if row.switches["transformer-impl"] == "local" else "TE"
    sizes = f"{row.num_layers} layers of {row.hidden_size:,}"
    if "num-experts" in row.switches:
        sizes += f", {row.switches['num-experts']} experts"
    return sizes, f"{row.tp} x {row.pp} x {row.cp}", f"{each.attention}, {kind}"


def _cells(errors: list[float]) -> tuple[str, ...]:
    mean = fmean(abs(error) for error in errors)
    worst = max(errors, key=abs)
    return str(len(errors)), f"{mean:.1%}", f"{median(errors):+.1%}", f"{worst:+.1%}"


def reserves() -> str:
    """Return what allocators held beyond live tensors by series, and what leaving one out does."""
    series: defaultdict[str, list[PublishedReserve]] = defaultdict(list)
    for row in load_published_reserves():
        series[row.series].append(row)
    rows = []
    for name, own in series.items():
        shares = [row.fraction for row in own]
        cells = [f"{share:.1%}" for share in (fmean(shares), min(shares), max(shares))]
        others = [row for row in load_published_reserves() if row.series != name]
        left = allocator_fractions(others) if own[0].is_fitted else None
        rows.append((name, len(own), *cells, *_without(left)))
    return table(RESERVE_HEAD, rows, rule=" --- ")


def _without(fractions: AllocatorFractions | None) -> tuple[str, str]:
    """Return fractions and how many runs that finished are accepted with them."""
    if fractions is None:
        return "not in the fit", ""
    accepted = _num_accepted(fractions)
    return " and ".join(f"{each:.1%}" for each in fractions), f"{accepted} of {_num_finished()}"


def _num_finished() -> int:
    return len(accuracy.board().finished)


def _num_accepted(fractions: AllocatorFractions) -> int:
    """Return how many runs that finished fit where fixed segments hold *fractions* beyond.

    Of stacks whose own fractions are not fitted on these rows all stays as it is.
    """
    passing, state = (round(fraction * PARTS) for fraction in fractions)
    count = 0
    for each in accuracy.board().finished:
        own = each.overheads.fragmentation
        if own.passing_parts != own.state_parts:
            own = own._replace(passing_parts=passing, state_parts=state)
        count += replace(each, overheads=each.overheads._replace(fragmentation=own)).fits
    return count


def acceptance() -> str:
    """Return how many runs that finished would fit with other allocators, in words.

    The other ones are those of pipelines with room to spare, which no fraction was fitted on, and
    one that holds nothing beyond.
    """
    rows = load_published_reserves()
    spare = fmean(row.fraction for row in rows if not row.is_fitted and "pipelines" in row.series)
    count = _num_accepted(AllocatorFractions(spare, spare))
    none = _num_accepted(AllocatorFractions(0.0, 0.0))
    return (
        f"with {spare:.1%} of all in their place {count} of {_num_finished()} runs would be "
        f"accepted, with nothing held beyond {none}"
    )


def refused_runs() -> str:
    """Return the runs that finished and are called too large, those furthest beyond first."""
    found = [each for each in accuracy.board().finished if not each.fits]
    found.sort(key=lambda each: each.device_bytes / each.usable_bytes, reverse=True)
    rows = [
        (
            each.id,
            format_bytes(each.device_bytes),
            format_bytes(each.usable_bytes),
            f"{each.device_bytes / each.usable_bytes - 1:+.1%}",
        )
        for each in found
    ]
    return table(REFUSED_HEAD, rows, rule=" --- ")


def errors_by_kind() -> dict[str, list[float]]:
    """Return errors of published peaks of what an allocator gave or held, by source."""
    errors: defaultdict[str, list[float]] = defaultdict(list)
    errors[GOLDEN] = [compare_peak(row).error_fraction for row in load_published_peaks()]
    kinds = {run.id: run.memory_kind for run in load_published_runs()}
    for row in accuracy.board().comparisons:
        kind = kinds.get(row.id)
        if row.quantity is Quantity.MEMORY and kind not in (None, MemoryKind.DEVICE):
            errors[f"{row.source} ({kind})"].append(row.error_fraction)
    return dict(errors)


def kinds() -> str:
    """Return those errors, and of all rows together."""
    errors = errors_by_kind()
    every = [error for own in errors.values() for error in own]
    rows = [(name, *_under(own)) for name, own in (*errors.items(), ("all", every))]
    return table(KIND_HEAD, rows, rule=" --- ")


def _under(errors: Iterable[float]) -> tuple[str, ...]:
    own = list(errors)
    count, mean, middle, _ = _cells(own)
    return count, mean, middle, str(sum(error < -0.05 for error in own))
