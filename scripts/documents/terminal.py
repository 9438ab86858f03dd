"""The shell in which the commands of a page are typed, one after the other, in one folder."""

import atexit
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import meshwright
from documents.numbers import save_with_numbers
from documents.pages import PICTURE, DocumentError, commands_of, fences, read_page

PROGRAM = "meshwright "  # how a line begins that is run
COLUMNS = "118"  # wide enough that no report of the pages is folded
NAMED_FILE = re.compile(r"# (?P<name>[\w.-]+\.(toml|py))\n")
# Commands of pages, as the shell would match them, and why nothing runs them for the pages.
NOT_RUN = {
    "bash scripts/*": "installs the project anew; the gate is one of them",
    "docker *": "needs Docker; tests/test_repository.py reads the Dockerfile",
    ".venv-outside/bin/python *": "needs training frameworks; scripts/test-outside has them",
    "meshwright count --rank *": "needs training frameworks; scripts/test-outside has them",
    "sbatch *": "needs Slurm",
    "srun *": "needs Slurm",
    "meshwright sweep * --dask *": "needs a Dask scheduler; tests/planner/test_sweep.py has one",
    "python -m pytest tests/validate/test_on_gpu.py *": "needs a GPU",
    "python -m meshwright.validate.gpu_check *": "needs a GPU",
    "meshwright validate gpu/*": "needs a GPU",
    "python -m meshwright.validate.calibration.steps.check *": "takes six minutes, and measures",
    "meshwright calibrate *": "measures a machine, or reads what another program measured",
    "meshwright simulate * --cluster my-node/my-node.toml *": "reads a calibration",
    "meshwright validate * --collect *": "reads the results of a cluster",
    "meshwright validate */plan.json --backend *": "measures; test_validate_command has others",
    "meshwright validate */plan.json": "a plan of docs/agreement.md, whose tables are a region",
    "python -m meshwright.validate.agreement": "makes the tables of its page, which are a region",
}


class Step(NamedTuple):
    """What pages say of a simulated step."""

    step_time_s: float
    mfu_fraction: float
    bubble_fraction: float
    exposed_comm_s: float
    device_bytes: int
    tokens_per_s: float
    hfu_fraction: float
    model_flops_per_s_per_gpu: float

    @property
    def hardware_flops_per_s_per_gpu(self) -> float:
        """The rate with recomputation counted."""
        return self.model_flops_per_s_per_gpu * self.hfu_fraction / self.mfu_fraction


class BestLayout(NamedTuple):
    """The proven best layout of a search."""

    degrees: dict[str, int]
    step: Step


class Terminal:
    """A folder with the files that a page shows; a command is run once, after those it needs.

    Args:
        page: The text of the page.
    """

    def __init__(self, page: str) -> None:
        self._commands = commands_of(page)
        self._has_pictures = PICTURE.search(page) is not None
        self._outputs: dict[str, str] = {}
        self.folder = scratch_folder()
        for text in (*fences(page, "toml"), *fences(page, "python")):
            if named := NAMED_FILE.match(text):
                (self.folder / named["name"]).write_text(text, encoding="utf-8")

    def output(self, command: str) -> str:
        """Return what *command*, a line of the page, prints."""
        if command not in self._outputs:
            for earlier in self._needed(command):
                self.output(earlier)
            words = shlex.split(command)[1:]
            is_drawn = self._has_pictures or not out_folder(command)
            with pictures_with_numbers() if is_drawn else without_pictures():
                self._outputs[command] = run(words, self.folder)
        return self._outputs[command]

    def _needed(self, command: str) -> Iterator[str]:
        """Yield the commands that write a folder, or a file, which *command* reads."""
        words = shlex.split(command)
        for earlier in self._commands:
            if earlier == command:
                return
            out = "" if reason_not_to_run(earlier) else out_folder(earlier)
            if out and any(word == out or word.startswith(f"{out}/") for word in words):
                yield earlier


def scratch_folder() -> Path:
    """Return a new folder, which goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="meshwright-pages-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def pictures_with_numbers() -> Iterator[None]:
    """Let every picture carry the digest of its numbers."""
    with patch("meshwright.planner.plots.save_figure", save_with_numbers):
        yield


@contextlib.contextmanager
def without_pictures() -> Iterator[None]:
    """Let ``--out`` leave empty pictures: to draw them takes longer than all else it does."""
    with patch("meshwright.planner.plots.save_figure", lambda _, path: path.touch()):
        yield


def reason_not_to_run(command: str) -> str:
    """Return why the gate does not run a command of a page; empty if it does."""
    return next((why for like, why in NOT_RUN.items() if fnmatchcase(command, like)), "")


def out_folder(command: str) -> str:
    """Return what follows ``--out``, or nothing.

    >>> out_folder("meshwright search gpt2 --out found")
    'found'
    """
    words = shlex.split(command)
    return words[words.index("--out") + 1] if "--out" in words else ""


@cache
def terminal(page_name: str) -> Terminal:
    """Return the one terminal of a page."""
    return Terminal(read_page(page_name))


def run(words: Sequence[str], folder: Path | None = None, columns: str = COLUMNS) -> str:
    """Return what ``meshwright WORDS`` prints, typed in *folder*, by default nowhere special.

    Raises:
        DocumentError: If it is a mistake; that nothing fits, status 1, is a result.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        _columns(columns),
        contextlib.chdir(folder or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = meshwright.main(words)
    if status > 1 or (status and not out.getvalue()):
        told = err.getvalue().strip() or out.getvalue().strip()[-200:]
        raise DocumentError(f"meshwright {shlex.join(words)} returned {status}: {told}")
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def step_of(command: str) -> Step:
    """Return the step that ``meshwright COMMAND``, a ``simulate``, finds."""
    return _step(json.loads(run([*shlex.split(command), "--json", "-"])))


def best_of(command: str) -> BestLayout:
    """Return the best layout that ``meshwright COMMAND``, a ``search``, finds.

    Raises:
        DocumentError: If it is not proven.
    """
    found = json.loads(run([*shlex.split(command), "--top", "1", "--json", "-"]))
    if not found["optimal"]:
        raise DocumentError(f"meshwright {command}: nothing is proven")
    best = found["plans"][0]
    degrees = {name: value for name, value in best["plan"].items() if isinstance(value, int)}
    return BestLayout(degrees, _step(best))


def _step(document: dict[str, object]) -> Step:
    """Read the document of a step, whose keys are the names of `Step`, bytes in its memory."""
    memory = document["memory"]
    assert isinstance(memory, dict)
    flat = {**document, **memory}
    return Step(**{name: flat[name] for name in Step._fields})


@contextlib.contextmanager
def _columns(columns: str) -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = columns
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
