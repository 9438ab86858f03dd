"""Facts of profiles as text: values with their units, and what was changed for one command."""

from collections.abc import Callable

from meshwright.hwprofiles import (
    ChangedFact,
    Cluster,
    StackProfile,
    changed_facts,
    format_bandwidth,
    format_bytes,
    format_flops_per_s,
    format_time,
)

# How a field that ends in a unit is shown; the longer endings come first.
FORMATS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_flops_per_s", format_flops_per_s),
    ("_bytes_per_s", format_bandwidth),
    ("_capacity_bytes", format_bytes),
    ("context_bytes", format_bytes),
    ("usable_bytes", format_bytes),
    ("communicator_bytes", format_bytes),
    ("_workspace_bytes", format_bytes),
    ("_s", format_time),
)


def changed_lines(cluster: Cluster, stack: StackProfile) -> list[tuple[str, str]]:
    """Return a line for each fact that is not that of the built-in cluster or stack."""
    return [
        ("set", _changed_text(each)) for each in (*changed_facts(stack), *changed_facts(cluster))
    ]


def _changed_text(fact: ChangedFact) -> str:
    now, before = (fact_text(fact.field, value) for value in (fact.value, fact.built_in))
    return f"{fact.key} = {now} (built in: {before})"


def fact_text(name: str, value: object) -> str:
    """Return the value of a fact; its name says the unit."""
    match value:
        case None:
            return "not given"
        case bool():
            return "yes" if value else "no"
        case tuple():
            return ", ".join(_item_text(item) for item in value) or "none"
        case float() | int():
            return _number_text(name, value)
        case _:
            return str(value) or "none"


def _item_text(item: object) -> str:
    """Return one of several values; a pair as its parts with a stroke between them."""
    return "/".join(str(part) for part in item) if isinstance(item, tuple) else str(item)


def _number_text(name: str, value: float) -> str:
    field = "_flops_per_s" if ".peak_flops_per_s." in f".{name}" else name
    for ending, show in FORMATS:
        if field.endswith(ending):
            return show(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
