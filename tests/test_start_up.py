"""What a process of the command imports: no more than the command needs."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, meshwright
status = meshwright.main()
print(*(name for name in sys.modules if name.count(".") < 2), file=sys.stderr)
sys.exit(status)
"""
SLOW = {"matplotlib", "pandas", "torch", "yaml", "tomlkit", "tree_sitter", "simpy", "numpy"}
SLOW |= {"pydantic", "rich", "typer"}
SEARCH = "search gpt2 --cluster dgx-a100 --gpus 8 --global-batch 64"
STEP = SEARCH.replace("search", "simulate")


def imported(words: str) -> set[str]:
    """Return the modules of a whole process, those of ours with one dot at most."""
    command = [sys.executable, "-c", PROGRAM, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("--version", set()),
        ("--help", {"typer"}),
        (SEARCH, {"numpy", "pydantic", "rich", "simpy"}),
        (f"{SEARCH} --json -", {"numpy", "pydantic", "simpy"}),
        (f"{STEP} --json -", {"numpy", "pydantic", "simpy"}),
        ("models", {"numpy", "pydantic", "rich", "simpy"}),
    ],
)
def test_a_command_imports_no_slow_package_that_it_has_no_need_of(
    words: str, needed: set[str]
) -> None:
    modules = imported(words)
    assert modules & SLOW <= needed
    assert "meshwright.validate" not in modules


def test_the_version_and_the_list_of_commands_import_nothing_of_ours() -> None:
    ours = {name for words in ("--version", "--help") for name in imported(words)}
    ours = {name for name in ours if name.startswith("meshwright")}
    assert ours == {"meshwright", "meshwright.command_line", "meshwright.ending"}
