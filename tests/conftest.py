"""What all tests share: Hypothesis measures no time, and imports are no garbage."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Imports make many objects and hardly any garbage: a quarter of the time to collect all tests.
gc.disable()
# A machine that others use stalls for longer than the 200 ms that an example may take by default.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
# What is printed does not depend on the terminal in which tests are started.
os.environ.pop("COLUMNS", None)


def pytest_collection_finish() -> None:
    """Leave what stands for good, torch and thousands of tests, out of every look for garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def no_pictures() -> Iterator[None]:
    """Let ``--out`` leave empty pictures; those of pages, and test_plots.py, are drawn."""
    from documents.terminal import without_pictures

    with without_pictures():
        yield
