"""However a command ends: its status, one line, and nothing left behind."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from words_said import said_once

from meshwright import main

STEP = ["simulate", "gpt2", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "16"]
COMMAND = [sys.executable, "-m", "meshwright"]


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (OSError(28, "No space left on device", "here"), 2, "No space left on device: here\n"),
        (KeyError("x"), 70, "a fault of meshwright itself, KeyError: 'x'; its traceback is in "),
        (RecursionError(), 70, "a fault of meshwright itself, RecursionError; its traceback"),
        (SystemError(1), 70, "a fault of meshwright itself, SystemError: 1; its traceback is in "),
    ],
)
def test_what_is_raised_ends_in_one_line_and_a_status_that_says_whose_fault_it_is(
    raised: BaseException,
    status: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("meshwright.planner.cli.growth.simulate", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(STEP) == status
    out, line = capsys.readouterr()
    assert out == ""
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    assert said in line
    assert ["Traceback" in path.read_text() for path in tmp_path.iterdir()] == [True] * (
        status == 70
    )


@pytest.mark.parametrize(
    ("streams", "status", "said"),
    [
        (">&-", 2, "error: standard output is closed\n"),
        (">/dev/full", 2, "error: No space left on device: standard output\n"),
        ("<&- 2>&-", 0, ""),
        (">&- 2>&- <&-", 2, ""),
        ("| true", 0, ""),
    ],
)
def test_streams_that_take_nothing_are_told_in_one_line(
    streams: str, status: int, said: str
) -> None:
    shell = f"{sys.executable} -m meshwright --version {streams}"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, said)


def test_a_command_whose_reader_has_gone_ends_as_by_sigpipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, "schedules"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_full_disk_is_told_with_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    words = [*COMMAND, *STEP, "--json", str(tmp_path / "x.json")]
    # Python would keep the first part of what it compiles, and trip over it from then on.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        words, env=env, capture_output=True, text=True, check=False, preexec_fn=limit, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path / 'x.json'} cannot be written: File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_a_signal_within_code_made_of_text_ends_with_its_own_status(tmp_path: Path) -> None:
    """Python runs the text of a dataclass's methods, and imports make many."""
    text = """
import sys
from meshwright import ending

ending.catch_signals()
try:
    exec("import os, signal; os.kill(os.getpid(), signal.SIGTERM); [None for _ in range(99)]")
except KeyboardInterrupt:
    sys.exit(ending.interrupted())
"""
    (tmp_path / "ended.py").write_text(text)
    words = [sys.executable, "-m", "ended"]
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, b"error: ended by SIGTERM\n")


def test_a_writer_keeps_others_out_and_leaves_nothing_when_it_is_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*STEP, "--out", str(tmp_path / "out")]
    with subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True) as writer:
        until = time.monotonic() + 60
        while not any(tmp_path.glob(".meshwright-*/files/*")) and time.monotonic() < until:
            time.sleep(0.02)
        writer.send_signal(signal.SIGSTOP)
        assert main(words) == 2
        assert "is being written by another command" in capsys.readouterr().err
        writer.send_signal(signal.SIGTERM)
        writer.send_signal(signal.SIGCONT)
        assert writer.wait(timeout=30) == 128 + signal.SIGTERM
        assert writer.stderr is not None
        assert writer.stderr.read() == "error: ended by SIGTERM\n"
    assert list(tmp_path.iterdir()) == []


def test_links_that_lead_in_a_circle_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = tmp_path / "loop.toml"
    loop.symlink_to(loop)
    for option in ("--out", "--json", "--trace", "--cluster", "--stack", "--plan"):
        assert main(said_once([*STEP, option, str(loop)])) == 2
        assert "oo many levels of symbolic links" in capsys.readouterr().err
