"""One of two checkouts: where it comes from, and what a block of commands does in it."""

import contextlib
import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from same_parts.blocks import INPUTS, PARTS, Block, NotComparable
from same_parts.outcomes import (
    STATUS,
    STORE,
    Outcome,
    Ran,
    has_ended,
    place_of,
    read_outcomes,
    write_outcomes,
)

ROOT = PARTS.parents[1]
LONGEST_S = 600
START_S = 180


@dataclass(kw_only=True)
class Side:
    """One of the two checkouts, its servers, and what is kept of an earlier run."""

    name: str
    scratch: Path
    folder: Path | None = None  # where it lies; None until the commit is unpacked
    commit: str | None = None  # under which outcomes are kept; None where no commit is the tree
    reads_kept: bool = False
    _servers: dict[bool, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _is_stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, block: Block, number: int) -> Ran:
        """Return what the commands of *block* leave in this checkout."""
        kept = None if self.commit is None else place_of(self.commit, block)
        if kept is not None and self.reads_kept and kept.exists():
            outcomes = read_outcomes(kept)
            return Ran(outcomes, [0.0] * len(outcomes))
        address = self._server(with_torch=block.needs_torch)
        ran = run_block(block, address, self.scratch / f"{self.name}-{number}")
        if kept is not None and all(map(has_ended, ran.outcomes)):
            write_outcomes(kept, ran.outcomes)
        return ran

    def _server(self, *, with_torch: bool) -> Path:
        """Return the socket of a server that listens, started at the first call."""
        address = self.scratch / f"{self.name}-{'torch' if with_torch else 'plain'}"
        with self._lock:
            if self._is_stopped:
                raise NotComparable("interrupted")
            if self.folder is None:
                assert self.commit is not None  # a side is a folder or a commit
                self.folder = unpacked(self.commit, self.scratch / f"{self.name}-checkout")
            if with_torch not in self._servers:
                self._servers[with_torch] = start_server(self.folder, address, torch=with_torch)
        return address

    def stop(self) -> None:
        """End the servers and what they still run."""
        with self._lock:  # one that starts is waited for, and none starts afterwards
            self._is_stopped = True
            for process in self._servers.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_block(block: Block, address: Path, folder: Path) -> Ran:
    """Return what each command of *block* leaves in *folder*, run by the server at *address*."""
    shutil.copytree(INPUTS, folder / "inputs")
    before, ran = files_below(folder), Ran([], [])
    for words in block.commands:
        start_s = time.perf_counter()
        outcome = ask(address, words, folder)
        ran.seconds.append(time.perf_counter() - start_s)
        after = files_below(folder)
        changed = {name for name, data in after.items() if before.get(name) != data}
        outcome |= {f"file {name}": readable(name, after[name]) for name in changed}
        outcome |= {f"removed {name}": b"" for name in before.keys() - after.keys()}
        ran.outcomes.append(outcome)
        before = after
    shutil.rmtree(folder)
    return ran


def ask(address: Path, words: Sequence[str], folder: Path) -> Outcome:
    """Return exit status and output of a command that a server runs in *folder*."""
    out, err = folder.with_suffix(".stdout"), folder.with_suffix(".stderr")
    request = {"words": words, "folder": str(folder), "stdout": str(out), "stderr": str(err)}
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(LONGEST_S)
        link.connect(str(address))
        link.sendall(json.dumps(request).encode() + b"\n")
        try:
            status = link.makefile("rb").read()
        except TimeoutError:
            status = b"none: no end\n"
    return {
        STATUS: status or b"none: the process died\n",
        "standard output": out.read_bytes() if out.exists() else b"",
        "standard error": err.read_bytes() if err.exists() else b"",
    }


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the content of each file by its name; a folder is a name with a slash, and empty."""
    return {
        path.relative_to(folder).as_posix() + ("/" if path.is_dir() else ""): (
            b"" if path.is_dir() else path.read_bytes()
        )
        for path in folder.rglob("*")
    }


def readable(name: str, data: bytes) -> bytes:
    """Return *data*, unpacked where it is compressed: a packer may note the time."""
    return gzip.decompress(data) if name.endswith(".gz") else data


def start_server(checkout: Path, address: Path, *, torch: bool) -> "subprocess.Popen[bytes]":
    """Return a server of *checkout* that answers at *address*.

    Raises:
        NotComparable: If it cannot import what it needs.
    """
    log, home = address.with_suffix(".log"), address.with_suffix(".home")
    home.mkdir()
    command = [sys.executable, "-P", str(PARTS / "server.py"), str(checkout), str(address)]
    with log.open("wb") as stream:
        process = subprocess.Popen(  # noqa: S603 - our own server
            [*command, "--torch"] if torch else command,
            cwd=home,
            env=environment(checkout, home),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    until_s = time.monotonic() + START_S
    while not address.exists():
        if process.poll() is not None or time.monotonic() > until_s:
            process.kill()
            said = log.read_text(errors="replace").strip().splitlines() or ["it says nothing"]
            raise NotComparable(f"{checkout} does not start: {said[-1]}")
        time.sleep(0.02)
    return process


def environment(checkout: Path, home: Path) -> dict[str, str]:
    """Return all that a command may know of the machine; the same for both sides but for paths."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "PYTHONPATH": str(checkout),
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "COLUMNS": "100",
        "LINES": "40",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": str(STORE / "matplotlib"),  # its list of fonts takes seconds to make
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def git(*words: str, folder: Path = ROOT) -> str | None:
    """Return what git prints, or None where it fails."""
    done = subprocess.run(  # noqa: S603 - our own command
        ["git", "-C", str(folder), *words],  # noqa: S607 - the user's git
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else None


def unpacked(commit: str, folder: Path) -> Path:
    """Return *folder* with the files of *commit*; the repository's own state is not touched."""
    archive = folder.with_suffix(".tar")
    if git("archive", "--format=tar", "-o", str(archive), commit) is None:
        raise NotComparable(f"git cannot unpack {commit}")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder


def is_checkout(folder: Path) -> bool:
    """Return whether the project lies in *folder*, as one module or as a package."""
    return any((folder / each).is_file() for each in ("meshwright.py", "meshwright/__init__.py"))


def base_side(base: str, scratch: Path) -> Side:
    """Return the side that is compared with: a folder or a revision.

    Raises:
        NotComparable: If *base* is neither.
    """
    if is_checkout(Path(base)):
        return Side(name="base", scratch=scratch, folder=Path(base).resolve())
    commit = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}")
    if not commit:
        raise NotComparable(f"{base!r} is no revision, and no folder with a checkout")
    return Side(name="base", scratch=scratch, commit=commit, reads_kept=True)


def new_side(folder: Path, scratch: Path) -> Side:
    """Return the side that is checked; what it does is kept for later if a commit is its tree.

    Raises:
        NotComparable: If there is no checkout.
    """
    if not is_checkout(folder):
        raise NotComparable(f"{folder} holds no checkout")
    top = git("rev-parse", "--show-toplevel", folder=folder)
    is_clean = top == str(folder.resolve()) and not git("status", "--porcelain", folder=folder)
    commit = git("rev-parse", "HEAD", folder=folder) if is_clean else None
    return Side(name="new", scratch=scratch, folder=folder.resolve(), commit=commit)
