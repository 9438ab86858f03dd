"""Put faults into a copy of the checkout, one at a time, and say which the tests find.

A fault that changes no byte of what a fixed set of commands prints is not counted. For the others
tests run until one fails: those that name the fault's folder, the rest of its package, then all
above it. The same seed gives the same faults. Nothing is written to the checkout.
"""

import argparse
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mutating.faults import PACKAGES, Fault, chosen_faults

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out")
OUTPUTS_S = 120  # they take some seconds; the fault may be a loop without an end
SILENT_S = 400  # the slowest test takes some minutes on a busy machine
ABOVE = ("tests/planner", "tests/validate", "tests")
# Pages are made by the commands of all others, and what styles them runs no code.
NOT_RUN = {"test_documents_are_current.py", "test_budgets.py", "test_layers.py"}
INTERRUPTED = 130
KINDS = ("killed", "survived", "no change")


class Found(NamedTuple):
    """What tests found: whether one failed, and which."""

    kind: str
    reason: str = ""


class Verdict(NamedTuple):
    """What came of a fault: ``killed``, ``survived`` or ``no change``; by what; its two lines."""

    fault: Fault
    kind: str
    reason: str
    difference: str


class Copy:
    """A copy of the checkout, in which one file at a time is at fault."""

    def __init__(self, folder: Path, most_s: float) -> None:
        self._root = folder / "copy"
        self._most_s = most_s
        shutil.copytree(ROOT, self._root, symlinks=True, ignore=NOT_COPIED)
        self._usual = self._outputs()
        if self._usual is None:
            raise SystemExit("error: the commands do not run without a fault")

    def judge(self, fault: Fault) -> Verdict:
        """Return what comes of *fault*; the copy is as it was afterwards."""
        path = self._root / fault.path
        text = path.read_text(encoding="utf-8")
        path.write_text(fault.changed(text), encoding="utf-8")
        try:
            is_same = self._outputs() == self._usual
            found = Found("no change") if is_same else self._tested(fault)
            return Verdict(fault, *found, fault.difference(text))
        finally:
            path.write_text(text, encoding="utf-8")

    def _environment(self) -> dict[str, str]:
        folders = (self._root, self._root / "tests" / "validate", self._root / "scripts")
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "COLUMNS": "100"}

    def _outputs(self) -> list[str] | None:
        """Return digests of what the commands print; None where they fail or do not end."""
        scripts = self._root / "scripts"
        words = [sys.executable, "-P", str(scripts / "mutating" / "outputs.py")]
        words += [str(scripts / "same_parts" / each) for each in ("commands.txt", "inputs")]
        try:
            done = subprocess.run(  # noqa: S603 - our own
                words,
                capture_output=True,
                env=self._environment(),
                cwd=self._root,
                timeout=OUTPUTS_S,
                check=True,
            )
            return list(json.loads(done.stdout))
        except (subprocess.SubprocessError, ValueError):
            return None

    def _tested(self, fault: Fault) -> Found:
        end_s = time.monotonic() + self._most_s
        for files in stages(self._root, fault):
            found = self._failure(files, end_s)
            if found is not None:
                return found
        return Found("survived")

    def _failure(self, files: Sequence[str], end_s: float) -> Found | None:
        """Return how the first test of *files* fails; None where all pass."""
        words = [sys.executable, "-P", "-m", "pytest", "--import-mode=importlib", "-x", "-v"]
        words += ["--tb=no", "-p", "no:cacheprovider", *files]
        with subprocess.Popen(  # noqa: S603 - our own
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment() | {"PYTHONUNBUFFERED": "1"},
            cwd=self._root,
            start_new_session=True,
        ) as process:
            try:
                said, stopped = self._heard(process, end_s)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what a hanging test started
        if stopped is not None or process.returncode in {0, 5}:  # 5: there is no test
            return stopped
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return Found("killed", failed[0] if failed else f"pytest ends with {process.returncode}")

    def _heard(self, process: "subprocess.Popen[bytes]", end_s: float) -> tuple[str, Found | None]:
        """Return what a run of tests said, and how it was stopped, if it did not end by itself."""
        assert process.stdout is not None
        said = b""
        while True:
            left_s = end_s - time.monotonic()
            ready, _, _ = select.select([process.stdout], [], [], max(0, min(left_s, SILENT_S)))
            if not ready and left_s <= SILENT_S:
                return "", Found("survived", f"all that ran in {self._most_s:g} s")
            if not ready:
                return "", Found("killed", f"timeout: silent for {SILENT_S} s")
            content = os.read(process.stdout.fileno(), 65536)
            if not content:
                process.wait()
                return said.decode("utf-8", "replace"), None
            said = (said + content)[-100_000:]


