"""Run fuzzed commands in this process and say which break the contract of the command line."""

import argparse
import contextlib
import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from random import Random
from types import FrameType

from fuzzing.cases import Case, command_line, file_case
from meshwright import main

LIMIT_S, WAIT_S = 10, 100  # of the processor, of the clock
STATUSES = {0, 1, 2, 130}


class TooLongError(BaseException):
    """A command that does not end; no handler of faults may take it for one."""


def outcome(case: Case) -> str | None:
    """Return how *case* breaks the contract, in one line; None where it keeps it.

    A command whose processor works longer than the limit is none that refuses: it is stopped and
    passes. One that waits longer waits for nothing.
    """
    out, err = io.StringIO(), io.StringIO()
    with _folder(case), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, _end)
        signal.alarm(WAIT_S)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            status = main(case.words)
        except TooLongError as error:
            return None if error.args == (signal.SIGPROF,) else f"waits beyond {WAIT_S} s"
        except BaseException as error:
            return f"raises {type(error).__name__}: {str(error)[:200]}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
    if status not in STATUSES:
        return f"status {status}: {err.getvalue()[:300].strip()}"
    lines = err.getvalue().splitlines()  # an import tells all mistakes of its file
    is_line = bool(lines) and all(each.startswith("error: ") for each in lines)
    is_line = is_line and (len(lines) == 1 or case.words[:1] == ["import"])
    if status == 2 and not (is_line and out.getvalue() == ""):
        return f"status 2 without one plain line: {(err.getvalue() + out.getvalue())[:300]}"
    said = out.getvalue() + err.getvalue()
    if not said.replace("\n", "").isprintable():
        return f"what a terminal obeys: {ascii(said)[:300]}"
    return "a traceback" if "Traceback" in said else None


def _end(number: int, _frame: FrameType | None) -> None:
    raise TooLongError(number)


@contextlib.contextmanager
def _folder(case: Case) -> Iterator[None]:
    """Work in a folder that holds the files of *case*, and goes with all that is in it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, content in case.files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content)
        yield


def fuzz(seed: int, num_lines: int, num_files: int, *, with_runs: bool) -> Iterator[str]:
    """Yield a line for each case that breaks the contract; the same for the same seed."""
    for number in range(num_lines + num_files):
        random = Random(f"{seed} {number}")  # noqa: S311 - no secret
        is_line = number < num_lines
        case = (
            command_line(random, with_runs=with_runs)
            if is_line
            else file_case(random, with_runs=with_runs)
        )
        found = outcome(case)
        if found is not None:
            content = "".join(f" {name}={text[:200]!r}" for name, text in case.files.items())
            yield f"{number}: {case.words}:{'' if is_line else content} {found}"


def run(words: Sequence[str] | None = None) -> int:
    """Fuzz as *words* ask; return 1 if something was found."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=1000, help="command lines")
    parser.add_argument("--files", type=int, default=1000, help="files")
    chosen = parser.parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import_module("torch")  # an import that is stopped half-way breaks all that follow
    count = 0
    for line in fuzz(chosen.seed, chosen.lines, chosen.files, with_runs=True):
        count += 1
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{chosen.lines} command lines, {chosen.files} files, {count} at fault\n")
    return 1 if count else 0
