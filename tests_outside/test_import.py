"""Configurations that are imported, in the hands of the frameworks that they are of.

What a framework's own classes read in a file, and in a file with one key dropped, misspelt or
changed, is what the plan says that is made of it; or there is no plan.
"""

import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
from accelerate.state import AcceleratorState
from witnesses.configurations import WITNESSES, Case, Figures, ours

from meshwright import main
from meshwright.planner.configuration import (
    json_keys,
    read_json,
    read_toml,
    read_yaml,
    toml_text,
    yaml_text,
)
from meshwright.planner.reports import SavedPlan, read_plan
from meshwright.planner.shell import read_commands

from torchtitan.config import ConfigManager  # isort: skip  (after its witness)

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
FILES = GOLDEN / "imports"
STYLES = ("deepspeed-", "accelerate-", "torchtitan-", "transformers-")
# Those that are no witness's.
OTHERS = {
    "deepspeed-starter.sh": "options of Megatron-DeepSpeed, which is not installed",
    "deepspeed-sgd.json": "DeepSpeed reads SGD, which is in no plan",
    "torchtitan-options.sh": "of 0.3; 0.2 is installed",
    "torchtitan-old.toml": "of 2024; 0.2.2 refuses what it has renamed",
}
SHARDED = (
    "--model llama3-8b --seq-len 4096 --global-batch 32 --micro-batch 1 --no-sync-each-microbatch "
    "--attention flash"
)
OPTIONS: Mapping[str, tuple[str, ...]] = {
    **{
        file: tuple(str(row.get("options", "")) for row in rows)
        for file, rows in tomllib.loads((GOLDEN / "import_plans.toml").read_text()).items()
    },
    "transformers-ddp.sh": ("--set devices_per_node=4",),
    "transformers-fsdp.sh": ("",),
    "transformers-fsdp2.yaml": (SHARDED,),
    "transformers-zero3.sh": ("--gpus 8 --global-batch 32",),
}
CASES = [
    pytest.param(file, words, id=f"{file} {number or ''}".strip())
    for file, rows in OPTIONS.items()
    if file.startswith(STYLES) and file not in OTHERS
    for number, words in enumerate(rows)
]


class Door:
    """Texts in the place of a golden file, as they are imported and as its framework reads them."""

    def __init__(self, file: str, folder: Path) -> None:
        self.path, self._out = folder / "files" / f"own{Path(file).suffix}", folder / "plan.json"
        shutil.copytree(FILES, self.path.parent)
        style = "accelerate" if file == "transformers-fsdp2.yaml" else file.partition("-")[0]
        self._witness = WITNESSES[style]

    def enter(self, text: str, words: str) -> SavedPlan | None:
        """Return the plan of a text with the options beside it, None where it is refused."""
        self.path.write_text(text)
        beside = ["--cluster", "dgx-h100", "--out", str(self._out), *shlex.split(words)]
        status = main(["import", str(self.path), *beside])
        return None if status else read_plan(self._out)

    def differing(self, saved: SavedPlan) -> Figures:
        """Return what the framework reads in the last text that its plan does not say."""
        try:
            with patch.dict(os.environ):
                theirs = self._witness(Case(self.path, saved))
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
        return {name: each for name, each in theirs.items() if ours(saved, name) != each}


@pytest.mark.parametrize(("file", "words"), CASES)
def test_a_framework_reads_in_a_file_what_its_plan_says(
    file: str, words: str, tmp_path: Path
) -> None:
    door = Door(file, tmp_path)
    saved = door.enter((FILES / file).read_text(), words)
    assert saved is not None
    assert door.differing(saved) == {}


# What a framework alone refuses, of a value that can be meant in one way.
REFUSED = {"--fsdp=True": "transformers takes the switch alone, or true of a file"}
# What a value may be changed to; what is none of a key's is refused, by all of them.
WORDS = (
    *("no", "none", "auto", "bf16", "fp16", "float32", "cpu", "True", "False", "1", "2"),
    *("FULL_SHARD", "NO_SHARD", "MULTI_GPU", "FSDP", "DEEPSPEED", "selective", "never", "70B"),
    *("GPipe", "1F1B"),
)
FORMS = {
    ".json": (read_json, json_keys),
    ".toml": (read_toml, toml_text),
    ".yaml": (read_yaml, yaml_text),
}


def others(value: object) -> list[object]:
    """Return values in the place of one."""
    if isinstance(value, bool):
        return [not value, "auto"]
    if isinstance(value, int | float):
        return [0, 1, 2, 3, 2 * value, "auto"]
    return [*WORDS] if isinstance(value, str) else [[]]


def mutants(path: Path) -> Iterator[tuple[str, str]]:
    """Yield texts with one key or option dropped, misspelt or changed, and what each is."""
    if path.suffix == ".sh":
        yield from of_words(path)
        return
    reader, writer = FORMS[path.suffix]
    keys = reader(path.read_text()).keys
    for key, value in keys.items():
        less = {name: each for name, each in keys.items() if name != key}
        yield f"without {key}", writer(less)
        yield f"misspelt {key}", writer({**less, f"{key}x": value})
        for each in others(value):
            yield f"{key}={each}", writer({**keys, key: each})


def of_words(path: Path) -> Iterator[tuple[str, str]]:
    commands = read_commands(path.read_text(), file=path, defines={})
    *before, words = [[each.text for each in command.words] for command in commands]
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, sign, value = word.partition("=")
        end = place + 1
        if not sign and not re.match(r"-|.*\.(py|train)$", f"{[*words, '-'][end]}"):
            value, end = words[end], end + 1
        start, rest = words[:place], words[end:]
        changed = {f"{name}={each}": [f"{name}={each}"] for each in others(value) if value}
        if value.isdecimal():
            changed = {f"{name}={each}": [name, str(each)] for each in others(int(value))}
        own = {f"without {name}": [], f"misspelt {name}": [f"{name}x", *words[place + 1 : end]]}
        for what, found in (own | changed).items():
            yield what, "\n".join(map(shlex.join, [*before, [*start, *found, *rest]]))


@pytest.mark.parametrize("file", dict.fromkeys(param.values[0] for param in CASES))
def test_a_mutant_is_the_plan_that_its_framework_reads_or_none(file: str, tmp_path: Path) -> None:
    """What the framework alone refuses is a value of what changes nothing: the plan is the same."""
    door, words = Door(file, tmp_path), OPTIONS[file][0]
    whole, wrong, taken = door.enter((FILES / file).read_text(), words), [], 0
    for what, text in mutants(FILES / file):
        saved = door.enter(text, words)
        if saved is None:
            continue
        try:
            differing: object = door.differing(saved)
        except (Exception, SystemExit) as error:
            differing = saved != whole and repr(error)[:200]
        taken += 1
        if (differing or what.startswith("misspelt")) and what not in REFUSED:
            wrong.append(f"{what}: {differing}")
    assert not wrong, "\n".join(wrong)
    assert taken


def test_every_file_of_these_frameworks_is_read() -> None:
    names = {each.name for each in FILES.iterdir() if each.name.startswith(STYLES)}
    assert names == {param.values[0] for param in CASES} | {*OTHERS}


def test_torchtitan_refuses_the_keys_of_2024() -> None:
    with pytest.raises((ValueError, SystemExit, TypeError)):
        ConfigManager().parse_args(["--job.config_file", str(FILES / "torchtitan-old.toml")])
