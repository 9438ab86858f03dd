"""Built-in models, clusters, stacks and schedules as text, with their sources."""

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.hwprofiles import (
    GIBI,
    StackProfile,
    common_refusals,
    counted,
    in_parentheses,
    list_clusters,
    list_releases,
    list_stacks,
    load_cluster,
    load_stack,
    release_changes,
    stack_frameworks,
)
from meshwright.planner.reports.facts import fact_text
from meshwright.planner.reports.step import facts_table, format_count
from meshwright.records import Record
from meshwright.simulator import (
    SCHEDULES,
    Schedule,
    count_active_parameters,
    count_parameters,
    get_schedule,
    list_models,
    load_model,
)

Facts = Iterator[tuple[str, str]]
# Fields that identify a stack, and those that are listed in words.
IDENTITY = ("name", "release", "alike", "title", "date", "source")
LISTED_FIELDS = ("switches", "ruled_by", "rules", "refused")


def models_table(name: str | None) -> RenderableType:
    """Return all built-in models, or everything about one model or model file."""
    return facts_table(_model_facts(name) if name else _model_lines())


def clusters_table(name: str | None) -> RenderableType:
    """Return all built-in clusters, or everything about one cluster or cluster file."""
    return facts_table(_record_facts(load_cluster(name)) if name else _cluster_lines())


def stacks_table(name: str | None) -> RenderableType:
    """Return all built-in stacks, or everything about one stack or stack file."""
    if name:
        return facts_table(_stack_facts(load_stack(name)))
    parts = {
        "": _framework_lines(),
        "releases": _release_lines(),
        "switches, --set KEY=VALUE": _switch_lines(),
        "stacks of published runs": _alias_lines(),
    }
    parts_shown: list[RenderableType] = []
    for title, facts in parts.items():
        parts_shown += [Text(f"\n{title}", style="bold")] * bool(title) + [facts_table(facts)]
    return Group(*parts_shown)


def schedules_table(name: str | None) -> RenderableType:
    """Return all schedules, or everything about one."""
    if name:
        return facts_table(_schedule_facts(get_schedule(name)))
    return facts_table((each.name, each.title) for each in SCHEDULES.values())


def _model_lines() -> Facts:
    for name in list_models():
        model = load_model(name)
        yield name, f"{model.title}, {format_count(count_parameters(model))} parameters"


def _model_facts(name: str) -> Facts:
    model = load_model(name)
    parameters = count_parameters(model)
    yield "parameters", f"{parameters:,} ({format_count(parameters)})"
    active = count_active_parameters(model)
    if active < parameters:
        yield "active parameters", f"{active:,} ({format_count(active)}), those a token passes"
    yield from _record_facts(model)


def _cluster_lines() -> Facts:
    for name in list_clusters():
        cluster = load_cluster(name)
        capacity = cluster.device.memory_capacity_bytes / GIBI
        yield name, f"{cluster.title} ({capacity:g} GiB a device)"


def _framework_lines() -> Facts:
    """Yield the title of each framework, and the release that its name alone means."""
    for framework in stack_frameworks():
        newest = load_stack(framework)
        yield framework, f"{newest.title} (newest: {newest.name.partition('@')[2]})"


def _release_lines() -> Facts:
    for framework in stack_frameworks():
        # The newest first.
        for name in reversed(list_releases(framework)):
            stack = load_stack(name)
            aliases = f"; also {', '.join(stack.alike)}" if stack.alike else ""
            yield name, f"{stack.date}{aliases}"


def _switch_lines() -> Facts:
    for framework in stack_frameworks():
        yield from _headed(framework, load_stack(framework).switches)


def _switch_word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _alias_lines() -> Facts:
    """Yield the release of each stack of published runs, and its switches that are otherwise."""
    for stack in map(load_stack, list_stacks()):
        if stack.release:
            changes = {each.key: each.value for each in release_changes(stack)}
            switch_texts = [
                f"{key}={_switch_word(changes.pop(key))}"
                for key in stack.switches
                if key in changes
            ]
            rest = f" and {counted(len(changes), 'other fact')}" if changes else ""
            yield stack.name, " ".join([stack.release, *switch_texts]) + rest


def _schedule_facts(schedule: Schedule) -> Facts:
    yield "name", schedule.name
    yield "title", schedule.title
    yield "virtual stages", "two or more" if schedule.interleaves else "one"
    for pp, num_microbatches in ((4, 16), (8, 64)):
        vpp = 2 if schedule.interleaves else 1
        fraction = schedule.bubble_fraction(pp, num_microbatches, vpp)
        case = f"pp={pp}, {counted(num_microbatches, 'microbatch')}, vpp={vpp}"
        yield "bubble", f"{fraction:.1%} at {case}"
    yield "source", schedule.source


def _stack_facts(stack: StackProfile) -> Facts:
    """Yield identity, switches, refusals and other facts of a stack."""
    yield from _record_facts(stack, fields=IDENTITY)
    yield from _headed("switches", stack.switches)
    yield from _headed("not offered", (f"{each}: {stack.rule(each)}" for each in stack.rules))
    rules = ({**common_refusals(), **stack.refused}).values()
    refused = (
        f"{each.reason or each.when}{in_parentheses(each.words(stack.ruled_by))}"
        for each in rules
        if each.when
    )
    yield from _headed("refused", refused)
    others = (each for each in type(stack).model_fields if each not in (*IDENTITY, *LISTED_FIELDS))
    yield from _record_facts(stack, fields=others)


def _headed(title: str, lines: Iterable[str]) -> Facts:
    """Yield *lines* behind a title that stands once."""
    for line in lines:
        yield title, line
        title = ""


def _record_facts(record: Record, prefix: str = "", fields: Iterable[str] | None = None) -> Facts:
    """Yield *fields* of a record that are written down, those inside with a dotted name."""
    written = record.model_dump()
    for field in filter(written.__contains__, fields or type(record).model_fields):
        yield from _value_facts(f"{prefix}{field}", getattr(record, field))


def _value_facts(name: str, value: object) -> Facts:
    if isinstance(value, Record):
        yield from _record_facts(value, f"{name}.")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _value_facts(f"{name}.{key}", item)
    elif isinstance(value, tuple) and value and isinstance(value[0], Record):
        for index, item in enumerate(value, 1):
            yield from _value_facts(f"{name}.{index}", item)
    else:
        yield name, fact_text(name, value)
