"""What docs/clusters.md says of stacks on clusters: their defaults there, or why they refuse."""

import json
from collections.abc import Iterable

from documents.pages import DocumentError
from documents.tables import table
from documents.terminal import run
from meshwright import list_clusters, list_stacks, load_cluster

STEP = ("simulate", "gpt2", "--gpus", "4", "--global-batch", "8")


def stack_defaults() -> str:
    """Return precision and attention of each stack, a column for clusters that are alike."""
    devices: dict[str, list[str]] = {}
    for name in list_clusters():
        devices.setdefault(load_cluster(name).device.name, []).append(name)
    alike: dict[tuple[str, ...], list[str]] = {}
    for clusters in devices.values():
        column = tuple(_cell(stack, clusters[0]) for stack in list_stacks())
        alike.setdefault(column, []).extend(clusters)
    head = ("stack", *(_names(clusters) for clusters in alike.values()))
    return table(head, zip(map(_code, list_stacks()), *alike, strict=True))


def _cell(stack: str, cluster: str) -> str:
    try:
        step = json.loads(run([*STEP, "--cluster", cluster, "--stack", stack, "--json", "-"]))
    except DocumentError as error:
        return str(error).partition("error: ")[2]
    return f"{step['job']['precision']}, {step['plan']['attention']}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(_code, names))


def _code(name: str) -> str:
    return f"`{name}`"
