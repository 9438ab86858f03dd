"""What is built in, as text: models, clusters, stacks and schedules, with their sources."""

from collections.abc import Iterable, Iterator, Mapping

from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.hwprofiles import (
    GIBI,
    counted,
    list_clusters,
    list_releases,
    list_stacks,
    load_cluster,
    load_stack,
    stack_frameworks,
)
from meshwright.planner.reports.facts import fact_text
from meshwright.planner.reports.step import facts_table, format_count
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


def models_table(name: str | None) -> RenderableType:
    """Return all built-in models, or everything about one model or model file."""
    return facts_table(_model_facts(name) if name else _model_lines())


def clusters_table(name: str | None) -> RenderableType:
    """Return all built-in clusters, or everything about one cluster or cluster file."""
    return facts_table(_record_facts(load_cluster(name)) if name else _cluster_lines())


def stacks_table(name: str | None) -> RenderableType:
    """Return all built-in stacks, or everything about one stack or stack file."""
    if name:
        return facts_table(_record_facts(load_stack(name)))
    releases = [each for name in stack_frameworks() for each in reversed(list_releases(name))]
    aliases = [each for each in list_stacks() if each not in releases]
    return Group(
        facts_table(_framework_lines()),
        Text("\nreleases", style="bold"),
        facts_table(_stack_lines(releases)),
        Text("\nof published runs", style="bold"),
        facts_table(_stack_lines(aliases)),
    )


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
    """Yield what each framework is, and which release its name alone means."""
    for framework in stack_frameworks():
        newest = load_stack(framework)
        yield framework, f"{newest.title}: {newest.name.partition('@')[2]}"


def _stack_lines(names: Iterable[str]) -> Facts:
    for name in names:
        stack = load_stack(name)
        yield name, f"{stack.title} ({stack.date})"


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


def _record_facts(record: BaseModel, prefix: str = "") -> Facts:
    """Yield each field of a record that is written down, those inside with a dotted name."""
    written = record.model_dump()
    for field in filter(written.__contains__, type(record).model_fields):
        yield from _value_facts(f"{prefix}{field}", getattr(record, field))


def _value_facts(name: str, value: object) -> Facts:
    if isinstance(value, BaseModel):
        yield from _record_facts(value, f"{name}.")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _value_facts(f"{name}.{key}", item)
    elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        for index, item in enumerate(value, 1):
            yield from _value_facts(f"{name}.{index}", item)
    else:
        yield name, fact_text(name, value)
