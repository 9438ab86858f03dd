"""The half of ``scripts/same`` in a checkout: imports once, then forks for each command.

``python -P server.py CHECKOUT SOCKET [--torch]`` answers on a socket.  A request is a
line of JSON with words and folders; the answer, a number, is the exit status.
"""

import contextlib
import importlib
import json
import os
import socketserver
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

THIRD_PARTY = (
    *("numpy", "simpy", "pydantic", "typer", "typer.main", "rich.console", "rich.progress"),
    *("rich.table", "rich.text", "pandas", "matplotlib.pyplot", "matplotlib.backends.backend_agg"),
)
STEP = ["simulate", "gpt2", "--cluster", "dgx-a100", "--gpus", "2", "--global-batch", "4"]
WARM_UP = (
    [*STEP, "--pp", "2", "--trace", "trace.json", "--out", "step"],
    ["search", *STEP[1:], "--max-micro-batch", "1", "--top", "1", "--out", "search"],
    [*STEP, "--stack", "parameter-server"],
    ["matmul", "4x5", "5x8", "--devices", "2", "--out", "matmul"],
    ["stacks"],
)
WARM_UP_TORCH = (
    [*STEP, "--pp", "2", "--out", "step"],
    ["validate", "step/plan.json", "--rank", "0"],
)


class Handler(socketserver.StreamRequestHandler):
    """One command, in a process of its own."""

    def handle(self) -> None:
        """Run what the request asks for and answer with its exit status."""
        request = json.loads(self.rfile.readline())
        os.chdir(request["folder"])
        redirect(1, request["stdout"])
        redirect(2, request["stderr"])
        self.wfile.write(b"%d\n" % run(request["words"]))


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Forks for each request, so that a command finds what was imported and nothing else."""

    def __init__(self, address: str, parent: int) -> None:
        """Listen at *address* for as long as the process *parent* lives."""
        super().__init__(address, Handler)
        self._parent = parent

    def service_actions(self) -> None:
        """End with the process that started this one, however that ended."""
        super().service_actions()
        if os.getppid() != self._parent:
            raise SystemExit(1)


def redirect(descriptor: int, path: str) -> None:
    """Make a standard stream of this process write to *path*."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(opened, descriptor)
    os.close(opened)


def run(words: Sequence[str]) -> int:
    """Return the exit status of a command, as the interpreter would end with it."""
    sys.argv = ["meshwright", *words]
    try:
        status = int(front_door().main(words))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # what a traceback says is compared, too
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def front_door() -> ModuleType:
    """Return the project's module, whichever way a checkout lays it out."""
    return importlib.import_module("meshwright")


def import_ahead(commands: Sequence[Sequence[str]]) -> None:
    """Import what *commands* need, without running one here: a child does and names its modules.

    So modules load once for all commands, while what a run leaves behind in them, such as
    caches, is in no command's process.
    """
    known = set(sys.modules)
    for name in in_child(lambda: modules_of(commands)):
        if name not in known:
            with contextlib.suppress(ImportError):  # names that only some library's code can make
                importlib.import_module(name)


def modules_of(commands: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of all modules loaded once *commands* have run in a folder that goes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        redirect(1, "stdout")
        for words in commands:
            if run(words):
                raise SystemExit(f"status of {words}: {Path('stdout').read_text()}")
    return [name for name in sys.modules if name != "__mp_main__"]


def in_child(work: Callable[[], list[str]]) -> list[str]:
    """Return what *work* returns in a fork of this process; nothing where it fails."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                json.dump(work(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return list(json.loads(text)) if text else []


def main(checkout: str, socket: str, *, with_torch: bool) -> None:
    """Import, listen, and serve until terminated.

    Raises:
        SystemExit: With one line, where *checkout* or a library is not what is imported.
    """
    parent = os.getppid()
    try:
        for name in (*THIRD_PARTY, *(("torch",) if with_torch else ())):
            importlib.import_module(name)
        place = Path(front_door().__file__ or "").resolve()
    except ImportError as error:
        raise SystemExit(f"{error}; run by a Python that has the libraries") from None
    if not place.is_relative_to(Path(checkout).resolve()):
        raise SystemExit(f"meshwright comes from {place}, not from {checkout}")
    import_ahead(WARM_UP_TORCH if with_torch else WARM_UP)
    with Server(socket, parent) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], with_torch="--torch" in sys.argv)
