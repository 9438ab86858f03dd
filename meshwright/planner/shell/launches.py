"""The command of a script that starts training, its launcher and its layout."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.hwprofiles import shown, suggestion
from meshwright.planner.shell.interpreter import Command
from meshwright.planner.shell.script import count_of
from meshwright.planner.shell.words import Word
from meshwright.planner.shell.wrappers import SLURM, next_at, split_options, where
from meshwright.simulator import PlanError

MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}
FILES = {
    "torchrun": "torchrun-2.13",
    "deepspeed": "deepspeed-launcher-0.19",
    "accelerate": "accelerate-launch-1.15",
}
PROGRAMS = frozenset({"llamafactory-cli", "axolotl", "composer"})  # they launch their ranks
PYTHON = re.compile(r"python[0-9.]*")
PYTHON_VALUES = ("-X", "-W", "--check-hash-based-pycs")
# Tools that stand beside a training command.
TOOLS = re.compile(
    r"convert|preprocess|prepare|tokeniz|download|merge|export|infer|generat|eval|server|benchmark"
    r"|(^|[._/-])(pip|test|tools|setup|plot|analyze|http|json|venv|wandb|ray)([._/-]|$)"
)
TRAINING = re.compile(r"train|finetune|fine_tune|sft|recipe|run_clm|run_mlm")
UNREAD = ("docker", "podman", "kubectl", "ssh", "pdsh", "xargs", "parallel", "ray", "salloc")
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
        unknown: Why a number of nodes or ranks that is written there is not known.
    """

    launcher: str
    launcher_words: Mapping[str, tuple[Word, ...]]
    program: Word
    arguments: tuple[Word, ...]
    environment: Mapping[str, Word]
    nodes: int | None = None
    ranks_per_node: int | None = None
    unknown: tuple[str, ...] = ()

    @property
    def world_size(self) -> int | None:
        """Ranks on all nodes; None where the launcher does not tell."""
        if self.nodes is None or self.ranks_per_node is None:
            return None
        return self.nodes * self.ranks_per_node


class Start(NamedTuple):
    """A command without the launchers before it.

    Args:
        launchers: Each with its options.
        words: The program and its arguments.
        values: Of the options, by launcher and name.
        is_python: The program is a file or a module of Python, not a command.
    """

    launchers: Mapping[str, tuple[Word, ...]]
    words: tuple[Word, ...]
    values: Mapping[str, Mapping[str, Word | None]]
    is_python: bool


class Count(NamedTuple):
    """Numbers of nodes and of ranks on each, None where they are not told."""

    nodes: int | None = None
    ranks_per_node: int | None = None
    asked: tuple[Word | None, ...] = ()


def find_launches(commands: Sequence[Command], *, program: str | None = None) -> list[Launch]:
    """Return the launches of training among the commands of a script: one.

    Args:
        commands: Of the script, in order.
        program: The one that is meant where there are several: its name, or the end of its path;
            with the line where it stands twice: ``pretrain_gpt.py:24``.

    Raises:
        PlanError: If there is none, several, or one that may not run.
    """
    headers: tuple[Word, ...] = ()
    found: list[tuple[Command, Launch]] = []
    for command in commands:
        if command.words[0].text == "sbatch" and not headers and command is commands[0]:
            headers = command.words[1:]
            continue
        launch = _launch(command, headers)
        if launch is not None:
            found.append((command, launch))
    chosen = _best(found, program)
    if not chosen:
        raise PlanError(_nothing(commands, found, program))
    doubtful = next((command for command, _ in chosen if command.unknown), None)
    if doubtful is not None:
        word = doubtful.words[0]
        raise PlanError(f"{where(word)}: whether {word.text} runs is not known: {doubtful.unknown}")
    for _, launch in chosen:
        if _is_unknown(launch.program):
            place, why = where(launch.program), launch.program.unknown
            raise PlanError(f"{place}: what {launch.launcher} starts is not known: {why}")
    distinct = {_signature(launch): launch for _, launch in chosen}
    if len(distinct) > 1:
        raise PlanError(
            f"the file starts {len(distinct)} programs: {_listed(distinct.values())}; say which one"
        )
    return list(distinct.values())


def _is_unknown(word: Word) -> bool:
    """Return whether the name of a program is not known; its folder may be unknown."""
    return bool(word.unknown) and "$" in word.text.rpartition("/")[2]


