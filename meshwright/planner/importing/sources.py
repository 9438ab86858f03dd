"""What a file is: which framework's, and what it, or the command in it, says by which keys."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.hwprofiles import FrameworkProfile, shown
from meshwright.planner.configuration import (
    FRAMEWORK_FILE,
    Document,
    Option,
    OptionWord,
    converted,
    known_option,
    read_json,
    read_options,
    read_toml,
    read_yaml,
)
from meshwright.planner.export import Framework
from meshwright.planner.formats import resolved
from meshwright.planner.importing.formats import FORMATS
from meshwright.planner.importing.launchers import (
    ACCELERATE,
    accelerate_keys,
    launcher_refusals,
    script_refusals,
)
from meshwright.planner.importing.reading import options_of
from meshwright.simulator import PlanError

if TYPE_CHECKING:
    from meshwright.planner.shell import Launch, Word

READERS = {"yaml": read_yaml, "json": read_json, "toml": read_toml}
SUFFIXES = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}
SCRIPT = "script"
SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm", ".args")
OVERRIDE = re.compile(r"(?P<key>[A-Za-z_][\w.-]*)=(?P<value>.*)", re.DOTALL)
SUBCOMMANDS = ("train",)  # of a program that names a configuration
PARENTS = 4  # folders above a script in which a configuration that it names is looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A configuration: whose it is, its values and lines by key, and how many ranks it starts.

    Args:
        framework: Whose it is.
        keys: Its values.
        lines: Its lines; those of a configuration that a script names are the configuration's.
        world_size: Ranks that its launcher starts, None where it does not say.
        refusals: What is wrong with its words.
    """

    framework: Framework
    keys: dict[str, object]
    lines: Mapping[str, int]
    world_size: int | None = None
    refusals: Sequence[str] = field(default_factory=list)


def read_source(
    path: Path | None, text: str, framework: Framework | None, defines: Mapping[str, str]
) -> Source:
    """Return what a file says.

    Args:
        path: Of the file; None where its *text* is an expanded command.
        text: Of the file.
        framework: Whose it is, if that is known.
        defines: Variables that a script does not set.

    Raises:
        PlanError: If it cannot be read, or is of no framework.
    """
    kind = _kind(path, text, framework)
    if kind == SCRIPT:
        # Only scripts need a parser of shells.
        from meshwright.planner.shell import find_launches, read_commands  # noqa: PLC0415

        commands = read_commands(text, file=path, defines=defines)
        folder = Path() if path is None else path.parent
        (launch,) = find_launches(commands)
        return _of_launch(launch, framework, folder)
    if defines:
        raise PlanError(f"--define goes with scripts; {path} is {kind.upper()}")
    document = READERS[kind](text)
    folder = Path() if path is None else path.parent
    return _of_document(document, kind, framework, folder)


def _kind(path: Path | None, text: str, framework: Framework | None) -> str:
    """Return what a text is: of a configuration, or a script."""
    suffix = "" if path is None else path.suffix.lower()
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    if path is None or suffix in SCRIPTS or text.startswith("#!"):
        return SCRIPT
    first = next(
        (line for each in text.splitlines() if (line := each.strip()) and line[0] != "#"), ""
    )
    if first.startswith("{"):
        return "json"
    if framework is not None and framework.profile.format in READERS:
        own = framework.profile.format
        return own if own != "toml" or "=" in text.partition("[")[2] else SCRIPT
    if re.fullmatch(r"\[[\w.-]+\]", first):
        return "toml"
    return "yaml" if re.fullmatch(r"[\w.-]+:( .*)?", first) else SCRIPT


def _of_document(
    document: Document, kind: str, framework: Framework | None, folder: Path
) -> Source:
    found = framework or _recognised(document, kind)
    if found.profile.format != kind:
        raise PlanError(
            f"--from {found.name} reads {found.profile.format}, not {kind.upper()}; "
            f"allowed for {kind.upper()}: {', '.join(_of_format(kind))}"
        )
    keys, lines = _whole(found, document.keys, document.lines, folder)
    return Source(framework=found, keys=keys, lines=lines)


