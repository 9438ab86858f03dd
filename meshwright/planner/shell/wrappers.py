"""Commands that start another command, and the options that stand between the two."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshwright.hwprofiles import shown, suggestion
from meshwright.planner.configuration import LAUNCHERS, Effect, Option, Takes, load_options
from meshwright.planner.shell.words import Word
from meshwright.simulator import PlanError

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


class Wrapper(NamedTuple):
    """A command that starts the command behind its options.

    Args:
        values: Its options that take a word; all others take none.
        positionals: Words between its options and the command.
        subcommands: The words of which one stands behind its name; empty where none does.
    """

    values: str = ""
    positionals: int = 0
    subcommands: str = ""


CONTAINER = Wrapper(
    "-B --bind -H --home -W --workdir --env --env-file --pwd --overlay --scratch --security "
    "--network --hostname --mount --fakeroot-path",
    positionals=1,
    subcommands="exec run",
)
MPI = Wrapper(
    "-n -np -c -N -npernode -H -host -hostfile -machinefile -x -bind-to -map-by -wdir -wd "
    "--n --np --npernode --host --hostfile --machinefile --bind-to --map-by --wdir --prefix "
    "-ppn -f -hosts -rf --rankfile --report-bindings-to --output-filename"
)
WRAPPERS: Mapping[str, Wrapper] = {
    **dict.fromkeys(("apptainer", "singularity"), CONTAINER),
    **dict.fromkeys(("mpirun", "mpiexec", "orterun"), MPI),
    "nohup": Wrapper(),
    "env": Wrapper("-u -C -S --unset --chdir"),
    "exec": Wrapper("-a"),
    "time": Wrapper("-f -o --format --output"),
    "numactl": Wrapper("-N -m -C -p -i -l --membind --cpunodebind --interleave --physcpubind"),
    "timeout": Wrapper("-k -s --kill-after --signal", positionals=1),
    "uv": Wrapper(
        "-p -w --python --project --directory --package --extra --no-extra --group --no-group "
        "--only-group --with --with-editable --with-requirements --env-file --index "
        "--default-index --index-url --extra-index-url --find-links --cache-dir --config-file",
        subcommands="run",
    ),
    "nsys": Wrapper(
        "-o -t -s -c -f -w -d -y -x -b -e -n -p --trace --output --sample --capture-range "
        "--capture-range-end --force-overwrite --stats --stop-on-exit --wait --delay --duration "
        "--cuda-memory-usage --cudabacktrace --python-sampling --gpu-metrics-device --kill "
        "--cpuctxsw --cuda-graph-trace --backtrace --session-new --export --env-var",
        subcommands="profile launch",
    ),
}
Values = Mapping[str, Word | None]  # by the name in the option file; None of a switch


class Options(NamedTuple):
    """The options of a command: their values, all their words, and the words behind them."""

    values: Values
    words: tuple[Word, ...]
    rest: tuple[Word, ...]


def split_options(words: Sequence[Word], program: str) -> Options:
    """Return the options of a launcher at the start of *words*, those after its name.

    Raises:
        PlanError: If an option is unknown or lacks its value.
    """
    options = load_options(LAUNCHERS[program])
    values: dict[str, Word | None] = {}
    at = 0
    while at < len(words) and words[at].text.startswith("-") and words[at].text != "-":
        word = words[at]
        at += 1
        if word.text == "--":
            break
        option, attached = _option(word, options, program)
        value = None if attached is None else word._replace(text=attached)
        if attached is None and option.takes not in {Takes.NOTHING, Takes.OPTIONAL}:
            if at >= len(words):
                raise PlanError(f"{where(word)}: {program} {word.text} has no value")
            value, at = words[at], at + 1
        key = option.allowed[0] if option.effect is Effect.RENAMED else option.key
        values[key] = value if option.takes is not Takes.NOTHING else None
    return Options(values, tuple(words[:at]), tuple(words[at:]))


def _option(word: Word, known: Mapping[str, Option], program: str) -> tuple[Option, str | None]:
    """Return the option that a word names, and the value that is joined to it."""
    text, equals, value = word.text.lstrip("-").partition("=")
    attached = value if equals else None
    is_short = not word.text.startswith("--")
    for name in (text, text.replace("_", "-")):
        if name in known and (not is_short or len(name) <= 2):
            return known[name], attached
    # Short options may be joined with their value, or with each other.
    if is_short and text[:1] in known:
        option = known[text[:1]]
        if option.takes is not Takes.NOTHING:
            return option, word.text[2:].removeprefix("=")
        if set(text) <= {each for each in known if len(each) == 1}:
            return option, None
    near = suggestion(text, [each for each in known if len(each) > 2])
    raise PlanError(f"{where(word)}: {program} has no option {shown(word.text)}; {near}")


def where(word: Word) -> str:
    """Return ``line 12``, with the file where that is not the script."""
    return f"{word.file}: line {word.line}" if word.file else f"line {word.line}"


def last_number(word: Word | None) -> int | None:
    """Return the number of an option of Slurm: of ``4``, ``h100:8``, ``gpu:h100:8`` the last."""
    text = "" if word is None or word.unknown else word.text.rpartition(":")[2].partition("(")[0]
    return int(text) if re.fullmatch(r"0*[1-9][0-9]{0,6}", text) else None


def wrapped_at(words: Sequence[Word]) -> int:
    """Return the index of the command that others, such as srun and nohup, start."""
    at = 0
    while at < len(words) and (after := next_at(words, at)) is not None:
        at = after
    return at


def next_at(words: Sequence[Word], at: int) -> int | None:
    """Return the index of the command behind a wrapper; None where there is no wrapper."""
    name, start = words[at].text.rpartition("/")[2], at + 1
    if name == "srun":
        # srun's options are known, so that none is taken for the command.
        return len(words) - len(split_options(words[start:], name).rest)
    wrapper = WRAPPERS.get(name)
    if wrapper is None:
        return None
    if wrapper.subcommands:
        if start >= len(words) or words[start].text not in wrapper.subcommands.split():
            return None
        start += 1
    takes = wrapper.values.split()
    while start < len(words):
        text = words[start].text
        if name == "env" and ASSIGNMENT.match(text):
            start += 1
        elif not text.startswith("-") or text == "-":
            break
        else:
            # These name a variable, or a parameter, and give its value as a word of its own.
            start += 3 if text in {"--mca", "-mca", "-genv"} else 2 if text in takes else 1
    return min(start + wrapper.positionals, len(words))


def environment_of(words: Sequence[Word]) -> dict[str, Word]:
    """Return the variables that ``env A=1`` sets among the words of wrappers."""
    pairs = [(each, each.text.partition("=")) for each in words[1:] if ASSIGNMENT.match(each.text)]
    return {name: word._replace(text=value) for word, (name, _, value) in pairs}
