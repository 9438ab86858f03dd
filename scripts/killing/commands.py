"""The commands that are killed, and what of their results is the same each time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "scripts" / "same_parts" / "inputs" / "tiny.toml"
PLAN = ["simulate", str(TINY), "--cluster", "localhost-cpu", "--gpus", "2", "--tp", "2"]
PLAN += ["--global-batch", "4", "--precision", "fp32", "--out", "plan"]
VALIDATE = ["validate", "plan/plan.json", "--backend", "gloo"]
SWEEP = ["sweep", "gpt2", "--cluster", "dgx-a100", "--global-batch", "96", "--jobs", "2"]
SWEEP += ["--vary", "gpus=8,16,32", "--vary", "tp=1,2", "--vary", "zero=0,1", "--out", "out"]
CALIBRATE = ["calibrate", "--device", "cpu", "--ranks", "2", "--budget-seconds", "6"]
MEASURED = {"s", "bytes/s", "FLOP/s"}  # no two runs measure the same
# gloo holds a message's buffer for a moment longer in some runs; that it is within what may differ
# is the same each time.
HELD = {"peak live bytes", "at the peak: activations and buffers"}


class Command(NamedTuple):
    """A command that is killed.

    Args:
        words: Of the command, which writes the folder ``out``.
        before: Words of the one that writes what it needs.
        lasting: What in its folder an undisturbed run leaves, too, by name.
        kept: What must be there after the same command has run again.
    """

    words: list[str]
    before: list[str]
    lasting: Callable[[Path], dict[str, bytes]]
    kept: Callable[[Path], list[str]] = lambda _folder: []


def every_file(folder: Path) -> dict[str, bytes]:
    """Return the content of all files."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def file_names(folder: Path) -> dict[str, bytes]:
    """Return the names of all files: what they hold was measured."""
    return dict.fromkeys(every_file(folder), b"")


def without_times(folder: Path) -> dict[str, bytes]:
    """Return the content of all files of a validation; of measured times their names.

    The report shows the rows of its data as a table, and a rank's own file is what its row says.
    """
    found = {}
    for name, content in every_file(folder).items():
        found[name] = content
        if name == "validation.json":
            found[name] = json.dumps(_without_times(json.loads(content)), indent=1).encode()
        elif name != "plan.json":
            found[name] = b""
    return {name: each for name, each in found.items() if not name.startswith("run-")}


def _without_times(value: object) -> object:
    if isinstance(value, list):
        return [_without_times(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("unit") in MEASURED:
        return value["quantity"].partition("(")[0]  # the slowest rank is another each time
    if value.get("quantity") in HELD:
        return {key: value[key] for key in ("quantity", "predicted", "verdict")}
    return {key: _without_times(each) for key, each in value.items()}


def measured_rows(folder: Path) -> list[str]:
    """Return the whole rows of a calibration that is not at its end, too."""
    file = folder / "measurements.csv"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [line for line in lines if line.endswith("\n") and not line.startswith("#")]


COMMANDS = {
    "validate": Command(
        [*VALIDATE, "--steps", "2", "--out", "out", "--force"],
        PLAN,
        without_times,
    ),
    "sweep": Command(SWEEP, [], every_file),
    "calibrate": Command([*CALIBRATE, "--out", "out"], [], file_names, measured_rows),
}
