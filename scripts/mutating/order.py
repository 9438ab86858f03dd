"""Which tests to run for a fault: those first that name what is at fault."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mutating.faults import Fault

NEAR = 6  # test files that run before it is known whether the fault changes an output
ABOVE = ("tests/planner", "tests/validate", "tests")
# Pages are made by the commands of all others, and what styles them runs no code.
NOT_RUN = {"test_documents_are_current.py", "test_budgets.py", "test_layers.py"}


def enclosing(text: str, line: int) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    r"""Return the classes and functions whose bodies hold a *line*, the outermost first.

    >>> [each.name for each in enclosing("class A:\n    def f(self):\n        return 1\n", 3)]
    ['A', 'f']
    """
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = [
        each
        for each in ast.walk(ast.parse(text))
        if isinstance(each, kinds) and each.body[0].lineno <= line <= (each.end_lineno or 0)
    ]
    return sorted(found, key=lambda each: each.lineno)


def called_at(text: str, line: int) -> int | None:
    """Return the first line of the function that holds a *line*, decorators included.

    None where the line runs as its file is imported.
    """
    functions = [each for each in enclosing(text, line) if not isinstance(each, ast.ClassDef)]
    if not functions:
        return None
    return min([functions[-1].lineno, *(each.lineno for each in functions[-1].decorator_list)])


def named_tests(root: Path, fault: Fault, text: str) -> list[str]:
    """Return the test files that name what is at fault in a file's *text*, most of it first."""
    path = Path(fault.path)
    names = {each.name for each in enclosing(text, fault.line) if len(each.name) > 3}
    module = ".".join(path.with_suffix("").parts)
    package = path.parts[1]
    scores = {}
    for file in _test_files(root):
        words, imports = _words(root / file)
        score = 8 * len(names & words) + 6 * (module in imports)
        score += 3 * (module.rpartition(".")[0] in imports)
        named = {path.stem, *path.parts[2:-1]}
        score += 4 * any(re.search(rf"(^|_){each}(_|$)", Path(file).stem) for each in named)
        if score:
            scores[file] = score + (file.split("/")[1] == package)
    return sorted(scores, key=lambda file: (-scores[file], file))


def other_tests(root: Path, fault: Fault, named: list[str]) -> Iterator[list[str]]:
    """Yield those of *named* that are not near, then all others, of the fault's package first."""
    known = {*named}
    if named[NEAR:]:
        yield named[NEAR:]
    package = fault.path.split("/")[1]
    for folder in (f"tests/{package}", *ABOVE):
        files = [
            file
            for file in _test_files(root)
            if Path(file).parent.as_posix() == folder and file not in known
        ]
        known |= {*files}
        if files:
            yield files


@cache
def _test_files(root: Path) -> list[str]:
    paths = sorted((root / "tests").rglob("test_*.py"))
    files = [path.relative_to(root).as_posix() for path in paths if path.name not in NOT_RUN]
    return [file for file in files if not file.startswith("tests/bench/")]


@cache
def _words(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names in a test file, and the modules that it imports from."""
    text = path.read_text(encoding="utf-8")
    imports = re.findall(r"^\s*(?:from|import) (meshwright[\w.]*)", text, re.MULTILINE)
    return frozenset(re.findall(r"[A-Za-z_]\w+", text)), frozenset(imports)
