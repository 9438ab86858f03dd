"""Command `import`: the configuration of a framework as a plan.

Imports are local, so that a command waits for no more than it needs.
"""
# ruff: noqa: PLC0415

import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, cast

from meshwright.planner.options import Given, ImportOptions, JobOptions
from meshwright.simulator import MistakesError, PlanError

if TYPE_CHECKING:
    from meshwright.hwprofiles import Cluster
    from meshwright.planner.importing import Imported, Source
    from meshwright.planner.reports import SavedPlan
    from meshwright.planner.tables import Framework
    from meshwright.simulator import ResolvedPlan

STANDARD_INPUT = "-"
WIDTH, COLUMN = 80, 38  # of a list of keys, and where their meanings begin


def run_import(options: ImportOptions, layout: Given, replication: Given) -> int:
    """Run ``meshwright import``; return its exit status."""
    from meshwright.planner.cli.handover import write_files
    from meshwright.planner.reports import check_file, json_text, plan_document

    framework = _framework(options)
    if options.options:
        # The list of keys reads no file, so that no other option has an effect.
        if {**layout, **replication} or options != ImportOptions(
            source=options.source, options=True
        ):
            raise PlanError("--options lists the keys of a framework; allowed beside it: --from")
        return _list_options(framework)
    if options.file is None:
        raise PlanError("FILE is missing; allowed: a configuration of a framework, or -")
    if options.out is not None:
        check_file("--out", options.out)
    imported, saved = _imported(options, framework, {**layout, **replication})
    if options.explain:
        _explain(imported, saved)
        if options.out is None:
            return 0
    write_files({"plan.json": json_text(plan_document(saved))}, options.out, force=False)
    return 0


def import_plan(
    file: str | Path,
    *,
    define: Mapping[str, str] | None = None,
    without: Iterable[str] = (),
    **said: object,
) -> "SavedPlan":
    """Return job, plan, cluster and stack of a configuration or a launch script.

    Args:
        file: The configuration.
        define: Variables that a script does not set.
        without: Keys that it is read without.
        said: What it does not say: ``model``, ``cluster``, ``gpus``, ``global_batch``, ``seq_len``,
            ``vocabulary``, ``precision``, ``stack``, ``source``, ``launch`` as the command's
            options (``source`` is ``--from``), and fields of a plan.

    Raises:
        PlanError: As the command refuses it, a line for each mistake.
    """
    from meshwright.hwprofiles import shown, suggestion
    from meshwright.simulator.layout import PLAN_FIELDS

    option_names = {each.name for each in fields(ImportOptions)} & said.keys()
    given = {name: value for name, value in said.items() if name not in option_names}
    for name in given:
        if name not in PLAN_FIELDS:
            raise PlanError(f"{shown(name)} is unknown; {suggestion(name, PLAN_FIELDS)}")
    options = ImportOptions(
        **cast("Any", {name: said[name] for name in option_names}),
        file=str(file),
        define=[f"{name}={value}" for name, value in (define or {}).items()],
        without=[*without],
    )
    return _imported(options, _framework(options), given)[1]


def _framework(options: ImportOptions) -> "Framework | None":
    from meshwright.planner.importing import get_format

    return None if options.source is None else get_format(options.source)


def _imported(
    options: ImportOptions, framework: "Framework | None", given: Given
) -> "tuple[Imported, SavedPlan]":
    """Return the plan of a file, completed by options and checked by its stack."""
    from meshwright.hwprofiles import shown_path
    from meshwright.planner.cli.request import read_setting, resolve_plan
    from meshwright.planner.importing import JOB_OPTIONS, OPTIONS, import_source
    from meshwright.planner.reports import SavedPlan
    from meshwright.simulator import ModelSpec, load_model
    from meshwright.simulator.layout import check_offered, check_sharding

    model = None if options.model is None else load_model(options.model)
    values = {name: getattr(options, key) for name, key in OPTIONS.items() if name != "stack"}
    values = {name: value for name, value in {**values, **given}.items() if value is not None}
    name = "standard input"
    try:
        if options.file != STANDARD_INPUT:
            name = shown_path(Path(options.file or ""))
        imported = import_source(
            _source(options, framework).without(options.without or ()),
            values,
            model if isinstance(model, ModelSpec) else None,
            options.stack,
        )
    except MistakesError as errors:
        raise errors.of_file(name) from None
    except PlanError as error:
        text = str(error)
        # An error of reading names the file already.
        raise PlanError(text if text.startswith(name) else f"{name}: {text}") from None
    job = JobOptions(
        **cast("Any", {option: imported.values.get(name) for name, option in JOB_OPTIONS.items()}),
        stack=options.stack or imported.stack,
        set=[*_stack_facts(imported.values), *(options.set or ())],
    )
    setting = read_setting(job, model=imported.model)
    plan = resolve_plan(setting, {**_plan_options(imported.values), **given})
    _check_nodes(imported, plan, setting.cluster)
    check_sharding(setting.job, plan)
    check_offered(setting.job, plan, setting.stack)
    saved = SavedPlan(job=setting.job, plan=plan, cluster=setting.cluster, stack=setting.stack)
    return imported, saved


