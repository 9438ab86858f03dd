"""A plugin of pytest that notes which functions of the project each test that passes calls.

``pytest -p mutating.noting`` with the name of a file in the environment's ``CALLS``. What a test
starts in another process is not seen.
"""

import json
import os
from collections.abc import Generator
from cProfile import Profile
from pathlib import Path

import pytest

from mutating.places import called

CALLS = "MUTATE_CALLS"
FOUND: dict[str, tuple[float, list[str]]] = {}
SECONDS: dict[str, float] = {}
FAILED: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note what a test calls, with its fixtures."""
    profile = Profile(builtins=False, subcalls=False)
    profile.enable()
    try:
        return (yield)
    finally:
        profile.disable()
        FOUND[item.nodeid] = (SECONDS.get(item.nodeid, 0.0), called(profile))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long a test takes, and whether it passes."""
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0.0) + report.duration
    if not report.passed:
        FAILED.add(report.nodeid)


def pytest_sessionfinish() -> None:
    """Write what was noted."""
    noted = [[name, *each] for name, each in FOUND.items() if name not in FAILED]
    Path(os.environ[CALLS]).write_text(json.dumps(noted), encoding="utf-8")
