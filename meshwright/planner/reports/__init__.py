"""Results for people and programs: text, JSON, tables, plan files and folders.

Text is made with rich, which who asks for a document alone need not wait for.
"""

from typing import TYPE_CHECKING

from meshwright.faces import lazy_name
from meshwright.planner.reports.documents import (
    COST,
    FIGURES,
    json_text,
    named,
    proof_fields,
    search_document,
    step_document,
)
from meshwright.planner.reports.money import Budget, training_run
from meshwright.planner.reports.output_folder import (
    NUMBERED_PLANS,
    check_file,
    check_folder,
    names_in,
    new_file,
    new_folder,
    output_file,
    output_path,
    write_output,
    write_whole,
)
from meshwright.planner.reports.plan_file import (
    Json,
    SavedPlan,
    is_plan_file,
    job_fields,
    plan_document,
    plan_fields,
    read_plan,
    read_runnable_plan,
)

if TYPE_CHECKING:
    from meshwright.planner.reports.catalogue import (
        clusters_table,
        models_table,
        schedules_table,
        stacks_table,
    )
    from meshwright.planner.reports.columns import Column, ColumnTable
    from meshwright.planner.reports.result_files import (
        saved_plan,
        search_breakdown,
        write_search,
        write_step,
    )
    from meshwright.planner.reports.search import (
        layout_column,
        layout_text,
        search_report,
        step_columns,
    )
    from meshwright.planner.reports.step import (
        facts_table,
        format_count,
        headline,
        job_text,
        step_report,
        value_text,
        warning_lines,
    )
    from meshwright.planner.reports.tables_csv import known_by, plan_rows, table_csv

__all__ = [
    "COST",
    "FIGURES",
    "NUMBERED_PLANS",
    "Budget",
    "Column",
    "ColumnTable",
    "Json",
    "SavedPlan",
    "check_file",
    "check_folder",
    "clusters_table",
    "facts_table",
    "format_count",
    "headline",
    "is_plan_file",
    "job_fields",
    "job_text",
    "json_text",
    "known_by",
    "layout_column",
    "layout_text",
    "models_table",
    "named",
    "names_in",
    "new_file",
    "new_folder",
    "output_file",
    "output_path",
    "plan_document",
    "plan_fields",
    "plan_rows",
    "proof_fields",
    "read_plan",
    "read_runnable_plan",
    "saved_plan",
    "schedules_table",
    "search_breakdown",
    "search_document",
    "search_report",
    "stacks_table",
    "step_columns",
    "step_document",
    "step_report",
    "table_csv",
    "training_run",
    "value_text",
    "warning_lines",
    "write_output",
    "write_search",
    "write_step",
    "write_whole",
]


def __getattr__(name: str) -> object:
    """Return a maker of text or files, imported when first asked for."""
    modules = ("tables_csv", "result_files", "columns", "step", "search", "catalogue")
    return lazy_name(__name__, modules, name)
