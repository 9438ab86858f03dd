"""Single facts of a cluster or a stack: set by name, and compared with the built-in profile.

A key is written as the fact stands in its file, after the name of the table or file that it is in:
``loss``, ``fitted.kernel_gap``, ``devices_per_node``, ``device.gemm.plateau_fraction``,
``inter_node.bandwidth``.  A list counts from 1: ``intra_node.collectives.1.busbw``.
"""
# ruff: noqa: PLC0415 (few commands change facts, or write TOML)

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin

from meshwright.hwprofiles.complaints import (
    ProfileError,
    one_line,
    quoted,
    shown,
    suggestion,
)
from meshwright.hwprofiles.loader import list_clusters, load_cluster
from meshwright.hwprofiles.schema import Cluster
from meshwright.hwprofiles.stack_schema import StackProfile
from meshwright.hwprofiles.stack_traits import half_weight_facts
from meshwright.hwprofiles.stacks import is_stack, load_stack
from meshwright.hwprofiles.units import (
    FROM_FILE,
    Profile,
    format_bandwidth,
    format_bytes,
    format_flops_per_s,
    format_time,
)

if TYPE_CHECKING:
    from tomlkit.items import SingleKey, Table

R = TypeVar("R", bound=Profile)

LEGIBLE = (format_bytes, format_bandwidth, format_flops_per_s, format_time)  # four digits
EXACT = ("B", "B/s", "FLOP/s", "s", "USD/GPU-hour")
TEXTS = (
    "name",
    "release",
    "alike",
    "rules",
    "ruled_by",
    "launched_by",
    "title",
    "date",
    "source",
    "memory_source",
)
IDENTITY = "name"  # by which the built-in profile is known, beside which a fact is shown
PROFILES: Mapping[str, type[Profile]] = {"stack": StackProfile, "cluster": Cluster}


class ChangedFact(NamedTuple):
    """A fact that differs from the built-in profile of the same name; None where that lacks it.

    ``key`` is written as in files, ``field`` as in Python, where names end in units.
    """

    key: str
    field: str
    value: object
    built_in: object


def with_facts(
    cluster: Cluster, stack: StackProfile, changes: Sequence[str]
) -> tuple[Cluster, StackProfile]:
    """Return *cluster* and *stack* with single facts changed, each checked as in its file.

    Args:
        cluster: Cluster of the run.
        stack: Software stack of the run.
        changes: Texts ``KEY=VALUE``. A value is written as in TOML; a text needs no quotes.

    Raises:
        ProfileError: If there is no such fact, or it cannot be so; names the change.

    >>> cluster, stack = load_cluster("dgx-a100"), load_stack("fsdp")
    >>> cluster, stack = with_facts(cluster, stack, ["loss=fused", "device.num_sms=96"])
    >>> str(stack.loss), cluster.device.num_sms
    ('fused', 96)
    """
    if not changes:
        return cluster, stack
    from pydantic import ValidationError

    for change in changes:
        key, sign, text = change.partition("=")
        if not (sign and key.strip() and text.strip()):
            raise ProfileError(f"--set {shown(change)} is not KEY=VALUE, as loss=fused")
        path = key.strip().split(".")
        kind = _profile_of(path)
        rest = path[1:] if path[0] in PROFILES else path
        try:
            if kind is Cluster:
                cluster = _changed(cluster, kind, rest, text.strip())
            else:
                stack = _in_format(_changed(stack, kind, rest, text.strip()), rest)
        except (ProfileError, ValidationError) as error:
            reason = one_line(error) if isinstance(error, ValidationError) else str(error)
            raise ProfileError(f"--set {change}: {reason}") from None
    return _checked(cluster), _checked(stack)


def _in_format(stack: StackProfile, path: Sequence[str]) -> StackProfile:
    """Return *stack* with the bytes of 16-bit weights, if *path* set ``parameter_precision``."""
    precision = stack.parameter_precision
    if list(path) != ["parameter_precision"] or precision not in stack.parameter_precisions:
        return stack
    return stack.model_copy(update=half_weight_facts(vars(stack), precision))


def changed_facts(profile: Cluster | StackProfile) -> tuple[ChangedFact, ...]:
    """Return the facts that differ from the built-in profile of the same name, if there is one.

    >>> changed_facts(load_cluster("dgx-a100"))
    ()
    """
    is_cluster = isinstance(profile, Cluster)
    if not (profile.name in list_clusters() if is_cluster else is_stack(profile.name)):
        return ()
    built_in = load_cluster(profile.name) if is_cluster else load_stack(profile.name)
    return () if profile == built_in else tuple(_differences(profile, built_in, "", ""))


