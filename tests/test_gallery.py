"""The gallery says what its commands print, and has a picture for each."""

import json
import re
import shlex
from pathlib import Path

import pytest

import meshwright
from meshwright.hwprofiles import GIBI

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "gallery.md").read_text(encoding="utf-8")
SECTIONS = re.findall(
    r"^## (.*)\n\n```\nmeshwright (.*) --trace \S+\n```\n\n!\[.*\]\((.*)\)$", PAGE, re.MULTILINE
)


def step_of(command: str, folder: Path) -> dict[str, float]:
    document = folder / "step.json"
    assert meshwright.main([*shlex.split(command), "--json", str(document)]) == 0
    data = json.loads(document.read_text(encoding="utf-8"))
    return {
        "ms": data["step_time_s"] * 1e3,
        "idle": data["bubble_fraction"],
        "comm_ms": data["exposed_comm_s"] * 1e3,
        "gib": data["memory"]["device_bytes"] / GIBI,
    }


@pytest.mark.parametrize(("title", "command", "picture"), SECTIONS, ids=[s[0] for s in SECTIONS])
def test_a_command_prints_its_row(title: str, command: str, picture: str, tmp_path: Path) -> None:
    step = step_of(command, tmp_path)
    figures = f"{step['ms']:.1f} ms | {step['idle']:.1%} | {step['comm_ms']:.1f} ms"
    row = f"| [{title}](#"
    (line,) = [each for each in PAGE.splitlines() if each.startswith(row)]
    assert f"| {figures} | {step['gib']:.1f} GiB |" in line
    assert (DOCS / picture).is_file()


def test_every_row_has_a_section() -> None:
    rows = re.findall(r"^\| \[(.*)\]\(#", PAGE, re.MULTILINE)
    assert rows == [title for title, _, _ in SECTIONS]
    assert len(rows) == 18
