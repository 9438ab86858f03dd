"""Command of a script that starts training, with its launcher and its layout."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from meshwright.hwprofiles import shown, suggestion
from meshwright.planner.configuration import LAUNCHERS
from meshwright.planner.shell.interpreter import Command
from meshwright.planner.shell.words import Word
from meshwright.planner.shell.wrappers import (
    Values,
    last_number,
    next_at,
    split_options,
    where,
)
from meshwright.simulator import PlanError

MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}
STARTERS = frozenset({"torchrun", "deepspeed", "accelerate"})
MPI = ("mpirun", "mpiexec", "orterun")
PROGRAMS = frozenset({"llamafactory-cli", "axolotl", "composer"})  # they launch their ranks
PYTHON = re.compile(r"python[0-9.]*")
PYTHON_VALUES = ("-X", "-W", "--check-hash-based-pycs")
# Tools that stand beside a training command.
TOOLS = re.compile(
    r"convert|preprocess|prepare|tokeniz|download|merge|export|infer|generat|eval|server|benchmark"
    r"|(^|[._/-])(pip|test|tools|setup|plot|analyze|http|json|venv|wandb|ray)([._/-]|$)"
)
TRAINING = re.compile(r"train|finetune|fine_tune|sft|recipe|run_clm|run_mlm")
WHOLE = re.compile(r"0*([1-9][0-9]{0,6})(?::0*\1)?")  # 2, or 2:2; another range is elastic
MOST_SHOWN = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A command that starts training.

    Args:
        launcher: What starts the ranks: ``torchrun``, ``deepspeed``, ``accelerate``, ``srun``,
            ``mpirun``, or ``python``; of a program that launches its own ranks its name.
        launcher_words: The options of each launcher, the headers of ``sbatch`` among them.
        program: What trains: a file, a module or a command.
        arguments: Its words.
        environment: The variables that it sees.
        nodes: Of the launcher's options; None where they do not tell it.
        ranks_per_node: The same.
        total: Ranks on all nodes, of a launcher that tells them without their nodes.
        unknown: Why a number of nodes or ranks that is written there is not known, or none.
    """

    launcher: str
    launcher_words: Mapping[str, tuple[Word, ...]]
    program: Word
    arguments: tuple[Word, ...]
    environment: Mapping[str, Word]
    nodes: int | None = None
    ranks_per_node: int | None = None
    total: int | None = None
    unknown: tuple[str, ...] = ()

    @property
    def world_size(self) -> int | None:
        """Ranks on all nodes; None where the launcher does not tell."""
        if self.nodes is None or self.ranks_per_node is None:
            return self.total
        return self.nodes * self.ranks_per_node


class Start(NamedTuple):
    """Command without its launchers: their options, the program and its arguments, its kind."""

    launchers: Mapping[str, tuple[Word, ...]]
    words: tuple[Word, ...]
    is_python: bool


class Count(NamedTuple):
    """Numbers of nodes and of ranks on each, None where they are not told, and where they stand."""

    nodes: int | None = None
    ranks_per_node: int | None = None
    asked: tuple[Word | None, ...] = ()
    total: int | None = None


def find_launches(commands: Sequence[Command], *, program: str | None = None) -> list[Launch]:
    """Return the launches of training among the commands of a script: one.

    Args:
        commands: Of the script, in order.
        program: The one that is meant where there are several: its name, or the end of its path;
            with the line where it stands twice: ``pretrain_gpt.py:24``.

    Raises:
        PlanError: If there is none, several, or one that may not run.
    """
    # Headers of sbatch stand as the first command.
    is_batch = bool(commands) and commands[0].words[0].text == "sbatch"
    headers = commands[0].words[1:] if is_batch else ()
    candidates = [(each, _launch(each, headers)) for each in commands[1 if is_batch else 0 :]]
    launches = [(command, launch) for command, launch in candidates if launch is not None]
    chosen = _best([launch for _, launch in launches], program)
    if not chosen:
        raise _refusal(_nothing(commands, [launch for _, launch in launches], program))
    for command, launch in launches:
        word, reason = command.words[0], command.unknown
        if reason and any(launch is each for each in chosen):
            raise _refusal(f"{where(word)}: whether {word.text} runs is not known: {reason}")
    for launch in chosen:
        if _is_unknown(launch.program):
            place, reason = where(launch.program), launch.program.unknown
            raise _refusal(f"{place}: what {launch.launcher} starts is not known: {reason}")
    words = {(each.program.text, *(word.text for word in each.arguments)): each for each in chosen}
    if len(words) > 1:
        raise _refusal(
            f"the file starts {len(words)} programs: {_listed(words.values())}; "
            "allowed: one, or --launch PROGRAM:LINE"
        )
    return list(words.values())


def _refusal(problem: str) -> PlanError:
    return PlanError(" ".join(problem.split()))  # one line, whatever the words hold


