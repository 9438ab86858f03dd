"""A copy of the checkout in which one fault at a time is judged."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mutating.faults import Fault
from mutating.order import NEAR, called_at, named_tests, other_tests
from mutating.outputs import Output, place
from mutating.report import Found, Verdict

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out")
BEFORE_S = 1200  # of all commands, twice, without a fault
OUTPUTS_S = 300  # they take some seconds; the fault may be a loop without an end
NEAR_S = 240  # of the tests that run first: then it is worth knowing whether an output changes
SILENT_S = 400  # the slowest test takes some minutes on a busy machine


class Copy:
    """A copy of the checkout, in which one file at a time is at fault."""

    def __init__(self, folder: Path, most_s: float) -> None:
        self._root = folder / "copy"
        self._most_s = most_s
        self._known = folder / "outputs.json"
        shutil.copytree(ROOT, self._root, symlinks=True, ignore=NOT_COPIED)
        try:
            text = self._commands([], BEFORE_S)
        except subprocess.SubprocessError as error:
            raise SystemExit(f"error: the commands do not run without a fault: {error}") from None
        self._known.write_text(text, encoding="utf-8")
        self._usual = [Output(*each) for each in json.loads(text)]

    def judge(self, fault: Fault) -> Verdict:
        """Return what comes of *fault*; the copy is as it was afterwards."""
        path = self._root / fault.path
        text = path.read_text(encoding="utf-8")
        path.write_text(fault.changed(text), encoding="utf-8")
        try:
            return Verdict(fault, *self._found(fault, text), fault.difference(text))
        finally:
            path.write_text(text, encoding="utf-8")

    def _found(self, fault: Fault, text: str) -> Found:
        named = named_tests(self._root, fault, text)
        near_end_s = time.monotonic() + min(NEAR_S, self._most_s)
        found = self._failure([fault.path, *named[:NEAR]], near_end_s)
        if found is not None and found.kind == "killed":
            return found
        changed = self._changed(fault, text)
        if changed is not None:
            return changed
        end_s = time.monotonic() + self._most_s
        left = [named[:NEAR]] if found is not None else []  # they did not come to their end
        for files in (*left, *other_tests(self._root, fault, named)):
            found = self._failure(files, end_s)
            if found is not None:
                return found
        return Found("survived")

    def _changed(self, fault: Fault, text: str) -> Found | None:
        """Return that no output changes; None if one does, or a command does not end."""
        line = called_at(text, fault.line)
        numbers = [
            number
            for number, each in enumerate(self._usual)
            if line is None or place(f"/{fault.path}", line) in each.calls
        ]
        if not numbers:
            return Found("not called")
        try:
            said = self._commands([str(self._known), *map(str, numbers)], OUTPUTS_S)
        except subprocess.SubprocessError:
            return None
        return Found("no change") if said == "null" else None

    def _environment(self) -> dict[str, str]:
        folders = (self._root, self._root / "tests" / "validate", self._root / "scripts")
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "COLUMNS": "100"}

    def _commands(self, words: list[str], most_s: float) -> str:
        """Return what the script of outputs prints.

        Raises:
            subprocess.SubprocessError: If it fails or does not end.
        """
        scripts = self._root / "scripts"
        files = [str(scripts / "same_parts" / each) for each in ("commands.txt", "inputs")]
        done = subprocess.run(  # noqa: S603 - our own
            [sys.executable, "-P", str(scripts / "mutating" / "outputs.py"), *files, *words],
            capture_output=True,
            text=True,
            env=self._environment(),
            cwd=self._root,
            timeout=most_s,
            check=True,
        )
        return done.stdout

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
                said, stopped = _heard(process, end_s)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what a hanging test started
        if stopped is not None or process.returncode in {0, 5}:  # 5: there is no test
            return stopped
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return Found("killed", failed[0] if failed else f"pytest ends with {process.returncode}")


def _heard(process: "subprocess.Popen[bytes]", end_s: float) -> tuple[str, Found | None]:
    """Return what a run of tests said, and how it was stopped, if it did not end by itself."""
    assert process.stdout is not None
    said = b""
    while True:
        left_s = end_s - time.monotonic()
        ready, _, _ = select.select([process.stdout], [], [], max(0, min(left_s, SILENT_S)))
        if not ready:
            silent = f"silent for {SILENT_S} s" if left_s > SILENT_S else "more tests are left"
            running = re.findall(rb"^(\S+::\S+)", said, re.MULTILINE)[-1:]
            return "", Found("timed out", f"{silent}, last {b''.join(running).decode()}")
        content = os.read(process.stdout.fileno(), 65536)
        if not content:
            process.wait()
            return said.decode("utf-8", "replace"), None
        said = (said + content)[-100_000:]
