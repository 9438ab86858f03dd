"""Whatever is dropped from a file, misspelt or changed in it: nothing of it is lost in silence."""

import json
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from meshwright import main
from meshwright.planner.configuration import (
    json_keys,
    read_json,
    read_toml,
    read_yaml,
    toml_text,
    yaml_text,
)
from meshwright.planner.importing import FORMATS, meanings
from meshwright.planner.shell import read_commands

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = GOLDEN / "imports"
OPTIONS = {
    file: str(rows[0].get("options", ""))
    for file, rows in tomllib.loads((GOLDEN / "import_plans.toml").read_text()).items()
}
FORMS = {
    ".json": (read_json, json_keys),
    ".toml": (read_toml, toml_text),
    ".yaml": (read_yaml, yaml_text),
}
STARTERS = ("torchrun", "deepspeed", "accelerate", "srun", "python", "python3")


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
    return {"auto": "other", "true": "false", "false": "true"}.get(text, f"{text}x")


def misspelt(key: str) -> str:
    return f"{key[:-2]}{key[-1]}{key[-2]}q"


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


def of_script(path: Path, defines: dict[str, str]) -> Iterator[Mutant]:
    """Yield the mutants of the command that a script runs, the first as it is."""
    commands = read_commands(path.read_text(), file=path, defines=defines)
    (words,) = (
        [each.text for each in command.words]
        for command in commands
        if command.words[0].text in STARTERS
    )
    yield Mutant("", "whole", shlex.join(words))
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    for place in starts:
        name, sign, value = words[place].partition("=")
        end = place + 1
        while end < len(words) and not sign and not words[end].startswith("-"):
            if words[end].endswith((".py", ".yaml", ".toml")) or "." in words[end - 1][:-3]:
                break
            end += 1
        values = [value] if sign else words[place + 1 : end]
        before, after = words[:place], words[end:]
        key = name.removeprefix("--")
        yield Mutant(key, "dropped", shlex.join([*before, *after]))
        wrong = f"--{misspelt(key)}{sign}{value}"
        yield Mutant(key, "misspelt", shlex.join([*before, wrong, *words[place + 1 :]]))
        if values:
            other = [str(changed(values[0])), *values[1:]]
            said = [f"{name}={other[0]}"] if sign else [name, *other]
            yield Mutant(key, "changed", shlex.join([*before, *said, *after]))


def plan_of(text: str, path: Path, folder: Path) -> dict[str, object] | None:
    """Return the plan of a file's text, None where it is refused."""
    file, out = folder / f"mutant{path.suffix}", folder / "plan.json"
    out.unlink(missing_ok=True)
    file.write_text(text)
    words = [each for each in OPTIONS[path.name].split() if path.suffix != ".sh"]
    given = shlex.split(OPTIONS[path.name])
    if path.suffix == ".sh":  # what a script is told is in its expanded command
        pairs = list(zip(given[::2], given[1::2], strict=True))
        words = [word for option, value in pairs if option != "--define" for word in (option, value)]
    status = main(["import", str(file), "--cluster", "dgx-h100", *words, "--out", str(out)])
    assert status in (0, 2)
    return json.loads(out.read_text()) if status == 0 else None


NO_EFFECT = {
    key.replace("_", "-")
    for each in FORMATS.values()
    for key, meaning in meanings(each.profile)
    if meaning.startswith("changes neither")
}


@pytest.mark.slow
@pytest.mark.parametrize("file", OPTIONS)
def test_no_key_is_lost_in_silence(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused, changes the plan, is on the list of what changes nothing, or the default."""
    path = FILES / file
    words = shlex.split(OPTIONS[file])
    defines = dict(each.split("=", 1) for each in words if "=" in each)
    mutants = of_script(path, defines) if path.suffix == ".sh" else of_configuration(path)
    whole, *others = mutants
    plan = plan_of(whole.text, path, tmp_path)
    assert plan is not None, capsys.readouterr().err
    lost = [
        f"{each.key} {each.how}"
        for each in others
        if each.key.replace("_", "-") not in NO_EFFECT and plan_of(each.text, path, tmp_path) == plan
    ]
    assert lost == []
