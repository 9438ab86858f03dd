"""What is compared of a command, and what is kept of it from run to run."""

import gzip
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from same_parts.blocks import INPUTS, PARTS, Block, NotComparable

STORE = PARTS.parents[1] / ".same"
COMMITS_KEPT = 10
LIBRARIES = ("matplotlib", "numpy", "pandas", "pydantic", "rich", "simpy", "torch", "typer")

Outcome = dict[str, bytes]  # status, output and files of one command
STATUS = "exit status"


class Ran(NamedTuple):
    """What the commands of a block left, and the seconds that each took; 0 if they were kept."""

    outcomes: list[Outcome]
    seconds: list[float]


def has_ended(outcome: Outcome) -> bool:
    """Return whether a command came to its own end, rather than to a signal or the limit."""
    return outcome[STATUS].strip().isdigit()


def library_versions() -> list[str]:
    """Return the versions of the libraries that shape results.

    Raises:
        NotComparable: If one is not installed for this Python.
    """
    try:
        return [version(name) for name in LIBRARIES]
    except PackageNotFoundError as error:
        raise NotComparable(
            f"{sys.executable} lacks {error.name}; run by a Python that has it"
        ) from None


def place_of(commit: str, block: Block) -> Path:
    """Return where the outcomes of a block are kept: named for all that they depend on."""
    digest = hashlib.sha256(repr((block.lines, sys.version, library_versions())).encode())
    for path in (PARTS / "server.py", PARTS / "sides.py", *sorted(INPUTS.rglob("*"))):
        digest.update(path.name.encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return STORE / commit / f"{digest.hexdigest()[:32]}.json.gz"


def read_outcomes(path: Path) -> list[Outcome]:
    """Return what `write_outcomes` wrote."""
    path.parent.touch()  # used last, removed last
    kept = json.loads(gzip.decompress(path.read_bytes()))
    return [{part: text.encode("latin-1") for part, text in each.items()} for each in kept]


def write_outcomes(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Keep *outcomes*: as JSON, each byte a letter."""
    texts = [{part: data.decode("latin-1") for part, data in each.items()} for each in outcomes]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_bytes(gzip.compress(json.dumps(texts).encode(), compresslevel=4))
    written.replace(path)


def forget_old_commits() -> None:
    """Remove what is kept of all but the commits used last."""
    commits = [path for path in STORE.iterdir() if re.fullmatch("[0-9a-f]{40,}", path.name)]
    commits.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in commits[COMMITS_KEPT:]:
        shutil.rmtree(path)
