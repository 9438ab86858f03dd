"""Launch scripts: the framework that a command starts, and the keys of its words and files.

Options of launchers are read, known or refused as those of frameworks are; Accelerate's say a
layout themselves, beside the configuration that it names.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from meshwright.hwprofiles import shown
from meshwright.planner.configuration import (
    FRAMEWORK_FILE,
    LAUNCHERS,
    Effect,
    Option,
    Options,
    OptionWord,
    Takes,
    Unknown,
    known_option,
    load_options,
    named_file,
    read_options,
    read_yaml,
)
from meshwright.planner.importing.reading import mistake
from meshwright.planner.importing.sources import (
    FORMATS,
    READERS,
    SCRIPT,
    SUFFIXES,
    Source,
    all_options,
    completed,
    document_source,
    dotted_names,
    kind_of,
    matching_framework,
)
from meshwright.planner.shell import Launch, Word, find_launches, read_commands
from meshwright.planner.tables import Framework, named_release
from meshwright.simulator import PlanError

OVERRIDE = re.compile(r"(?P<key>[A-Za-z_][\w.-]*)=(?P<value>.*)", re.DOTALL)
SUBCOMMANDS = ("train",)  # of a program that names a configuration
# Options that name a configuration.
CONFIG_OPTION = re.compile(r"--?(job\.|deepspeed_)?config([-_]?(file|path|name))?")

ACCELERATE = "accelerate"
PYTHON = "python"  # starts one rank
SLURM = ("srun", "sbatch")
# Accelerate's options that say how many ranks there are, which any launch reads.
RANK_OPTIONS = ("num-machines", "num-processes", "multi-gpu", "gpu-ids")
TYPE = "distributed_type"
SECTIONS = ("", "fsdp_config.", "deepspeed_config.", "parallelism_config.", "megatron_lm_config.")
STRATEGIES = {
    "use-megatron-lm": "MEGATRON_LM",
    "use-deepspeed": "DEEPSPEED",
    "use-fsdp": "FSDP",
    "multi-gpu": "MULTI_GPU",
}
# All variables of these libraries are keys.
ENGINES = ("NVTE_",)
TRAINER = "transformers"  # whose options users' own scripts have, too


def read_source(
    path: Path | None,
    text: str,
    framework: Framework | None,
    defines: Mapping[str, str],
    program: str | None = None,
) -> Source:
    """Return the source of a file, with the release that an export names.

    Args:
        path: Of the file; None where its *text* is an expanded command.
        text: Of the file.
        framework: Whose it is, if that is known.
        defines: Variables that a script does not set.
        program: That is meant, where a script starts several: its name, or ``NAME:LINE``.

    Raises:
        PlanError: If it cannot be read, or is of no framework.
    """
    source = _read_source(path, text, framework, defines, program)
    return replace(source, release=named_release(text))


def _read_source(
    path: Path | None,
    text: str,
    framework: Framework | None,
    defines: Mapping[str, str],
    program: str | None,
) -> Source:
    kind, folder = kind_of(path, text, framework), Path() if path is None else path.parent
    if kind != SCRIPT:
        if defines or program:
            option = "--define" if defines else "--launch"
            raise PlanError(f"{option} goes with scripts; this is {kind.upper()}")
        return document_source(text, kind, framework, folder)
    commands = read_commands(text, file=path, defines=defines)
    (launch,) = find_launches(commands, program=program)
    _check_program(launch)
    return _of_launch(launch, framework or _started(launch, folder), folder)


def _check_program(launch: Launch) -> None:
    """Raise PlanError for a program of a framework that trains what no plan has."""
    path = Path(launch.program.text)
    for name, each in FORMATS.items():
        for pattern, trained in each.profile.other_programs.items():
            if path.match(pattern):
                raise PlanError(
                    f"line {launch.program.line}: {path.name} of {name} trains {trained}, which is "
                    f"in no plan; allowed: {', '.join(each.profile.programs)}"
                )


def _of_launch(launch: Launch, framework: Framework, folder: Path) -> Source:
    """Return the source that a command is: its options, the files that it names, its launchers."""
    parsed, files = _said(launch, framework, folder)
    launch_keys, sizes, beside = parsed.keys, _sizes(launch), ""
    # Of a user's own script the launcher's configuration is all that says a layout.
    if framework.name == ACCELERATE:
        beside = ACCELERATE
    elif framework.program.launched is not None and ACCELERATE in launch.launcher_words:
        beside, configuration = ACCELERATE, _accelerate(launch, folder)[0].keys
        launch_keys = framework.program.launched(launch_keys, configuration)
        ranks = configuration.get("num_processes")
        if isinstance(ranks, int) and ranks > 0:
            # A count on the command line goes before that of the configuration.
            sizes.setdefault("world_size", ranks)
    launchers = _launchers(launch)
    environment = {name: word.line for name, word in launch.environment.items()}
    variables = _variables(launch, framework)
    keys, lines = completed(
        framework, {**launch_keys, **variables}, {**parsed.lines, **environment}, folder
    )
    stray = [
        f"line {each.line}: {each.unknown or f'{shown(each.text)} belongs to no option'}"
        for each in parsed.words
    ]
    return Source(
        framework=framework,
        keys=keys,
        lines=lines,
        files=files,
        launched=sizes,
        launcher=tuple(_counts(launchers)),
        refusals=[*_mistakes(launch, launchers, beside), *parsed.refusals, *stray],
    )


def _sizes(launch: Launch) -> dict[str, int]:
    """Return the numbers of ranks and nodes of a launch; a plain python is one rank."""
    is_alone = launch.launcher == PYTHON and not set(launch.launcher_words) & {*LAUNCHERS}
    counts = {
        "world_size": 1 if is_alone else launch.world_size,
        "num_nodes": launch.nodes,
        "ranks_per_node": launch.ranks_per_node if launch.nodes is None else None,
    }
    return {name: number for name, number in counts.items() if number is not None}


def _started(launch: Launch, folder: Path) -> Framework:
    """Return the framework whose program a launch starts, or whose options it gives.

    Of programs of one name the configuration that is named beside tells.

    Raises:
        PlanError: If it is none that is known.
    """
    path = Path(launch.program.text)
    patterns = {name: each.profile.programs for name, each in FORMATS.items()}
    named = [name for name, each in patterns.items() if any(map(path.match, each))]
    kinds = {SUFFIXES.get(Path(each.text).suffix) for each in launch.arguments}
    named = [  # a program that reads a configuration names one, or takes options, too
        name
        for name in named
        if FORMATS[name].profile.format in {*kinds, "options", "overrides"}
        or FORMATS[name].program.read_words is not None
    ]
    for word in launch.arguments if len(named) > 1 else ():
        kind = SUFFIXES.get(Path(word.text).suffix)
        if kind is not None:
            document = READERS[kind](FRAMEWORK_FILE.read_text(_found_file(word, folder)))
            return matching_framework(document, kind, named)
    if named:
        return FORMATS[named[0]]
    # A user's own script is told by the options of a framework that it takes.
    starts = [each.text.lstrip("-").partition("=")[0] for each in launch.arguments]
    for each in FORMATS.values():
        options = all_options(each.profile)
        if any(known_option(start, options) for start in starts if start in each.profile.known_by):
            return each
    if ACCELERATE in launch.launcher_words:
        return FORMATS[ACCELERATE]
    files = [each.text for each in launch.arguments if Path(each.text).suffix in SUFFIXES]
    remedy = (
        f"import {Path(files[0].rpartition('=')[2]).name} itself"
        if files
        else f"say whose options it takes: --from {', '.join(FORMATS)}"
    )
    raise PlanError(
        f"line {launch.program.line}: {shown(launch.program.text)} is the program of no framework "
        f"that is known; {remedy}"
    )


def _said(launch: Launch, framework: Framework, folder: Path) -> tuple[Options, dict[str, str]]:
    """Return the options of a launch, and the files of keys that stand elsewhere."""
    profile, read_words = framework.profile, framework.program.read_words
    if framework.name == ACCELERATE:
        return _accelerate(launch, folder)
    kind = str(profile.format)
    files = [each for each in launch.arguments if SUFFIXES.get(Path(each.text).suffix) == kind]
    if kind in READERS and (read_words is None or files):
        return _named(launch, framework, files, folder)
    options = all_options(profile)
    return read_options(launch.arguments, options) if read_words is None else read_words(
        launch.arguments
    ), {}


def _named(
    launch: Launch, framework: Framework, files: list[Word], folder: Path
) -> tuple[Options, dict[str, str]]:
    """Return the keys of the configuration that a launch names, with its command's overrides."""
    kind, program = str(framework.profile.format), launch.program
    if not files:
        raise PlanError(f"line {program.line}: {program.text} names no {kind.upper()} file")
    path = _found_file(files[0], folder)
    document = READERS[kind](FRAMEWORK_FILE.read_text(path))
    index = launch.arguments.index(files[0])
    # `--config FILE` takes the option out of the command with its file.
    names_it = index > 0 and CONFIG_OPTION.fullmatch(launch.arguments[index - 1].text) is not None
    other_words = [*launch.arguments[: index - names_it], *launch.arguments[index + 1 :]]
    parsed = read_options(other_words, all_options(framework.profile))
    stray = []
    for word in parsed.words:
        match = OVERRIDE.fullmatch(word.text)
        if match and not word.unknown:
            parsed.keys[match["key"]] = read_yaml(f"a: {match['value']}").keys["a"]
            parsed.lines[match["key"]] = word.line
        elif word.text not in SUBCOMMANDS:
            stray.append(word)
    files_of = {key: path.name for key in document.keys if key not in parsed.keys}
    keys, lines = {**document.keys, **parsed.keys}, {**document.lines, **parsed.lines}
    refusals = [*(f"{path.name} {each}" for each in dotted_names(document)), *parsed.refusals]
    return Options(keys, lines, stray, refusals), files_of


