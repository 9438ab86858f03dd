"""What a process of the command imports: no more than the command needs."""

import subprocess
import sys

import pytest

from meshwright.command_line import run_command_line
from meshwright.planner.options import (
    LAYOUT,
    FileOptions,
    JobOptions,
    OutputOptions,
    as_command,
)
from meshwright.planner.options.words import Command

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
        (SEARCH, {"numpy", "rich", "simpy"}),
        (f"{SEARCH} --json -", {"numpy", "simpy"}),
        (f"{STEP} --json -", {"numpy", "simpy"}),
        ("models", {"numpy", "rich", "simpy"}),
        ("stacks", {"numpy", "rich", "simpy"}),
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


@pytest.mark.parametrize(
    "words",
    [
        "gpt2 --gpus 8 --tp=2 --set a=b --set c=d --out out --json -",
        "--plan=-x --force --no-sequence-parallel --seq-len -1 -- gpt2",
        "gpt2 --precision bf16 --out=--tp --memory-limit=",
        "- --stages 1,2 --max layers",
    ],
)
def test_words_read_without_typer_are_what_typer_makes_of_them(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def run(job: JobOptions, layout: object, files: FileOptions, output: OutputOptions) -> int:
        given.append((job, layout, files, output))
        return 0

    command = as_command(run, JobOptions, LAYOUT, FileOptions, OutputOptions)
    line = ["simulate", *words.split()]
    assert command.typed(line[1:]) is not None
    run_command_line({"simulate": ""}, lambda _name: command, line)
    monkeypatch.setattr(Command, "typed", lambda _self, _words: None)
    run_command_line({"simulate": ""}, lambda _name: command, line)
    assert given[0] == given[1]