def _check_nodes(imported: "Imported", plan: "ResolvedPlan", cluster: "Cluster") -> None:
    """Raise PlanError where nodes, or the ranks of one, are not those of the cluster."""
    num_nodes, per_node = imported.values.get("num_nodes"), cluster.devices_per_node
    ranks = imported.values.get("ranks_per_node")
    # A job smaller than a node fills a part of it.
    if isinstance(ranks, int) and ranks != min(per_node, plan.world_size):
        raise PlanError(
            f"{ranks} ranks a node are not those of {plan.world_size} ranks on {cluster.name}, "
            f"which has {per_node} devices a node; allowed: a cluster with {ranks}, or "
            f"--set devices_per_node={ranks}"
        )
    if isinstance(num_nodes, int) and num_nodes != -(-plan.world_size // per_node):
        allowed = -(-plan.world_size // num_nodes)
        raise PlanError(
            f"{plan.world_size} ranks on {num_nodes} nodes are not those of {cluster.name}, which "
            f"has {per_node} devices a node; allowed: a cluster with {allowed}, "
            f"or --set devices_per_node={allowed}"
        )


def _source(options: ImportOptions, framework: "Framework | None") -> "Source":
    from meshwright.planner.configuration import FRAMEWORK_FILE
    from meshwright.planner.importing import read_source

    defines = dict(_variable_definition(each) for each in options.define or ())
    if options.file == STANDARD_INPUT:
        text = FRAMEWORK_FILE.decoded(_standard_input(), "standard input")
        return read_source(None, text, framework, defines, options.launch)
    path = Path(options.file or "")
    text = FRAMEWORK_FILE.read_text(path)
    return read_source(path, text, framework, defines, options.launch)


def _standard_input() -> bytes:
    from meshwright.planner.configuration import FRAMEWORK_FILE

    if sys.stdin is None:
        raise PlanError("it is closed; allowed: an expanded command")
    try:
        # A byte more than is allowed, so that `decoded` refuses what is too long.
        return sys.stdin.buffer.read(FRAMEWORK_FILE.most_bytes + 1)
    except OSError as error:
        raise PlanError(f"cannot be read: {error.strerror}") from None


def _variable_definition(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not (name.isidentifier() or name.isdigit() or name == "@"):
        raise PlanError(f"--define {text!r} is not allowed; it must be NAME=VALUE")
    return name, value


def _stack_facts(values: Mapping[str, object]) -> Iterable[str]:
    """Yield the stack's facts of a configuration as ``--set`` takes them."""
    from meshwright.planner.tables import STACK_FACT

    for name, value in values.items():
        if name.startswith(STACK_FACT) and value is not None:
            yield f"{name.removeprefix(STACK_FACT)}={str(value).lower()}"


def _plan_options(values: Mapping[str, object]) -> Given:
    """Return the fields of a plan as options give them."""
    from meshwright.simulator.layout import PLAN_FIELDS

    plan_values = {name: values[name] for name in PLAN_FIELDS if values.get(name) is not None}
    # --stages takes the layers of each stage with commas between them.
    stages = plan_values.get("stages")
    if isinstance(stages, tuple):
        plan_values["stages"] = ",".join(map(str, stages))
    return plan_values


def _explain(imported: "Imported", saved: "SavedPlan") -> None:
    """Print each value of the plan with its origin; the others are the stack's defaults."""
    from meshwright.planner.cli.handover import say
    from meshwright.planner.importing import Row
    from meshwright.simulator.layout import PLAN_FIELDS

    row_names = {row.name for row in imported.rows}
    defaults = tuple(
        Row(name, _value_text(value), (), f"stack {saved.stack.name}")
        for name in PLAN_FIELDS
        if name not in row_names and (value := getattr(saved.plan, name)) not in (None, ())
    )
    rows = (*imported.rows, *defaults)
    width = max(len(row.name) for row in rows)
    say(sys.stdout, f"{'field':<{width}}  {'value':<10}  line  said there, or by whom")
    for row in rows:
        first, *further = row.said or ((0, row.otherwise),)
        say(sys.stdout, f"{row.name:<{width}}  {row.value:<10}  {_line(*first)}")
        for each in further:
            say(sys.stdout, f"{'':<{width}}  {'':<10}  {_line(*each)}")


def _value_text(value: object) -> str:
    from meshwright.planner.tables import theirs

    return ",".join(map(str, value)) if isinstance(value, tuple) else theirs(value)


def _line(number: int, text: str) -> str:
    return f"{number or '':>4}  {text}"


def _list_options(framework: "Framework | None") -> int:
    """Print the meaning of each key of a framework."""
    from meshwright.planner.cli.handover import say
    from meshwright.planner.importing import FORMATS, meanings

    if framework is None:
        raise PlanError(f"--options needs --from; allowed: {', '.join(FORMATS)}")
    for key, meaning in meanings(framework.profile):
        first, *further = wrap(meaning, WIDTH - COLUMN)
        head = [f"{key:<{COLUMN}}{first}"] if len(key) < COLUMN else [key, f"{'':<{COLUMN}}{first}"]
        for line in (*head, *(f"{'':<{COLUMN}}{each}" for each in further)):
            say(sys.stdout, line)
    return 0
