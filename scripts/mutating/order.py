"""Which tests to run for a fault: those first that name what is at fault."""

import re
from functools import cache
from pathlib import Path

from mutating.faults import Fault
from mutating.places import enclosing

NEAR = 6  # test files that name what is at fault
# Pages are made by the commands of all others, and what styles them runs no code.
NOT_RUN = {"test_documents_are_current.py", "test_budgets.py", "test_layers.py"}


def named_tests(root: Path, fault: Fault, text: str) -> list[str]:
    """Return the test files that name what is at fault in a file's *text*, most of it first."""
    path = Path(fault.path)
    names = {each.name for each in enclosing(text, fault.line) if len(each.name) > 3}
    module = ".".join(path.with_suffix("").parts)
    package = path.parts[1]
    scores = {}
    for file in files_of_tests(root):
        words, imports = _words(root / file)
        score = 8 * len(names & words) + 6 * (module in imports)
        score += 3 * (module.rpartition(".")[0] in imports)
        named = {path.stem, *path.parts[2:-1]}
        score += 4 * any(re.search(rf"(^|_){each}(_|$)", Path(file).stem) for each in named)
        if score:
            scores[file] = score + (file.split("/")[1] == package)
    return sorted(scores, key=lambda file: (-scores[file], file))


@cache
def files_of_tests(root: Path) -> list[str]:
    """Return the files of tests that are run."""
    paths = sorted((root / "tests").rglob("test_*.py"))
    files = [path.relative_to(root).as_posix() for path in paths if path.name not in NOT_RUN]
    return [file for file in files if not file.startswith("tests/bench/")]


def files_of_examples(root: Path) -> list[str]:
    """Return the modules that show examples."""
    paths = sorted((root / "meshwright").rglob("*.py"))
    shown = [path for path in paths if ">>>" in path.read_text(encoding="utf-8")]
    return [path.relative_to(root).as_posix() for path in shown]


@cache
def _words(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names in a test file, and the modules that it imports from."""
    text = path.read_text(encoding="utf-8")
    imports = re.findall(r"^\s*(?:from|import) (meshwright[\w.]*)", text, re.MULTILINE)
    return frozenset(re.findall(r"[A-Za-z_]\w+", text)), frozenset(imports)
