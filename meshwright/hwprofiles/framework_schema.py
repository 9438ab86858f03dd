"""What a framework that trains can be told, and how it spells it: one file each.

Exporters, importers and the search read the same tables: a value that leaves one leaves all three.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, cast

from meshwright.hwprofiles.complaints import ProfileError, shown, suggestion
from meshwright.hwprofiles.conditions import Condition, Refusal
from meshwright.hwprofiles.loader import DATA_FOLDER, PROFILE_FILE, checked, read_built_in
from meshwright.hwprofiles.units import Flag, Name, Profile, StackName, Text
from meshwright.records import Field, model_validator

UNSET = "unset"  # a field that is None, where a file has no null
NULL = "null"  # the same of a framework's own value
OTHERWISE = "otherwise"  # the last of several conditions

Format: TypeAlias = Literal["options", "overrides", "yaml", "json", "toml"]
"""How a framework is told: by options or ``KEY=VALUE`` of a command, or by a file."""
Theirs: TypeAlias = Flag | Annotated[int, Field(strict=True)] | str | list[str]
"""A value as a framework has it."""
Told: TypeAlias = Theirs | dict[str, Theirs]
"""A value of an entry's one key, or of each of several."""
Ours: TypeAlias = Flag | Annotated[int, Field(strict=True)] | str
"""A value of a field, as a plan's file has it, or ``unset``."""


class ScriptLine(Profile):
    """What the user's own script has to say of a plan, since no file does.

    Args:
        line: The words; fields and facts stand in braces.
        when: Of which plans.
    """

    line: Text
    when: str = ""


class FieldEntry(Profile):
    """How a framework is told a field of the plan, or a fact of its job, model or stack.

    An entry without any key is of what a launcher or a script says: it holds every value.

    Args:
        key: Of the framework.
        keys: Keys of a codec, by what they are there.
        further_keys: More of them, by themselves.
        values: What the framework is told, by the field's value; read back the same way.
        also: Field's values by further spellings of the framework, which are only read.
        absent: What no key means; of several keys, what each of them does.
        absent_as: Another field, or fact, whose value it then has.
        nothing: Values of the framework that say as little as no key.
        leaves_out: Whether a value that is as ``absent`` is not written.
        of_launch: Whether variables of the launch tell it; a file alone leaves it open.
        only: The values that it can have; all of ``values`` where there are none.
        always: Values by the condition under which the framework has them whatever it is told.
        same_as: Another field, or fact, whose value it has whatever it is told.
        tells: Another number that is written in its place, and read by nobody.
        when: Plans of which it is told; of others nothing is written or read.
        otherwise: What is written of the others.
        script: What a user's script says: the first line whose condition holds.
        beside: Keys that are written beside, and on which no layout depends.
        codec: Name of the code that writes or reads what is irregular.
        fields: Further fields of which the codec tells.
        asks: Whether it is asked for where a file does not say it: the user's own script does.
        why: By which rule, and which version has it.
    """

    key: str = ""
    keys: dict[str, str] = Field({})
    further_keys: tuple[str, ...] = ()
    values: dict[str, Told] = Field({})
    also: dict[str, Ours] = Field({})
    absent: Told | None = None
    absent_as: str = ""
    nothing: tuple[Theirs, ...] = ()
    leaves_out: Flag = False
    of_launch: Flag = False
    only: tuple[Ours, ...] = ()
    always: dict[str, str] = Field({})
    same_as: str = ""
    tells: str = ""
    when: str = ""
    otherwise: Theirs | None = None
    script: tuple[ScriptLine, ...] = ()
    beside: dict[str, Theirs] = Field({})
    codec: str = ""
    fields: tuple[str, ...] = ()
    asks: Flag = False
    why: str = ""

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Keys of the framework that it reads or writes."""
        tables = (each for each in self.values.values() if isinstance(each, dict))
        named = (self.key, *self.roles.values(), *(key for each in tables for key in each))
        return tuple(dict.fromkeys(key for key in (*named, *self.beside) if key))

    @property
    def roles(self) -> dict[str, str]:
        """Keys of a codec, by what they are there."""
        return {**self.keys, **{key: key for key in self.further_keys}}

    @property
    def allowed(self) -> tuple[Ours, ...]:
        """Values of the field that the framework has; none where it takes all."""
        return self.only or tuple(self.values)

    @model_validator(mode="after")
    def _check_conditions(self) -> None:
        lines = (each.when for each in self.script)
        for text in (self.when, *self.always.values(), *lines):
            if text and text != OTHERWISE:
                Condition(text)


class HeldKey(Profile):
    """A key of which no plan speaks, and that changes a layout: it may have these values alone.

    Args:
        values: Those that a plan goes with.
        when: Plans that it is looked at for.
        is_required: Whether a file must have it.
    """

    values: tuple[Theirs, ...] = Field(min_length=1)
    when: str = ""
    is_required: Flag = False


class FrameworkTable(Profile):
    """What a framework, a version of it, or one of its engines can be told.

    Args:
        version: Of the framework; all of them where it is empty.
        release: What the version is called.
        stack: That a plan of such a file is of.
        launches: Patterns of the names of stacks whose plans it trains in any case.
        when: Which plans of other stacks it trains.
        told_by: Values by which a file of it is known.
        options: Files of options that its configuration, or its command, may hold.
        sections: Frameworks whose configurations stand in sections of it, or in files that these
            name, by the sections: their keys are read as those frameworks read them.
        notes: What is to be said of such an export.
        model_facts: Facts of a model that it is told; all others must be as usual.  Where there are
            none nothing is asked of a model.
        fields: By the name of a field, or of a fact: model, precision, stack.loss.
        held: By the framework's key.
        refused: Plans that it cannot be told, by a name.
    """

    version: tuple[str, ...] = ()
    release: str = ""
    stack: StackName | None = None
    launches: tuple[str, ...] = ()
    when: str = ""
    told_by: dict[str, Theirs] = Field({})
    options: tuple[str, ...] = ()
    sections: dict[Name, Name] = Field({})
    notes: tuple[str, ...] = ()
    model_facts: tuple[str, ...] = ()
    fields: dict[str, FieldEntry] = Field({})
    held: dict[str, HeldKey] = Field({})
    refused: dict[str, Refusal] = Field({})

    def is_of(self, stack: str) -> bool:
        """Return whether a plan of such a file is of *stack*, or of a release of it."""
        return self.stack in (stack, stack.partition("@")[0])

    @property
    def spoken(self) -> frozenset[str]:
        """Fields of a plan, and facts, of which it says something."""
        others = (name for entry in self.fields.values() for name in entry.fields)
        return frozenset({*self.fields, *others})

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that it knows."""
        of_fields = (key for entry in self.fields.values() for key in entry.all_keys)
        return tuple(dict.fromkeys((*of_fields, *self.held, *self.told_by)))


