"""The files that ``sweep --out`` leaves beside the cells: a table, a document, plans, pictures."""

from pathlib import Path

from meshwright.planner.reports import json_text, output_file, table_csv, write_output
from meshwright.planner.sweep.result import SweepResult, sweep_document


def write_sweep(result: SweepResult, folder: Path) -> tuple[str, ...]:
    """Write sweep.csv, result.json, pictures and a plan file for each cell that has one.

    Returns:
        What was written, the plans in one word.
    """
    from meshwright.planner.plots import save_figure  # noqa: PLC0415 - matplotlib is slow to import
    from meshwright.planner.sweep.pictures import pictures_of  # noqa: PLC0415

    names = ["result.json", "sweep.csv"]
    write_output(folder / "sweep.csv", table_csv(result.rows))
    write_output(folder / "result.json", json_text(sweep_document(result)))
    for name, draw in pictures_of(result).items():
        with output_file(folder / f"{name}.png") as path:
            save_figure(draw(result), path)
        names.append(f"{name}.png")
    plans = 0
    for cell, document in zip(result.cells, result.documents, strict=True):
        plan = document.get("plan_file")
        if isinstance(plan, dict):
            write_output(folder / f"plan-{cell.number}.json", json_text(plan))
            plans += 1
    return (*sorted(names), f"cells/ and {plans} of plan-N.json")
