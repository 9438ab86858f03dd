"""Files that `--out` leaves: plans, documents, tables and pictures."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.planner.changes import Change
from meshwright.planner.reports.documents import json_text, search_document, step_document
from meshwright.planner.reports.money import Budget
from meshwright.planner.reports.output_folder import names_in, new_folder
from meshwright.planner.reports.plan_file import SavedPlan, plan_document
from meshwright.planner.reports.tables_csv import plans_csv, stages_csv
from meshwright.planner.search import SearchResult
from meshwright.simulator import ResolvedPlan, StepResult, TooManyTasksError

# Plans whose breakdowns stand side by side: with more a bar is no higher than its name.
MOST_BARS = 6

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from meshwright.planner.largest import Largest


def write_step(
    result: StepResult,
    folder: Path,
    budget: Budget | None = None,
    changes: Sequence[Change] = (),
    largest: "Largest | None" = None,
) -> tuple[str, ...]:
    """Write one step: plan.json, result.json, plans.csv, stages.csv and pictures; return names."""
    with new_folder(folder) as files:
        _write(files / "result.json", json_text(step_document(result, budget, changes, largest)))
        _write_plans(files, [result], budget)
        _save(files, {**_step_pictures(result), "breakdown": _breakdown([result])})
        return names_in(files)


def write_search(
    result: SearchResult,
    folder: Path,
    budget: Budget | None = None,
    largest: "Largest | None" = None,
) -> tuple[str, ...]:
    """Write a search and return names: the best as plan.json, the next as plan-2.json, the rest.

    A search in which nothing fits leaves result.json alone, with the nearest layout.
    """
    with new_folder(folder) as files:
        _write(files / "result.json", json_text(search_document(result, budget, largest)))
        if result.plans:
            _write_plans(files, result.plans, budget, result.like)
            _save(files, _step_pictures(result.plans[0]) | _search_pictures(result))
        return names_in(files)


def saved_plan(result: StepResult) -> SavedPlan:
    """Return the content of a plan file for a simulated step."""
    return SavedPlan(job=result.job, plan=result.plan, cluster=result.cluster, stack=result.stack)


def _write_plans(
    files: Path,
    results: Sequence[StepResult],
    budget: Budget | None,
    likes: Sequence[Sequence[ResolvedPlan]] | None = None,
) -> None:
    for rank, result in enumerate(results, 1):
        _write(files / _plan_file(rank), json_text(plan_document(saved_plan(result))))
    _write(files / "plans.csv", plans_csv(results, budget, likes))
    _write(files / "stages.csv", stages_csv(results))


def _plan_file(rank: int) -> Path:
    return Path("plan.json" if rank == 1 else f"plan-{rank}.json")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


# The pictures' package is imported where it is needed: matplotlib takes half a second to start.


def _step_pictures(result: StepResult) -> dict[str, "Figure"]:
    from meshwright.planner.plots import plot_stage_memory, plot_timeline  # noqa: PLC0415

    pictures = {"stage_memory": plot_stage_memory(result)}
    with suppress(TooManyTasksError):  # of a long step the timeline is left out
        pictures["timeline"] = plot_timeline(result)
    return pictures


def _search_pictures(result: SearchResult) -> dict[str, "Figure"]:
    from meshwright.planner.plots import plot_memory_time  # noqa: PLC0415

    return {"memory_time": plot_memory_time(result), "breakdown": search_breakdown(result)}


def search_breakdown(result: SearchResult) -> "Figure":
    """Return the breakdowns of the best layouts, side by side."""
    best = result.plans[:MOST_BARS]
    return _breakdown(best, [_plan_file(index + 1).stem for index in range(len(best))])


def _breakdown(steps: Sequence[StepResult], names: Sequence[str] = ()) -> "Figure":
    from meshwright.planner.plots import plot_breakdown  # noqa: PLC0415

    return plot_breakdown(*steps, names=names)


def _save(files: Path, figures: Mapping[str, "Figure"]) -> None:
    from meshwright.planner.plots import save_figure  # noqa: PLC0415

    for name, figure in figures.items():
        save_figure(figure, files / f"{name}.png")
