"""Software stacks: frameworks by release, those of published runs, and a user's own files."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

from meshwright.hwprofiles.complaints import ProfileError, shown, shown_path, suggestion
from meshwright.hwprofiles.conditions import Refusal
from meshwright.hwprofiles.kinds import LayerFact
from meshwright.hwprofiles.loader import (
    PROFILE_FILE,
    checked,
    is_path,
    names,
    read_built_in,
    reference,
)
from meshwright.hwprofiles.stack_schema import StackProfile
from meshwright.hwprofiles.stack_traits import half_weight_facts

DEFAULT_STACK = "megatron-core"


class StackFile(NamedTuple):
    """The file of a framework: facts of its first release, and changes of the others.

    Args:
        facts: All facts of one of its releases.
        release: The name of that release.
        changes: Facts that other releases, and stacks of published runs, override, by name; ``of``
            names the release they are based on, ``alike`` releases that count as the same.
        aliases: The names of stacks of published runs.
    """

    facts: Mapping[str, object]
    release: str
    changes: Mapping[str, Mapping[str, object]]
    aliases: tuple[str, ...]

    @property
    def releases(self) -> tuple[str, ...]:
        """The names of its releases, oldest first."""
        names = (self.release, *(name for name in self.changes if name not in self.aliases))
        return tuple(sorted(names, key=lambda name: str(self.data(name)["date"])))

    def data(self, name: str) -> dict[str, object]:
        """Return all facts of a release, or of a stack of published runs."""
        if name == self.release:
            return dict(self.facts)
        own = dict(self.changes[name])
        usual = self.data(str(own.pop("of", self.release)))
        usual.pop("alike", None)  # says of the base alone which releases count as it
        return _merged(usual, own)

    def release_of(self, name: str) -> str:
        """Return the release that a stack of published runs is based on."""
        while name in self.aliases:
            name = str(self.changes[name].get("of", self.release))
        return name

    def find(self, text: str) -> str | None:
        """Return the release of a version number; patch releases count as theirs."""
        for name in reversed(self.releases):
            versions = (name, *self._alike(name))
            if any(text == each or text.startswith(f"{each}.") for each in versions):
                return name
        return None

    @property
    def release_texts(self) -> tuple[str, ...]:
        """The releases for a message, oldest first, each with those that count as the same."""
        others = {name: ", ".join(self._alike(name)) for name in self.releases}
        return tuple(
            f"{name} (as which {other} count{'' if ', ' in other else 's'})" if other else name
            for name, other in others.items()
        )

    def _alike(self, name: str) -> list[str]:
        return cast("list[str]", self.changes.get(name, self.facts).get("alike", []))


def stack_frameworks() -> tuple[str, ...]:
    """Return the names of the frameworks of the built-in software stacks, sorted.

    >>> "megatron-core" in stack_frameworks()
    True
    """
    return names("stacks")


def list_releases(framework: str) -> tuple[str, ...]:
    """Return the names of the dated stacks of a framework, oldest first.

    >>> list_releases("torchtitan")
    ('torchtitan@2024-12', 'torchtitan@0.2', 'torchtitan@0.3')
    """
    return tuple(f"{framework}@{each}" for each in _stack_file(framework).releases)


def first_release(framework: str) -> str:
    """Return the dated stack that all others of a framework are based on.

    >>> first_release("megatron-core")
    'megatron-core@0.12'
    """
    return f"{framework}@{_stack_file(framework).release}"


def list_stacks() -> tuple[str, ...]:
    """Return the names of the built-in software stacks: releases, and those of published runs.

    >>> {"megatron-core@0.16", "megatron-core-graphs"} <= set(list_stacks())
    True
    """
    releases = (each for name in stack_frameworks() for each in list_releases(name))
    return (*releases, *sorted(_aliases()))


def is_stack(name: str) -> bool:
    """Return True if *name* is a built-in stack; a framework's name without a release is not.

    >>> is_stack("megatron-core@0.16"), is_stack("megatron-core")
    (True, False)
    """
    framework, sign, release = name.partition("@")
    if framework in stack_frameworks():
        return bool(sign) and release in _stack_file(framework).releases
    return name in _aliases()


def load_stack(name: str | Path | StackProfile = DEFAULT_STACK) -> StackProfile:
    """Return a stack: a built-in one by name, or a TOML file by path; a `StackProfile` as it is.

    A framework's name alone is its newest release, ``megatron-core@0.16`` another one. A file may
    name another stack as its ``base``, whose facts are its own where it says nothing;
    a path there is relative to the file.

    Args:
        name: A built-in name, or a path: a ``Path``, or a text with a slash or ending in .toml.

    Raises:
        ProfileError: If there is no such stack, or its file has a mistake.

    >>> load_stack("megatron-core").zero_stage
    1
    """
    if isinstance(name, StackProfile):
        return name
    if is_path(name):
        file = shown_path(name)
        return checked(StackProfile, _flat(_stack_data(name, ()), file), file)
    return _built_in_stack(_stack_name(str(name)))


def stacks_with(facts: Iterable[LayerFact]) -> tuple[str, ...]:
    """Return the frameworks whose layers support all of *facts*, as `frameworks_where` does.

    >>> stacks_with([LayerFact.NORM_PLACES])
    ('ddp', 'fsdp')
    """
    wanted = frozenset(facts)
    return frameworks_where(lambda stack: wanted <= {*stack.layer_facts})


def frameworks_where(holds: Callable[[StackProfile], bool]) -> tuple[str, ...]:
    """Return the frameworks for which *holds*, each by its newest release for which it does.

    >>> frameworks_where(lambda stack: "squared relu" in str(stack.layer_facts))
    ('megatron-core',)
    >>> frameworks_where(lambda stack: stack.title.startswith("Megatron-LM"))
    ('megatron-lm',)
    """
    names = []
    for framework in stack_frameworks():
        newest, *others = map(load_stack, reversed(list_releases(framework)))
        if holds(newest):
            names.append(framework)
        else:
            names += [each.name for each in others if holds(each)][:1]
    return tuple(names)


@cache
def common_refusals() -> Mapping[str, Refusal]:
    """Return the refusals of all stacks, by name; a stack may override one under the same name.

    >>> common_refusals()["offload-of-divided-experts"].field
    'offload'
    """
    tables = cast("Mapping[str, dict[str, object]]", read_built_in("refused"))
    return {name: Refusal.trusted(table) for name, table in tables.items()}


@cache
def _built_in_stack(name: str) -> StackProfile:
    return StackProfile.trusted(_flat(_stack_data(name, ()), f"stack {name}"))


@cache
def _stack_file(framework: str) -> StackFile:
    data = read_built_in(f"stacks/{framework}")
    release = str(data.pop("release"))
    releases = cast("dict[str, dict[str, object]]", data.pop("releases", {}))
    aliases = cast("dict[str, dict[str, object]]", data.pop("aliases", {}))
    return StackFile(data, release, releases | aliases, tuple(aliases))


@cache
def _aliases() -> Mapping[str, str]:
    """Return the framework of each stack of published runs, by name."""
    return {
        alias: framework
        for framework in stack_frameworks()
        for alias in _stack_file(framework).aliases
    }


def _stack_name(text: str) -> str:
    """Return the full name of a built-in stack; a framework alone means its newest release.

    Raises:
        ProfileError: If there is none.
    """
    framework, sign, number = text.partition("@")
    if framework not in stack_frameworks():
        if text in _aliases():
            return text
        known = (*stack_frameworks(), *_aliases())
        raise ProfileError(
            f"unknown stack {shown(text)}; {suggestion(text, known)}; or a path ending in .toml"
        )
    file = _stack_file(framework)
    release = file.find(number) if sign else file.releases[-1]
    if release is None:
        releases = ", ".join(f"{framework}@{each}" for each in reversed(file.release_texts))
        raise ProfileError(f"unknown release {shown(text)}; allowed: {releases}")
    return f"{framework}@{release}"


def _built_in_stack_data(name: str) -> dict[str, object]:
    """Return all facts of the built-in stack *name*, as a file has them."""
    framework, _, release = name.partition("@")
    file = _stack_file(framework if release else _aliases()[name])
    data = file.data(release or name)
    of = {} if release else {"release": f"{_aliases()[name]}@{file.release_of(name)}"}
    return {**data, **of, "name": name}


def _stack_data(name: str | Path, users: tuple[str, ...]) -> dict[str, object]:
    """Return the facts of a stack and its base; *users* are the files based on it."""
    is_file = is_path(name)
    if is_file:
        file, data = shown_path(name), PROFILE_FILE.read_toml(Path(name))
    else:
        known = _stack_name(str(name))
        file, data = f"stack {known}", _built_in_stack_data(known)
    if "base" not in data:
        return data
    if file in users:  # a file that is its own base would recurse forever
        raise ProfileError(f"{file}: base: leads back to {file}; allowed: another stack")
    try:
        base = reference(data.pop("base"), Path(name).parent if is_file else Path())
        usual = _stack_data(base, (*users, file))
        usual.pop("alike", None)
    except ProfileError as error:
        text = str(error)
        raise ProfileError(text if "base: " in text else f"{file}: base: {text}") from None
    # Bytes of the base are those of its own format of weights; another one brings its bytes along.
    precision = data.get("parameter_precision")
    if precision in cast("Collection[object]", usual.get("parameter_precisions", ())):
        usual |= half_weight_facts({"autocast": False, **usual}, precision)
    return _merged(usual, data)


def _merged(usual: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Return *own* merged over *usual*, tables entry by entry."""
    merged = {**usual, **own}
    for key, value in own.items():
        beneath = usual.get(key)
        if isinstance(value, Mapping) and isinstance(beneath, Mapping):
            merged[key] = _merged(beneath, value)
    return merged


def _flat(data: Mapping[str, object], file: str) -> dict[str, object]:
    """Return the facts of a stack with ``[fitted]`` flattened to the dotted aliases of fields."""
    flat = dict(data)
    fitted = flat.pop("fitted", {})
    if not isinstance(fitted, Mapping):
        raise ProfileError(f"{file}: fitted: {shown(fitted)} is not a table; allowed: [fitted]")
    flat.update({f"fitted.{key}": value for key, value in fitted.items()})
    return flat
