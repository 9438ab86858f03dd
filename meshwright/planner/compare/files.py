"""The files that ``compare --out`` leaves."""

from collections.abc import Iterator
from pathlib import Path

from meshwright.hwprofiles import PS_PER_S
from meshwright.planner.compare.comparison import Comparison, memory_terms, time_terms
from meshwright.planner.compare.report import comparison_document
from meshwright.planner.reports import json_text, names_in, new_folder


def write_comparison(comparison: Comparison, folder: Path) -> tuple[str, ...]:
    """Write result.json, terms.csv and breakdown.png; return names."""
    from meshwright.planner.plots import plot_breakdown, save_figure  # noqa: PLC0415  (slow to import)

    with new_folder(folder) as files:
        texts = {
            "result.json": json_text(comparison_document(comparison)),
            "terms.csv": "".join(f"{line}\n" for line in _lines(comparison)),
        }
        for name, text in texts.items():
            (files / name).write_text(text, encoding="utf-8", newline="\n")
        figure = plot_breakdown(*comparison.steps, names=comparison.names)
        save_figure(figure, files / "breakdown.png")
        return names_in(files)


def _lines(comparison: Comparison) -> Iterator[str]:
    yield "plan,term,unit,value"
    for name, step in zip(comparison.names, comparison.steps, strict=True):
        quoted = '"' + name.replace('"', '""') + '"'
        for term, time_ps in time_terms(step).items():
            yield f"{quoted},{term},s,{time_ps / PS_PER_S!r}"
        for term, size_bytes in memory_terms(step).items():
            yield f"{quoted},{term},bytes,{size_bytes}"
