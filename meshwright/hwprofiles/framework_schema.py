"""Options of training frameworks and the plan fields that they set: one TOML file each.

Exporters, importers and the search read the same tables, so that none can disagree with another.
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
"""Format of a framework's configuration: command-line options, ``KEY=VALUE`` overrides, a file."""
FrameworkValue: TypeAlias = Flag | Annotated[int, Field(strict=True)] | str | list[str]
"""A value as the framework spells it."""
FrameworkValues: TypeAlias = FrameworkValue | dict[str, FrameworkValue]
"""A value of an entry's only key, or one for each of its keys."""
PlanValue: TypeAlias = Flag | Annotated[int, Field(strict=True)] | str
"""A value of a plan field, as a plan file spells it, or ``unset``."""


class ScriptLine(Profile):
    """A line that the user's own training script needs, as no configuration file can set it.

    Args:
        line: The text; fields and facts in braces are filled in.
        when: Condition on the plan.
    """

    line: Text
    when: str = ""


class FieldEntry(Profile):
    """Framework options of one plan field, or of one fact of the job, model or stack.

    An entry without a key is set by a launcher or a script: it takes every value.

    Args:
        key: Option of the framework.
        keys: Options of a codec, by their role in it.
        further_keys: More options of the codec, whose roles are their names.
        values: The framework's value by the field's value; import reads the same table backwards.
        also: Field's values by further spellings of the framework, which are only read.
        absent: The framework's default, where the key is absent; of several keys, one for each.
        absent_as: Another field, or fact, whose value it then has.
        nothing: Values of the framework that say as little as no key.
        leaves_out: Whether a value equal to ``absent`` is not written.
        of_launch: Whether the launcher's environment sets it; a file alone leaves it open.
        only: Values that the framework supports; all of ``values`` where it is empty.
        always: Values by the condition under which the framework fixes them.
        same_as: Another field, or fact, whose value the framework always uses.
        tells: Another number that is written in its place, and never imported.
        when: Condition on the plan; where it fails nothing is written or read.
        otherwise: Value written where it fails.
        script: Lines of a user's script, of which the first whose condition holds applies.
        beside: Options that are also written, and on which no layout depends.
        codec: Name of the code that writes or reads what is irregular.
        fields: Further fields that the codec sets.
        asks: Whether import asks the user for it where a file lacks it, as the script sets it.
        why: The framework's rule, and the version that has it.
    """

    key: str = ""
    keys: dict[str, str] = Field({})
    further_keys: tuple[str, ...] = ()
    values: dict[str, FrameworkValues] = Field({})
    also: dict[str, PlanValue] = Field({})
    absent: FrameworkValues | None = None
    absent_as: str = ""
    nothing: tuple[FrameworkValue, ...] = ()
    leaves_out: Flag = False
    of_launch: Flag = False
    only: tuple[PlanValue, ...] = ()
    always: dict[str, str] = Field({})
    same_as: str = ""
    tells: str = ""
    when: str = ""
    otherwise: FrameworkValue | None = None
    script: tuple[ScriptLine, ...] = ()
    beside: dict[str, FrameworkValue] = Field({})
    codec: str = ""
    fields: tuple[str, ...] = ()
    asks: Flag = False
    why: str = ""

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Framework options that the entry reads or writes."""
        tables = (each for each in self.values.values() if isinstance(each, dict))
        named = (self.key, *self.roles.values(), *(key for each in tables for key in each))
        return tuple(dict.fromkeys(key for key in (*named, *self.beside) if key))

    @property
    def roles(self) -> dict[str, str]:
        """Options of a codec, by their role in it."""
        return {**self.keys, **{key: key for key in self.further_keys}}

    @property
    def allowed(self) -> tuple[PlanValue, ...]:
        """Values of the field that the framework supports; empty where it takes all."""
        return self.only or tuple(self.values)

    @model_validator(mode="after")
    def _check_conditions(self) -> None:
        lines = (each.when for each in self.script)
        for text in (self.when, *self.always.values(), *lines):
            if text and text != OTHERWISE:
                Condition(text)


class FixedKey(Profile):
    """A framework option that changes a layout but is no plan field: only these values are read.

    Args:
        values: Supported values.
        when: Condition on the plan under which it is checked.
        is_required: Whether a file must have it.
    """

    values: tuple[FrameworkValue, ...] = Field(min_length=1)
    when: str = ""
    is_required: Flag = False


class FrameworkTable(Profile):
    """Options of a framework, of one version of it, or of one of its engines.

    Args:
        version: Of the framework; all of them where it is empty.
        release: Name of the version.
        stack: Stack of an imported plan.
        launches: Patterns of the names of stacks whose plans it trains in any case.
        when: Condition on plans of other stacks that it trains.
        told_by: Option values that identify a configuration of it.
        options: Files of options that its configuration, or its command, may hold.
        sections: Frameworks whose configurations stand in sections of it, or in files that these
            name, by the sections: their keys are read as those frameworks read them.
        notes: Remarks printed with an export.
        model_facts: Model facts that it can configure; all others must be the defaults.  An empty
            list checks nothing of a model.
        fields: By the name of a field, or of a fact: model, precision, stack.loss.
        held: By the framework's key.
        refused: Plans that it cannot express, by a name.
    """

    version: tuple[str, ...] = ()
    release: str = ""
    stack: StackName | None = None
    launches: tuple[str, ...] = ()
    when: str = ""
    told_by: dict[str, FrameworkValue] = Field({})
    options: tuple[str, ...] = ()
    sections: dict[Name, Name] = Field({})
    notes: tuple[str, ...] = ()
    model_facts: tuple[str, ...] = ()
    fields: dict[str, FieldEntry] = Field({})
    held: dict[str, FixedKey] = Field({})
    refused: dict[str, Refusal] = Field({})

    def is_of(self, stack: str) -> bool:
        """Return True if a plan of such a file is of *stack*, or of a release of it."""
        return self.stack in (stack, stack.partition("@")[0])

    @property
    def spoken(self) -> frozenset[str]:
        """Plan fields and facts that the table sets."""
        others = (name for entry in self.fields.values() for name in entry.fields)
        return frozenset({*self.fields, *others})

    @property
    def keys(self) -> tuple[str, ...]:
        """All framework options of the table."""
        of_fields = (key for entry in self.fields.values() for key in entry.all_keys)
        return tuple(dict.fromkeys((*of_fields, *self.held, *self.told_by)))


class FrameworkProfile(Profile):
    """A training framework: its tables of options, and how its files are recognised.

    Args:
        name: As ``--to`` and ``--from`` have it.
        title: Name for people.
        source: Release, or revision, that the options were checked against.
        format: Format of configurations that are imported; None where there is only an export.
        known_by: Keys, or sections, one of which a configuration of it has.
        programs: Patterns of the programs, or modules, that a script of it starts.
        other_programs: Titles of its programs that no plan describes, by their patterns.
        has_references: Whether values of its files may name other keys: ``${section.key}``.
        has_options: Whether its keys are command-line options: a flag that is off is left out.
        tables: Tables of its versions and engines; the first that fits a plan is used.
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
        """Return the name of a version."""
        named = (each.release for each in self.tables_of(version) if each.release)
        return next(named, self.source)


