"""What `scripts/mutate` does to the code, and what it says of it."""

import ast
from pathlib import Path

from mutating.faults import Fault, chosen_faults, faults_of
from mutating.order import NEAR, called_at, named_tests, other_tests
from mutating.outputs import observed, place
from mutating.report import Verdict, report

ROOT = Path(__file__).resolve().parents[1]
COSTS = "meshwright/simulator/costs"


def test_faults_are_of_different_lines_and_the_same_for_a_seed() -> None:
    faults = chosen_faults(ROOT, COSTS, 60, seed=3)
    assert faults == chosen_faults(ROOT, COSTS, 60, seed=3)
    assert faults != chosen_faults(ROOT, COSTS, 60, seed=4)
    assert len({(fault.path, fault.line) for fault in faults}) == 60
    for fault in faults:
        text = (ROOT / fault.path).read_text(encoding="utf-8")
        before, after = ast.parse(text), ast.parse(fault.changed(text))
        assert ast.dump(before) != ast.dump(after)


def test_types_and_texts_are_left_alone() -> None:
    text = "def f(x: Literal[1] = 2) -> Tuple[3]:\n    return f'{x + 1}' * 4\n"
    assert {(fault.line, fault.written) for fault in faults_of("x.py", text)} == {
        *((1, "3"), (1, "1"), (2, "5"), (2, "3")),
        (2, "(f'{x + 1}' + 4)"),
        (2, "(f'{x + 1}')"),
    }


def test_tests_that_name_what_is_at_fault_run_first_and_each_once() -> None:
    path = f"{COSTS}/compute.py"
    text = (ROOT / path).read_text(encoding="utf-8")
    fault = Fault(path, len(text.splitlines()), 0, 0, "")
    named = named_tests(ROOT, fault, text)
    assert named[0] == "tests/simulator/test_compute_costs.py"
    others = [each for files in other_tests(ROOT, fault, named) for each in files]
    everything = [*named[:NEAR], *others]
    assert len(everything) == len(set(everything))
    assert {"tests/test_bad_input.py", "tests/planner/test_proof.py"} <= set(everything)


def test_commands_are_known_by_the_functions_that_they_call(tmp_path: Path) -> None:
    called = observed(["schedules"], tmp_path).calls
    for name, function, is_called in (
        ("__init__", "main", True),
        ("planner/search/search", "search", False),
    ):
        path = ROOT / "meshwright" / f"{name}.py"
        text = path.read_text(encoding="utf-8")
        line = text[: text.index(f"def {function}(")].count("\n") + 1
        assert (place(str(path), line) in called) == is_called
        assert called_at(text, line + 20) == line
        assert called_at(text, 1) is None


def test_survivors_are_told_with_their_lines() -> None:
    fault = Fault("meshwright/a/b.py", 3, 0, 1, "2")
    said = report(
        [
            Verdict(fault, "killed", "tests/x.py", ""),
            Verdict(fault, "survived", "", "  - 1\n  + 2"),
            Verdict(fault, "no change", "", ""),
            Verdict(fault, "timed out", "", ""),
        ]
    )
    assert "meshwright/a/b.py:3 survived\n  - 1\n  + 2\n" in said
    assert said.endswith("killed: 50% of 2 faults that a test or an output shows\n")