def _is_unknown(word: Word) -> bool:
    """Return True if the name of a program is not known; its folder may be unknown."""
    return bool(word.unknown) and "$" in word.text.rpartition("/")[2]


def _listed(launches: Iterable[Launch]) -> str:
    texts = [f"{each.program.text}:{each.program.line}" for each in launches]
    more = f" and {len(texts) - MOST_SHOWN} more" if len(texts) > MOST_SHOWN else ""
    return ", ".join(texts[:MOST_SHOWN]) + more


def _best(found: Sequence[Launch], program: str | None) -> list[Launch]:
    """Return the launches that are most likely training: by launcher, then by name."""
    if program is not None:
        name, _, line = program.partition(":")
        return [
            each
            for each in found
            if f"/{each.program.text}".endswith(f"/{name}") and line in {"", str(each.program.line)}
        ]
    trains = [each for each in found if TRAINING.search(each.program.text)]
    kept = [each for each in found if not TOOLS.search(each.program.text)] or trains
    # Beside a launcher's program a plain python prepares something.
    kept = [each for each in kept if each.launcher != "python"] or kept
    named = [each for each in kept if each in trains or each.program.text in PROGRAMS]
    return named or kept


def _nothing(commands: Sequence[Command], found: Sequence[Launch], program: str | None) -> str:
    """Return the reason why a file starts no training."""
    if program is not None:
        near = suggestion(program, [each.program.text for each in found])
        return f"no command starts {shown(program)}; {near}"
    first_words = [each.words[0] for each in commands]
    unknown = next((each for each in first_words if _is_unknown(each)), None)
    if unknown is not None:
        return f"{where(unknown)}: which command runs is not known: {unknown.unknown}"
    start = "the file has no command that starts training"
    names = {*STARTERS, *PROGRAMS}
    for first, *rest in (each.words for each in commands):
        if first.text != "echo" and any(each.text.rpartition("/")[2] in names for each in rest):
            return f"{start}: what {first.text} runs (line {first.line}) is not read"
    if first_words and first_words[-1].text == "exit":
        place = where(first_words[-1])
        return f"{start}: it ends at {place} (exit); --define 1=... gives arguments"
    if found:
        return f"{start}: {_listed(found)} trains nothing"
    texts = list(dict.fromkeys(shown(each.text) for each in first_words))[:MOST_SHOWN]
    launchers = "torchrun, deepspeed, accelerate launch, srun, python"
    return f"{start} ({launchers}): it runs {', '.join(texts) or 'none'}"


def _launch(command: Command, headers: tuple[Word, ...]) -> Launch | None:
    """Return the launch that a command is, None of another command."""
    start = _start(command, {"sbatch": headers} if headers else {})
    if start is None or not start.words:
        return None
    program, *arguments = start.words
    launcher_names = [name for name in start.launchers if name != "sbatch"]
    name = program.text.rpartition("/")[2]
    trains = name == "composer" or any(e.text in {"train", "fine-tune"} for e in arguments[:1])
    if not start.is_python and not (trains and name in PROGRAMS):
        return None
    launcher = name if name in PROGRAMS else launcher_names[-1] if launcher_names else "python"
    count = _counted(launcher, start.launchers)
    return Launch(
        launcher=launcher,
        launcher_words=start.launchers,
        program=program,
        arguments=tuple(arguments),
        environment=command.environment,
        nodes=count.nodes,
        ranks_per_node=count.ranks_per_node,
        total=count.total,
        unknown=(
            *(each.unknown for each in count.asked if each is not None and each.unknown),
            *_started_twice(launcher, count, start.launchers),
        ),
    )


def _start(command: Command, launchers: dict[str, tuple[Word, ...]]) -> Start | None:
    """Return a command without wrappers and launchers; None where it runs no program of Python."""
    # A launcher around `bash -c` starts what stands within.
    words = (*command.launcher, *command.words)
    while words:
        name = words[0].text.rpartition("/")[2]
        if name in STARTERS:
            return _started(name, words[1:], launchers)
        if PYTHON.fullmatch(name):
            return _of_python(words, launchers)
        after = next_at(words, 0)
        if after is None:
            is_open = _is_unknown(words[0]) and any(each != "sbatch" for each in launchers)
            return Start(launchers, words, is_python=is_open or name.endswith(".py"))
        if name == "srun" or name in MPI:
            launchers[name] = words[1:after]
        words = words[after:]
    return None


