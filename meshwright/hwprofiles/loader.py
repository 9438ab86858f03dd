"""Read profiles: the built-in ones by name, a user's by path."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

from pydantic import ValidationError

from meshwright.hwprofiles.base import FROM_FILE, Profile
from meshwright.hwprofiles.complaints import (
    ProfileError,
    nearest_names,
    one_line,
    shown,
    shown_path,
    suggestion,
)
from meshwright.hwprofiles.conditions import Refusal
from meshwright.hwprofiles.kinds import LayerFact
from meshwright.hwprofiles.reading import FileKind
from meshwright.hwprofiles.schema import Cluster, Device, Link
from meshwright.hwprofiles.stack_schema import StackProfile
from meshwright.hwprofiles.stack_traits import half_weight_facts

__all__ = [
    "DEFAULT_STACK",
    "common_refusals",
    "list_clusters",
    "list_devices",
    "list_links",
    "list_stacks",
    "load_cluster",
    "load_device",
    "load_link",
    "load_stack",
    "nearest_names",
    "stacks_with",
]

P = TypeVar("P", bound=Profile)
DEFAULT_STACK = "megatron-core"
DATA_FOLDER = Path(__file__).parent / "data"
PROFILE_FILE = FileKind(title="TOML file", most_bytes=1_000_000)


def list_devices() -> tuple[str, ...]:
    """Return the names of the built-in devices, sorted.

    >>> "a100-sxm4-80gb" in list_devices()
    True
    """
    return _names("devices")


def list_links() -> tuple[str, ...]:
    """Return the names of the built-in links, sorted.

    >>> "infiniband-hdr" in list_links()
    True
    """
    return _names("links")


def list_clusters() -> tuple[str, ...]:
    """Return the names of the built-in clusters, sorted.

    >>> "dgx-a100" in list_clusters()
    True
    """
    return _names("clusters")


def list_stacks() -> tuple[str, ...]:
    """Return the names of the built-in software stacks, sorted.

    >>> "megatron-core" in list_stacks()
    True
    """
    return _names("stacks")


def load_device(name: str | Path) -> Device:
    """Return a device: a built-in one by name, or a TOML file by path.

    Args:
        name: A built-in name, or a path: a ``Path``, or a text with a slash or ending in .toml.

    Raises:
        ProfileError: If there is no such device, or its file has a mistake.

    >>> load_device("a100-sxm4-80gb").num_sms
    108
    """
    if _is_path(name):
        return _checked(Device, PROFILE_FILE.read_toml(Path(name)), shown_path(name))
    return _built_in_device(_known_name("devices", str(name)))


def load_link(name: str | Path) -> Link:
    """Return a link: a built-in one by name, or a TOML file by path.

    Args:
        name: A built-in name, or a path: a ``Path``, or a text with a slash or ending in .toml.

    Raises:
        ProfileError: If there is no such link, or its file has a mistake.

    >>> load_link("infiniband-hdr").bandwidth_bytes_per_s
    25000000000.0
    """
    if _is_path(name):
        return _checked(Link, PROFILE_FILE.read_toml(Path(name)), shown_path(name))
    return _built_in_link(_known_name("links", str(name)))


def load_stack(name: str | Path | StackProfile = DEFAULT_STACK) -> StackProfile:
    """Return a software stack: a built-in one by name, or a TOML file by path; one as it is.

    A file may name another stack as its ``base``, whose facts are its own where it says nothing;
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
    if _is_path(name):
        return _checked_stack(_stack_data(name, ()), shown_path(name))
    return _built_in_stack(_known_name("stacks", str(name)))


def stacks_with(facts: Iterable[LayerFact]) -> tuple[str, ...]:
    """Return the names of the built-in stacks whose layers may have all of *facts*, sorted.

    >>> stacks_with([LayerFact.NORM_PLACES])
    ('ddp', 'fsdp')
    """
    wanted = frozenset(facts)
    return tuple(each for each in list_stacks() if wanted <= {*load_stack(each).layer_facts})


@cache
def common_refusals() -> Mapping[str, Refusal]:
    """Return what no stack runs, by name: a stack may say otherwise under the same name.

    >>> common_refusals()["offload-of-divided-experts"].field
    'offload'
    """
    content = (DATA_FOLDER / "refused.toml").read_bytes()
    data = PROFILE_FILE.parse_toml(content, "refused.toml")
    return {
        name: _checked(Refusal, cast("Mapping[str, object]", table), f"refused.toml: {name}")
        for name, table in data.items()
    }


