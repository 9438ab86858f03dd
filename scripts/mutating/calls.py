"""Which tests call what is at fault, noted once and kept below ``.mutate``."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mutating.order import files_of_examples, files_of_tests

AT_ONCE = 8  # files of a run that notes: what an interruption loses


class Caller(NamedTuple):
    """A test without a fault.

    Args:
        name: As pytest takes it.
        seconds: It took, while its calls were noted.
        calls: Of the project's functions.
    """

    name: str
    seconds: float
    calls: Sequence[str]

    @property
    def file(self) -> str:
        """File that holds it."""
        return self.name.partition("::")[0]


class Calls:
    """What the tests of a checkout call, as it was noted.

    Args:
        root: Of the checkout.
        kept: Folder of what was noted; made where it is missing.
    """

    def __init__(self, root: Path, kept: Path) -> None:
        self._root = root
        self._kept = kept
        kept.mkdir(parents=True, exist_ok=True)

    def missing(self) -> Iterator[list[str]]:
        """Yield test files whose calls are not noted as they are today, a few at a time."""
        tests = [file for file in files_of_tests(self._root) if not self._place(file).exists()]
        for first in range(0, len(tests), AT_ONCE):
            yield tests[first : first + AT_ONCE]
        examples = [
            file for file in files_of_examples(self._root) if not self._place(file).exists()
        ]
        if examples:
            yield examples

    def keep(self, files: Sequence[str], noted: str) -> None:
        """Keep what a run of *files* noted."""
        by_file: dict[str, list[object]] = {file: [] for file in files}
        for each in json.loads(noted):
            by_file.setdefault(each[0].partition("::")[0], []).append(each)
        for file, tests in by_file.items():
            self._place(file).write_text(json.dumps(tests), encoding="utf-8")

    def read(self) -> "Callers":
        """Return what is noted."""
        files = (*files_of_tests(self._root), *files_of_examples(self._root))
        noted = [json.loads(path.read_text("utf-8")) for path in map(self._place, files)]
        return Callers(Caller(*each) for tests in noted for each in tests)

    def _place(self, file: str) -> Path:
        content = (self._root / file).read_bytes()
        name = f"{file} {hashlib.sha256(content).hexdigest()}".encode()
        return self._kept / f"{hashlib.sha256(name).hexdigest()[:24]}.json"


class Callers:
    """Who calls a function of the project: tests, the shortest first."""

    def __init__(self, tests: Iterable[Caller]) -> None:
        self._by_place: dict[str, list[Caller]] = {}
        self._tests = sorted(tests, key=lambda each: (each.seconds, each.name))
        self._longest: dict[str, float] = {}
        for test in self._tests:
            self._longest[test.file] = test.seconds  # the last is the longest
            for each in test.calls:
                self._by_place.setdefault(each, []).append(test)

    def longest_s(self, file: str) -> float:
        """Return what the longest test of *file* takes; what its fixtures do is in it."""
        return self._longest[file]

    def in_files(self, files: Sequence[str]) -> list[Caller]:
        """Return the tests of *files*, the shortest first."""
        return [test for test in self._tests if test.file in files]

    def of(self, at_fault: str) -> list[Caller]:
        """Return the tests that call what is at fault.

        Of what runs as its file is imported, these are the tests that call anything in the file.
        """
        if not at_fault.endswith(":"):
            return self._by_place.get(at_fault, [])
        found = {
            test.name: test
            for name, tests in self._by_place.items()
            if name.startswith(at_fault)
            for test in tests
        }
        return sorted(found.values(), key=lambda each: (each.seconds, each.name))
