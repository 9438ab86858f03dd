"""What `scripts/mutate` does to the code, and what it says of it."""

import ast
import json
from pathlib import Path

from mutating.calls import Caller, Callers, Calls
from mutating.faults import Fault, chosen_faults, faults_of
from mutating.order import files_of_examples, files_of_tests, named_tests
from mutating.outputs import observed
from mutating.places import place_of_line
from mutating.report import Verdict, report
from mutating.verdicts import Verdicts

ROOT = Path(__file__).resolve().parents[1]
COSTS = "meshwright/simulator/costs"


def test_faults_are_of_different_lines_and_the_same_for_a_seed() -> None:
    faults = chosen_faults(ROOT, [COSTS], 60, seed=3)
    assert faults == chosen_faults(ROOT, [COSTS], 60, seed=3)
    assert faults != chosen_faults(ROOT, [COSTS], 60, seed=4)
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


def test_tests_that_name_what_is_at_fault_are_near_it() -> None:
    path = f"{COSTS}/compute.py"
    text = (ROOT / path).read_text(encoding="utf-8")
    named = named_tests(ROOT, Fault(path, len(text.splitlines()), 0, 0, ""), text)
    assert named[0] == "tests/simulator/test_compute_costs.py"


def test_what_is_noted_is_of_a_test_file_as_it_is(tmp_path: Path) -> None:
    file = "tests/simulator/test_a.py"
    (tmp_path / "copy" / "meshwright").mkdir(parents=True)
    path = tmp_path / "copy" / file
    path.parent.mkdir(parents=True)
    path.write_text("a", encoding="utf-8")
    calls = Calls(tmp_path / "copy", tmp_path / "kept")
    assert [*calls.missing()] == [[file]]
    noted = [
        [f"{file}::{name}", seconds, ["meshwright/b.py:f"]]
        for name, seconds in (("slow", 2.0), ("fast", 1.0))
    ]
    calls.keep([file], json.dumps(noted))
    assert [*calls.missing()] == []
    slow, fast = (Caller(*each) for each in noted)
    assert calls.read().of("meshwright/b.py:f") == [fast, slow]
    path.write_text("b", encoding="utf-8")
    assert [*calls.missing()] == [[file]]


def test_what_runs_at_import_is_found_by_tests_that_call_its_file() -> None:
    test = Caller("tests/test_a.py::test_b", 1.0, ["a.py:f", "b.py:g"])
    callers = Callers([test])
    assert callers.of("a.py:") == callers.of("a.py:f") == [test]
    assert callers.of("a.py:h") == callers.of("c.py:") == []


def test_all_tests_but_those_of_pages_are_run() -> None:
    assert {"tests/test_bad_input.py", "tests/planner/test_proof.py"} <= {*files_of_tests(ROOT)}
    assert "tests/test_documents_are_current.py" not in files_of_tests(ROOT)
    assert f"{COSTS}/collectives.py" in files_of_examples(ROOT)


def test_what_came_of_a_fault_is_kept_until_its_file_changes(tmp_path: Path) -> None:
    file, kept = tmp_path / "a.py", tmp_path / "verdicts.jsonl"
    file.write_text("x = 1\n", encoding="utf-8")
    faults = faults_of("a.py", "x = 1\n")
    verdicts = [Verdict(faults[0], "killed", "a test", "-"), Verdict(faults[1], "survived", "", "")]
    for each in verdicts:
        Verdicts(kept, tmp_path).add(each)
    again = Verdicts(kept, tmp_path)
    assert [again.of(fault) for fault in faults] == [verdicts[0], None]
    file.write_text("x = 1  # other\n", encoding="utf-8")
    assert Verdicts(kept, tmp_path).of(faults[0]) is None


def test_commands_are_known_by_the_functions_that_they_call(tmp_path: Path) -> None:
    called = observed(["schedules"], tmp_path).calls
    for name, function, is_called in (
        ("__init__", "main", True),
        ("planner/search/search", "search", False),
    ):
        path = f"meshwright/{name}.py"
        text = (ROOT / path).read_text(encoding="utf-8")
        line = text[: text.index(f"def {function}(")].count("\n") + 1
        place = place_of_line(path, text, line + 20)
        assert place == f"{path}:{function}"
        assert (place in called) == is_called
        assert place_of_line(path, text, 1) == f"{path}:"


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
