"""An explanation as text and as a document."""

from collections.abc import Iterator
from typing import cast

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.hwprofiles import GIBI, PS_PER_S, counted, format_bytes, format_time
from meshwright.planner.compare import time_terms
from meshwright.planner.explain.explanation import Explanation, Gain, Neighbour
from meshwright.planner.reports import (
    Column,
    ColumnTable,
    Json,
    facts_table,
    headline,
    job_text,
    layout_text,
    plan_fields,
    step_document,
    warning_lines,
)

MOST_NEIGHBOURS = 8


def explanation_document(explanation: Explanation) -> dict[str, Json]:
    """Return the document of an explanation: that of the step, and its causes."""
    path = explanation.path
    return {
        **step_document(explanation.step),
        "time_terms_s": {
            name: time_ps / PS_PER_S for name, time_ps in time_terms(explanation.step).items()
        },
        "critical_path_s": None
        if path is None
        else {name.value: time_ps / PS_PER_S for name, time_ps in path.time_ps.items()},
        "a_tenth_more": [
            {
                "resource": gain.resource.value,
                "set": list(gain.changes),
                "step_time_s": gain.step_ps / PS_PER_S,
                "fits": gain.fits,
            }
            for gain in explanation.gains
        ],
        "neighbours": [_neighbour_fields(each) for each in explanation.neighbours],
        "memory_products": [
            {"name": term.name, "bytes": term.size_bytes, "factors": term.factors}
            for term in explanation.memory
        ],
    }


def _neighbour_fields(neighbour: Neighbour) -> dict[str, Json]:
    change = neighbour.change
    more_s = {name: time_ps / PS_PER_S for name, time_ps in neighbour.more_ps.items()}
    return {
        "options": change.options,
        "plan": plan_fields(change.plan),
        "fits": neighbour.fits,
        "step_time_s": change.step_ps / PS_PER_S,
        "device_bytes": change.device_bytes,
        "more_s": cast("dict[str, Json]", more_s),
    }


def explanation_report(explanation: Explanation) -> RenderableType:
    """Return the report of an explanation."""
    step = explanation.step
    devices = f"{counted(step.plan.world_size, 'GPU')} of {step.cluster.name}"
    memory = step.memory
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    need, have = format_bytes(memory.device_bytes), format_bytes(memory.usable_bytes)
    facts = [
        ("job", job_text(step.job)),
        ("layout", layout_text(step.plan, step.job)),
        ("step time", format_time(step.step_time_s)),
        ("memory", f"{verdict}: {need} of {have}"),
    ]
    return Group(
        Text(headline(step.job, devices, step.stack.name), style="bold"),
        facts_table(facts),
        Text(),
        _causes(explanation),
        *_path_lines(explanation),
        Text(),
        _gains(explanation),
        *_memory_lines(explanation),
        Text(),
        *_neighbours(explanation),
        Text(),
        _memory(explanation),
        *warning_lines(step.warnings),
    )


def _causes(explanation: Explanation) -> ColumnTable:
    """Return a table of times by cause: along the critical path, and averaged over ranks."""
    step, path = explanation.step, explanation.path
    mean = time_terms(step)
    along = mean if path is None else {name.value: ps for name, ps in path.time_ps.items()}
    names = [name for name in mean if mean[name] or along[name]]
    # Ordered by the critical path: time that is overlapped does not lengthen the step.
    names.sort(key=lambda name: (-along[name], -mean[name]))
    columns = [
        _text_column("cause", [name.replace("_", " ") for name in names]),
        *(
            []
            if path is None
            else _time_columns("critical path", [along[n] for n in names], step.step_ps)
        ),
        *_time_columns("mean of ranks", [mean[name] for name in names], step.step_ps),
    ]
    return ColumnTable(columns)


def _time_columns(head: str, values_ps: list[int], step_ps: int) -> Iterator[Column]:
    yield Column(head=head, cells=[_time(each) for each in values_ps])
    yield Column(head="share", cells=[f"{each / step_ps:.1%}" for each in values_ps])


