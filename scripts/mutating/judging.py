"""What comes of a fault."""

import hashlib
import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mutating.calls import Caller, Calls
from mutating.checkout import Copy
from mutating.faults import Fault
from mutating.order import NEAR, named_tests
from mutating.outputs import Output
from mutating.places import place_of_line
from mutating.report import Found, Verdict

BEFORE_S = 1200  # of all commands, twice, without a fault
OUTPUTS_S = 300  # they take some seconds; the fault may be a loop without an end
SHARE_OF_FILE = 4  # part of the time for tests that the longest of a file may take
FIRST_S = 15  # of the tests that run before it is known whether an output changes


class Judge:
    """Judges faults in a *copy* of the checkout; what is slow to find out is below *kept*.

    A fault that tests of *most_s* in all do not find survives.
    """

    def __init__(self, copy: Copy, kept: Path, most_s: float = math.inf) -> None:
        self._copy = copy
        self._most_s = most_s
        calls = Calls(copy.root, kept / "calls")
        for files in calls.missing():
            calls.keep(files, copy.noted(files))
        self._callers = calls.read()
        self._known = kept / f"outputs-{_digest(copy.root)}.json"
        if not self._known.exists():
            try:
                text = copy.commands([], BEFORE_S)
            except subprocess.SubprocessError as error:
                raise SystemExit(f"error: commands do not run without a fault: {error}") from None
            self._known.write_text(text, encoding="utf-8")
        self._usual = [Output(*each) for each in json.loads(self._known.read_text("utf-8"))]

    def judge(self, fault: Fault) -> Verdict:
        """Return what comes of *fault*."""
        with self._copy.at_fault(fault) as text:
            return Verdict(fault, *self._found(fault, text), fault.difference(text))

    def _found(self, fault: Fault, text: str) -> Found:
        at_fault = place_of_line(fault.path, text, fault.line)
        tests = self._callers.of(at_fault)
        near = [fault.path, *named_tests(self._copy.root, fault, text)[:NEAR]]
        first = _within(FIRST_S, [test for test in tests if test.file in near])
        first = first or _within(FIRST_S, tests)
        found = self._failure(first)
        if found is not None:
            return found
        changed = self._changed(at_fault)
        if changed is not None and changed.kind == "no change":
            return changed
        known = {test.name for test in first}
        found = self._failure(self._short([test for test in tests if test.name not in known]))
        if found is None:  # what tests start in processes of their own was not noted
            found = self._failure(self._short(self._callers.in_files(near)))
        return found or changed or Found("survived")

    def _short(self, tests: Sequence[Caller]) -> list[Caller]:
        """Return those of *tests* that there is time for; all where there is no end to it."""
        each_s = self._most_s / SHARE_OF_FILE
        short = [test for test in tests if self._callers.longest_s(test.file) <= each_s]
        return _within(self._most_s, short)

    def _failure(self, tests: Sequence[Caller]) -> Found | None:
        names = [test.name for test in tests]
        return self._copy.failure(names, sum(test.seconds for test in tests)) if names else None

    def _changed(self, at_fault: str) -> Found | None:
        """Return that no output changes; None if one does, or a command does not end."""
        numbers = [
            number
            for number, each in enumerate(self._usual)
            if at_fault in each.calls or at_fault.endswith(":")
        ]
        if not numbers:
            return Found("not called")
        try:
            said = self._copy.commands([str(self._known), *map(str, numbers)], OUTPUTS_S)
        except subprocess.SubprocessError:
            return None
        return Found("no change") if said == "null" else None


def _within(most_s: float, tests: Sequence[Caller]) -> list[Caller]:
    """Return the first of *tests* that end within a while."""
    chosen: list[Caller] = []
    for test in tests:
        most_s -= test.seconds
        if most_s < 0:
            break
        chosen.append(test)
    return chosen


def _digest(root: Path) -> str:
    """Return a digest of the code and of the commands."""
    parts = root / "scripts" / "same_parts"
    files = sorted(
        path
        for folder in (root / "meshwright", parts)
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return found.hexdigest()[:16]