def _signature(launch: Launch) -> tuple[str, ...]:
    return (launch.program.text, *(each.text for each in launch.arguments))


def _listed(launches: Iterable[Launch]) -> str:
    texts = [f"{each.program.text}:{each.program.line}" for each in launches]
    more = f" and {len(texts) - MOST_SHOWN} more" if len(texts) > MOST_SHOWN else ""
    return ", ".join(texts[:MOST_SHOWN]) + more


def _best(
    found: Sequence[tuple[Command, Launch]], program: str | None
) -> list[tuple[Command, Launch]]:
    """Return the launches that are most likely training: by launcher, then by name."""
    if program is not None:
        name, _, line = program.partition(":")
        return [
            each
            for each in found
            if name in _names(each[1].program.text) and line in {"", str(each[1].program.line)}
        ]
    kept = [each for each in found if not TOOLS.search(each[1].program.text)]
    kept = kept or [each for each in found if TRAINING.search(each[1].program.text)]
    for is_better in (
        lambda each: each[1].launcher != "python",
        lambda each: TRAINING.search(each[1].program.text) or each[1].program.text in PROGRAMS,
    ):
        better = [each for each in kept if is_better(each)]
        kept = better or kept
    return kept


def _names(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[at:]) for at in range(len(parts))]


def _nothing(
    commands: Sequence[Command], found: Sequence[tuple[Command, Launch]], program: str | None
) -> str:
    """Return why a file starts no training."""
    if program is not None:
        names = [each.program.text for _, each in found]
        return f"no command starts {shown(program)}; {suggestion(program, names)}"
    first_words = [each.words[0] for each in commands]
    unknown = next((each for each in first_words if _is_unknown(each)), None)
    if unknown is not None:
        return f"{where(unknown)}: which command runs is not known: {unknown.unknown}"
    start = "the file has no command that starts training"
    for command in commands:
        name = command.words[0].text.rpartition("/")[2]
        if name in UNREAD and any(_is_launcher(word.text) for word in command.words[1:]):
            return f"{start}: what {name} runs (line {command.words[0].line}) is not read"
    last = commands[-1] if commands else None
    if last is not None and last.words[0].text == "exit":
        return f"{start}: it ends at {where(last.words[0])} (exit); --define 1=... gives arguments"
    if found:
        return f"{start}: {_listed(launch for _, launch in found)} trains nothing"
    ran = ", ".join(
        shown(each) for each in list(dict.fromkeys(w.text for w in first_words))[:MOST_SHOWN]
    )
    return (
        f"{start} (torchrun, deepspeed, accelerate launch, srun, python): it runs {ran or 'none'}"
    )


def _is_launcher(text: str) -> bool:
    name = text.rpartition("/")[2]
    return name in FILES or name in PROGRAMS or bool(re.search(r"torchrun|deepspeed", text))


def _launch(command: Command, headers: tuple[Word, ...]) -> Launch | None:
    """Return the launch that a command is, None of another command."""
    start = _start(command, headers)
    if start is None or not start.words:
        return None
    program, *arguments = start.words
    own = [name for name in start.launchers if name != "sbatch"]
    name = program.text.rpartition("/")[2]
    trains = name in PROGRAMS and (
        name == "composer" or any(each.text in {"train", "fine-tune"} for each in arguments[:1])
    )
    if not start.is_python and not trains:
        return None
    launcher = name if name in PROGRAMS else own[-1] if own else "python"
    count = _counted(launcher, start.values)
    return Launch(
        launcher=launcher,
        launcher_words=start.launchers,
        program=program,
        arguments=tuple(arguments),
        environment=command.environment,
        nodes=count.nodes,
        ranks_per_node=count.ranks_per_node,
        unknown=tuple(each.unknown for each in count.asked if each is not None and each.unknown),
    )


