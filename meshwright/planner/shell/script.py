"""Commands that a script runs: nothing is executed, no process variable is read."""

import re
from collections.abc import Mapping
from pathlib import Path

from meshwright.hwprofiles import shown, suggestion
from meshwright.planner.shell.commands import run_text
from meshwright.planner.shell.expansion import MOST_BYTES, text_of_file
from meshwright.planner.shell.interpreter import Command, Flow, Frame, Interpreter, State, Variable
from meshwright.planner.shell.statements import run_statement
from meshwright.planner.shell.words import Unknown, Word, written
from meshwright.planner.shell.wrappers import Values, last_number, split_options
from meshwright.simulator import PlanError

HEADER = re.compile(r"#SBATCH\s+(.*)")
NAME = re.compile(r"[A-Za-z_]\w*|[0-9]+|@", re.ASCII)
MOST_ARGUMENTS = 1_000
SLURM = {
    "SLURM_NNODES": "nodes",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
}
SLURM_ALIASES = {
    "SLURM_JOB_NUM_NODES": "SLURM_NNODES",
    "SLURM_NPROCS": "SLURM_NTASKS",
    "SLURM_GPUS_ON_NODE": "SLURM_GPUS_PER_NODE",
}


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
    # Options of the header hold before the first command runs.
    headers = _headers(text)
    if headers:
        shell.commands.append(Command(words=(Word("sbatch", headers[0].line), *headers)))
        _set_slurm_variables(shell, split_options(headers, "sbatch").values)
    try:
        run_text(shell, whole, 0)
    except Flow:
        pass
    except RecursionError:
        raise PlanError("the script nests too deeply") from None
    _check_used(shell)
    return shell.commands


def _first_state(file: Path | None, defines: Mapping[str, str]) -> State:
    """Return the state of the shell before the first command."""
    numbers = [int(each) for each in defines if each.isdigit()]
    if max(numbers, default=0) > MOST_ARGUMENTS:
        raise PlanError(f"--define {max(numbers)}: at most {MOST_ARGUMENTS:,} arguments")
    variables = {
        name: Variable((written(value, 0),))
        for name, value in defines.items()
        if name.isidentifier()
    }
    state = State(variables, frozenset(variables), name=written(str(file or "bash"), 0))
    if file is not None:
        state.folder = written(str(file.parent), 0)
    arguments = defines.get("@", "").split()
    if numbers:
        arguments = [defines.get(str(at), "") for at in range(1, max(numbers) + 1)]
    state.arguments = tuple(written(each, 0) for each in arguments)
    state.knows_arguments = "@" in defines
    return state


def _headers(text: str) -> tuple[Word, ...]:
    """Return the words of ``#SBATCH`` lines: those before the first command."""
    words: list[Word] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.startswith("#"):
            break
        match = HEADER.match(line)
        if match:
            # sbatch parses its lines itself, without a shell.
            plain = match[1].partition(" #")[0].replace('"', "").replace("'", "")
            words += [Word(each, number) for each in plain.split()]
    return tuple(words)


def _set_slurm_variables(shell: Interpreter, options: Values) -> None:
    """Set what sbatch sets of its options."""
    counts = {variable: last_number(options.get(option)) for variable, option in SLURM.items()}
    nodes, per_node = counts["SLURM_NNODES"], counts["SLURM_NTASKS_PER_NODE"]
    # Slurm derives the tasks from the nodes where they are not given.
    if counts["SLURM_NTASKS"] is None and nodes is not None and per_node is not None:
        counts["SLURM_NTASKS"] = nodes * per_node
    # --gres=gpu:8 is the older spelling.
    counts["SLURM_GPUS_PER_NODE"] = counts["SLURM_GPUS_PER_NODE"] or last_number(
        options.get("gres")
    )
    counts |= {name: counts[of] for name, of in SLURM_ALIASES.items()}
    variables = shell.state.variables
    number = shell.mark(1, Unknown("$SLURM_JOB_ID", "$SLURM_JOB_ID is given by Slurm"))
    variables.setdefault("SLURM_JOB_ID", Variable((number,)))
    for name, count in counts.items():
        if count is not None:
            variables.setdefault(name, Variable((written(str(count), 0),)))
    shell.state.exported |= {name for name in variables if name.startswith("SLURM_")}


def _check_used(shell: Interpreter) -> None:
    """Refuse a define that nothing asked for."""
    for name in shell.defines:
        if name in shell.used or not name.isidentifier():
            continue
        variable = shell.state.variables.get(name, Variable(()))
        place = next((each.place for each in variable.texts if each.place), 0)
        if place:
            where = shell.unknowns.where(place)
            raise PlanError(f"--define {name}: the script sets {name} itself at {where}")
        unset = {each.name for each in shell.unknowns.listed if each.is_unset}
        near = suggestion(name, sorted(unset - {name}))
        raise PlanError(f"--define {name}: the script asks for no {name}; {near}")
