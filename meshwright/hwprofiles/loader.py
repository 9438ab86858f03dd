"""Read profiles: the built-in ones by name, a user's by path."""
# ruff: noqa: PLC0415 (pydantic checks a user's alone)

import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

from meshwright.hwprofiles.complaints import (
    ProfileError,
    one_line,
    shown,
    shown_path,
    suggestion,
)
from meshwright.hwprofiles.reading import FileKind
from meshwright.hwprofiles.schema import Cluster, Device, Link
from meshwright.hwprofiles.units import FROM_FILE, Profile

P = TypeVar("P", bound=Profile)
DATA_FOLDER = Path(__file__).parent / "data"
PROFILE_FILE = FileKind(title="TOML file", most_bytes=1_000_000)


def list_devices() -> tuple[str, ...]:
    """Return the names of the built-in devices, sorted.

    >>> "a100-sxm4-80gb" in list_devices()
    True
    """
    return names("devices")


def list_links() -> tuple[str, ...]:
    """Return the names of the built-in links, sorted.

    >>> "infiniband-hdr" in list_links()
    True
    """
    return names("links")


def list_clusters() -> tuple[str, ...]:
    """Return the names of the built-in clusters, sorted.

    >>> "dgx-a100" in list_clusters()
    True
    """
    return names("clusters")


def load_device(name: str | Path) -> Device:
    """Return a device: a built-in one by name, or a TOML file by path.

    Args:
        name: A built-in name, or a path: a ``Path``, or a text with a slash or ending in .toml.

    Raises:
        ProfileError: If there is no such device, or its file has a mistake.

    >>> load_device("a100-sxm4-80gb").num_sms
    108
    """
    if is_path(name):
        return checked(Device, PROFILE_FILE.read_toml(Path(name)), shown_path(name))
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
    if is_path(name):
        return checked(Link, PROFILE_FILE.read_toml(Path(name)), shown_path(name))
    return _built_in_link(_known_name("links", str(name)))


# References in a cluster file, each a built-in name, a path or a table.
PARTS: Mapping[str, Callable[[str | Path], Profile]] = {
    "device": load_device,
    **dict.fromkeys(("intra_node", "inter_node", "host_link"), load_link),
}


def load_cluster(name: str | Path | Cluster) -> Cluster:
    """Return a cluster: a built-in one by name, or a TOML file by path; a `Cluster` as it is.

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
    if is_path(name):
        path = Path(name)
        return _checked_cluster(PROFILE_FILE.read_toml(path), shown_path(name), path.parent)
    return _built_in_cluster(_known_name("clusters", str(name)))


@cache
def _built_in_device(name: str) -> Device:
    return Device.trusted(read_built_in(f"devices/{name}"))


@cache
def _built_in_link(name: str) -> Link:
    return Link.trusted(read_built_in(f"links/{name}"))


@cache
def _built_in_cluster(name: str) -> Cluster:
    data = read_built_in(f"clusters/{name}")
    parts = {key: load(str(data[key])) for key, load in PARTS.items() if key in data}
    return Cluster.trusted(data | parts)


@cache
def names(folder: str) -> tuple[str, ...]:
    """Return the names of the built-in files of a folder, sorted."""
    return tuple(sorted(file.stem for file in (DATA_FOLDER / folder).glob("*.toml")))


def is_path(name: str | Path) -> bool:
    """Return True if *name* is a path, not the name of a built-in profile."""
    return isinstance(name, Path) or name.endswith(".toml") or "/" in name or "\\" in name


def _known_name(folder: str, name: str) -> str:
    known = names(folder)
    if name not in known:
        # Data folders are plural nouns, so that the message can name one of them.
        kind = folder.removesuffix("s")
        raise ProfileError(
            f"unknown {kind} {shown(name)}; {suggestion(name, known)}; or a path ending in .toml"
        )
    return name


def read_built_in(name: str) -> dict[str, object]:
    """Return the parsed TOML of a built-in file such as ``links/nvlink3``."""
    return tomllib.loads((DATA_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def checked(model: type[P], data: Mapping[str, object], file: str) -> P:
    """Return the profile in *data* of a file, validated.

    Raises:
        ProfileError: If it is not valid; names the file and the first mistake.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(data, context=FROM_FILE)
    except ValidationError as error:
        raise ProfileError(f"{file}: {one_line(error)}") from None


def _checked_cluster(data: Mapping[str, object], file: str, folder: Path) -> Cluster:
    resolved = dict(data)
    for key, load in PARTS.items():
        kind: type[Profile] = Device if key == "device" else Link
        value = data.get(key)
        try:
            if isinstance(value, Mapping):
                resolved[key] = checked(kind, value, key)
            elif key in data:
                resolved[key] = load(reference(value, folder))
        except ProfileError as error:
            where = "" if isinstance(value, Mapping) else f"{key}: "
            raise ProfileError(f"{file}: {where}{error}") from None
    return checked(Cluster, resolved, file)


def reference(value: object, folder: Path) -> str | Path:
    """Return *value* as a built-in name, or as a path relative to *folder*.

    Raises:
        ProfileError: If it is neither.
    """
    if not isinstance(value, str):
        raise ProfileError(f"{shown(value)} is not a text; allowed: a built-in name or a path")
    return folder / value if is_path(value) else value
