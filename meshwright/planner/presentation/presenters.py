"""What steps, searches and comparisons show of themselves in Python: what their commands write."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from meshwright.hwprofiles import suggestion
from meshwright.planner.compare import Comparison, comparison_document, term_rows
from meshwright.planner.reports import plan_rows, search_document, step_document
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
        # matplotlib is slow to import
        from meshwright.planner.plots import (  # noqa: PLC0415
            plot_breakdown,
            plot_stage_memory,
            plot_timeline,
        )

        drawn: dict[str, Callable[[StepResult], Figure]] = {
            "timeline": plot_timeline,
            "breakdown": plot_breakdown,
            "stage_memory": plot_stage_memory,
        }
        return drawn[known_kind(kind, drawn)](self._step)


class SearchPresenter:
    """A search; pictures of its best step are those of ``plans[0]``."""

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
        """Return the time of layouts against their memory."""
        from meshwright.planner.plots import plot_memory_time  # noqa: PLC0415

        known_kind(kind, ("memory_time",))
        return plot_memory_time(self._result)


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


def known_kind(kind: str | None, known: "Mapping[str, object] | tuple[str, ...]") -> str:
    """Return the name of a picture, the first of *known* where none is asked for.

    Raises:
        PlanError: If there is none of that name.
    """
    if kind is not None and kind not in known:
        raise PlanError(f"there is no picture {kind!r} of it; {suggestion(kind, known)}")
    return next(iter(known)) if kind is None else kind


def presenter_of(result: object) -> Presenter:
    """Return what shows *result*: a step, a search or a comparison."""
    if isinstance(result, SearchResult):
        return SearchPresenter(result)
    if isinstance(result, Comparison):
        return ComparisonPresenter(result)
    assert isinstance(result, StepResult)
    return StepPresenter(result)
