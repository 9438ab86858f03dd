"""Options of the fields of a plan, and of pins and limits of a search.

They are made from the declarations of the fields (`meshwright.simulator.layout`).
"""

from collections.abc import Iterable
from enum import StrEnum

from meshwright.planner.options.records import JobOptions, check_count
from meshwright.planner.options.words import Given, Option, OptionGroup, option_name
from meshwright.simulator.layout import (
    PLAN_FIELDS,
    SEARCHED_FIELDS,
    SERVER_FIELDS,
    PlanField,
    in_option_order,
)

# The size of a stack's gradient buckets is no field of a plan: it changes the stack.
BUCKET_SIZE = Option(
    "bucket_size", "bucket_size", str, "SIZE", 'Gradients reduced at a time, as "25 MB".'
)
OPT_IN_FIELDS = {
    option_name(each.option)[2:]: each for each in SEARCHED_FIELDS if each.declaration.is_asked
}
ALL = "all"
# Number formats that are asked for together: of gradients, of their reduction, of moments.
TOGETHER = {"precision": tuple(each for each in OPT_IN_FIELDS if each.endswith("-precision"))}
ALSO = Option(
    "also",
    "also",
    str,
    "LIST",
    "Vary fields that are held unless asked for: "
    f"{', '.join([*OPT_IN_FIELDS, *TOGETHER])} or {ALL}.",
)
FOR = Option("framework", "for", str, "FRAMEWORK", "Launch with it [what launches the stack].")
ANY = Option(
    "any_layout", "any", bool, help="Also layouts that no framework launches.", flags="--any"
)
SEARCH_OPTIONS = {each.key: each for each in (ALSO, FOR, ANY)}  # of which one layout says nothing
SEARCHED = {each.name for each in SEARCHED_FIELDS}
FOLLOWING_OPTIONS = {"reshard_after_forward": [BUCKET_SIZE]}


def _option(field: PlanField) -> Option:
    """Return the option that sets a field; a list or a choice with words is read later."""
    declaration, name = field.declaration, field.option
    if field.kind is bool:
        dashed = name.replace("_", "-")
        flags = f"--{dashed}/--no-{dashed}"
        return Option(field.name, name, bool, help=declaration.help, flags=flags)
    words = (
        "|".join(str(each) for each in field.choices) if issubclass(field.kind, StrEnum) else "N"
    )
    kind = str if field.kind is tuple else field.kind
    return Option(field.name, name, kind, declaration.metavar or words, declaration.help)


def _options(group: str) -> Iterable[Option]:
    of_group = [each for each in PLAN_FIELDS.values() if each.declaration.group == group]
    for field in in_option_order(tuple(of_group)):
        if (
            field.name == "parameter_server"
        ):  # a record of its own, an option for each of its fields
            yield from map(_option, SERVER_FIELDS.values())
        else:
            yield _option(field)
        yield from FOLLOWING_OPTIONS.get(field.name, [])


def _limit(field: PlanField) -> Option:
    text = f"Largest {option_name(field.option)}."
    return Option(field.limit, f"max_{field.option}", int, "N", text)


def _present(values: Given) -> Given:
    return {key: value for key, value in values.items() if value is not None}


LAYOUT = OptionGroup(tuple(_options("layout")), _present)
REPLICATION = OptionGroup(tuple(_options("replication")), _present)
# What a search takes beside the layout: largest values, and pins of the switches that it varies.
LIMITS = OptionGroup(
    (
        *(each for each in REPLICATION.options if each.key in SEARCHED),
        *(_limit(each) for each in SEARCHED_FIELDS if each.declaration.is_limited),
        ALSO,
        FOR,
        ANY,
    ),
    _present,
)
# What a sweep takes: all that a search does, and what only a simulation does.
SWEPT = OptionGroup(
    (
        *LAYOUT.options,
        *LIMITS.options,
        *(each for each in REPLICATION.options if each.key not in SEARCHED),
    ),
    _present,
)
# The options of a job without its model, for commands that take several.
SHARED_JOB = OptionGroup(
    tuple(each for each in OptionGroup.of(JobOptions).options if each.key != "model"),
    OptionGroup.of(JobOptions).build,
)
_NAMES = {each.key: each.name for group in (LAYOUT, REPLICATION, LIMITS) for each in group.options}


def option_of(key: str) -> str:
    """Return the option that sets a field or its limit.

    >>> option_of("num_virtual_stages"), option_of("max_microbatch_size")
    ('--vpp', '--max-micro-batch')
    """
    return option_name(_NAMES[key])


def check_given(given: Given) -> None:
    """Raise PlanError when a count that was given is out of range.

    A ZeRO stage is a number of a list, not a count; the stack says which it knows. What shares
    states among data-parallel ranks is checked where the plan is made.
    """
    counts = {each.key for group in (LAYOUT, LIMITS) for each in group.options} - {"zero_stage"}
    for key, value in given.items():
        if key in counts and not isinstance(value, str):
            check_count(_NAMES[key], value)