def release_changes(stack: StackProfile) -> tuple[ChangedFact, ...]:
    """Return the facts in which *stack* differs from the release that it is based on.

    >>> [each.key for each in release_changes(load_stack("llm-foundry-2023"))]
    ['units', 'norm_by_axis', 'layer_facts', 'loss']
    """
    if not stack.release:
        return ()
    changes = _differences(stack, load_stack(stack.release), "", "")
    return tuple(change for change in changes if change.key.rpartition(".")[2] not in TEXTS)


def fact_keys() -> tuple[str, ...]:
    """Return the keys of stacks and clusters, each alone and after the name of its file.

    >>> {"loss", "stack.loss", "device", "cluster.device"} <= set(fact_keys())
    True
    """
    keys = [(name, key) for name, kind in PROFILES.items() for key in kind.file_keys()]
    alone = (key for _, key in keys if key != IDENTITY)
    return (*alone, *(f"{name}.{key}" for name, key in keys if key != IDENTITY))


def profile_toml(profile: Profile) -> str:
    """Return *profile* as a file that holds all its facts, a line each; it can be loaded.

    The words before each ``=`` are what `with_facts` knows the fact by.

    >>> print(profile_toml(load_cluster("dgx-a100").host_link).splitlines()[2])
    bandwidth = "32 GB/s per direction"
    """
    lines = []  # one document a line: tomlkit takes seconds for hundreds of dotted keys in one
    for words, value in _facts(profile, ()):
        key = ".".join(_toml_key(word).as_string() for word in words)
        is_given = value is not None
        lines.append(f"{key} = {_on_a_line(value)}" if is_given else f"# {key} is not given")
    return "".join(f"{line}\n" for line in lines)


def toml_table(table: Mapping[str, object]) -> "Table":
    r"""Return tables in tables as TOML, each with a header of its own.

    What is not printable is escaped, so that the text is safe to show.

    >>> print(toml_table({"a": {"b": 1, "c": ["x\n"]}, "d": 2}).as_string(), end="")
    d = 2
    <BLANKLINE>
    [a]
    b = 1
    c = ["x\n"]
    """
    import tomlkit

    return cast("Table", tomlkit.item(_toml_words(table)))


