"""What all tests share: Hypothesis measures no time, and threads and imports cost little."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from xdist.scheduler import Scheduling

# Imports make many objects and hardly any garbage: a quarter of the time to collect all tests.
gc.disable()
# A machine that others use stalls for longer than the 200 ms that an example may take by default.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
# What is printed does not depend on the terminal in which tests are started.
os.environ.pop("COLUMNS", None)
# Tensors here are small, and the other core has a worker of its own: threads only wait for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Python's own, and less than the command's: a simulated step makes 100,000 objects and no cycles.
OFTEN, RARELY = gc.get_threshold(), (100_000, 20, 20)
# They look at predictions that a process makes once for both.
TOGETHER = dict.fromkeys(
    ("tests/validate/test_peaks.py", "tests/validate/test_scoreboard.py"),
    "tests/test_documents_are_current.py",
)


def file_of(nodeid: str) -> str:
    """Return the file of a test, or the one that it goes with."""
    file = nodeid.partition("::")[0]
    return TOGETHER.get(file, file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files that hold slow tests, then the largest: one at the end idles a worker."""
    slow = {file_of(each.nodeid) for each in items if each.get_closest_marker("slow")}
    sizes = Counter(file_of(each.nodeid) for each in items)

    def place(item: pytest.Item) -> tuple[bool, int]:
        file = file_of(item.nodeid)
        return file not in slow, -sizes[file]

    items.sort(key=place)  # stable: within a file as they stand there


def pytest_collection_finish() -> None:
    """Look for garbage from now on."""
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _what_stands_is_no_garbage() -> None:
    """Leave what stands for good, torch and what files before have kept, out of every look.

    A counted step looks through all else, some times.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    """Compute on one thread, whatever a file before has asked PyTorch for: a calibration, of all.

    Threads that wait in a loop for a core that has another worker take ten times the time.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Look for garbage as rarely as the command does, but where peaks of PyTorch depend on it.

    There each counted step looks through all that stands, some tenths of a second where many tests
    went before: what they left is passed over. To freeze looks at nothing; garbage then stays.
    """
    needs_torch = item.nodeid.startswith("tests/validate") or item.get_closest_marker("skipif")
    gc.set_threshold(*(OFTEN if needs_torch else RARELY))
    if needs_torch:
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> "Scheduling | None":
    """Give files that belong together to one worker, in the order of above."""
    from xdist.scheduler import LoadFileScheduling

    class LoadTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return file_of(nodeid)

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return LoadTogether(config, log)


@pytest.fixture
def no_pictures() -> Iterator[None]:
    """Let ``--out`` leave empty pictures; those of pages, and test_plots.py, are drawn."""
    from documents.terminal import without_pictures

    with without_pictures():
        yield