def load_cluster(name: str | Path | Cluster) -> Cluster:
    """Return a cluster: a built-in one by name, or a TOML file by path; one as it is.

    A file names its device and links, or holds them as tables; a path there is relative to the
    cluster's file.

    Args:
        name: A built-in name, or a path: a ``Path``, or a text with a slash or ending in .toml.

    Raises:
        ProfileError: If there is no such cluster, or one of its files has a mistake.

    >>> load_cluster("dgx-a100").device.name
    'a100-sxm4-80gb'
    """
    if isinstance(name, Cluster):
        return name
    if _is_path(name):
        path = Path(name)
        return _checked_cluster(PROFILE_FILE.read_toml(path), shown_path(name), path.parent)
    return _built_in_cluster(_known_name("clusters", str(name)))


@cache
def _built_in_device(name: str) -> Device:
    return _checked(Device, _read_built_in("devices", name), f"devices/{name}.toml")


@cache
def _built_in_link(name: str) -> Link:
    return _checked(Link, _read_built_in("links", name), f"links/{name}.toml")


@cache
def _built_in_stack(name: str) -> StackProfile:
    return _checked_stack(_stack_data(name, ()), f"stacks/{name}.toml")


@cache
def _built_in_cluster(name: str) -> Cluster:
    data = _read_built_in("clusters", name)
    return _checked_cluster(data, f"clusters/{name}.toml", Path())


@cache
def _names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(each.stem for each in (DATA_FOLDER / folder).glob("*.toml")))


def _is_path(name: str | Path) -> bool:
    return isinstance(name, Path) or name.endswith(".toml") or "/" in name or "\\" in name


def _known_name(folder: str, name: str) -> str:
    known = _names(folder)
    if name not in known:
        kind = folder.removesuffix("s")
        raise ProfileError(
            f"unknown {kind} {shown(name)}; {suggestion(name, known)}; or a path ending in .toml"
        )
    return name


def _read_built_in(folder: str, name: str) -> dict[str, object]:
    content = (DATA_FOLDER / folder / f"{name}.toml").read_bytes()
    return PROFILE_FILE.parse_toml(content, f"{folder}/{name}.toml")


def _checked(model: type[P], data: Mapping[str, object], file: str) -> P:
    try:
        return model.model_validate(data, context=FROM_FILE)
    except ValidationError as error:
        raise ProfileError(f"{file}: {one_line(error)}") from None


def _stack_data(name: str | Path, users: tuple[str, ...]) -> dict[str, object]:
    """Return what the file of a stack says, and its base, which *users* of it lead to."""
    is_path = _is_path(name)
    if is_path:
        file, data = shown_path(name), PROFILE_FILE.read_toml(Path(name))
    else:
        known = _known_name("stacks", str(name))
        file, data = f"stacks/{known}.toml", _read_built_in("stacks", known)
    if "base" not in data:
        return data
    if file in users:
        raise ProfileError(f"{file}: base: leads back to {file}; allowed: another stack")
    try:
        base = _reference(data.pop("base"), Path(name).parent if is_path else Path())
        usual = _stack_data(base, (*users, file))
    except ProfileError as error:
        text = str(error)
        raise ProfileError(text if "base: " in text else f"{file}: base: {text}") from None
    precision = data.get("parameter_precision")
    if precision in cast("Collection[object]", usual.get("parameter_precisions", ())):
        usual |= half_weight_facts({"autocast": False, **usual}, precision)
    return _merged(usual, data)


def _merged(usual: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Return *own* on top of *usual*, tables entry by entry."""
    merged = {**usual, **own}
    for key, value in own.items():
        beneath = usual.get(key)
        if isinstance(value, Mapping) and isinstance(beneath, Mapping):
            merged[key] = _merged(beneath, value)
    return merged


def _checked_stack(data: Mapping[str, object], file: str) -> StackProfile:
    flat = dict(data)
    fitted = flat.pop("fitted", {})
    if not isinstance(fitted, Mapping):
        raise ProfileError(f"{file}: fitted: {shown(fitted)} is not a table; allowed: [fitted]")
    flat.update({f"fitted.{key}": value for key, value in fitted.items()})
    return _checked(StackProfile, flat, file)


def _checked_cluster(data: Mapping[str, object], file: str, folder: Path) -> Cluster:
    resolved = dict(data)
    for key in ("device", "intra_node", "inter_node", "host_link"):
        part: Callable[[str | Path], Profile] = load_device if key == "device" else load_link
        kind: type[Profile] = Device if key == "device" else Link
        value = data.get(key)
        try:
            if isinstance(value, Mapping):
                resolved[key] = _checked(kind, value, key)
            elif key in data:
                resolved[key] = part(_reference(value, folder))
        except ProfileError as error:
            where = "" if isinstance(value, Mapping) else f"{key}: "
            raise ProfileError(f"{file}: {where}{error}") from None
    return _checked(Cluster, resolved, file)


def _reference(value: object, folder: Path) -> str | Path:
    if not isinstance(value, str):
        raise ProfileError(f"{shown(value)} is not a text; allowed: a built-in name or a path")
    return folder / value if _is_path(value) else value