def _started(
    name: str, words: tuple[Word, ...], launchers: dict[str, tuple[Word, ...]]
) -> Start | None:
    """Return the program that a launcher starts; None of ``accelerate config`` and the like."""
    if name == "accelerate" and words and words[0].text == "launch":
        words = words[1:]
    elif name == "accelerate" and words and not re.match(r"-|.*\.py$", words[0].text):
        return None
    options = split_options(words, name)
    launchers[name] = options.words
    if not options.rest and any(key.startswith("n") for key in options.values):
        raise PlanError(f"{where(words[0])}: {name} starts no program; does a blank end the line?")
    # `deepspeed python train.py` starts train.py.
    is_doubled = name == "deepspeed" and options.rest and PYTHON.fullmatch(options.rest[0].text)
    return Start(launchers, options.rest[1 if is_doubled else 0 :], is_python=True)


def _of_python(words: tuple[Word, ...], launchers: dict[str, tuple[Word, ...]]) -> Start | None:
    """Return the file or the module that Python runs; of a launcher's module what it starts."""
    at = 1
    while at < len(words):
        text = words[at].text
        if text == "-m" and at + 1 < len(words):
            module, rest = words[at + 1].text, words[at + 1 :]
            if module in MODULES:
                return _started(MODULES[module], rest[1:], launchers)
            return Start(launchers, rest, is_python=True)
        if text in {"-c", "-", "-m"}:
            return None
        if not text.startswith("-"):
            return Start(launchers, words[at:], is_python=True)
        at += 2 if text in PYTHON_VALUES else 1
    return None


def _counted(launcher: str, launchers: Mapping[str, tuple[Word, ...]]) -> Count:
    """Return the numbers of nodes and ranks that the launcher's options say."""
    options = _values(launcher, launchers)
    if launcher == "torchrun":
        nodes, ranks = options.get("nnodes"), options.get("nproc-per-node")
        return Count(
            1 if "standalone" in options or "nnodes" not in options else _whole(nodes),
            1 if "nproc-per-node" not in options else _whole(ranks),
            (nodes, ranks),
        )
    if launcher == "deepspeed":
        return _counted_deepspeed(options)
    if launcher == "accelerate":
        machines, processes = options.get("num-machines"), options.get("num-processes")
        count = _whole(machines)
        return Count(count, _quotient(_whole(processes), count), (machines, processes))
    return _counted_mpi(launchers[launcher]) if launcher in MPI else _counted_slurm(launchers)


def _counted_mpi(words: Sequence[Word]) -> Count:
    """Return the ranks of ``mpirun -np N``."""
    asked = [after for word, after in pairwise(words) if word.text.lstrip("-") in {"n", "np", "c"}]
    return Count(asked=tuple(asked[-1:]), total=_whole(asked[-1]) if asked else None)


def _started_twice(
    launcher: str, count: Count, launchers: Mapping[str, tuple[Word, ...]]
) -> Iterable[str]:
    """Yield why srun or mpirun starts a launcher of ranks more often than once a node."""
    outer = next((each for each in ("srun", *MPI) if each in launchers), "")
    if outer == "srun":
        # torchrun and the like start the ranks of a node: srun starts them once on each.
        tasks = _counted_slurm(launchers).ranks_per_node or 1
    else:
        tasks = (_counted_mpi(launchers.get(outer, ())).total or 1) // (count.nodes or 1)
    if tasks > 1 and launcher in STARTERS:
        yield f"{outer} starts {tasks} of {launcher} on each node; allowed: 1"


def _values(name: str, launchers: Mapping[str, tuple[Word, ...]]) -> Values:
    return split_options(launchers.get(name, ()), name).values if name in LAUNCHERS else {}


def _whole(word: Word | None) -> int | None:
    match = WHOLE.fullmatch(word.text) if word is not None and not word.unknown else None
    return int(match[1]) if match else None


def _quotient(total: int | None, count: int | None) -> int | None:
    return total // count if total and count and total % count == 0 else None


def _counted_deepspeed(options: Values) -> Count:
    nodes, ranks, include = (
        options.get("num-nodes"),
        options.get("num-gpus"),
        options.get("include"),
    )
    if "exclude" in options:
        return Count()
    if include is not None and not include.unknown:
        hosts = [each.partition(":")[2].split(",") for each in include.text.split("@")]
        sizes = {len([each for each in slots if each]) for slots in hosts}
        # Hosts with different slots have no one number of ranks.
        return Count(len(hosts), (sizes.pop() if len(sizes) == 1 else 0) or None, (include,))
    return Count(_whole(nodes), _whole(ranks), (nodes, ranks, include))


def _counted_slurm(launchers: Mapping[str, tuple[Word, ...]]) -> Count:
    srun, header = _values("srun", launchers), dict(_values("sbatch", launchers))
    if "ntasks" in srun:
        header.pop("ntasks-per-node", None)  # then the most that a node may have
    options = {**header, **srun}
    asked = tuple(options.get(each) for each in ("nodes", "ntasks-per-node", "ntasks"))
    count, ranks, total = map(last_number, asked)
    ranks = ranks or _quotient(total, count)
    return Count(count or _quotient(total, ranks), ranks, asked)
