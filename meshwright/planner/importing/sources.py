"""Sources of a configuration: its framework, its keys and their lines."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.hwprofiles import FieldEntry, FrameworkProfile, load_framework, shown, suggestion
from meshwright.planner.configuration import (
    Document,
    Effect,
    Option,
    converted,
    known_option,
    read_json,
    read_toml,
    read_yaml,
)
from meshwright.planner.export import FRAMEWORKS
from meshwright.planner.formats import PROGRAMS, resolved
from meshwright.planner.importing.reading import options_of
from meshwright.planner.tables import Framework, spelled
from meshwright.simulator import PlanError

FORMATS: Mapping[str, Framework] = {
    **{name: each for name, each in FRAMEWORKS.items() if each.is_read},
    **{
        name: Framework(profile=load_framework(name), program=program)
        for name, program in PROGRAMS.items()
    },
}
READERS = {"yaml": read_yaml, "json": read_json, "toml": read_toml}
SUFFIXES = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}
SCRIPT = "script"
SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm", ".args")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Source of a plan: a framework, its keys and their lines, and the ranks that it starts.

    Args:
        framework: Whose it is.
        keys: Its values.
        lines: Its lines.
        files: Names of the files, other than the one that is read, in which keys stand.
        launched: What its launcher says of nodes and ranks, by the names of facts.
        launcher: Lines and words of the launchers' options that say it.
        refusals: What is wrong with its words.
        release: Of which stack it is, if a line that exports have says it.
    """

    framework: Framework
    keys: dict[str, object]
    lines: Mapping[str, int]
    files: Mapping[str, str] = field(default_factory=dict)
    launched: Mapping[str, int] = field(default_factory=dict)
    launcher: tuple[tuple[int, str], ...] = ()
    refusals: Sequence[str] = ()
    release: str | None = None

    def without(self, keys: Iterable[str]) -> "Source":
        """Return the configuration without some keys, which a user takes for harmless.

        Raises:
            PlanError: If it does not have one.
        """
        remaining = dict(self.keys)
        for key in keys:
            names = (key, key.replace("_", "-"), key.replace("-", "_"))
            name = next((each for each in names if each in remaining), None)
            if name is None:
                raise PlanError(
                    f"--without {shown(key)} is not in it; {suggestion(key, remaining)}"
                )
            del remaining[name]
        return replace(self, keys=remaining)

    def place(self, key: str) -> str:
        """Return the file and the line of a key; empty where it has none."""
        line = self.lines.get(key)
        return "" if line is None else f"{self.files.get(key, '')} line {line}".lstrip()


def kind_of(path: Path | None, text: str, framework: Framework | None) -> str:
    """Return the kind of a text: the format of a configuration, or a script."""
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
        # A text that names a program of the framework starts it.
        starts = any(each in text for each in framework.profile.programs)
        return SCRIPT if starts else framework.profile.format
    # TOML begins with a section, YAML with a key.
    if re.fullmatch(r"\[[\w.-]+\]", first):
        return "toml"
    return "yaml" if re.fullmatch(r"[\w.-]+:( .*)?", first) else SCRIPT


def document_source(text: str, kind: str, framework: Framework | None, folder: Path) -> Source:
    """Return the source that the text of a configuration is.

    Args:
        text: Of it.
        kind: One of `READERS`.
        framework: Whose it is, if that is known.
        folder: Of its file.

    Raises:
        PlanError: If it is none, or is of no framework.
    """
    document = READERS[kind](text)
    framework = framework or matching_framework(document, kind)
    if framework.profile.format != kind:
        raise PlanError(
            f"--from {framework.name} reads {framework.profile.format}, not {kind.upper()}; "
            f"allowed for {kind.upper()}: {', '.join(_of_format(kind))}"
        )
    keys, lines = completed(framework, document.keys, document.lines, folder)
    return Source(framework=framework, keys=keys, lines=lines, refusals=dotted_names(document))


def dotted_names(document: Document) -> list[str]:
    """Return the refusals of names with a dot of their own, which no program takes for sections."""
    return [
        f"line {document.lines[key]}: {shown(key)} is one name, not a key of a section"
        for key in sorted(document.dotted)
    ]


