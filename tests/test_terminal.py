"""What the commands look like where people type them: widths, numbers, files, completion."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from meshwright import main
from meshwright.simulator.layout import Axis

JOB = ["gpt2", "--cluster", "dgx-a100", "--gpus", "64", "--global-batch", "64"]
SEARCH = ["search", *JOB, "--tokens", "300B", "--price", "2", "--top", "6"]
STYLE = re.compile(r"\x1b\[[0-9;]*m")
PROGRAM = [sys.executable, "-m", "meshwright"]


def on_terminals(words: list[str], widths: list[int]) -> list[str]:
    """Return what a command prints on terminals of so many columns, all at once."""
    runs = []
    for width in widths:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        bare = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        environment = {**bare, "TERM": "xterm"}
        command = [*PROGRAM, *words]
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment
        )
        os.close(theirs)
        runs.append((process, ours))
    return [_read(*run) for run in runs]


def _read(process: subprocess.Popen[bytes], terminal: int) -> str:
    text = b""
    try:
        while part := os.read(terminal, 65536):
            text += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(terminal)
    assert process.stderr is not None
    with process.stderr:
        assert (process.stderr.read(), process.wait()) == (b"", 0)
    return STYLE.sub("", text.decode()).replace("\r\n", "\n")


def test_a_narrow_terminal_shows_every_degree_with_time_and_memory() -> None:
    widths = [80, 100]
    for width, text in zip(widths, on_terminals(SEARCH, widths), strict=True):
        lines = text.splitlines()
        assert max(map(len, lines)) <= width
        assert "\u2026" not in text
        heads = [number for number, line in enumerate(lines) if "step s  " in line]
        assert len(heads) == 2  # plans, and the frontier
        for number in heads:
            shown, shared = lines[number].split(), " ".join(lines[number - 2 : number])
            assert "GiB" in shown
            # Sequences this short are not cut unasked: that degree is told with what was held.
            told = [axis for axis in Axis if axis in shown or f"{axis}=" in shared]
            assert {*Axis} - {*told} <= {Axis.CP}
            assert "held      cp=1" in text


def test_an_error_is_wrapped_on_a_terminal_and_one_line_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    words = ["simulate", *JOB, "--zero", "2"]
    assert main(words) == 2
    said = capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if not line.startswith("\x1b")]
    assert said.count("\n") == 1
    assert len(lines) > 2
    assert max(map(len, lines)) <= 60
    assert " ".join(lines) in said


@pytest.mark.parametrize("width", [60, 80, 118])
def test_piped_output_obeys_columns(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["simulate", *JOB]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert width - 30 < max(map(len, lines)) <= width


def test_numbers_are_read_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    documents = []
    for gpus, batch, length, tokens, price in (
        ("64", "1024", "1000", "15000000000000", "2.5 USD/GPU-hour"),
        ("64", "1,024", "1e3", "15T", "2.5"),
    ):
        words = ["--gpus", gpus, "--global-batch", batch, "--seq-len", length]
        words += ["--tokens", tokens, "--price", price, "--json", "-"]
        assert main(["simulate", *JOB[:3], *words]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] == documents[1]


def test_what_was_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, trace, result = (str(tmp_path / name) for name in ("out", "trace.json", "r.json"))
    assert main(["simulate", *JOB, "--out", out, "--trace", trace, "--json", result]) == 0
    said = capsys.readouterr().out.splitlines()[-3:]
    names = " ".join(sorted(path.name for path in Path(out).iterdir()))
    assert said == [f"written  {result}", f"written  {trace}", f"written  {out}: {names}"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("meshwright sea", "search"),
        ("meshwright search --cl", "--cluster"),
        ("meshwright sweep --va", "--vary"),
    ],
)
def test_the_shell_completes_commands_and_options(line: str, offered: str) -> None:
    count = len(line.split()) - 1
    told = {"COMP_WORDS": line, "COMP_CWORD": str(count), "_MESHWRIGHT_COMPLETE": "complete_bash"}
    done = subprocess.run(
        PROGRAM, env=os.environ | told, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [offered]


def test_numbers_that_idle_devices_are_met_with_the_nearest_good_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["search", *JOB[:3], "--top", "1", "--max-pp", "1", "--max-micro-batch", "1"]
    assert main([*words, "--gpus", "12", "--global-batch", "97"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "hint: 12 GPUs leave 4 of the last node's 8 idle; nearest: 8 or 16 hint: a" in said
    assert "allows dp up to 1; nearest: 96 (dp up to 12) or 108 (dp up to 12)" in said
    assert main([*words, "--gpus", "16", "--global-batch", "96"]) == 0
    assert "hint" not in capsys.readouterr().out


def test_files_that_were_written_stand_on_lines_as_wide_as_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    words = ["simulate", "gpt2", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "8"]
    assert main([*words, "--out", "found"]) == 0
    said = capsys.readouterr().out
    lines = said[said.index("written  found:") :].splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60
    assert all(line.startswith(" " * 9) for line in lines[1:])
    assert {*" ".join(lines).split()[2:]} == {each.name for each in (tmp_path / "found").iterdir()}
