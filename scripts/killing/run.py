"""Kill -9 a process of a command at random moments; say who runs on and what is lost.

Each command runs undisturbed once. Then, N times, one of its processes, the first or another, is
killed at a moment of that time. Of what it started nothing may run five seconds later, or five
seconds after its end where it was not the first; and the same command again must end as the
undisturbed one did: with its status, with the bytes of its results where two runs leave the same,
and with every row that was measured before.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import unified_diff
from pathlib import Path
from random import Random
from typing import NamedTuple

from killing.commands import COMMANDS, ROOT, Command
from killing.processes import MARK, left_running, marked

LONG_S = 300.0  # of a command that nobody kills
MOST_SAID = 300  # letters of what differs
_HEADS = {"--", "++", "@@"}
GONE_S = 5.0


class Undisturbed(NamedTuple):
    """A run that nobody kills: how long it took, its status, what it left."""

    seconds: float
    status: int
    lasting: dict[str, bytes]
    names: set[str]


def undisturbed(command: Command, folder: Path) -> Undisturbed:
    """Run a command in a new *folder*."""
    folder.mkdir()
    if command.before:
        _run(command.before, folder)
    begin_s = time.monotonic()
    done = _run(command.words, folder)
    seconds = time.monotonic() - begin_s
    names = {path.name for path in folder.iterdir()}
    return Undisturbed(seconds, done.returncode, command.lasting(folder / "out"), names)


def kill_once(command: Command, usual: Undisturbed, folder: Path, random: Random) -> Iterator[str]:
    """Run a command in a new *folder*, kill a process of it, and run it again.

    Yields what was done, and then each thing that is not as it should be; nothing where it ended
    before its moment, on a machine that is faster now.
    """
    folder.mkdir()
    if command.before:
        _run(command.before, folder)
    moment_s = random.uniform(0, usual.seconds)
    with _start(command.words, folder) as first:
        with suppress(subprocess.TimeoutExpired):
            first.wait(moment_s)
            return
        pids = marked(str(folder)) or [first.pid]
        victim = random.choice(pids)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        whose = "the first" if victim == first.pid else "another"
        yield f"after {moment_s:.1f} of {usual.seconds:.1f} s {whose} of {len(pids)}"
        try:
            status = first.wait(LONG_S)
            yield from [] if victim == first.pid else [f"status {status}"]
        except subprocess.TimeoutExpired:
            yield f"FAULT: does not end within {LONG_S:.0f} s"
        if left := left_running(lambda: marked(str(folder)), GONE_S):
            yield f"FAULT: {len(left)} processes run on"
    yield from _again(command, usual, folder)


def _again(command: Command, usual: Undisturbed, folder: Path) -> Iterator[str]:
    """Run a command that was killed again; yield what is not as in an undisturbed run."""
    kept = command.kept(folder / "out")
    done = _run(command.words, folder)
    if done.returncode != usual.status:
        yield f"FAULT: status {done.returncode}, not {usual.status}: {done.stderr[-300:]}"
    yield from again_differs(command, usual, folder, kept)


def again_differs(
    command: Command, usual: Undisturbed, folder: Path, kept: Sequence[str]
) -> Iterator[str]:
    """Yield what is not in *folder* as an undisturbed run leaves it, and whether rows are kept."""
    lasting = command.lasting(folder / "out")
    for name in sorted({*lasting, *usual.lasting}):
        if lasting.get(name) != usual.lasting.get(name):
            yield f"FAULT: {name} differs{_difference(usual.lasting.get(name), lasting.get(name))}"
    rows = command.kept(folder / "out")
    if lost := [row for row in kept if row not in rows]:
        yield f"FAULT: {len(lost)} of {len(kept)} rows are lost"
    if kept:
        yield f"{len(kept)} rows kept"
    if names := {path.name for path in folder.iterdir()} - usual.names:
        yield f"FAULT: {', '.join(sorted(names))} left behind"


def _difference(usual: bytes | None, found: bytes | None) -> str:
    """Return the first lines that differ; nothing where one of the files is not there."""
    if usual is None or found is None:
        return ""
    texts = [each.decode("utf-8", "replace").splitlines() for each in (usual, found)]
    lines = [line for line in unified_diff(*texts, n=0, lineterm="") if line[:2] not in _HEADS]
    return ": " + " ".join(" ".join(lines).split())[:MOST_SAID]


def _start(words: Sequence[str], folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(  # noqa: S603 - our own
        [sys.executable, "-P", "-m", "meshwright", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), MARK: str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        text=True,
    )


def _run(words: Sequence[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-P", "-m", "meshwright", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        cwd=folder,
        text=True,
        timeout=LONG_S,
        check=False,
    )


def run(words: Sequence[str] | None = None) -> int:
    """Kill as *words* ask; return 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(prog="scripts/kill", description=__doc__)
    parser.add_argument("count", metavar="N", type=int, help="how many moments of each command")
    parser.add_argument("--seed", type=int, default=0, help="of the moments [0]")
    parser.add_argument("--of", nargs="+", choices=COMMANDS, default=[*COMMANDS])
    chosen = parser.parse_args(words)
    num_faults = 0
    with tempfile.TemporaryDirectory(prefix="kill-") as scratch:
        for name in chosen.of:
            command, random = COMMANDS[name], Random(f"{chosen.seed} {name}")  # noqa: S311
            usual = undisturbed(command, Path(scratch, name))
            tries, number = itertools.count(), 0
            while number < chosen.count:
                folder = Path(scratch, f"{name}-{next(tries)}")
                if said := list(kill_once(command, usual, folder, random)):
                    number += 1
                    num_faults += sum(each.startswith("FAULT") for each in said)
                    sys.stdout.write(f"{name} {number}: {'; '.join(said)}\n")
                    sys.stdout.flush()
    sys.stdout.write(f"{chosen.count} moments of {', '.join(chosen.of)}: {num_faults} at fault\n")
    return int(num_faults > 0)
