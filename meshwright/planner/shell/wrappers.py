"""Commands that start another command, and the options that stand between the two."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshwright.hwprofiles import shown, suggestion
from meshwright.planner.configuration import Effect, Option, Takes, load_options
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


CONTAINER = (
    "-B --bind -H --home -W --workdir --env --env-file --pwd --overlay --scratch --security "
    "--network --hostname --mount --fakeroot-path"
)
WRAPPERS: Mapping[str, Wrapper] = {
    "env": Wrapper("-u -C -S --unset --chdir"),
    "exec": Wrapper("-a"),
    "nohup": Wrapper(),
    "uv": Wrapper(
        "-p -w --python --project --directory --package --extra --no-extra --group --no-group "
        "--only-group --with --with-editable --with-requirements --env-file --index "
        "--default-index --index-url --extra-index-url --find-links --cache-dir --config-file",
        subcommands="run",
    ),
    "time": Wrapper("-f -o --format --output"),
    "setsid": Wrapper(),
    "unbuffer": Wrapper(),
    "nice": Wrapper("-n --adjustment"),
    "ionice": Wrapper("-c -n --class --classdata"),
    "numactl": Wrapper("-N -m -C -p -i -l --membind --cpunodebind --interleave --physcpubind"),
    "taskset": Wrapper(positionals=1),
    "timeout": Wrapper("-k -s --kill-after --signal", positionals=1),
    "sudo": Wrapper("-u -g -h -p -C -T -R -D"),
    "stdbuf": Wrapper("-i -o -e --input --output --error"),
    "nsys": Wrapper(
        "-o -t -s -c -f -w -d -y -x -b -e -n -p --trace --output --sample --capture-range "
        "--capture-range-end --force-overwrite --stats --stop-on-exit --wait --delay --duration "
        "--cuda-memory-usage --cudabacktrace --python-sampling --gpu-metrics-device --kill "
        "--cpuctxsw --cuda-graph-trace --backtrace --session-new --export --env-var",
        subcommands="profile launch",
    ),
    "apptainer": Wrapper(CONTAINER, positionals=1, subcommands="exec run"),
    "singularity": Wrapper(CONTAINER, positionals=1, subcommands="exec run"),
    "mpirun": Wrapper(
        "-n -np -c -N -npernode -H -host -hostfile -machinefile -x -bind-to -map-by -wdir -wd "
        "--n --np --npernode --host --hostfile --machinefile --bind-to --map-by --wdir --prefix "
        "-ppn -f -hosts -rf --rankfile --report-bindings-to --output-filename"
    ),
    "conda": Wrapper("-n -p --name --prefix --cwd", subcommands="run"),
    "poetry": Wrapper(subcommands="run"),
    "docker": Wrapper(
        "-v -e -p -w -u -h -m --volume --env --publish --workdir --user --hostname --memory --name "
        "--gpus --network --net --ipc --shm-size --ulimit --mount --env-file "
        "--entrypoint --runtime --device --cap-add --security-opt --cpus --pid --group-add "
        "--label --log-driver --restart",
        positionals=1,
        subcommands="run exec",
    ),
}
ALIASES = {
    "mpiexec": "mpirun",
    "orterun": "mpirun",
    "podman": "docker",
    "mamba": "conda",
    "micromamba": "conda",
}
SLURM = "srun-25"


class Options(NamedTuple):
    """The options of a command, and the words behind them.

    Args:
        values: By name with dashes, as the option file has them; None of a switch.
        words: All of them as they stand.
        rest: The words from the first that is none.
    """

    values: Mapping[str, Word | None]
    words: tuple[Word, ...]
    rest: tuple[Word, ...]


def split_options(words: Sequence[Word], name: str) -> Options:
    """Return the options at the start of *words*.

    Args:
        words: Those after the name of the program.
        name: Of its option file.

    Raises:
        PlanError: If an option is unknown or lacks its value.
    """
    known, program = load_options(name), name.rpartition("-")[0]
    values: dict[str, Word | None] = {}
    at = 0
    while at < len(words):
        word = words[at]
        if word.text == "--":
            at += 1
            break
        if not word.text.startswith("-") or word.text == "-":
            break
        at += 1
        option, attached = _option(word, known, program)
        value: Word | None = None
        if option.takes is not Takes.NOTHING:
            if attached is not None:
                value = word._replace(text=attached)
            elif option.takes is not Takes.OPTIONAL:
                if at >= len(words):
                    raise PlanError(f"{where(word)}: {program} {word.text} has no value")
                value = words[at]
                at += 1
        key = option.allowed[0] if option.effect is Effect.RENAMED else option.key
        values[key] = value
    return Options(values, tuple(words[:at]), tuple(words[at:]))


def _option(word: Word, known: Mapping[str, Option], program: str) -> tuple[Option, str | None]:
    """Return the option that a word names, and the value that is joined to it."""
    text, equals, value = word.text.lstrip("-").partition("=")
    attached = value if equals else None
    is_short = not word.text.startswith("--")
    for name in (text, text.replace("_", "-")):
        if name in known and (not is_short or len(name) <= 2):
            return known[name], attached
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


def wrapped_at(words: Sequence[Word]) -> int:
    """Return where the command begins that others, such as srun and nohup, start."""
    at = 0
    while at < len(words):
        after = next_at(words, at)
        if after is None:
            break
        at = after
    return at


def next_at(words: Sequence[Word], at: int) -> int | None:
    """Return where the command behind a wrapper begins; None where there is no wrapper."""
    name = words[at].text.rpartition("/")[2]
    if name == "srun":
        return len(words) - len(split_options(words[at + 1 :], SLURM).rest)
    wrapper = WRAPPERS.get(ALIASES.get(name, name))
    if wrapper is None:
        return None
    start = at + 1
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
            start += 1 + (text in takes) + (text in {"--mca", "-mca", "-genv"}) * 2
    return min(start + wrapper.positionals, len(words))


def environment_of(words: Sequence[Word]) -> dict[str, Word]:
    """Return the variables that ``env A=1`` sets among the words of wrappers."""
    found = {}
    for number, word in enumerate(words):
        if number and ASSIGNMENT.match(word.text):
            name, _, value = word.text.partition("=")
            found[name] = word._replace(text=value)
    return found
