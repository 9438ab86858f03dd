"""What `scripts/mutate` does to the code, and what it says of it."""

import ast
from pathlib import Path

from mutating.faults import Fault, chosen_faults, faults_of
from mutating.run import Verdict, report, stages

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


def test_tests_that_name_the_folder_run_first_and_each_once() -> None:
    fault = Fault(f"{COSTS}/links.py", 1, 0, 0, "")
    near, *others = stages(ROOT, fault)
    assert near[0] == fault.path
    assert "tests/simulator/test_compute_costs.py" in near[:3]
    everything = [each for files in (near, *others) for each in files]
    assert len(everything) == len(set(everything))
    assert {"tests/test_bad_input.py", "tests/planner/test_proof.py"} <= set(everything)


def test_survivors_are_told_with_their_lines() -> None:
    fault = Fault("meshwright/a/b.py", 3, 0, 1, "2")
    said = report(
        [
            Verdict(fault, "killed", "tests/x.py", ""),
            Verdict(fault, "survived", "", "  - 1\n  + 2"),
            Verdict(fault, "no change", "", ""),
        ]
    )
    assert "meshwright/a/b.py:3 survived\n  - 1\n  + 2\n" in said
    assert said.endswith("50% of 2 faults that change an output\n")
