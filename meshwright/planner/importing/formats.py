"""The formats that plans are read from: of frameworks that are written, and of others."""

from collections.abc import Iterator, Mapping

from meshwright.hwprofiles import FieldEntry, FrameworkProfile, load_framework, shown, suggestion
from meshwright.planner.configuration import Effect, Option
from meshwright.planner.export import FRAMEWORKS
from meshwright.planner.formats import PROGRAMS
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
    read: dict[str, list[str]] = {}
    options: dict[str, Option] = {}
    for table in profile.tables.values():
        options |= options_of(table)
        for name, entry in table.fields.items():
            for key in entry.all_keys:
                read.setdefault(key, []).append(_read(name, entry))
    for key in sorted({*read, *options}):
        said = ", ".join(dict.fromkeys(read[key])) if key in read else _unread(options[key])
        yield key, said


def _read(name: str, entry: FieldEntry) -> str:
    """Return what an entry reads, and what it takes where it finds nothing."""
    plain = entry.absent is not None and not isinstance(entry.absent, dict)
    return f"{name} [{spelled(entry.absent)}]" if plain else name


def _unread(option: Option) -> str:
    allowed = ", ".join(option.allowed)
    return {
        Effect.NONE: "no effect on time or memory",
        Effect.HELD: f"allowed: {allowed}" if allowed else "refused",
        Effect.RENAMED: f"old name of {allowed}",
        Effect.READ: "read",
    }[option.effect] + (f" ({option.why})" if option.why else "")
