"""Whatever is dropped from a file, misspelt or changed in it: nothing of it is lost in silence."""

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
    Effect,
    json_keys,
    known_option,
    load_options,
    read_json,
    read_toml,
    read_yaml,
    toml_text,
    yaml_text,
)
from meshwright.planner.importing import FORMATS, Imported, Row
from meshwright.planner.importing.scripts import LAUNCHERS
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
LEAST = 20


class Mutant(NamedTuple):
    """A file with one key dropped, misspelt or changed."""

    key: str
    how: str
    text: str


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
        yield Mutant(key, "dropped", write(others))
        yield Mutant(key, "misspelt", write({**others, misspelt(key): value}))
        yield Mutant(key, "changed", write({**keys, key: changed(value)}))


def of_script(path: Path, words: list[str]) -> Iterator[Mutant]:
    """Yield the mutants of the commands that a script runs, the first as they are."""
    defines = dict(each.split("=", 1) for each in words if "=" in each)
    commands = [
        [each.text for each in command.words]
        for command in read_commands(path.read_text(), file=path, defines=defines)
    ]

    def text_of(number: int, command: list[str]) -> str:
        return "\n".join(map(shlex.join, [*commands[:number], command, *commands[number + 1 :]]))

    yield Mutant("", "whole", text_of(0, commands[0]))
    for number, command in enumerate(commands):
        for place, word in enumerate(command):
            if word.startswith("--"):
                for each in of_option(command, place):
                    yield each._replace(text=text_of(number, shlex.split(each.text)))


def of_option(words: list[str], place: int) -> Iterator[Mutant]:
    """Yield a command with one option dropped, misspelt and changed."""
    name, sign, value = words[place].partition("=")
    end = place + 1
    while end < len(words) and not sign and not words[end].startswith("-"):
        if words[end].endswith(PROGRAM):
            break
        end += 1
    before, values, after = words[:place], words[place + 1 : end], words[end:]
    key = name.removeprefix("--")
    yield Mutant(key, "dropped", shlex.join([*before, *after]))
    wrong = f"--{misspelt(key)}{sign}{value}"
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


def rows_of(framework: str, key: str) -> set[Effect]:
    """Return what files of options say of a key, of a framework's and of launchers'."""
    files = {each for table in FORMATS[framework].profile.tables.values() for each in table.options}
    found = (known_option(key, load_options(each)) for each in {*files, *LAUNCHERS.values()})
    return {each.effect for each in found if each is not None}


def is_default(key: str, whole: Imported, less: Imported) -> bool:
    """Return whether all that a key said is now told to be by default, or said by others."""
    now = {row.name: row for row in less.rows}
    told = [row for row in whole.rows if any(each.startswith(f"{key}=") for _, each in row.said)]
    return bool(told) and all(is_told(now.get(row.name)) for row in told)


def is_told(row: Row | None) -> bool:
    return row is None or bool(row.said or row.otherwise)


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
        effects = rows_of(found[0].framework, each.key)
        is_gone = each.how == "dropped" and (
            Effect.HELD in effects or is_default(each.key, whole[0], found[0])
        )
        if each.how == "misspelt" or not (Effect.NONE in effects or is_gone):
            lost.append(f"{each.key} {each.how}")
    assert lost == []


def test_twenty_files_and_more_are_mutated() -> None:
    assert len(OPTIONS) >= LEAST