def _toml_words(value: object) -> Any:  # noqa: ANN401
    """Return *value* with its texts as tomlkit's, escaped as `quoted` does."""
    from tomlkit.items import String, StringType, Trivia

    if isinstance(value, Mapping):
        return {_toml_key(key): _toml_words(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_toml_words(each) for each in value]
    if isinstance(value, str):
        return String(StringType.SLB, value, quoted(value)[1:-1], Trivia())
    return value


def _toml_key(word: str) -> "SingleKey":
    from tomlkit.items import KeyType, SingleKey

    if re.fullmatch(r"[A-Za-z0-9_-]+", word):
        # tomlkit escapes controls, but leaves U+202E and its like to the terminal.
        return SingleKey(word)
    return SingleKey(word, t=KeyType.Basic, original=quoted(word))


def _on_a_line(value: object) -> str:
    """Return a value as TOML, its tables in braces."""
    import tomlkit

    if isinstance(value, list):
        return f"[{', '.join(map(_on_a_line, value))}]"
    if isinstance(value, Mapping):
        items = (f" {_toml_key(key).as_string()} = {_on_a_line(value[key])}" for key in value)
        return f"{{{','.join(items)}{' ' if value else ''}}}"
    return str(tomlkit.item(_toml_words(value)).as_string())


def _facts(profile: Profile, before: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the words of the key of each fact, and its value as a file has it."""
    for name, field in type(profile).model_fields.items():
        value, kind = getattr(profile, name), _annotation(type(profile), name)
        words = (*before, *(field.alias or name).split("."))
        if isinstance(value, Profile):
            yield from _facts(value, words)
        elif isinstance(value, Mapping) and value:
            for word, item in value.items():
                if isinstance(item, Profile):
                    yield from _facts(item, (*words, word))
                else:
                    yield (*words, word), _written(get_args(kind)[-1], item)
        else:
            yield words, _written(kind, value)


def _written(kind: object, value: object) -> object:
    """Return *value* of a field of type *kind* as written in a file, rounded only if exact."""
    if isinstance(value, tuple):
        return [_written(get_args(kind)[0], item) for item in value]
    if isinstance(value, Profile):
        return {".".join(words): item for words, item in _facts(value, ())}
    if isinstance(value, Mapping | bool) or not isinstance(value, int | float):
        return value
    sizes = [*(write(value) for write in LEGIBLE), *(f"{value!r} {unit}" for unit in EXACT)]
    texts = [f"{size}{direction}" for size in sizes for direction in ("", " per direction")]
    # Four digits first, as people write them; where they lose precision the base unit is exact.
    return next(each for each in (value, *texts) if _parses_to(kind, each, value))


def _parses_to(kind: object, written: object, value: object) -> bool:
    try:
        return _read(kind, written) == value
    except ValueError:
        return False


def _profile_of(path: Sequence[str]) -> type[Profile]:
    if path[0] in PROFILES and len(path) > 1:
        return PROFILES[path[0]]
    having = {name: kind for name, kind in PROFILES.items() if _field(kind, path) is not None}
    if len(having) == 1:
        return next(iter(having.values()))
    key = ".".join(path)
    if having:
        both = " or ".join(f"{name}.{key}" for name in having)
        raise ProfileError(f"--set {shown(key)} is a fact of several files; allowed: {both}")
    known = [each for kind in PROFILES.values() for each in kind.file_keys() if each != IDENTITY]
    raise ProfileError(f"--set {shown(key)} is unknown; {suggestion(key, known)}")


def _field(kind: type[Profile], path: Sequence[str]) -> tuple[str, int] | None:
    """Return the field of *kind* that *path* begins with, and the number of words of its key."""
    for name, field in kind.model_fields.items():
        words = (field.alias or name).split(".")
        if list(path[: len(words)]) == words:
            return name, len(words)
    return None


def _changed(value: object, kind: object, path: Sequence[str], text: str) -> Any:  # noqa: ANN401
    """Return *value*, of type *kind*, with the fact at *path* parsed from *text*."""
    if not path:
        return _read(kind, _toml_value(text))
    if isinstance(value, Profile):
        found = _field(type(value), path)
        if found is None or found[0] == IDENTITY:
            known = [key for key in value.file_keys() if key != IDENTITY]
            raise ProfileError(f"unknown key {shown(path[0])}; {suggestion(path[0], known)}")
        name, num_words = found
        inner = _annotation(type(value), name)
        changed = _changed(getattr(value, name), inner, path[num_words:], text)
        return value.model_copy(update={name: changed})
    entries = _entries(value)
    if value is None:
        raise ProfileError(f"{shown(path[0])} is of a table that is not given")
    if path[0] not in entries:
        raise ProfileError(f"unknown key {shown(path[0])}; {suggestion(path[0], entries)}")
    inner = get_args(kind)[-1 if isinstance(value, Mapping) else 0]
    entries[path[0]] = _changed(entries[path[0]], inner, path[1:], text)
    if isinstance(value, Mapping):
        return dict(zip(value, entries.values(), strict=True))
    return tuple(entries.values())


def _read(kind: object, value: object) -> object:
    """Return *value* of a file, validated as a field of type *kind*."""
    from pydantic import TypeAdapter

    known_at_run_time = cast("type[object]", kind)
    return TypeAdapter(known_at_run_time).validate_python(value, context=FROM_FILE)


def _annotation(kind: type[Profile], name: str) -> object:
    """Return the type of a field with its limits; a table's or a list's alone."""
    field = kind.model_fields[name]
    if not field.metadata or get_origin(field.annotation) in (dict, tuple):
        return field.annotation
    return cast("Any", Annotated)[(field.annotation, *field.metadata)]


def _entries(value: object) -> dict[str, object]:
    """Return the items of a table by key, or of a list by number; none of anything else."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, tuple):
        return {str(number): item for number, item in enumerate(value, 1)}
    return {}


def _toml_value(text: str) -> object:
    """Return *text* as TOML reads a value, or as a text where it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"] if text.isprintable() else text
    except (ValueError, RecursionError):
        return text


def _checked(record: R) -> R:
    """Return *record* validated anew, since `model_copy` skips checks between fields."""
    values = {
        name: _checked(value) if isinstance(value, Profile) else value
        for name in type(record).model_fields
        for value in [getattr(record, name)]
    }
    from pydantic import ValidationError

    try:
        return type(record).model_validate(values)
    except ValidationError as error:
        raise ProfileError(f"--set: {one_line(error)}") from None


def _differences(value: object, built_in: object, key: str, field: str) -> Iterator[ChangedFact]:
    if value == built_in:
        return
    parts, others = _parts(value), _parts(built_in)
    if not parts or parts.keys() != others.keys():
        yield ChangedFact(key.removeprefix("."), field.removeprefix("."), value, built_in)
        return
    for names, part in parts.items():
        yield from _differences(part, others[names], f"{key}.{names[0]}", f"{field}.{names[1]}")


def _parts(value: object) -> dict[tuple[str, str], object]:
    """Return the fields or items of *value*, by key in a file and name in Python."""
    if isinstance(value, Profile):
        fields = type(value).model_fields.items()
        return {(field.alias or name, name): getattr(value, name) for name, field in fields}
    # A list of plain values is one fact: its items have no names that a reader could tell apart.
    if isinstance(value, tuple) and not any(isinstance(each, Profile) for each in value):
        return {}
    return {(key, key): item for key, item in _entries(value).items()}
