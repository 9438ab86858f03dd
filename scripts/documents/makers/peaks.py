"""The tables of docs/accuracy.md on peaks that Megatron-LM's own tests record."""

from collections import Counter, defaultdict
from statistics import fmean, median

from documents.tables import table
from meshwright.validate.published import (
    PeakComparison,
    compare_peak,
    load_excluded_peaks,
    load_published_peaks,
)

HEAD = ("model", "tp x pp", "attention, layers", "rows", "mean abs", "median", "worst")
EXCLUDED_HEAD = ("rows", "why left out")


def published_peaks() -> str:
    """Return errors by layout, then of all rows."""
    groups: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for each in map(compare_peak, load_published_peaks()):
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
    return sizes, f"{row.tp} x {row.pp}", f"{each.attention}, {kind}"


def _cells(errors: list[float]) -> tuple[str, ...]:
    mean = fmean(abs(error) for error in errors)
    worst = max(errors, key=abs)
    return str(len(errors)), f"{mean:.1%}", f"{median(errors):+.1%}", f"{worst:+.1%}"
