"""Store of a sweep while it runs: each finished cell, whole or not at all.

A folder belongs to one sweep: ``sweep.json`` says which, and the same sweep goes on in it.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright import __version__
from meshwright.hwprofiles import FileKind, shown, shown_path
from meshwright.planner.reports import NUMBERED_PLANS, Json, json_text, write_output
from meshwright.planner.sweep.grid import Cell, Request, Task
from meshwright.planner.sweep.outcome import Document
from meshwright.simulator import PlanError

FORMAT = "meshwright-sweep-1"
SWEEP_FILE = FileKind(title="sweep", most_bytes=64_000_000, error=PlanError)
CELL_FILE = FileKind(title="cell of a sweep", most_bytes=16_000_000, error=PlanError)
MANIFEST, CELLS = "sweep.json", "cells"
DRAFTS = ".meshwright-*"  # what a killed command left of files that it was writing


def is_sweep_folder(folder: Path) -> bool:
    """Return True if a sweep has begun in *folder*."""
    return (folder / MANIFEST).is_file()


def manifest(request: Request, cells: Sequence[Cell]) -> Document:
    """Return the manifest of a sweep: its variations, and the task of each cell."""
    return {
        "format": FORMAT,
        "version": __version__,
        "runs": "simulate" if request.is_simulation else "search",
        "vary": {each.name: [value.text for value in each.values] for each in request.varied},
        "cells": [
            {
                "cell": each.number,
                **{
                    variation.name: value.text
                    for variation, value in zip(request.varied, each.values, strict=True)
                },
                "task": each.task.digest if isinstance(each.task, Task) else None,
                "refused": None if isinstance(each.task, Task) else each.task,
            }
            for each in cells
        ],
    }


class Store:
    """The finished cells of a sweep in a folder.

    Args:
        folder: Where; it is claimed, and need not exist.
        wanted: The manifest of the sweep.
        restarts: Whether cells of another sweep, or of this one, are thrown away.

    Raises:
        PlanError: If the folder holds another sweep.
    """

    def __init__(self, folder: Path, wanted: Document, *, restarts: bool) -> None:
        self._cells = folder / CELLS
        if is_sweep_folder(folder) and not restarts:
            _check_same(folder, wanted)
        elif self._cells.is_symlink():  # what it leads to is no sweep's of this folder
            self._cells.unlink()
        if is_sweep_folder(folder) and restarts:
            shutil.rmtree(self._cells, ignore_errors=True)
            for stale in folder.glob(NUMBERED_PLANS):
                stale.unlink()
        self._cells.mkdir(parents=True, exist_ok=True)
        # The folder is claimed: drafts in it are of a command that was killed.
        for each in (folder, self._cells):
            for draft in each.glob(DRAFTS):
                shutil.rmtree(draft, ignore_errors=True)
        # Last, so that a folder with a manifest has its cells' folder.
        write_output(folder / MANIFEST, json_text(wanted))

    def keep(self, number: int, document: Document) -> None:
        """Write the document of a cell; raises PlanError if that cannot be."""
        write_output(
            self._path(number), json_text({"cell": number, "sum": _sum(document), **document})
        )

    def finished(self, numbers: Sequence[int]) -> Iterator[tuple[int, Document]]:
        """Yield the cells of *numbers* that are finished.

        Raises:
            PlanError: If a file is none of a cell.
        """
        for number in numbers:
            path = self._path(number)
            if path.exists():
                yield number, _cell_document(path, number)

    def _path(self, number: int) -> Path:
        return self._cells / f"{number:04d}.json"


def _cell_document(path: Path, number: int) -> Document:
    document = CELL_FILE.read_json(path)
    if isinstance(document, dict):
        identity = document.pop("cell", None), document.pop("sum", None)
        # A cell that was edited, or cut short, is not taken for finished.
        if identity == (number, _sum(document)):
            return document
    raise PlanError(
        f"{shown_path(path)} is not cell {number} as it was written; allowed: to remove it"
    )


def _sum(document: Mapping[str, object]) -> str:
    """Return a checksum that tells a document that was changed."""
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()[:16]


def _check_same(folder: Path, wanted: Document) -> None:
    """Raise PlanError when the folder holds another sweep, with what differs first."""
    folder_text = shown_path(folder)
    saved = SWEEP_FILE.read_json(folder / MANIFEST)
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise PlanError(f"--out {folder_text}: {MANIFEST} is of no sweep; allowed: another folder")
    asked: dict[str, Any] = json.loads(json.dumps(wanted))
    for key, value in asked.items():
        if saved.get(key) != value:
            difference = _difference(key, saved.get(key), value)
            raise PlanError(
                f"--out {folder_text} holds another sweep: {difference}; allowed: another "
                "folder, or --force, which begins anew"
            )


def _difference(key: str, saved: Json, asked: list[dict[str, object]]) -> str:
    """Return in words how *found* differs from what is asked for."""
    if key != "cells":
        return f"{key} {_short(saved)}, not {_short(asked)}"
    others = saved if isinstance(saved, list) else []
    number = next(
        (index for index, each in enumerate(asked) if [each] != others[index : index + 1]), 0
    )
    return f"cell {number + 1} has other options, or files that say something else"


def _short(value: object) -> str:
    if isinstance(value, dict) and all(isinstance(each, list) for each in value.values()):
        return " ".join(f"{name}={','.join(map(str, texts))}" for name, texts in value.items())
    return shown(value)
