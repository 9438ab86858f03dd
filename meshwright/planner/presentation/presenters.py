"""Presenters of steps, searches and comparisons in Python: what their commands write."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from meshwright.hwprofiles import shown
from meshwright.planner.compare import Comparison, comparison_document, term_rows
from meshwright.planner.reports import plan_rows, search_breakdown, search_document, step_document
from meshwright.planner.search import SearchResult
from meshwright.simulator import PlanError, StepResult
from meshwright.simulator.account import Presenter

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _pictures_of_steps() -> "Mapping[str, Callable[[StepResult], Figure]]":
    """Return the pictures of a step, by name."""
    # matplotlib is slow to import
    from meshwright.planner.plots import plot_breakdown, plot_stage_memory, plot_timeline  # noqa: PLC0415

    return {
        "timeline": plot_timeline,
        "breakdown": plot_breakdown,
        "stage_memory": plot_stage_memory,
    }


def picture_kind(kind: str | None, known: tuple[str, ...]) -> str:
    """Return the name of a picture, the first of *known* where none is asked for.

    Raises:
        PlanError: If there is none of that name.
    """
    if kind is not None and kind not in known:
        raise PlanError(f"there is no picture {shown(kind)} of it; allowed: {', '.join(known)}")
    return known[0] if kind is None else kind


def _picture_of_step(step: StepResult, kind: str | None) -> "Figure":
    """Return the timeline, the breakdown, or the memory of stages."""
    drawn = _pictures_of_steps()
    return drawn[picture_kind(kind, tuple(drawn))](step)


def _picture_of_search(result: SearchResult, kind: str | None) -> "Figure":
    """Return the time of layouts against their memory, or a picture of the best ones."""
    from meshwright.planner.plots import plot_memory_time  # noqa: PLC0415

    of_best = _pictures_of_steps() if result.plans else {}
    chosen = picture_kind(kind, ("memory_time", *of_best))
    if chosen == "memory_time":
        return plot_memory_time(result)
    if chosen == "breakdown":
        return search_breakdown(result)
    return of_best[chosen](result.plans[0])


def _picture_of_comparison(comparison: Comparison, kind: str | None) -> "Figure":
    """Return the breakdowns of the steps."""
    from meshwright.planner.plots import plot_breakdown  # noqa: PLC0415

    picture_kind(kind, ("breakdown",))
    return plot_breakdown(*comparison.steps, names=comparison.names)


def presenter_of(result: object) -> Presenter:
    """Return the presenter of a step, a search or a comparison, as its command shows it."""
    if isinstance(result, SearchResult):
        return Presenter(
            document=partial(search_document, result),
            rows=partial(plan_rows, result.plans, likes=result.like),
            picture=partial(_picture_of_search, result),
        )
    if isinstance(result, Comparison):
        return Presenter(
            document=partial(comparison_document, result),
            rows=partial(term_rows, result),
            picture=partial(_picture_of_comparison, result),
        )
    assert isinstance(result, StepResult)
    return Presenter(
        document=partial(step_document, result),
        rows=partial(plan_rows, [result]),
        picture=partial(_picture_of_step, result),
    )
