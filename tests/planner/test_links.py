"""Links in an output folder: ``--force`` replaces them, and what they lead to stays."""

from pathlib import Path

import pytest

from meshwright import main
from meshwright.planner.options import release_claims
from meshwright.planner.reports import check_folder, write_output

JOB = ["gpt2", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "16", "--seq-len", "256"]
ONE = ["--pp", "1", "--micro-batch", "1", "--zero", "1", "--recompute", "none"]
COMMANDS = {
    "simulate": ["simulate", *JOB],
    "search": ["search", *JOB, *ONE, "--tp", "1"],
    "compare": ["compare", *JOB, "--stack", "ddp,fsdp", "--tp", "1", "--pp", "1"],
    "sweep": ["sweep", *JOB, "--vary", "tp=1,2", "--jobs", "1"],
    "matmul": ["matmul", "4x5", "5x8", "--devices", "2"],
}
KEPT = "nobody's business of a command"


def files_in(folder: Path) -> dict[str, bytes]:
    found = [each for each in sorted(folder.rglob("*")) if each.is_file()]
    return {str(each.relative_to(folder)): each.read_bytes() for each in found}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_link_in_a_folder_in_use_is_replaced(name: str, tmp_path: Path) -> None:
    words, plain = COMMANDS[name], tmp_path / "plain"
    assert main([*words, "--out", str(plain)]) == 0
    release_claims()
    wanted = files_in(plain)
    target, folder = tmp_path / "elsewhere", tmp_path / "folder"
    target.write_text(KEPT)
    for each in wanted:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        (folder / each).symlink_to(target)
    assert main([*words, "--out", str(folder), "--force"]) == 0
    assert target.read_text() == KEPT
    assert not any(each.is_symlink() for each in folder.rglob("*"))
    assert files_in(folder) == wanted


@pytest.mark.parametrize("begun", [False, True])
def test_a_link_in_the_place_of_cells_is_replaced(tmp_path: Path, *, begun: bool) -> None:
    folder, target = tmp_path / "folder", tmp_path / "elsewhere"
    target.mkdir()
    (target / "0001.json").write_text(KEPT)
    folder.mkdir()
    if begun:
        assert main([*COMMANDS["sweep"], "--out", str(folder)]) == 0
        release_claims()
        (folder / "cells").rename(tmp_path / "before")
    (folder / "cells").symlink_to(target)
    assert main([*COMMANDS["sweep"], "--out", str(folder), "--force"]) == 0
    assert files_in(target) == {"0001.json": KEPT.encode()}
    assert sorted(each.name for each in (folder / "cells").iterdir()) == ["0001.json", "0002.json"]


def test_a_folder_that_is_a_link_is_written_to(tmp_path: Path) -> None:
    """It is what the user named."""
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    write_output(tmp_path / "out" / "file", "text")
    assert (tmp_path / "real" / "file").read_text() == "text"
    assert (tmp_path / "out").is_symlink()


def test_a_link_in_the_place_of_a_lock_makes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_folder(str(tmp_path / "out"), force=False)
    (lock,) = tmp_path.iterdir()
    release_claims()
    lock.symlink_to(tmp_path / "elsewhere")
    assert main([*COMMANDS["simulate"], "--out", str(tmp_path / "out")]) == 2
    assert "symbolic links" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()
