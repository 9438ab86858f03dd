"""A copy of the checkout, in which tests and commands run."""

import importlib.util
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mutating.faults import Fault
from mutating.report import Found

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out")
NOT_FOUND = 4  # status of pytest
SILENT_S = 60  # beside what the tests of a run take in all without a fault
PYTEST = ("-m", "pytest", "--import-mode=importlib", "-vv", "--tb=no", "-p", "no:cacheprovider")


class Copy:
    """A copy of the checkout, in which one file at a time is at fault."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "copy"
        self._folder = folder
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=NOT_COPIED)

    @contextmanager
    def at_fault(self, fault: Fault) -> Iterator[str]:
        """Have *fault* in the copy for a while, which is as it was afterwards.

        Yields the file's text without it. What Python keeps compiled is known by the second of
        its source alone, and goes both times.
        """
        path = self.root / fault.path
        compiled = Path(importlib.util.cache_from_source(str(path)))
        text = path.read_text(encoding="utf-8")
        compiled.unlink(missing_ok=True)
        path.write_text(fault.changed(text), encoding="utf-8")
        try:
            yield text
        finally:
            path.write_text(text, encoding="utf-8")
            compiled.unlink(missing_ok=True)

    def failure(self, tests: Sequence[str], usual_s: float) -> Found | None:
        """Return how the first of *tests* fails; None where all pass.

        They take *usual_s* without a fault, and are stopped if they are silent for far longer.
        """
        said, status = self._pytest(["-x"], tests, {}, SILENT_S + 5 * usual_s)
        if status is None:
            running = re.findall(r"^(\S+::\S+)", said, re.MULTILINE)[-1:]
            return Found("timed out", "".join(running))
        if status in {0, 5}:  # 5: there is no test
            return None
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        files = sorted({test.partition("::")[0] for test in tests})
        if not failed and status == NOT_FOUND and files != sorted(tests):  # they have other names
            return self.failure(files, 10 * usual_s)
        return Found("killed", failed[0] if failed else f"pytest ends with {status}")

    def noted(self, files: Sequence[str]) -> str:
        """Return which functions each test of *files* calls, as `noting` writes it.

        Raises:
            SystemExit: If the tests do not end.
        """
        place = self._folder / "calls.json"
        said, _ = self._pytest(["-p", "mutating.noting"], files, {"MUTATE_CALLS": str(place)}, 900)
        if not place.exists():
            raise SystemExit(f"error: tests do not run without a fault: {said[-2000:]}")
        text = place.read_text(encoding="utf-8")
        place.unlink()
        return text

    def commands(self, words: Sequence[str], most_s: float) -> str:
        """Return what the script of outputs prints.

        Raises:
            subprocess.SubprocessError: If it fails or does not end.
        """
        scripts = self.root / "scripts"
        files = [str(scripts / "same_parts" / each) for each in ("commands.txt", "inputs")]
        done = subprocess.run(  # noqa: S603 - our own
            [sys.executable, "-P", str(scripts / "mutating" / "outputs.py"), *files, *words],
            capture_output=True,
            text=True,
            env=self._environment(),
            cwd=self.root,
            timeout=most_s,
            check=True,
        )
        return done.stdout

    def _environment(self) -> dict[str, str]:
        folders = (self.root, self.root / "tests" / "validate", self.root / "scripts")
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "COLUMNS": "100"}

    def _pytest(
        self, words: list[str], tests: Sequence[str], more: dict[str, str], silent_s: float
    ) -> tuple[str, int | None]:
        """Return what pytest said, and its status; None where it was silent for too long."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=self._folder) as names:
            names.write("\n".join(tests))  # more than a command line may hold
            names.flush()
            with subprocess.Popen(  # noqa: S603 - our own
                [sys.executable, "-P", *PYTEST, *words, f"@{names.name}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment() | {"PYTHONUNBUFFERED": "1"} | more,
                cwd=self.root,
                start_new_session=True,
            ) as process:
                try:
                    return _heard(process, silent_s)
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # with what a hanging test started


def _heard(process: "subprocess.Popen[bytes]", silent_s: float) -> tuple[str, int | None]:
    """Return what a process said, and its status; None where it was silent for too long."""
    assert process.stdout is not None
    said = b""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], silent_s)
        content = os.read(process.stdout.fileno(), 65536) if ready else b""
        said = (said + content)[-100_000:]
        if not content:
            text = said.decode("utf-8", "replace")
            return text, process.wait() if ready else None