def list_frameworks() -> tuple[str, ...]:
    """Return the names of the frameworks, in the order in which they are offered.

    >>> "torchtitan" in list_frameworks()
    True
    """
    names = {file.stem for file in (DATA_FOLDER / "frameworks").glob("*.toml")}
    return tuple(sorted(names, key=lambda name: (name not in ORDER, ORDER.get(name, 0), name)))


# Frameworks in the order in which they are offered; others follow by name.
ORDER = {
    name: index
    for index, name in enumerate(
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
    """Return the tables of a framework, keys outside of ``[tables]`` merged into each of them.

    What is shared with others stands in a file of ``shared``, whose keys are those of a
    configuration with sections; of options the section is left out, and dashes join words.
    """
    own = dict(data)
    shared = own.pop("base", None)
    common: dict[str, object] = (
        {} if shared is None else read_built_in(f"frameworks/shared/{shared}")
    )
    # Megatron-LM's arguments are the dashed names of the fields in Megatron-Bridge's sections.
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
    """Return *own* merged over *usual*; fields, fixed options and refusals entry by entry."""
    merged = {**usual, **own}
    for key in ("fields", "held", "refused"):
        if key in merged:
            tables = (cast("dict[str, object]", each.get(key, {})) for each in (usual, own))
            first, second = tables
            merged[key] = {**first, **second}
    return merged


def _with_sections(common: Mapping[str, object], table: Mapping[str, object]) -> dict[str, object]:
    """Return *common* with the options of frameworks whose files are sections of a table."""
    merged = dict(common)
    for section, name in cast("Mapping[str, str]", table.get("sections", {})).items():
        other = read_built_in(f"frameworks/{name}")
        told = {key: each for key, each in other.items() if key in ("fields", "held", "refused")}
        merged = _merged(merged, _renamed(told, f"{section}.{{}}".format))
    return merged


def _as_options(table: Mapping[str, object]) -> dict[str, object]:
    """Return a table with keys of sections as command-line options."""
    return _renamed(table, _option)


Rename: TypeAlias = Callable[[str], str]


def _renamed(table: Mapping[str, object], rename: Rename) -> dict[str, object]:
    """Return a table with the framework's keys renamed."""
    renamed = dict(table)
    fields = cast("Mapping[str, dict[str, object]]", table.get("fields", {}))
    renamed["fields"] = {name: _renamed_entry(entry, rename) for name, entry in fields.items()}
    held = cast("Mapping[str, object]", table.get("held", {}))
    renamed["held"] = {rename(key): value for key, value in held.items()}
    return renamed


def _renamed_entry(entry: Mapping[str, object], rename: Rename) -> dict[str, object]:
    renamed = dict(entry)
    if "key" in entry:
        renamed["key"] = rename(str(entry["key"]))
    if "keys" in entry:
        keys = cast("Mapping[str, str]", entry["keys"])
        renamed["keys"] = {role: rename(key) for role, key in keys.items()}
    if "further_keys" in entry:
        renamed["further_keys"] = [*map(rename, cast("list[str]", entry["further_keys"]))]
    if "values" in entry:
        values = cast("Mapping[str, object]", entry["values"])
        renamed["values"] = {field: _renamed_keys(each, rename) for field, each in values.items()}
    for name in ("beside", "absent"):
        if name in entry:
            renamed[name] = _renamed_keys(entry[name], rename)
    return renamed


def _renamed_keys(value: object, rename: Rename) -> object:
    if not isinstance(value, Mapping):
        return value
    return {rename(str(key)): each for key, each in value.items()}


def _option(key: str) -> str:
    return key.rpartition(".")[2].replace("_", "-")
