"""What came of faults, kept for the next run."""

import hashlib
import json
from dataclasses import astuple
from pathlib import Path

from mutating.faults import Fault
from mutating.report import Verdict

JUDGED_AGAIN = {"survived", "timed out", "not called"}  # a new test may find them


class Verdicts:
    """Verdicts by fault and by the text of its file.

    Args:
        file: That keeps them, a line each.
        root: Of the checkout that the faults are of.
    """

    def __init__(self, file: Path, root: Path) -> None:
        self._file = file
        self._root = root
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self._known = {
            key: Verdict(Fault(*fault), *rest) for key, fault, *rest in map(json.loads, lines)
        }

    def of(self, fault: Fault) -> Verdict | None:
        """Return what came of *fault* in an earlier run; None where it is to be judged."""
        verdict = self._known.get(self._key(fault))
        return None if verdict is None or verdict.kind in JUDGED_AGAIN else verdict

    def add(self, verdict: Verdict) -> None:
        """Keep a verdict."""
        fault, *rest = verdict
        line = json.dumps([self._key(fault), astuple(fault), *rest])
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def _key(self, fault: Fault) -> str:
        text = (self._root / fault.path).read_bytes()
        return hashlib.sha256(f"{astuple(fault)}".encode() + text).hexdigest()[:24]
