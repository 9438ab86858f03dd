"""Launch of a script as by ``torchrun``: environment, arguments, main program."""

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from torch.distributed.launcher.api import elastic_launch

from meshwright.simulator import PlanError

RANKS_PER_NODE = 8
PORT = "29500"


def check_script(words: Sequence[str]) -> None:
    """Raise PlanError unless *words* name a script, or ``-m`` and a module.

    Raises:
        PlanError: If there is no such file.
    """
    if not words:
        raise PlanError("SCRIPT is missing; allowed: meshwright count -- SCRIPT [ARGS]")
    if words[0] == "-m":
        if len(words) < 2:
            raise PlanError("-m names no module; allowed: meshwright count -- -m MODULE [ARGS]")
    elif not Path(words[0]).is_file():
        raise PlanError(f"script {words[0]!r} is not a file; allowed: a Python file, or -m MODULE")


def launched(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables that ``torchrun`` sets for *rank*, eight ranks a node.

    >>> [launched(9, 16)[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")]
    ['9', '1', '1']
    """
    on_node = min(RANKS_PER_NODE, world_size)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % on_node,
        "LOCAL_WORLD_SIZE": on_node,
        "GROUP_RANK": rank // on_node,
        "NODE_RANK": rank // on_node,
        "GROUP_WORLD_SIZE": -(-world_size // on_node),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
    }
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, "TORCHELASTIC_RUN_ID": "count"}
    return {name: str(number) for name, number in numbers.items()} | names


@contextmanager
def as_rank(words: Sequence[str], rank: int, world_size: int) -> Iterator[None]:
    """Give the code inside the environment and the arguments of a script that was launched."""
    arguments = list(words[1:] if words[0] == "-m" else words)
    first = str(Path.cwd()) if words[0] == "-m" else str(Path(words[0]).resolve().parent)
    with (
        patch.dict(os.environ, launched(rank, world_size)),
        patch.object(sys, "argv", arguments),
        patch.object(sys, "path", [first, *sys.path]),
    ):
        yield


def run_script(words: Sequence[str]) -> None:
    """Run a script, or a module after ``-m``, as the main program."""
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


@contextmanager
def launches_answered(rank: int, world_size: int) -> Iterator[None]:
    """Let what starts ranks as ``torchrun`` does (``accelerate launch``, too) be one of them.

    The script that it starts runs here, in the environment that it has prepared.

    Raises:
        PlanError: If it starts another number of ranks, or what is no Python script.
    """

    def start(launch: elastic_launch, *words: str) -> None:
        config, program = launch._config, launch._entrypoint  # noqa: SLF001
        started = config.max_nodes * config.nproc_per_node
        if started != world_size:
            raise PlanError(
                f"--world {world_size} is not what the launcher starts; allowed: {started}"
            )
        if program != sys.executable:
            raise PlanError(f"the launcher starts {program}; allowed: a Python script")
        # torchrun starts Python unbuffered.
        own = words[1:] if words[0] == "-u" else words
        with as_rank(own, rank, world_size):
            run_script(own)

    with patch.object(elastic_launch, "__call__", start):
        yield
