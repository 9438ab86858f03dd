"""From a plan to a framework's configuration, and back.

Imports are local, so that a command waits for no more than it needs.
"""
# ruff: noqa: PLC0415

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from meshwright.planner.options import (
    ExportOptions,
    Given,
    ImportOptions,
    JobOptions,
    option_name,
    option_of,
)
from meshwright.simulator import PlanError

if TYPE_CHECKING:
    from meshwright.planner.export import Facts
    from meshwright.planner.reports import SavedPlan

# The option of a value that is not of a plan.
JOB_OPTIONS = {
    "model": "model",
    "world_size": "gpus",
    "global_batch_size": "global_batch",
    "seq_len": "seq_len",
    "precision": "precision",
    "prediction_layers": "prediction_layers",
}


def run_export(options: ExportOptions) -> int:
    """Write a plan as the configuration of a framework."""
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
    _write(files, options.out, force=options.force)
    for note in notes:
        _say(sys.stderr, f"note: {note}")
    return 0


def _write(files: Mapping[str, str], out: str | None, *, force: bool) -> None:
    """Write the only file to *out*, or several into it, all of them or none."""
    from meshwright.hwprofiles import shown_path
    from meshwright.planner.reports import check_file, check_folder, new_folder, write_whole

    if out is None:
        for name, text in files.items():
            head = f"==> {name} <==\n" if len(files) > 1 else ""
            _say(sys.stdout, f"{head}{text}".rstrip("\n"))
        return
    if len(files) == 1:
        target = check_file("--out", out)
        write_whole(target, *files.values())
    else:
        target = check_folder(out, force=force)
        with new_folder(target) as folder:
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8", newline="\n")
    _say(sys.stdout, f"written  {shown_path(target)}")


def run_import(options: ImportOptions, layout: Given, replication: Given) -> int:
    """Read a framework's configuration as a plan."""
    from meshwright.planner.reports import check_file, json_text, plan_document

    if options.file is None:
        raise PlanError("FILE is missing; allowed: a configuration of a framework")
    if options.out is not None:
        check_file("--out", options.out)
    saved = _imported(options, {**layout, **replication})
    _write({"plan.json": json_text(plan_document(saved))}, options.out, force=False)
    return 0


def _imported(options: ImportOptions, given: Given) -> "SavedPlan":
    """Return the plan of a file, completed by options and checked by its stack."""
    from meshwright.hwprofiles import shown_path
    from meshwright.planner.cli.request import read_setting, resolve_plan
    from meshwright.planner.configuration import FRAMEWORK_FILE
    from meshwright.planner.export import (
        STACK_FACT,
        get_framework,
        read_framework_file,
    )
    from meshwright.planner.reports import SavedPlan
    from meshwright.simulator.layout import check_sharding, stack_refusal

    path = Path(options.file or "")
    framework = None if options.source is None else get_framework(options.source)
    text = FRAMEWORK_FILE.read_text(path)
    try:
        _, values, own = read_framework_file(path, text, framework, _known(options, given))
    except PlanError as error:
        raise PlanError(f"{shown_path(path)}: {error}") from None
    _check_agreement(options, given, values)
    facts = [
        f"{name.removeprefix(STACK_FACT)}={str(value).lower()}"
        for name, value in values.items()
        if name.startswith(STACK_FACT)
    ]
    job = JobOptions(
        **cast("Any", {option: values.get(name) for name, option in JOB_OPTIONS.items()}),
        cluster=options.cluster,
        stack=options.stack or own,
        set=[*facts, *(options.set or ())],
    )
    setting = read_setting(job)
    plan = resolve_plan(setting, {**_words(values), **given})
    check_sharding(setting.job, plan)
    refusal = stack_refusal(setting.job, plan, setting.stack)
    if refusal is not None:
        raise PlanError(refusal)
    return SavedPlan(job=setting.job, plan=plan, cluster=setting.cluster, stack=setting.stack)


def _known(options: ImportOptions, given: Given) -> "Facts":
    """Return what options say before the file is read."""
    from meshwright.planner.export import Facts
    from meshwright.simulator import ModelSpec, load_model

    model = None if options.model is None else load_model(options.model)
    return Facts(_told(options, given), model if isinstance(model, ModelSpec) else None)


def _told(options: ImportOptions, given: Given) -> dict[str, object]:
    """Return what options say of the job and of the layout."""
    found = {name: getattr(options, option) for name, option in JOB_OPTIONS.items()}
    return {name: value for name, value in {**found, **given}.items() if value is not None}


def _check_agreement(options: ImportOptions, given: Given, values: Mapping[str, object]) -> None:
    """Raise PlanError where an option says other than the file."""
    for name, value in _told(options, given).items():
        if name in values and values[name] not in (value, str(value)):
            option = option_name(JOB_OPTIONS[name]) if name in JOB_OPTIONS else option_of(name)
            raise PlanError(
                f"{option} {value} is not what {options.file} says; allowed: {values[name]}"
            )


def _words(values: Mapping[str, object]) -> Given:
    """Return the fields of a plan as options give them."""
    from meshwright.simulator.layout import PLAN_FIELDS

    found = {name: values[name] for name in PLAN_FIELDS if values.get(name) is not None}
    stages = found.get("stages")
    if isinstance(stages, tuple):
        found["stages"] = ",".join(map(str, stages))
    return found


def _say(stream: TextIO, line: str) -> None:
    from meshwright.planner.cli.commands import write_text

    write_text(stream, f"{line}\n")
