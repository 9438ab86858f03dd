"""One import of a file, asked again with what it asks for, and the plan that it leaves."""

import contextlib
import io
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from meshwright import main
from meshwright.planner.reports import read_plan
from meshwright.simulator.layout import PLAN_FIELDS

ASKED = re.compile(r'--([a-z]+(?:-[a-z]+)*)(?: (\w+)=(""|))?')
MISSING = re.compile(r"is missing|give it with|not set|does not say|gives arguments")
DENIED = re.compile(r"--([a-z-]+) \S+ is not what the file says")
MOST_ROUNDS = 12
REFUSED = re.compile(
    r"'([a-z][\w-]+)' of megatron-lm is unknown"
    r"|(?:^|\s)([a-z][\w-]*)=[^\n]* of megatron-lm is in no plan"
)
# What decides a layout stays, even if it is refused.
KEPT = {
    "deepspeed",
    "moe-expert-parallel-size",
    "zero-stage",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "micro-batch-size",
    "global-batch-size",
    "num-layers",
    "hidden-size",
    "bf16",
    "fp16",
}

Claims = dict[str, object]


class Answers(NamedTuple):
    """What a person says where a file leaves something out; models by words of files' names."""

    options: Mapping[str, str]
    variables: Mapping[str, str]
    models: Mapping[str, str] = MappingProxyType({})

    def of(self, name: str) -> "Answers":
        """Return the answers for a file with this name."""
        model = next((each for word, each in self.models.items() if word in name), None)
        options = {**self.options, "model": model} if model else self.options
        return self._replace(options=options)


class Imported(NamedTuple):
    """What an import came to: the plan's fields, or a refusal in its words."""

    status: int
    fields: Claims | None
    refusal: str
    options: dict[str, str]
    variables: dict[str, str]


def refused_options(refusal: str) -> list[str]:
    """Return the options of a script that a refusal names as of no plan.

    >>> refused_options("'tp-x' of megatron-lm is unknown; zero=1 of megatron-lm is in no plan")
    ['tp-x', 'zero']
    """
    found = (name for names in REFUSED.findall(refusal) for name in names if name)
    return [name for name in dict.fromkeys(found) if name not in KEPT]


def imported(
    file: Path,
    given: Mapping[str, str],
    answers: Answers,
    words: Sequence[str] = (),
    *,
    leaves_out: bool = False,
) -> Imported:
    """Import a file with what is *given*, and again as long as it asks for what *answers* have.

    Args:
        file: To import.
        given: Options of the import, whatever the file says.
        answers: What a person says who is asked.
        words: Positional parameters of a script.
        leaves_out: Whether what is refused by name is left out (``--without``).
    """
    left: list[str] = []
    options = dict(given)
    variables = {str(number): word for number, word in enumerate(words, start=1)}
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        for _ in range(MOST_ROUNDS):
            command = ["import", str(file), "--out", str(plan)]
            for name, value in options.items():
                command += [f"--{name}", value] if value else [f"--{name}"]
            command += [word for name in left for word in ("--without", name)]
            for name, value in variables.items():
                command += ["--define", f"{name}={value}"]
            err = io.StringIO()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
                status = main(command)
            refusal = err.getvalue().strip().removeprefix("error: ").replace(str(file), file.name)
            if status == 0:
                return Imported(0, _fields(plan), "", options, variables)
            more = [each for each in refused_options(refusal) if each not in left]
            left += more if leaves_out else []
            if not _answered(refusal, answers, options, variables) and not (more and leaves_out):
                break
    return Imported(status, None, refusal, options, variables)


def _answered(
    refusal: str, answers: Answers, options: dict[str, str], variables: dict[str, str]
) -> bool:
    """Add what a refusal asks for, drop what the file says, and return whether any of it is new."""
    before = len(options) + len(variables)
    if denied := [name for name in DENIED.findall(refusal) if name in options]:
        for name in denied:
            del options[name]
        return True
    asking = "\n".join(line for line in refusal.splitlines() if MISSING.search(line))
    for option, variable, nothing in ASKED.findall(asking):
        if option == "define" and variable:
            usual = "" if nothing else "1"
            variables.setdefault(variable, answers.variables.get(variable, usual))
        elif option == "model" and "--vocabulary (" in asking:
            continue  # a vocabulary is all that is missing of it
        elif option in answers.options:
            options.setdefault(option, answers.options[option])
    return len(options) + len(variables) > before


def _fields(path: Path) -> Claims:
    """Return the fields of a plan file, and those of its model and job."""
    saved = read_plan(path)
    model, plan, job = saved.job.transformer, saved.plan, saved.job
    fields: Claims = {name: getattr(plan, name) for name in PLAN_FIELDS}
    return {
        **fields,
        **model.model_dump(),
        "num_experts": model.experts.num_experts if model.experts else 0,
        "global_batch_size": job.global_batch_size,
        "seq_len": job.seq_len,
        "precision": str(job.precision),
        "world_size": plan.world_size,
        "num_microbatches": job.global_batch_size // plan.dp // plan.microbatch_size,
        "optimizer": "adam",
    }