def completed(
    framework: Framework, keys: Mapping[str, object], lines: Mapping[str, int], folder: Path
) -> tuple[dict[str, object], dict[str, int]]:
    """Return values and lines by the names of today, with those of files that keys name.

    These have the line that names their file.

    Raises:
        PlanError: If a file is not there, or a key stands there by its old and its new name.
    """
    values, placed = dict(keys), dict(lines)
    # Before files are read: a reference may name one.
    if framework.profile.has_references:
        values = resolved(values)
    if framework.program.included is not None:
        values = framework.program.included(values, folder)
        sections = {key: key.partition(".")[0] for key in values if key not in placed}
        placed |= {key: lines[name] for key, name in sections.items() if name in lines}
    return with_current_names(values, placed, all_options(framework.profile))


def with_current_names(
    keys: Mapping[str, object], lines: Mapping[str, int], options: Mapping[str, Option]
) -> tuple[dict[str, object], dict[str, int]]:
    """Return values and lines of a configuration by the keys' names of today.

    Raises:
        PlanError: If a key stands there by its old and its new name.
    """
    named = {key: known_option(key, options) for key in (*keys, *lines)}
    values: dict[str, object] = {}
    spelt: dict[str, str] = {}
    for key, value in keys.items():
        option = named[key]
        name = key if option is None else option.key
        if (other := spelt.setdefault(name, key)) != key:
            line = f"line {lines.get(key, 0)}"
            raise PlanError(f"{line}: {key} and {other} are one key; allowed: one of them")
        values[name] = value if option is None else converted(option, value)
    placed = {
        key if (option := named[key]) is None else option.key: line for key, line in lines.items()
    }
    return values, placed


def _of_format(kind: str) -> list[str]:
    return [name for name, each in FORMATS.items() if each.profile.format == kind]


def matching_framework(document: Document, kind: str, among: Collection[str] = ()) -> Framework:
    """Return the framework that has most of a document's keys.

    Args:
        document: The document.
        kind: Its format.
        among: Names of those that it may be of; all where there are none.

    Raises:
        PlanError: If there is none.
    """
    # Frameworks share keys: the most specific one has most of them.
    ranked = [
        (len([key for key in document.keys if key in _keys_of(each.profile)]), name)
        for name, each in FORMATS.items()
        if each.profile.format == kind
        and (not among or name in among)
        and any(key in document.lines for key in each.profile.known_by)
    ]
    best = max(ranked, default=(0, ""), key=lambda each: each[0])
    if not best[1]:
        readable = ", ".join(_of_format(kind)) or "none"
        raise PlanError(f"is of no framework that is known; {kind.upper()} is read of: {readable}")
    return FORMATS[best[1]]


def _keys_of(profile: FrameworkProfile) -> set[str]:
    """Return the keys that configurations of a framework may hold."""
    tables = profile.tables.values()
    return {key for table in tables for key in (*table.keys, *options_of(table))}


def all_options(profile: FrameworkProfile) -> Mapping[str, Option]:
    """Return the options of all tables of a framework; the first one of a key in several."""
    by_key: dict[str, Option] = {}
    for table in profile.tables.values():
        by_key |= {key: each for key, each in options_of(table).items() if key not in by_key}
    return by_key


def get_format(name: str) -> Framework:
    """Return a framework whose configurations are read, by name.

    Raises:
        PlanError: If there is none.
    """
    if name not in FORMATS:
        raise PlanError(f"--from {shown(name)} is unknown; {suggestion(name, FORMATS)}")
    return FORMATS[name]


def meanings(profile: FrameworkProfile) -> Iterator[tuple[str, str]]:
    """Yield each key of a framework's configurations with what it means here."""
    fields_by_key: dict[str, list[str]] = {}
    options: dict[str, Option] = {}
    for table in profile.tables.values():
        options |= options_of(table)
        for name, entry in table.fields.items():
            for key in entry.all_keys:
                fields_by_key.setdefault(key, []).append(_field_text(name, entry))
    for key in sorted({*fields_by_key, *options}):
        meaning = (
            ", ".join(dict.fromkeys(fields_by_key[key]))
            if key in fields_by_key
            else _effect_text(options[key])
        )
        yield key, meaning


def _field_text(name: str, entry: FieldEntry) -> str:
    """Return the field of an entry, with its default in brackets."""
    plain = entry.absent is not None and not isinstance(entry.absent, dict)
    return f"{name} [{spelled(entry.absent)}]" if plain else name


def _effect_text(option: Option) -> str:
    allowed = ", ".join(option.allowed)
    return {
        Effect.NONE: "no effect on time or memory",
        Effect.HELD: f"allowed: {allowed}" if allowed else "refused",
        Effect.RENAMED: f"old name of {allowed}",
        Effect.READ: "read",
    }[option.effect] + (f" ({option.why})" if option.why else "")