def _start(command: Command, headers: tuple[Word, ...]) -> Start | None:
    """Return a command without wrappers and launchers; None where it runs no program of Python."""
    launchers: dict[str, tuple[Word, ...]] = {}
    values: dict[str, Mapping[str, Word | None]] = {}
    if headers:
        launchers["sbatch"], values["sbatch"] = headers, split_options(headers, SLURM).values
    words = (*command.launcher, *command.words)
    while words:
        name = words[0].text.rpartition("/")[2]
        if name in FILES:
            return _launched(name, words[1:], launchers, values)
        if PYTHON.fullmatch(name):
            inner = _python(words)
            if inner is None:
                return None
            launcher = MODULES.get(inner[0].text) if inner[0] is not words[1] else None
            if launcher is None:
                return Start(launchers, inner, values, is_python=True)
            return _launched(launcher, inner[1:], launchers, values)
        after = next_at(words, 0)
        if after is None:
            is_open = _is_unknown(words[0]) and any(each != "sbatch" for each in launchers)
            return Start(launchers, words, values, is_python=is_open or name.endswith(".py"))
        if name in {"srun", "mpirun", "mpiexec", "orterun"}:
            launchers[name] = words[1:after]
            if name == "srun":
                values[name] = split_options(words[1:after], SLURM).values
        words = words[after:]
    return None


def _launched(
    name: str,
    words: Sequence[Word],
    launchers: dict[str, tuple[Word, ...]],
    values: dict[str, Mapping[str, Word | None]],
) -> Start | None:
    """Return what a launcher starts."""
    if name == "accelerate":
        if words and words[0].text != "launch":
            is_module = words[0].text.startswith("-") or words[0].text.endswith(".py")
            if not is_module:
                return None
        else:
            words = words[1:]
    options = split_options(words, FILES[name])
    launchers[name], values[name] = options.words, options.values
    rest = options.rest
    if name == "deepspeed" and rest and PYTHON.fullmatch(rest[0].text):
        rest = rest[1:]
    return Start(launchers, rest, values, is_python=True)


def _python(words: Sequence[Word]) -> tuple[Word, ...] | None:
    """Return the file or the module that Python runs, with its arguments."""
    at = 1
    while at < len(words):
        text = words[at].text
        if text == "-m":
            return tuple(words[at + 1 :]) or None
        if text in {"-c", "-"}:
            return None
        if not text.startswith("-"):
            return tuple(words[at:])
        at += 1 + (text in PYTHON_VALUES)
    return None


def _counted(launcher: str, values: Mapping[str, Mapping[str, Word | None]]) -> Count:
    """Return the numbers of nodes and ranks that the launcher's options say."""
    if launcher == "torchrun":
        own = values["torchrun"]
        nodes, ranks = own.get("nnodes"), own.get("nproc-per-node")
        return Count(
            _whole(nodes, 1 if "standalone" in own or "nnodes" not in own else None),
            _whole(ranks, 1 if "nproc-per-node" not in own else None),
            (nodes, ranks),
        )
    if launcher == "deepspeed":
        return _counted_deepspeed(values["deepspeed"])
    if launcher == "accelerate":
        own = values["accelerate"]
        machines, processes = own.get("num-machines"), own.get("num-processes")
        count, total = _whole(machines, None), _whole(processes, None)
        per_node = total // count if count and total and total % count == 0 else None
        return Count(count, per_node, (machines, processes))
    slurm = {**values.get("sbatch", {}), **values.get("srun", {})}
    return _counted_slurm(slurm) if launcher == "srun" or slurm else Count()


def _whole(word: Word | None, absent: int | None) -> int | None:
    if word is None:
        return absent
    if word.unknown or not re.fullmatch(r"0*[1-9][0-9]{0,6}(:0*[1-9][0-9]{0,6})?", word.text):
        return None
    low, _, high = word.text.partition(":")
    return int(low) if not high or int(high) == int(low) else None  # a range is elastic


def _counted_deepspeed(own: Mapping[str, Word | None]) -> Count:
    nodes, ranks = own.get("num-nodes"), own.get("num-gpus")
    include = own.get("include")
    if "exclude" in own:
        return Count()
    if include is not None and not include.unknown:
        hosts = [each.partition(":")[2].split(",") for each in include.text.split("@")]
        sizes = {len([each for each in slots if each]) for slots in hosts}
        size = next(iter(sizes)) if len(sizes) == 1 else 0
        return Count(len(hosts), size or None, (include,))
    return Count(_whole(nodes, None), _whole(ranks, None), (nodes, ranks, include))


def _counted_slurm(own: Mapping[str, Word | None]) -> Count:
    nodes, per_node, tasks = (own.get(each) for each in ("nodes", "ntasks-per-node", "ntasks"))
    count, total = count_of(nodes), count_of(tasks)
    ranks = count_of(per_node)
    if ranks is None and count and total and total % count == 0:
        ranks = total // count
    if count is None and ranks and total and total % ranks == 0:
        count = total // ranks
    return Count(count, ranks, (nodes, per_node, tasks))
