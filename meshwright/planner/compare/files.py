"""The files that ``compare --out`` leaves."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright.hwprofiles import PS_PER_S
from meshwright.planner.compare.comparison import Comparison, memory_terms, time_terms
from meshwright.planner.compare.report import comparison_document
from meshwright.planner.reports import json_text, known_by, names_in, new_folder, table_csv


def write_comparison(comparison: Comparison, folder: Path) -> tuple[str, ...]:
    """Write result.json, terms.csv and breakdown.png; return names."""
    from meshwright.planner.plots import plot_breakdown, save_figure  # noqa: PLC0415  (slow to import)

    with new_folder(folder) as files:
        texts = {
            "result.json": json_text(comparison_document(comparison)),
            "terms.csv": table_csv(term_rows(comparison)),
        }
        for name, text in texts.items():
            (files / name).write_text(text, encoding="utf-8", newline="\n")
        figure = plot_breakdown(*comparison.steps, names=comparison.names)
        save_figure(figure, files / "breakdown.png")
        return names_in(files)


def term_rows(comparison: Comparison) -> list[Mapping[str, object]]:
    """Return a row for each term of time and memory of each step."""
    return list(_rows(comparison))


def _rows(comparison: Comparison) -> Iterator[Mapping[str, object]]:
    for name, step in zip(comparison.names, comparison.steps, strict=True):
        columns = known_by(step.job, step.cluster, step.stack, step.plan.world_size)
        for term, time_ps in time_terms(step).items():
            yield {"plan": name, **columns, "term": term, "unit": "s", "value": time_ps / PS_PER_S}
        for term, size_bytes in memory_terms(step).items():
            yield {"plan": name, **columns, "term": term, "unit": "bytes", "value": size_bytes}
