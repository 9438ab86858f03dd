"""What all tests share: Hypothesis measures no time, and threads and imports cost little."""

import gc
import os
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
    """Leave what stands for good, torch and thousands of tests, out of every look for garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


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