def _found_file(word: OptionWord, folder: Path) -> Path:
    """Return the file that a word names, relative to a script's folder or to one above it.

    Raises:
        PlanError: If there is none.
    """
    if word.unknown:
        raise PlanError(f"line {word.line}: {word.unknown}")
    name = word.text.partition("=")[2] or word.text
    # An absolute path is of the machine that the script was written for.
    path = None if Path(name).is_absolute() else named_file(name, folder)
    if path is None:
        raise PlanError(f"line {word.line}: {shown(name)} is not there; it says the layout")
    return path


def _variables(launch: Launch, framework: Framework) -> dict[str, object]:
    """Return the variables of the environment that a plan may depend on."""
    options = all_options(framework.profile)
    starts = tuple(each for each in ENGINES if any(key.startswith(each) for key in options))
    return {
        name: Unknown(word.unknown) if word.unknown else word.text
        for name, word in launch.environment.items()
        if name.isupper() and (name in options or name.startswith(starts or "-"))
    }


def _accelerate(launch: Launch, folder: Path) -> tuple[Options, dict[str, str]]:
    """Return the configuration that ``accelerate launch`` makes of its options and its file.

    Of the options of a user's own script those alone are known that change nothing.
    """
    words = launch.launcher_words.get(ACCELERATE, ())
    parsed = read_options(words, load_options(LAUNCHERS[ACCELERATE]))
    keys: dict[str, object] = {}
    lines: dict[str, int] = {}
    files: dict[str, str] = {}
    refusals: list[str] = []
    name = parsed.keys.get("config-file")
    for word in words:
        if (name is not None and word.text.partition("=")[2] == name) or word.text == name:
            path = _found_file(word, folder)
            document = read_yaml(FRAMEWORK_FILE.read_text(path))
            keys, lines = dict(document.keys), dict(document.lines)
            files = dict.fromkeys(keys, path.name)
            refusals = [f"{path.name} {each}" for each in dotted_names(document)]
    options = all_options(FORMATS[ACCELERATE].profile)
    for key, value in parsed.keys.items():
        names = (f"{section}{key.replace('-', '_')}" for section in SECTIONS)
        known_key = next((each for each in names if each in options), None)
        if known_key is not None:
            keys[known_key], lines[known_key] = value, parsed.lines[key]
            # Options of the command override the file that it names.
            files.pop(known_key, None)
    strategies = [kind for key, kind in STRATEGIES.items() if key in parsed.keys]
    if strategies or TYPE not in keys:
        # Without a word it starts several processes as with --multi_gpu (launch.py).
        keys[TYPE] = strategies[0] if strategies else "MULTI_GPU"
    options = all_options(FORMATS[TRAINER].profile)
    user_options = read_options(launch.arguments, options)
    refusals += [*user_options.refusals, *_of_own_script(launch, user_options, options)]
    return Options(keys, lines, user_options.words, refusals), files


