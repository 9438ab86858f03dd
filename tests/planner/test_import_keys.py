"""Whatever is dropped from a file, misspelt or changed in it: nothing of it is lost in silence."""

import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from meshwright import main
from meshwright.planner.cli import importer
from meshwright.planner.configuration import (
    LAUNCHERS,
    Effect,
    Option,
    json_keys,
    known_option,
    load_options,
    read_json,
    read_toml,
    read_yaml,
    toml_text,
    yaml_text,
)
from meshwright.planner.importing import FORMATS, Imported
from meshwright.planner.options import ImportOptions
from meshwright.planner.reports import SavedPlan
from meshwright.planner.shell import read_commands
from meshwright.simulator import PlanError

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = GOLDEN / "imports"
OPTIONS = {
    file: shlex.split(str(rows[0].get("options", "")))
    for file, rows in tomllib.loads((GOLDEN / "import_plans.toml").read_text()).items()
}
FORMS = {
    ".json": (read_json, json_keys),
    ".toml": (read_toml, toml_text),
    ".yaml": (read_yaml, yaml_text),
}
PROGRAM = (".py", ".train", ".run", "-cli")  # how the names of programs end
OVERRIDE = r"[a-z][\w.]*="  # of a program that takes them beside its options
LEAST = 20
LAUNCHED = tuple({*LAUNCHERS.values()})
# Keys that are read and change nothing in some plans.
UNUSED = {
    "max-position-embeddings": "positions that are not learned have no weights",
    "model.tokenizer_path": "the vocabulary of a built-in model is taken for its own",
    "ckpt-format": "Megatron-FSDP has checkpoints of its own, which are written beside it",
}


class Mutant(NamedTuple):
    """A file with one key dropped, misspelt or changed."""

    key: str
    how: str
    text: str
    value: object = None


def changed(value: object) -> object:
    """Return another value of a kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value * 2 if value > 0 else 1
    if isinstance(value, list):
        return value[1:] if len(value) > 1 else ["other"]
    text = str(value)
    if text.isdecimal():
        return str(int(text) * 2 or 1)
    return {"true": "false", "false": "true", "": "x"}.get(text, f"{text}x")


def misspelt(key: str) -> str:
    return f"{key[:-1]}q{key[-1]}"


def of_configuration(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of a configuration, the first as it is."""
    read, write = FORMS[path.suffix]
    keys = {key: each for key, each in read(path.read_text()).keys.items() if each != {}}
    yield Mutant("", "whole", write(keys))
    for key, value in keys.items():
        others = {name: each for name, each in keys.items() if name != key}
        yield Mutant(key, "dropped", write(others), value)
        yield Mutant(key, "misspelt", write({**others, misspelt(key): value}))
        yield Mutant(key, "changed", write({**keys, key: changed(value)}))


def of_script(path: Path, words: list[str]) -> Iterator[Mutant]:
    """Yield the mutants of the commands that a script runs, the first as they are."""
    defines = dict(each.split("=", 1) for each in words if "=" in each)
    commands = [
        [each.text for each in (*command.launcher, *command.words)]
        for command in read_commands(path.read_text(), file=path, defines=defines)
    ]

    def text_of(number: int, command: list[str]) -> str:
        return "\n".join(map(shlex.join, [*commands[:number], command, *commands[number + 1 :]]))

    yield Mutant("", "whole", text_of(0, commands[0]))
    for number, command in enumerate(commands):
        for place, word in enumerate(command):
            # Of an option that stands twice the last counts.
            if re.match(f"--[a-zA-Z]|{OVERRIDE}", word) and word not in command[place + 1 :]:
                for each in of_option(command, place):
                    yield each._replace(text=text_of(number, shlex.split(each.text)))


