"""What `scripts/kill` compares."""

import json
from pathlib import Path

from killing.commands import COMMANDS, every_file
from killing.run import Undisturbed, again_differs


def validation(folder: Path, *, seconds: float, calls: int, held: int = 0) -> None:
    peak = {"quantity": "peak live bytes", "unit": "bytes", "predicted": 9, "measured": 9 + held}
    rows = [
        peak | {"verdict": "pass" if held < 5 else "fail"},
        {"quantity": f"step time, slowest rank ({calls})", "unit": "s", "measured": seconds},
        {"quantity": "tp all_reduce", "unit": "calls", "measured": calls},
    ]
    for name, content in (
        ("validation.json", json.dumps({"run": rows})),
        ("rank-00000.json", f"{seconds}"),
        ("run-1/rank-00000.out", "killed"),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def test_of_a_validation_all_but_times_and_an_earlier_run_is_compared(tmp_path: Path) -> None:
    lasting = COMMANDS["validate"].lasting
    validation(tmp_path, seconds=0.5, calls=4)
    before = lasting(tmp_path)
    assert sorted(before) == ["rank-00000.json", "validation.json"]
    validation(tmp_path, seconds=0.7, calls=4, held=4)
    assert lasting(tmp_path) == before
    validation(tmp_path, seconds=0.7, calls=4, held=5)
    assert lasting(tmp_path) != before
    validation(tmp_path, seconds=0.5, calls=5)
    assert lasting(tmp_path) != before


def test_what_is_lost_left_behind_or_different_is_told(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "measurements.csv"
    command = COMMANDS["calibrate"]
    usual = Undisturbed(1.0, 0, command.lasting(tmp_path / "out"), {"out"})
    assert list(again_differs(command, usual, tmp_path, [])) == []
    different = Undisturbed(1.0, 0, {"plan.json": b"[\n1,\n2]"}, {"out"})
    every = command._replace(lasting=lambda _folder: {"plan.json": b"[\n1,\n3]"})
    said = list(again_differs(every, different, tmp_path, []))
    assert said == ["FAULT: plan.json differs: -2] +3]"]
    file.write_text("# of a machine\nadd,1\nadd,2\nadd,", encoding="utf-8")
    assert command.kept(tmp_path / "out") == ["add,1\n", "add,2\n"]
    (tmp_path / "scratch").mkdir()
    assert list(again_differs(command, usual, tmp_path, ["add,1\n", "add,3\n"])) == [
        "FAULT: measurements.csv differs",
        "FAULT: 1 of 2 rows are lost",
        "2 rows kept",
        "FAULT: scratch left behind",
    ]
    assert every_file(tmp_path / "out") == {"measurements.csv": file.read_bytes()}