def _of_own_script(launch: Launch, parsed: Options, options: Mapping[str, Option]) -> Iterator[str]:
    """Yield the options of a user's own script that may change the plan."""
    for key, line in parsed.lines.items():
        option = options.get(key)
        if option is None or option.effect is not Effect.NONE:
            yield f"line {line}: --{key} of {launch.program.text} may change the plan"


def _launchers(launch: Launch) -> dict[str, Options]:
    """Return the options of each launcher of a launch, by its name."""
    by_launcher = {}
    for name, words in launch.launcher_words.items():
        if name in LAUNCHERS:
            options = load_options(LAUNCHERS[name])
            by_launcher[name] = read_options([*_separated(words, options)], options)
    return by_launcher


def _counts(launchers: Mapping[str, Options]) -> Iterator[tuple[int, str]]:
    """Yield line and text of the launchers' options that count ranks."""
    for name, parsed in launchers.items():
        options = load_options(LAUNCHERS[name])
        for key, value in parsed.keys.items():
            if key in options and options[key].effect is Effect.READ:
                yield parsed.lines[key], f"{key}={value}"


def _mistakes(launch: Launch, launchers: Mapping[str, Options], beside: str) -> Iterator[str]:
    """Yield what is wrong with the options of a launch's launchers.

    Args:
        launch: The launch.
        launchers: Their options.
        beside: The launcher whose options are read as a configuration.
    """
    yield from launch.unknown
    for name, parsed in launchers.items():
        options = load_options(LAUNCHERS[name])
        yield from parsed.refusals
        # Messages have options as they are written.
        dashed = {f"--{key}": each for key, each in options.items()}
        for key, value in parsed.keys.items():
            text = mistake(name, f"--{key}", value, dashed, ())
            if name != beside and _is_layout(name, options.get(key)):
                text = f"--{key} of {name} says a layout beside that of {launch.program.text}"
            if name in SLURM:
                text = text or _other_count(launch, key, value)
            if text:
                yield f"line {parsed.lines[key]}: {text}"


