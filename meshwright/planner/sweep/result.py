"""Result of a sweep: a row a cell."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from meshwright.planner.presentation import picture_kind
from meshwright.planner.reports import COST, FIGURES, Budget, Json, named, training_run
from meshwright.planner.sweep.grid import Cell
from meshwright.planner.sweep.outcome import Document, Outcome
from meshwright.planner.sweep.varied import Variation
from meshwright.simulator import PlanError
from meshwright.simulator.account import Shown
from meshwright.simulator.layout import PLAN_FIELDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
GPUS = "num_gpus"
RATE = "tokens_per_s_per_gpu"
MEMORY = ("peak_bytes", "reserved_bytes", "device_bytes", "usable_bytes")
PROOF = ("space_size", "simulated", "optimal", "bound_gap_fraction")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SweepResult(Shown):
    """The cells of a sweep, in the order of what is varied, the last one fastest.

    Args:
        varied: What is varied.
        cells: Every combination.
        documents: What came of each, as ``--json`` tells it.
        is_weak: Whether the batch grew with the devices.
        budget: Tokens of a run, and what a GPU costs; None where nobody asks for days and money.
    """

    varied: tuple[Variation, ...]
    cells: tuple[Cell, ...]
    documents: tuple[Document, ...]
    is_weak: bool = False
    budget: Budget | None = None

    def __repr__(self) -> str:
        """Return the sweep in a line: what it varies, and how many of its cells fit."""
        names = " x ".join(each.name for each in self.varied)
        return f"<SweepResult of {names}: {self.num_fitting} of {len(self.cells)} cells fit>"

    @property
    def num_fitting(self) -> int:
        """Cells with a layout that fits."""
        return sum(each["outcome"] == Outcome.FITS for each in self.documents)

    @property
    def rows(self) -> list[Row]:
        """A row for each cell: what it is known by, what is varied, its layout and what it takes.

        ``scaling_efficiency`` is the throughput a GPU against that of the cell with the first
        number of GPUs that fits, and the same of everything else that is varied.
        """
        rows: list[dict[str, Any]] = [
            self._row(cell, document)
            for cell, document in zip(self.cells, self.documents, strict=True)
        ]
        first: dict[tuple[str, ...], float] = {}
        for cell, row in zip(self.cells, rows, strict=True):
            others = self._others(cell)
            if others is not None and row["outcome"] == Outcome.FITS:
                # The first number of GPUs that fits is the reference.
                row["scaling_efficiency"] = row[RATE] / first.setdefault(others, row[RATE])
        return list(rows)

    def _document(self) -> Mapping[str, object]:
        return sweep_document(self)

    def _rows(self) -> list[Mapping[str, object]]:
        return list(self.rows)

    def _picture(self, kind: str | None) -> "Figure":
        from meshwright.planner.sweep.pictures import pictures_of  # noqa: PLC0415 - slow to import

        drawn = pictures_of(self)
        if not drawn:
            raise PlanError("there is nothing to draw: one cell, or none that has a layout")
        return drawn[picture_kind(kind, tuple(drawn))](self)

    def _row(self, cell: Cell, document: Document) -> dict[str, Any]:
        row: dict[str, Any] = {"cell": cell.number, **cell.setting}
        for variation, value in zip(self.varied, cell.values, strict=True):
            row.setdefault(variation.column, value.content)
        row |= {"outcome": str(document["outcome"]), "reason": document["reason"] or None}
        step = cast("Mapping[str, Any] | None", document.get("step"))
        if step is not None:
            row |= dict(_plan_cells(step))
            row |= {name: step[name] for name in FIGURES}
            row |= {name: step["memory"][name] for name in MEMORY}
            row |= {f"{name}_s": time_s for name, time_s in step["time_breakdown_s"].items()}
            row |= self._money(cell, step)
        if "lacks_bytes" in document:
            row["lacks_bytes"] = document["lacks_bytes"]
        proof = cast("Mapping[str, Any]", document.get("search") or {})
        return row | {name: proof[name] for name in PROOF if proof}

    def _money(self, cell: Cell, step: Row) -> dict[str, Any]:
        if self.budget is None:
            return {}
        # A price that is given holds for all cells.
        price = self.budget.price_usd_per_gpu_hour
        run = training_run(
            self.budget.tokens,
            tokens_per_s=step["tokens_per_s"],
            num_gpus=step["num_gpus"],
            price_usd_per_gpu_hour=cell.price_usd_per_gpu_hour if price is None else price,
        )
        return dict(named(run, *COST))

    def _others(self, cell: Cell) -> tuple[str, ...] | None:
        """Return a cell's values of all variations but devices; None where these are not varied."""
        columns = [each.column for each in self.varied]
        pairs = zip(columns, cell.values, strict=True)
        others = tuple(value.text for column, value in pairs if column != GPUS)
        return others if GPUS in columns else None


def _plan_cells(step: Row) -> Iterator[tuple[str, object]]:
    """Yield the fields of a plan that a table shows, the microbatches with their size."""
    for name, value in step["plan"].items():
        field = PLAN_FIELDS[name].declaration
        if not (field.is_basic or field.heading) or (field.members and not value):
            continue
        yield name, " ".join(map(str, value)) if isinstance(value, list | tuple) else value
        if name == "microbatch_size":
            yield "num_microbatches", step["num_microbatches"]


def sweep_document(result: SweepResult) -> dict[str, Json]:
    """Return the document of a sweep: what is varied, and each cell with its step."""
    rows = result.rows
    return {
        "vary": {each.name: [value.text for value in each.values] for each in result.varied},
        "weak": result.is_weak,
        "cells": [
            {
                "cell": cell.number,
                "values": {
                    each.name: value.text
                    for each, value in zip(result.varied, cell.values, strict=True)
                },
                "setting": dict(cell.setting),
                "scaling_efficiency": row.get("scaling_efficiency"),
                **{name: part for name, part in document.items() if name != "plan_file"},
                **{name: row[name] for name in COST if name in row},
            }
            for cell, document, row in zip(result.cells, result.documents, rows, strict=True)
        ],
    }
