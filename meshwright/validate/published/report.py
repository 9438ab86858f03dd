"""Scoreboard as a table or as JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from meshwright.hwprofiles import GIBI, KILO
from meshwright.planner.reports import named
from meshwright.validate.published.scoreboard import (
    Comparison,
    Quantity,
    Scoreboard,
    SourceSummary,
    Verdict,
)


class TableStyle(StrEnum):
    """Style of a table: aligned columns, or Markdown."""

    TEXT = "text"
    MARKDOWN = "markdown"


SUMMARY_HEAD = ("quantity", "source", "rows", "mean abs", "median", "bias", "worst", "worst row")
ROW_HEAD = ("row", "quantity", "published", "predicted", "error")
EXCLUDED_HEAD = ("rows", "source", "why left out")


def format_scoreboard(board: Scoreboard, *, style: TableStyle = TableStyle.TEXT) -> str:
    """Return errors by source, verdicts on memory, and the rows left out.

    Args:
        board: Scoreboard.
        style: Style of the tables.
    """
    parts = [_table(SUMMARY_HEAD, [_summary_cells(item) for item in board.summaries], style)]
    if board.verdicts:
        groups = (("Finished", board.finished), ("Out of memory", board.failed))
        parts.append("\n".join(_calls(name, verdicts) for name, verdicts in groups if verdicts))
    if board.excluded:
        counts = Counter((row.source, row.reason) for row in board.excluded)
        cells = [(str(count), source, why) for (source, why), count in counts.items()]
        parts.append(_table(EXCLUDED_HEAD, cells, style))
    return "\n\n".join(parts) + "\n"


def format_comparisons(board: Scoreboard, *, style: TableStyle = TableStyle.TEXT) -> str:
    """Return every published figure with its prediction."""
    return _table(ROW_HEAD, [_row_cells(row) for row in board.comparisons], style) + "\n"


def scoreboard_json(board: Scoreboard) -> str:
    """Return the scoreboard as JSON: summaries, comparisons, verdicts and rows left out."""
    document = {
        "summaries": [
            {
                **named(item, "quantity", "source", "num_rows"),
                **named(item, "mean_abs_fraction", "median_abs_fraction", "bias_fraction"),
                "worst": named(item.worst, "id", "error_fraction"),
            }
            for item in board.summaries
        ],
        "comparisons": [
            {
                **named(row, "id", "source", "quantity"),
                "unit": "B" if row.quantity is Quantity.MEMORY else "s",
                **named(row, "published", "predicted", "error_fraction", "rel_tol"),
            }
            for row in board.comparisons
        ],
        "verdicts": [
            {
                **named(item, "id", "source", "out_of_memory"),
                **named(item, "device_bytes", "usable_bytes", "is_called_right"),
            }
            for item in board.verdicts
        ],
        "excluded": [row.model_dump(mode="json") for row in board.excluded],
    }
    return json.dumps(document, indent=2) + "\n"


def _calls(name: str, verdicts: Sequence[Verdict]) -> str:
    right = sum(verdict.is_called_right for verdict in verdicts)
    return (
        f"{name} as printed: {right} of {len(verdicts)} predicted so ({right / len(verdicts):.1%})."
    )


def _summary_cells(item: SourceSummary) -> tuple[str, ...]:
    return (
        item.quantity,
        item.source,
        str(item.num_rows),
        f"{item.mean_abs_fraction:.1%}",
        f"{item.median_abs_fraction:.1%}",
        f"{item.bias_fraction:+.1%}",
        f"{item.worst.error_fraction:+.1%}",
        item.worst.id,
    )


def _row_cells(row: Comparison) -> tuple[str, ...]:
    return (
        row.id,
        row.quantity,
        _figure(row.published, row.quantity),
        _figure(row.predicted, row.quantity),
        f"{row.error_fraction:+.1%}",
    )


def _figure(value: float, quantity: Quantity) -> str:
    match quantity:
        case Quantity.STEP_TIME:
            return f"{value:.3f} s"
        case Quantity.LAYER_TIME:
            return f"{value * KILO:.2f} ms"
        case Quantity.MEMORY:
            return f"{value / GIBI:.1f} GiB"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], style: TableStyle) -> str:
    if style is TableStyle.MARKDOWN:
        lines = [head, ["---"] * len(head), *rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    widths = [max(len(cells[column]) for cells in (head, *rows)) for column in range(len(head))]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in (head, *rows)
    ]
    return "\n".join(padded)
