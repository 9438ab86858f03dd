"""Published runs, and a scoreboard of the simulator against them."""

from meshwright.validate.published.margins import (
    AllocatorFractions,
    PublishedReserve,
    allocator_fractions,
    load_published_reserves,
)
from meshwright.validate.published.peaks import (
    ExcludedPeak,
    PeakComparison,
    PublishedPeak,
    compare_peak,
    load_excluded_peaks,
    load_published_peaks,
)
from meshwright.validate.published.report import (
    TableStyle,
    format_comparisons,
    format_scoreboard,
    scoreboard_json,
)
from meshwright.validate.published.runs import (
    ExcludedRun,
    MemoryKind,
    PaddedLength,
    PublishedLayer,
    PublishedRun,
    load_excluded_runs,
    load_padded_lengths,
    load_published_layers,
    load_published_runs,
)
from meshwright.validate.published.scoreboard import (
    Comparison,
    Quantity,
    Scoreboard,
    SourceSummary,
    Verdict,
    layer_time_s,
    scoreboard,
    simulate_run,
    step_time_s,
)

__all__ = [
    "AllocatorFractions",
    "Comparison",
    "ExcludedPeak",
    "ExcludedRun",
    "MemoryKind",
    "PaddedLength",
    "PeakComparison",
    "PublishedLayer",
    "PublishedPeak",
    "PublishedReserve",
    "PublishedRun",
    "Quantity",
    "Scoreboard",
    "SourceSummary",
    "TableStyle",
    "Verdict",
    "allocator_fractions",
    "compare_peak",
    "format_comparisons",
    "format_scoreboard",
    "layer_time_s",
    "load_excluded_peaks",
    "load_excluded_runs",
    "load_padded_lengths",
    "load_published_layers",
    "load_published_peaks",
    "load_published_reserves",
    "load_published_runs",
    "scoreboard",
    "scoreboard_json",
    "simulate_run",
    "step_time_s",
]