def stages(root: Path, fault: Fault) -> Iterator[list[str]]:
    """Yield the test files to run, the likeliest to fail first, each once."""
    package, *folders = fault.folder.split("/")[1:]
    own = sorted((root / "tests" / package).glob("test_*.py"))
    names = {*folders, Path(fault.path).stem}
    near = [path for path in own if any(name in path.stem for name in names)]
    inside = ".".join(["meshwright", package, *folders])
    near += [path for path in own if path not in near and f"{inside}" in path.read_text("utf-8")]
    yield [fault.path, *(path.relative_to(root).as_posix() for path in near)]
    done = {*near}
    for folder in (f"tests/{package}", *ABOVE):
        files = [path for path in sorted((root / folder).glob("test_*.py")) if path not in done]
        done |= {*files}
        if shown := [
            each.relative_to(root).as_posix() for each in files if each.name not in NOT_RUN
        ]:
            yield shown


def report(judged: Sequence[Verdict]) -> str:
    """Return a line for each folder, and the survivors."""
    counts = Counter((each.fault.folder, each.kind) for each in judged)
    lines = [f"{'folder':40}" + "".join(f"{kind:>11}" for kind in KINDS)]
    lines += [
        f"{folder:40}" + "".join(f"{counts[folder, kind]:11}" for kind in KINDS)
        for folder in sorted({each.fault.folder for each in judged})
    ]
    totals = [sum(each.kind == kind for each in judged) for kind in KINDS]
    lines.append(f"{'all':40}" + "".join(f"{total:11}" for total in totals))
    for each in judged:
        if each.kind == "survived":
            place = f"{each.fault.path}:{each.fault.line} survived {each.reason}".rstrip()
            lines += ["", place, each.difference]
    if changing := sum(totals[:2]):
        lines += ["", f"{totals[0] / changing:.0%} of {changing} faults that change an output"]
    return "\n".join(lines) + "\n"


def read_words(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the script."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("count", metavar="N", type=int, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="of the choice [0]")
    parser.add_argument(
        "--under", metavar="FOLDER", default="meshwright", help="where [meshwright]"
    )
    parser.add_argument(
        "--most-seconds", type=float, default=1e5, help="of tests for a fault [all of them]"
    )
    options = parser.parse_args(words)
    options.under = Path(options.under).as_posix()
    folders = ("meshwright", *(f"meshwright/{each}" for each in PACKAGES))
    is_inside = options.under == folders[0] or options.under.startswith(folders[1:])
    if not is_inside or not (ROOT / options.under).is_dir():
        parser.error(f"--under {options.under} is no folder of {', '.join(folders[1:])}")
    return options


def run(words: Sequence[str] | None = None) -> int:
    """Do as *words* ask; return 1 if a fault survived."""
    options = read_words(words)
    faults = chosen_faults(ROOT, options.under, options.count, options.seed)
    judged: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
        try:
            copy = Copy(Path(folder), options.most_seconds)
            for fault in faults:
                judged.append(copy.judge(fault))
                place = f"{len(judged)} of {len(faults)}  {fault.path}:{fault.line}"
                sys.stderr.write(f"{place}  {judged[-1].kind}  {judged[-1].reason}\n")
        except KeyboardInterrupt:
            sys.stdout.write(report(judged))
            return INTERRUPTED
    sys.stdout.write(report(judged))
    return int(any(each.kind == "survived" for each in judged))