def _whole(
    framework: Framework, keys: Mapping[str, object], lines: Mapping[str, int], folder: Path
) -> tuple[dict[str, object], dict[str, int]]:
    """Return values and lines with those of the files that a configuration names.

    These have the line that names their file.

    Raises:
        PlanError: If a file is not there, or a key stands there by its old and its new name.
    """
    found, placed = dict(keys), dict(lines)
    if framework.profile.has_references:
        found = resolved(found)
    if framework.program.included is not None:
        found = framework.program.included(found, folder)
        sections = {key: key.partition(".")[0] for key in found if key not in placed}
        placed |= {key: lines[name] for key, name in sections.items() if name in lines}
    return _by_present_names(found, placed, all_options(framework.profile))


def _by_present_names(
    keys: Mapping[str, object], lines: Mapping[str, int], options: Mapping[str, Option]
) -> tuple[dict[str, object], dict[str, int]]:
    """Return values and lines of a configuration by the keys' names of today.

    Raises:
        PlanError: If a key stands there by its old and its new name.
    """
    named = {key: known_option(key, options) for key in keys}
    found: dict[str, object] = {}
    for key, value in keys.items():
        option = named[key]
        name = key if option is None else option.key
        if name in found:
            raise PlanError(f"line {lines.get(key, 0)}: {key} and {name} are one key")
        found[name] = value if option is None else converted(option, value)
    placed = {
        key if (option := named.get(key)) is None else option.key: line
        for key, line in lines.items()
    }
    return found, placed


def _of_format(kind: str) -> list[str]:
    return [name for name, each in FORMATS.items() if each.profile.format == kind]


def _recognised(document: Document, kind: str) -> Framework:
    """Return the framework most of whose keys a document has.

    Raises:
        PlanError: If there is none.
    """
    ranked = [
        (len([key for key in document.keys if key in keys_of_profile(each.profile)]), name)
        for name, each in FORMATS.items()
        if each.profile.format == kind
        and any(key in document.lines for key in each.profile.known_by)
    ]
    best = max(ranked, default=(0, ""), key=lambda each: each[0])
    if not best[0]:
        known = ", ".join(_of_format(kind)) or "none"
        raise PlanError(f"is of no framework that is known; {kind.upper()} is read of: {known}")
    return FORMATS[best[1]]


def keys_of_profile(profile: FrameworkProfile) -> dict[str, None]:
    """Return the keys that configurations of a framework may hold."""
    tables = profile.tables.values()
    return dict.fromkeys(key for table in tables for key in (*table.keys, *options_of(table)))


def all_options(profile: FrameworkProfile) -> Mapping[str, Option]:
    """Return the options of all tables of a framework; of a key that several have the first."""
    found: dict[str, Option] = {}
    for table in profile.tables.values():
        found |= {key: each for key, each in options_of(table).items() if key not in found}
    return found


def _of_launch(launch: "Launch", framework: Framework | None, folder: Path) -> Source:
    found = framework or _started(launch)
    profile = found.profile
    if found.name == ACCELERATE and ACCELERATE in launch.launcher_words:
        keys, lines = accelerate_keys(launch, folder, found_file)
        keys, lines = _by_present_names(keys, lines, all_options(profile))
        refusals = [*launcher_refusals(launch, is_configuration=True), *script_refusals(launch)]
        return Source(framework=found, keys=keys, lines=lines, refusals=refusals)
    read = found.program.read_words
    if profile.format in READERS and (read is None or _files_of(launch, str(profile.format))):
        return _named_document(launch, found, folder)
    options = all_options(profile)
    said = read_options(launch.arguments, options) if read is None else read(launch.arguments)
    stray = [f"line {each.line}: {each.unknown or shown(each.text)}" for each in said.words]
    told = _launched(found, said.keys, launch, folder)
    keys, lines = _whole(found, told.keys, said.lines, folder)
    return Source(
        framework=found,
        keys=keys,
        lines=lines,
        world_size=told.world_size,
        refusals=[*told.refusals, *said.refusals, *stray],
    )