class FrameworkProfile(Profile):
    """A framework that trains: its tables, and what else its files may hold.

    Args:
        name: As ``--to`` and ``--from`` have it.
        title: In words.
        source: Which release, or revision, the words are of.
        format: Of the configurations that it reads; none where it only writes.
        known_by: Keys, or sections, one of which a configuration of it has.
        programs: Patterns of the programs, or modules, that a script of it starts.
        other_programs: What its other programs train, which no plan has, by their patterns.
        has_references: Whether values of its files may name other keys: ``${section.key}``.
        has_options: Whether its keys are options of a command: a switch that is off is left out.
        tables: Of its versions and engines; the first that goes with a plan is its.
    """

    name: Name
    title: Text
    source: Text
    format: Format | None = None
    known_by: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    other_programs: dict[str, Text] = Field({})
    has_references: Flag = False
    has_options: Flag = False
    tables: dict[Name, FrameworkTable] = Field(min_length=1)

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions that can be asked for, the usual one first."""
        return tuple(
            dict.fromkeys(each for table in self.tables.values() for each in table.version)
        )

    def version_for(self, stack: str) -> str:
        """Return the version whose programs a stack is of, else the usual one; empty of none."""
        of_stack = (
            each
            for each in self.versions
            if any(table.is_of(stack) for table in self.tables_of(each))
        )
        return next(of_stack, self.versions[0] if self.versions else "")

    def tables_of(self, version: str) -> tuple[FrameworkTable, ...]:
        """Return the tables of a version."""
        known = self.tables.values()
        return tuple(each for each in known if not each.version or version in each.version)

    def release_of(self, version: str) -> str:
        """Return what a version is called."""
        named = (each.release for each in self.tables_of(version) if each.release)
        return next(named, self.source)


def list_frameworks() -> tuple[str, ...]:
    """Return the names of the frameworks, in the order in which they are offered.

    >>> "torchtitan" in list_frameworks()
    True
    """
    known = {each.stem for each in (DATA_FOLDER / "frameworks").glob("*.toml")}
    return tuple(sorted(known, key=lambda name: (name not in ORDER, ORDER.get(name, 0), name)))


ORDER = {
    name: place
    for place, name in enumerate(
        ("megatron-lm", "megatron-bridge", "torchtitan", "deepspeed", "accelerate", "torchrun")
    )
}


def load_framework(name: str | Path) -> FrameworkProfile:
    """Return a framework: a built-in one by name, or a TOML file by path.

    Raises:
        ProfileError: If there is none, or its file has a mistake.

    >>> load_framework("torchtitan").versions
    ('0.2', '0.3')
    """
    if isinstance(name, Path):
        return checked(FrameworkProfile, _whole(PROFILE_FILE.read_toml(name)), name.name)
    if name not in list_frameworks():
        known = list_frameworks()
        raise ProfileError(f"framework {shown(name)} is unknown; {suggestion(name, known)}")
    return _built_in(name)


@cache
def _built_in(name: str) -> FrameworkProfile:
    return FrameworkProfile.trusted(_whole(read_built_in(f"frameworks/{name}")))


TABLE_KEYS = tuple(FrameworkTable.model_fields)


def _whole(data: Mapping[str, object]) -> dict[str, object]:
    """Return all of a framework; what its file says outside of ``[tables]`` each of its tables has.

    What is shared with others stands in a file of ``shared``, whose keys are those of a
    configuration with sections; of options the section is left out, and dashes join words.
    """
    own = dict(data)
    shared = own.pop("base", None)
    common: dict[str, object] = (
        {} if shared is None else read_built_in(f"frameworks/shared/{shared}")
    )
    if own.get("has_options") is True:
        common = _as_options(common)
    usual = {key: own.pop(key) for key in TABLE_KEYS if key in own}
    tables = cast("Mapping[str, Mapping[str, object]]", own.pop("tables", {"all": {}}))
    own["tables"] = {
        name: _merged(_merged(_with_sections(common, table), usual), table)
        for name, table in tables.items()
    }
    return own


def _merged(usual: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Return *own* on top of *usual*: fields and what is held or refused entry by entry."""
    merged = {**usual, **own}
    for key in ("fields", "held", "refused"):
        if key in merged:
            tables = (cast("dict[str, object]", each.get(key, {})) for each in (usual, own))
            first, second = tables
            merged[key] = {**first, **second}
    return merged


