"""Right, refused or wrong: what an import made of a file, beside what the file itself says."""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from examining.bash import batch_header, give_away, started
from examining.commands import TRAINS, command_claims, devices_of, launches, program_of
from examining.configurations import configuration_claims
from examining.imports import Answers, Claims, Imported, imported

Outcome = Literal["right", "refused", "wrong"]
REFUSED = 2
PRESENT = ("tmp", "dataset")  # folders that a script writes to
PARAMETER = re.compile(r"^\s*(?:export )?([A-Z_]+)=\"?\$\{?(\d+)\}?", re.MULTILINE)
SIZES = re.compile(r"\[+ *\"?\$\{?MODEL_SIZE\}?\"? *==? *\"?([\w.-]+)")


class Judgement(NamedTuple):
    """What came of a file, and why, in words."""

    name: str
    outcome: Outcome
    why: str


def judged(
    name: str,
    folders: tuple[Path, Path],
    given: Mapping[str, str],
    answers: Answers,
    *,
    leaves_out: bool = False,
) -> Judgement:
    """Import a file, and judge what comes.

    Args:
        name: Of the file.
        folders: With it: one to read, one to run its script in.
        given: Options of the import, whatever the file says.
        answers: What a person would say.
        leaves_out: Whether options of a script that are refused are left out.
    """
    file, ran, answers = folders[0] / name, folders[1] / name, answers.of(name)
    if file.suffix != ".sh":
        found = imported(file, given, answers)
        if found.fields is None:
            return _refused(name, found)
        told = configuration_claims(file, found.options)
        return _compared(name, found.fields, told)
    words = _parameters(file.read_text(encoding="utf-8", errors="replace"), answers)
    found = imported(file, given, answers, words, leaves_out=leaves_out)
    if found.fields is None:
        return _refused(name, found)
    told = _script_claims(ran, words, found, answers)
    return _compared(name, found.fields, told)


def _refused(name: str, found: Imported) -> Judgement:
    """Return what a refusal is: none where it is a fault, or says nothing."""
    is_one = found.status == REFUSED and found.refusal
    return Judgement(name, "refused" if is_one else "wrong", found.refusal)


def _script_claims(
    script: Path, words: list[str], found: Imported, answers: Answers
) -> Claims | None:
    """Return what the only training of a script says; None where it starts none, or several."""
    variables = {key: value for key, value in found.variables.items() if not key.isdecimal()}
    (script.parent / "pretrain_gpt.py").touch()
    for each in PRESENT:
        (script.parent / each).mkdir(exist_ok=True)
        give_away(script.parent / each)
    gpus = int(found.options.get("gpus", answers.variables["GPUS_PER_NODE"]))
    with tempfile.TemporaryDirectory() as scratch:
        give_away(Path(scratch))
        ran = started(script, words, variables, Path(scratch), gpus)
    commands = launches(ran)
    if not commands or any(each != commands[0] for each in commands):
        return None
    if not TRAINS.fullmatch(program_of(commands[0])):
        return None
    header = batch_header(script.read_text(encoding="utf-8", errors="replace"))
    if any(each[0] in ("srun", "mpirun") for each in ran):
        header.setdefault("ranks", "")  # as many as they are told
    return command_claims(commands[0], devices_of(commands[0], header, gpus))


def _parameters(text: str, answers: Answers) -> list[str]:
    """Return the positional parameters of a script, by the names that it gives them."""
    variables = dict(answers.variables)
    sizes = SIZES.findall(text)
    if sizes and variables["MODEL_SIZE"] not in sizes:
        variables["MODEL_SIZE"] = sizes[0]
    names = {int(number): name for name, number in PARAMETER.findall(text)}
    numbers = range(1, max(names, default=0) + 1)
    return [variables.get(names.get(number, ""), "1") for number in numbers]


def _compared(name: str, fields: Claims, told: Mapping[str, object] | None) -> Judgement:
    if told is None:
        return Judgement(name, "wrong", "came in, but starts no training that a plan describes")
    wrong = [
        f"{key} {fields.get(key)!r} for {value!r}"
        for key, value in told.items()
        if fields.get(key) != value
    ]
    return Judgement(name, "wrong", ", ".join(wrong)) if wrong else Judgement(name, "right", "")