class _Launched(NamedTuple):
    """Values of a configuration, its ranks and what is wrong, with what its launcher says."""

    keys: dict[str, object]
    world_size: int | None
    refusals: list[str]


def _launched(
    framework: Framework, keys: dict[str, object], launch: "Launch", folder: Path
) -> _Launched:
    """Return *keys* with what Accelerate's launcher says in the place of its program."""
    added = framework.program.launched
    says = added is not None and ACCELERATE in launch.launcher_words
    refusals = [*launcher_refusals(launch, is_configuration=says)]
    if added is None or not says:
        return _Launched(keys, launch.world_size, refusals)
    configuration, _ = accelerate_keys(launch, folder, found_file)
    ranks = configuration.get("num_processes")
    told = ranks if isinstance(ranks, int) and ranks > 0 else None
    return _Launched(added(keys, configuration), launch.world_size or told, refusals)


def _started(launch: "Launch") -> Framework:
    """Return the framework whose program a launch starts, or whose options it gives.

    Raises:
        PlanError: If it is none that is known.
    """
    name = Path(launch.program.text).name
    for each in FORMATS.values():
        if any(fnmatchcase(name, pattern) for pattern in each.profile.programs):
            return each
    starts = [each.text.lstrip("-").partition("=")[0] for each in launch.arguments]
    for each in FORMATS.values():
        known = all_options(each.profile)
        if any(known_option(start, known) for start in starts if start in each.profile.known_by):
            return each
    if ACCELERATE in launch.launcher_words:
        return FORMATS[ACCELERATE]
    known_programs = sorted({name for each in FORMATS.values() for name in each.profile.programs})
    raise PlanError(
        f"line {launch.program.line}: {launch.program.text} is the program of no framework that is "
        f"known; allowed: {', '.join(known_programs)}, or --from with the framework's name"
    )


def _files_of(launch: "Launch", kind: str) -> "list[Word]":
    return [each for each in launch.arguments if SUFFIXES.get(Path(each.text).suffix) == kind]


def _named_document(launch: "Launch", framework: Framework, folder: Path) -> Source:
    """Return the configuration that a launch names, with what its command overrides."""
    kind = str(framework.profile.format)
    files = _files_of(launch, kind)
    if not files:
        raise PlanError(
            f"line {launch.program.line}: {launch.program.text} names no {kind.upper()} file"
        )
    path = found_file(files[0], folder)
    document = READERS[kind](FRAMEWORK_FILE.read_text(path))
    place = launch.arguments.index(files[0])
    names_it = place > 0 and launch.arguments[place - 1].text.startswith("-")
    others = [*launch.arguments[: place - names_it], *launch.arguments[place + 1 :]]
    said = read_options(others, all_options(framework.profile))
    keys, lines = {**document.keys, **said.keys}, {**document.lines, **said.lines}
    refusals = [*said.refusals]
    for word in said.words:
        match = OVERRIDE.fullmatch(word.text)
        if match and not word.unknown:
            keys[match["key"]] = READERS["yaml"](f"a: {match['value']}").keys["a"]
            lines[match["key"]] = word.line
        elif word.text not in SUBCOMMANDS:
            refusals.append(f"line {word.line}: {word.unknown or shown(word.text)}")
    told = _launched(framework, keys, launch, folder)
    keys, lines = _whole(framework, told.keys, lines, path.parent)
    return Source(
        framework=framework,
        keys=keys,
        lines=lines,
        world_size=told.world_size,
        refusals=[*told.refusals, *refusals],
    )


def found_file(word: OptionWord, folder: Path) -> Path:
    """Return the file that a word names, relative to a script's folder or to one above it.

    Raises:
        PlanError: If there is none.
    """
    if word.unknown:
        raise PlanError(f"line {word.line}: {word.unknown}")
    name = Path(word.text.partition("=")[2] or word.text)
    for above in [folder, *folder.resolve().parents][: PARENTS + 1]:
        found = above / name
        if not name.is_absolute() and ".." not in name.parts and found.is_file():
            return found
    raise PlanError(f"line {word.line}: {shown(str(name))} is not there; it says the layout")
