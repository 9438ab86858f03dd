"""What steps, searches and comparisons show of themselves in Python: what their commands write."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from meshwright.hwprofiles import shown
from meshwright.planner.compare import Comparison, comparison_document, term_rows
from meshwright.planner.reports import (
    plan_rows,
    search_breakdown,
    search_document,
    step_document,
)
from meshwright.planner.search import SearchResult
from meshwright.simulator import PlanError, StepResult
from meshwright.simulator.account import Presenter

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class StepPresenter:
    """A simulated step."""

    def __init__(self, step: StepResult) -> None:
        self._step = step

    @property
    def document(self) -> Mapping[str, object]:
        """The document of ``simulate``."""
        return step_document(self._step)

    @property
    def rows(self) -> list[Mapping[str, object]]:
        """The one row of plans.csv."""
        return plan_rows([self._step])

    def picture(self, kind: str | None) -> "Figure":
        """Return the timeline, the breakdown, or the memory of stages."""
        drawn = _pictures_of_steps()
        return drawn[known_kind(kind, tuple(drawn))](self._step)


class SearchPresenter:
    """A search, with the pictures of its best step."""

    def __init__(self, result: SearchResult) -> None:
        self._result = result

    @property
    def document(self) -> Mapping[str, object]:
        """The document of ``search``."""
        return search_document(self._result)

    @property
    def rows(self) -> list[Mapping[str, object]]:
        """The rows of plans.csv: one a plan."""
        return plan_rows(self._result.plans, likes=self._result.like)

    def picture(self, kind: str | None) -> "Figure":
        """Return the time of layouts against their memory, or a picture of the best ones."""
        from meshwright.planner.plots import plot_memory_time  # noqa: PLC0415

        of_best = _pictures_of_steps() if self._result.plans else {}
        chosen = known_kind(kind, ("memory_time", *of_best))
        if chosen == "memory_time":
            return plot_memory_time(self._result)
        if chosen == "breakdown":
            return search_breakdown(self._result)
        return of_best[chosen](self._result.plans[0])


class ComparisonPresenter:
    """Steps beside each other."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison

    @property
    def document(self) -> Mapping[str, object]:
        """The document of ``compare``."""
        return comparison_document(self._comparison)

    @property
    def rows(self) -> list[Mapping[str, object]]:
        """The rows of terms.csv: one a term of a step."""
        return term_rows(self._comparison)

    def picture(self, kind: str | None) -> "Figure":
        """Return the breakdowns of the steps."""
        from meshwright.planner.plots import plot_breakdown  # noqa: PLC0415

        known_kind(kind, ("breakdown",))
        return plot_breakdown(*self._comparison.steps, names=self._comparison.names)


def _pictures_of_steps() -> "Mapping[str, Callable[[StepResult], Figure]]":
    """Return the pictures that there are of a step, by name."""
    # matplotlib is slow to import
    from meshwright.planner.plots import (  # noqa: PLC0415
        plot_breakdown,
        plot_stage_memory,
        plot_timeline,
    )

    return {
        "timeline": plot_timeline,
        "breakdown": plot_breakdown,
        "stage_memory": plot_stage_memory,
    }


def known_kind(kind: str | None, known: tuple[str, ...]) -> str:
    """Return the name of a picture, the first of *known* where none is asked for.

    Raises:
        PlanError: If there is none of that name.
    """
    if kind is not None and kind not in known:
        raise PlanError(f"there is no picture {shown(kind)} of it; allowed: {', '.join(known)}")
    return known[0] if kind is None else kind


def presenter_of(result: object) -> Presenter:
    """Return what shows *result*: a step, a search or a comparison."""
    if isinstance(result, SearchResult):
        return SearchPresenter(result)
    if isinstance(result, Comparison):
        return ComparisonPresenter(result)
    assert isinstance(result, StepResult)
    return StepPresenter(result)
