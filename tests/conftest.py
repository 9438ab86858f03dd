"""What all tests share: Hypothesis measures no time, and nothing is computed by two workers."""

import gc
import os

import pytest
from hypothesis import settings

# A machine that others use stalls for longer than the 200 ms that an example may take by default.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
# What is printed does not depend on the terminal in which tests are started.
os.environ.pop("COLUMNS", None)


def pytest_collection_finish() -> None:
    """Leave what stands for good, torch and thousands of tests, out of every look for garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests that share what their module computes to one worker, where none is chosen."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None and _shares(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def _shares(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    known = item._fixtureinfo.name2fixturedefs.values()
    return any(each.scope == "module" for found in known for each in found)
