"""Counts of a script as tables for a terminal, as a page and as a JSON document."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.planner.reports import Json, json_text, new_folder
from meshwright.validate.ranks import ByteKind, write_measurement
from meshwright.validate.scripts.run import ScriptCount

MOST_TENSORS = 8  # of the terminal; the document has more


def count_report(count: ScriptCount) -> RenderableType:
    """Return a count as tables for a terminal."""
    parts: list[RenderableType] = [Text(line) for line in _head(count)]
    for head, rows in _tables(count):
        if rows:
            parts += [Text(""), _table(head, rows)]
    notes = [f"note: {each}" for each in _notes(count)]
    return Group(*parts, *(Text(line) for line in ["", *notes] if notes))


def count_page(count: ScriptCount) -> str:
    """Return the same as a page of Markdown."""
    lines = ["# Count", "", *(f"    {line}" for line in _head(count))]
    for head, rows in _tables(count):
        if rows:
            rule = ["---", *["---:"] * (len(head) - 1)]
            lines += ["", *(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))]
    lines += ["", *(f"- {each}" for each in _notes(count))]
    return "\n".join(lines).rstrip() + "\n"


def count_document(count: ScriptCount) -> dict[str, Json]:
    """Return the same as a JSON document, with all collectives and notes."""
    run, measured = count.run, count.measurement
    return {
        "script": list(run.words),
        "rank": run.rank,
        "world_size": run.world_size,
        "step": run.num_steps,
        "versions": dict(measured.versions),
        "flops": measured.flops,
        "flops_by_operator": dict(count.flops_by_operator),
        "collectives": [call._asdict() for call in measured.collectives],
        "peak_bytes": measured.peak_bytes,
        "bytes_at_peak": {str(kind): measured.bytes_at_peak.get(kind, 0) for kind in ByteKind},
        "host_peak_bytes": measured.host_bytes,
        "largest_at_peak": [group._asdict() for group in count.largest],
        "notes": [
            {"what": what, "where": where, "times": number} for what, where, number in count.notes
        ],
    }


def write_count(count: ScriptCount, folder: Path) -> None:
    """Write report.md, count.json and the measurement, which other programs read."""
    with new_folder(folder) as files:
        texts = {"report.md": count_page(count), "count.json": json_text(count_document(count))}
        for name, text in texts.items():
            (files / name).write_text(text, encoding="utf-8", newline="\n")
        write_measurement(count.measurement, files / "measurement.json")


def _head(count: ScriptCount) -> list[str]:
    run, measured = count.run, count.measurement
    return [
        " ".join(run.words),
        f"rank     {run.rank:,} of {run.world_size:,}, step {run.num_steps:,}",
        f"FLOPs    {measured.flops:,}",
        f"peak     {measured.peak_bytes:,} bytes of live tensors",
    ]


def _notes(count: ScriptCount) -> list[str]:
    """Return the answers given without data: how often, and where first."""
    places: dict[str, list[tuple[str, int]]] = {}
    for what, where, number in count.notes:
        places.setdefault(what, []).append((where, number))
    lines = []
    for what, found in places.items():
        more = f" and {len(found) - 1} more places" if len(found) > 1 else ""
        lines.append(f"{sum(n for _, n in found):,} x {what}, at {found[0][0]}{more}")
    return lines


def _tables(count: ScriptCount) -> Iterable[tuple[Sequence[str], list[tuple[str, ...]]]]:
    measured = count.measurement
    flops = sorted(count.flops_by_operator.items(), key=lambda each: -each[1])
    yield ("operator", "FLOPs"), [(name, f"{number:,}") for name, number in flops]
    yield (
        ("group", "operation", "ranks", "bytes", "calls"),
        [
            (
                call.axis,
                call.op,
                *(f"{n:,}" for n in (call.num_ranks, call.size_bytes, call.num_calls)),
            )
            for call in measured.collectives
        ],
    )
    kinds = ((str(kind), measured.bytes_at_peak.get(kind, 0)) for kind in ByteKind)
    yield ("at the peak", "bytes"), [(kind, f"{size:,}") for kind, size in kinds]
    yield (
        ("largest tensors at the peak", "for", "bytes", "number"),
        [
            (each.where_made, str(each.kind), f"{each.size_bytes:,}", f"{each.num_storages:,}")
            for each in count.largest[:MOST_TENSORS]
        ],
    )


def _table(head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(head):
        is_text = not rows[0][index].replace(",", "").isdigit()
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