def _separated(words: Iterable[Word], options: Mapping[str, Option]) -> Iterator[Word]:
    """Yield words, and a short option and its value apart where they are joined: ``-N2``."""
    for word in words:
        name, text = word.text[1:2], word.text[1:]
        is_joined = (
            word.text[:1] == "-" and len(text) > 1 and name in options and text not in options
        )
        if is_joined and options[name].takes is not Takes.NOTHING and text[1] != "=":
            yield word._replace(text=f"-{name}")
            yield word._replace(text=text[1:])
        else:
            yield word


def _other_count(launch: Launch, key: str, value: object) -> str:
    """Return the mismatch of an option of Slurm with the counts of the launcher below it."""
    gpus = launch.ranks_per_node
    counts = {"nodes": launch.nodes, "gpus-per-node": gpus, "gres": gpus}
    launched, stated = counts.get(key), re.search(r"(?:^|:)([0-9]+)$", str(value))
    if launched is None or (stated and int(stated[1]) == launched):
        return ""
    return f"--{key} {value} does not go with {launched}, which the launcher starts"


def _is_layout(launcher: str, option: Option | None) -> bool:
    """Return True if an option of a launcher sets more than the number of ranks."""
    is_read = option is not None and option.effect is Effect.READ and option.key not in RANK_OPTIONS
    return launcher == ACCELERATE and is_read
