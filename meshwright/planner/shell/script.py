"""A script as the commands that it runs: nothing is executed, no process variable is read."""

import re
from collections.abc import Mapping
from pathlib import Path

from meshwright.hwprofiles import shown, suggestion
from meshwright.planner.shell.commands import run_text
from meshwright.planner.shell.expansion import MOST_BYTES, text_of_file
from meshwright.planner.shell.interpreter import Command, Flow, Frame, Interpreter, State, Variable
from meshwright.planner.shell.statements import run_statement
from meshwright.planner.shell.words import Unknown, Word, written
from meshwright.planner.shell.wrappers import SLURM, Options, split_options
from meshwright.simulator import PlanError

HEADER = re.compile(r"#SBATCH\s+(.*)")
NAME = re.compile(r"[A-Za-z_]\w*|[0-9]+|@")


def read_commands(text: str, *, file: Path | None, defines: Mapping[str, str]) -> list[Command]:
    """Return the commands that a bash script runs, in order, with their words expanded.

    What the script does not tell stands in the words as it is written, with the reason. The
    headers of sbatch are the first command.

    Args:
        text: The script.
        file: Where it lies; files that it sources are read from there. None of no file.
        defines: Variables by name that the script finds set; ``1`` is its first argument, ``@``
            all of them. They also stand for a variable whose value in the script is not known.

    Raises:
        PlanError: If it is no bash, does more than a script of a launch, or asks for none of a
            define.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise PlanError(f"a script has at most {MOST_BYTES:,} bytes")
    for name in defines:
        if not NAME.fullmatch(name):
            raise PlanError(f"--define {shown(name)}: no name of a variable, nor an argument")
    whole = text_of_file(text, 0)
    path = file.resolve() if file is not None else None
    state = _first_state(path, defines)
    shell = Interpreter(run_statement, state, Frame(whole), path, defines)
    headers = _headers(text)
    if headers:
        shell.commands.append(
            Command(words=(Word("sbatch", headers[0].line), *headers), environment={})
        )
        _set_slurm_variables(shell, split_options(headers, SLURM))
    try:
        run_text(shell, whole, 0)
    except Flow:
        pass
    except RecursionError:
        raise PlanError("the script nests too deeply") from None
    _check_used(shell)
    return shell.commands


def _first_state(file: Path | None, defines: Mapping[str, str]) -> State:
    variables = {
        name: Variable((written(value, 0),))
        for name, value in defines.items()
        if not name.isdigit() and name != "@"
    }
    state = State(variables, frozenset(variables), name=written("bash", 0))
    if file is not None:
        state.folder, state.name = written(str(file.parent), 0), written(str(file), 0)
    if "@" in defines:
        state.arguments = tuple(written(each, 0) for each in defines["@"].split())
        state.knows_arguments = True
    last = max((int(name) for name in defines if name.isdigit()), default=0)
    if last > 1_000:
        raise PlanError(f"--define {last}: a script has at most 1,000 arguments here")
    if last:
        state.arguments = tuple(written(defines.get(str(at), ""), 0) for at in range(1, last + 1))
    return state


def _headers(text: str) -> tuple[Word, ...]:
    """Return the words of ``#SBATCH`` lines: those before the first command."""
    words: list[Word] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.startswith("#"):
            break
        found = HEADER.match(line)
        if found:
            plain = found[1].partition(" #")[0].replace('"', "").replace("'", "")
            words += [Word(each, number) for each in plain.split()]
    return tuple(words)


def _set_slurm_variables(shell: Interpreter, options: Options) -> None:
    """Set what sbatch sets of its options."""
    counts = {name: count_of(options.values.get(name)) for name in COUNTED}
    nodes, tasks = counts["nodes"], counts["ntasks"]
    per_node, gpus = counts["ntasks-per-node"], counts["gpus-per-node"] or counts["gres"]
    if tasks is None and nodes is not None and per_node is not None:
        tasks = nodes * per_node
    found = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_GPUS_PER_NODE": gpus,
        "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_CPUS_PER_TASK": counts["cpus-per-task"],
    }
    variables = shell.state.variables
    for name, value in found.items():
        if value is not None and name not in variables:
            variables[name] = Variable((written(str(value), 0),))
    if "SLURM_JOB_ID" not in variables:
        number = Unknown("$SLURM_JOB_ID", "$SLURM_JOB_ID is given by Slurm")
        variables["SLURM_JOB_ID"] = Variable((shell.mark(1, number),))
    shell.state.exported |= {name for name in variables if name.startswith("SLURM_")}


COUNTED = ("nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "gres", "cpus-per-task")


def count_of(word: Word | None) -> int | None:
    """Return the number of an option: of ``4``, ``h100:8`` and ``gpu:h100:8`` the last."""
    if word is None or word.unknown:
        return None
    text = word.text.rpartition(":")[2].partition("(")[0]
    return int(text) if re.fullmatch(r"0*[1-9][0-9]{0,6}", text) else None


def _check_used(shell: Interpreter) -> None:
    """Refuse a define that nothing asked for."""
    for name in shell.defines:
        is_asked = name in shell.used or name == "@" or name.isdigit()
        if not is_asked:
            variable = shell.state.variables.get(name)
            place = (
                next((each.place for each in variable.texts if each.place), 0) if variable else 0
            )
            if place:
                where = shell.unknowns.where(place)
                raise PlanError(f"--define {name}: the script sets {name} itself at {where}")
            known = sorted({each.name for each in shell.unknowns.listed if each.is_unset} - {name})
            raise PlanError(
                f"--define {name}: the script asks for no {name}; {suggestion(name, known)}"
            )