def _with_sections(common: Mapping[str, object], table: Mapping[str, object]) -> dict[str, object]:
    """Return *common* with what other frameworks are told in sections of a table."""
    merged = dict(common)
    for section, name in cast("Mapping[str, str]", table.get("sections", {})).items():
        other = read_built_in(f"frameworks/{name}")
        told = {key: each for key, each in other.items() if key in ("fields", "held", "refused")}
        merged = _merged(merged, _renamed(told, f"{section}.{{}}".format))
    return merged


def _as_options(table: Mapping[str, object]) -> dict[str, object]:
    """Return a table with keys of sections as options of a command."""
    return _renamed(table, _option)


Rename: TypeAlias = Callable[[str], str]


def _renamed(table: Mapping[str, object], rename: Rename) -> dict[str, object]:
    """Return a table with other names of the framework's keys."""
    found = dict(table)
    fields = cast("Mapping[str, dict[str, object]]", table.get("fields", {}))
    found["fields"] = {name: _renamed_entry(entry, rename) for name, entry in fields.items()}
    held = cast("Mapping[str, object]", table.get("held", {}))
    found["held"] = {rename(key): value for key, value in held.items()}
    return found


def _renamed_entry(entry: Mapping[str, object], rename: Rename) -> dict[str, object]:
    found = dict(entry)
    if "key" in entry:
        found["key"] = rename(str(entry["key"]))
    if "keys" in entry:
        keys = cast("Mapping[str, str]", entry["keys"])
        found["keys"] = {role: rename(key) for role, key in keys.items()}
    if "further_keys" in entry:
        found["further_keys"] = [*map(rename, cast("list[str]", entry["further_keys"]))]
    if "values" in entry:
        values = cast("Mapping[str, object]", entry["values"])
        found["values"] = {ours: _renamed_keys(theirs, rename) for ours, theirs in values.items()}
    for name in ("beside", "absent"):
        if name in entry:
            found[name] = _renamed_keys(entry[name], rename)
    return found


def _renamed_keys(value: object, rename: Rename) -> object:
    if not isinstance(value, Mapping):
        return value
    return {rename(str(key)): each for key, each in value.items()}


def _option(key: str) -> str:
    return key.rpartition(".")[2].replace("_", "-")