def _time(time_ps: int) -> str:
    return format_time(time_ps / PS_PER_S) if time_ps else "-"


def _text_column(head: str, cells: list[str]) -> Column:
    return Column(head=head, cells=cells, is_word=True, is_first=True)


def _path_lines(explanation: Explanation) -> Iterator[Text]:
    """Say through which ranks the critical path goes."""
    path = explanation.path
    if path is None or len(path.by_rank_ps) < 2:
        return
    longest = max(path.by_rank_ps, key=lambda rank: path.by_rank_ps[rank])
    share = path.by_rank_ps[longest] / explanation.step.step_ps
    yield Text(
        f"the critical path goes through {counted(path.num_passes, 'pass')} of "
        f"{counted(len(path.by_rank_ps), 'pipeline rank')}, {share:.0%} of the step on "
        f"pipeline rank {longest}"
    )


def _gains(explanation: Explanation) -> ColumnTable:
    before_ps, gains = explanation.step.step_ps, explanation.gains
    return ColumnTable(
        [
            _text_column("a tenth more of", [gain.resource.value for gain in gains]),
            Column(head="step", cells=[_time(gain.step_ps) for gain in gains]),
            Column(head="less", cells=[_time(before_ps - gain.step_ps) for gain in gains]),
            Column(head="change", cells=[_change_text(gain, before_ps) for gain in gains]),
        ]
    )


def _change_text(gain: Gain, before_ps: int) -> str:
    """Return the change of the step in percent."""
    return f"{gain.step_ps / before_ps - 1:+.2%}" if gain.step_ps != before_ps else "none"


def _memory_lines(explanation: Explanation) -> Iterator[Text]:
    roomier = explanation.roomier
    if roomier is not None:
        change = roomier.change
        yield Text(
            f"with a tenth more memory {change.options} fits, too: {change.slower_fraction:+.1%}"
        )


def _neighbours(explanation: Explanation) -> Iterator[RenderableType]:
    """Yield the fastest plans one change away, and the term that makes each what it is."""
    # They come the fastest first.
    near = [each for each in explanation.neighbours if each.fits][:MOST_NEIGHBOURS]
    over = [each for each in explanation.neighbours if not each.fits]
    if not near:
        yield Text("no plan one change away fits")
    else:
        changes = [each.change for each in near]
        yield ColumnTable(
            [
                _text_column("one change away", [each.options for each in changes]),
                Column(head="step", cells=[_time(each.step_ps) for each in changes], is_first=True),
                Column(head="change", cells=[f"{each.slower_fraction:+.1%}" for each in changes]),
                Column(
                    head="GiB",
                    cells=[f"{each.device_bytes / GIBI:.1f}" for each in changes],
                    is_first=True,
                ),
                Column(head="most of it", cells=[_cost_text(each) for each in near], is_word=True),
            ]
        )
    if over:
        yield Text(f"{len(over)} more do not fit, such as {over[0].change.options}")


def _cost_text(neighbour: Neighbour) -> str:
    name, more_ps = neighbour.costliest
    if not more_ps:
        return "-"
    sign = "+" if more_ps >= 0 else "-"
    return f"{name.replace('_', ' ')} {sign}{format_time(abs(more_ps) / PS_PER_S)}"


def _memory(explanation: Explanation) -> ColumnTable:
    memory, terms = explanation.step.memory, explanation.memory
    sizes = {
        **{term.name: term.size_bytes for term in terms},
        "allocator": memory.reserved_bytes - memory.peak_bytes,
        "context and communicators": memory.device_bytes - memory.reserved_bytes,
        "device": memory.device_bytes,
    }
    factors = {term.name: term.factors for term in terms}
    return ColumnTable(
        [
            _text_column(f"memory of rank {memory.worst_rank}, the fullest", list(sizes)),
            Column(head="GiB", cells=[f"{each / GIBI:.2f}" for each in sizes.values()]),
            Column(head="as", cells=[factors.get(name, "") for name in sizes], is_word=True),
        ]
    )
