"""The tables of docs/performance.md: what tests/bench measures on this machine, never compared."""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from documents.pages import ROOT
from documents.tables import table

BENCH = ("-m", "pytest", "tests/bench", "-m", "bench", "--benchmark-enable", "-n", "0", "-q")
START = "test_a_start"
PROCESS, GROWTH = "test_a_whole_search_process", "test_search_time_against_gpus"
FOLDED = "test_a_folded_run_of_32_stages_and_128_microbatches"
UNFOLDED = "test_an_unfolded_run_of_3072_ranks_and_three_million_passes"


class Measured(NamedTuple):
    """One benchmark: what it was given, its median time, and what it noted besides."""

    name: str
    params: dict[str, str | int]
    median_s: float
    notes: dict[str, Any]


def processes() -> str:
    """Return whole searches and single runs of the engine: time and memory."""
    rows = []
    for each in _measured(PROCESS):
        what = f"`search {each.notes['model']}`, {each.notes['num_gpus']:,} GPUs"
        laid_out = f"{each.notes['laid_out']:,} of {each.notes['space_size']:,} layouts"
        layouts = f"{laid_out} laid out, whole process"
        seconds = f"{each.notes['least_cpu_s']:.1f} to {each.notes['most_cpu_s']:.1f} s of CPU"
        cpu = f"{seconds}, {each.notes['loops']:.1f} loops"
        rows.append((f"{what}, {layouts}", cpu, f"{each.notes['peak_mebi']:.0f} MiB"))
    (folded,), (unfolded,) = _measured(FOLDED), _measured(UNFOLDED)
    folded_ms = f"{folded.median_s * 1e3:.0f} ms"
    rows.append(("engine, 32 stages x 128 microbatches, folded", folded_ms, ""))
    peak = f"{unfolded.notes['peak_mebi'] / 1024:.1f} GiB"
    what = "engine, all 3,072 ranks of 64 x 6 x 8, 3.1 M passes"
    rows.append((what, f"{unfolded.median_s:.0f} s", peak))
    return table(("what", "time", "memory"), rows).replace("  |", " |")


def starts() -> str:
    """Return what a process takes that does next to nothing."""
    rows = [
        (
            f"`meshwright {each.params['words']}`",
            f"{each.notes['least_cpu_s']:.3f} s of CPU, {each.notes['loops']:.2f} loops",
        )
        for each in _measured(START)
    ]
    return table(("command", "whole process"), rows)


def growth() -> str:
    """Return the time of a search by the number of GPUs."""
    rows = [
        (f"{each.params['num_gpus']:,}", f"{each.notes['space_size']:,}", f"{each.median_s:.2f} s")
        for each in _measured(GROWTH)
    ]
    return table(("GPUs", "layouts", "search"), rows)


def _measured(name: str) -> list[Measured]:
    return [each for each in _benchmarks() if each.name.partition("[")[0] == name]


@cache
def _benchmarks() -> tuple[Measured, ...]:
    """Run the benchmarks on this checkout; it takes some minutes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "bench.json"
        command = [sys.executable, *BENCH, f"--benchmark-json={result}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, env=environment)  # noqa: S603
        document = json.loads(result.read_text(encoding="utf-8"))
    return tuple(
        Measured(each["name"], each["params"] or {}, each["stats"]["median"], each["extra_info"])
        for each in document["benchmarks"]
    )
