"""Command `export`: a plan as the configuration of a framework.

Imports are local, so that a command waits for no more than it needs.
"""
# ruff: noqa: PLC0415

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from meshwright.planner.options import ExportOptions
from meshwright.simulator import PlanError


def run_export(options: ExportOptions) -> int:
    """Run ``meshwright export``; return its exit status."""
    from meshwright.planner.export import export_plan, get_framework
    from meshwright.planner.reports import read_runnable_plan

    if options.plan is None:
        raise PlanError("PLAN is missing; allowed: a plan.json that search or simulate wrote")
    if options.to is None:
        from meshwright.planner.export import FRAMEWORKS

        raise PlanError(f"--to is missing; allowed: {', '.join(FRAMEWORKS)}")
    framework = get_framework(options.to)
    files, notes = export_plan(
        read_runnable_plan(Path(options.plan)),
        framework,
        options.framework_version,
        slurm=options.slurm,
    )
    write_files(files, options.out, force=options.force)
    for note in notes:
        say(sys.stderr, f"note: {note}")
    return 0


def write_files(files: Mapping[str, str], out: str | None, *, force: bool) -> None:
    """Write the only file to *out*, or several into it, all of them or none."""
    from meshwright.hwprofiles import shown_path
    from meshwright.planner.reports import check_file, check_folder, new_folder, write_whole

    if out is None:
        # Headed as `head` and `tail` do it with several files.
        for name, text in files.items():
            head = f"==> {name} <==\n" if len(files) > 1 else ""
            say(sys.stdout, f"{head}{text}".rstrip("\n"))
        return
    if len(files) == 1:
        target = check_file("--out", out)
        # Whole or not at all: a file cut short might still be read.
        write_whole(target, *files.values())
    else:
        target = check_folder(out, force=force)
        with new_folder(target) as folder:
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8", newline="\n")
    say(sys.stdout, f"written  {shown_path(target)}")


def say(stream: TextIO, line: str) -> None:
    """Write a line."""
    from meshwright.planner.cli.commands import write_text

    write_text(stream, f"{line}\n")