def of_option(words: list[str], place: int) -> Iterator[Mutant]:
    """Yield a command with one option or override dropped, misspelt and changed."""
    name, sign, value = words[place].partition("=")
    end = place + 1
    while end < len(words) and not sign and not words[end].startswith("-"):
        if words[end].endswith(PROGRAM) or re.match(OVERRIDE, words[end]):
            break
        end += 1
    before, values, after = words[:place], words[place + 1 : end], words[end:]
    key = name.removeprefix("--")
    dashes = name.removesuffix(key)
    yield Mutant(key, "dropped", shlex.join([*before, *after]))
    wrong = f"{dashes}{misspelt(key)}{sign}{value}"
    yield Mutant(key, "misspelt", shlex.join([*before, wrong, *values, *after]))
    if sign:
        yield Mutant(key, "changed", shlex.join([*before, f"{name}={changed(value)}", *after]))
    elif values:
        other = [str(changed(values[0])), *values[1:]]
        yield Mutant(key, "changed", shlex.join([*before, name, *other, *after]))


class Door:
    """The command, with the options that a file needs."""

    def __init__(self, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / f"mutant{path.suffix}"
        words = list(OPTIONS[path.name])
        while path.suffix == ".sh" and "--define" in words:  # they are in the expanded command
            place = words.index("--define")
            del words[place : place + 2]
        heard: list[tuple[ImportOptions, dict[str, object]]] = []

        def hear(options: ImportOptions, *given: dict[str, object]) -> int:
            heard.append((options, {name: each for part in given for name, each in part.items()}))
            return 0

        monkeypatch.setattr(importer, "run_import", hear)
        assert main(["import", str(self.file), "--cluster", "dgx-h100", *words]) == 0
        self.options, self.given = heard[0]

    def enter(self, text: str) -> tuple[Imported, SavedPlan] | None:
        """Return what a text is, None where it is refused."""
        self.file.write_text(text)
        try:
            return importer._imported(replace(self.options), None, self.given)
        except PlanError:
            return None


def rows_of(framework: str, key: str) -> list[Option]:
    """Return what files of options say of a key: a framework's, a script's and launchers'."""
    own = [FORMATS[name].profile.tables.values() for name in (framework, "transformers")]
    files = {each for tables in own for table in tables for each in table.options}
    found = (known_option(key, load_options(each)) for each in (*files, *LAUNCHED))
    return [each for each in found if each is not None]


def is_elsewhere(keys: set[str], whole: Imported, less: Imported) -> bool:
    """Return whether --explain tells who now says all that keys said: a default, or others."""
    now = {row.name for row in less.rows}
    starts = tuple(f"{key}=" for key in keys)
    told = {
        row.name for row in whole.rows if any(starts_with(each, starts) for _, each in row.said)
    }
    return bool(told) and told <= now


def starts_with(words: str, starts: tuple[str, ...]) -> bool:
    """Return whether words of --explain, behind the name of a file, start with a key."""
    return words.startswith(starts) or words.rpartition(": ")[2].startswith(starts)


def is_lost(mutant: Mutant, whole: Imported, found: Imported) -> bool:
    """Return whether nothing tells why a mutant is the plan that the whole file is."""
    rows = rows_of(found.framework, mutant.key)
    keys, effects = {each.key for each in rows}, {each.effect for each in rows}
    if mutant.how == "misspelt":
        return True
    if Effect.NONE in effects or keys & {*UNUSED}:
        return False
    is_launchers = any(mutant.key in load_options(each) for each in LAUNCHED)
    return mutant.how == "changed" or not (
        mutant.value == "auto"  # it says as little as nothing
        or Effect.HELD in effects  # and had a value that is allowed
        or is_launchers  # what it said of the ranks others say, too
        or is_elsewhere(keys, whole, found)
    )


@pytest.mark.slow
@pytest.mark.parametrize("file", OPTIONS)
def test_no_key_is_lost_in_silence(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, changes the plan, is on the list of what changes nothing, or the default."""
    path, folder = FILES / file, tmp_path / "files"
    shutil.copytree(FILES, folder)  # what a file names lies beside it
    mutants = of_script(path, OPTIONS[file]) if path.suffix == ".sh" else of_configuration(path)
    door = Door(path, folder, monkeypatch)
    whole = door.enter(next(mutants).text)
    assert whole is not None
    lost = []
    for each in mutants:
        found = door.enter(each.text)
        if found is None or found[1] != whole[1]:
            continue
        if is_lost(each, whole[0], found[0]):
            lost.append(f"{each.key} {each.how}")
    assert lost == []


def test_twenty_files_and_more_are_mutated() -> None:
    assert len(OPTIONS) >= LEAST
