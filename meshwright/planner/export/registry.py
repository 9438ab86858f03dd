"""Frameworks that plans are exported to and imported from."""

import shlex
from collections.abc import Mapping
from typing import NamedTuple

from meshwright.hwprofiles import (
    FrameworkTable,
    StackProfile,
    Strategy,
    load_framework,
    load_stack,
    release_changes,
    shown,
    suggestion,
)
from meshwright.planner.export import (
    accelerate,
    deepspeed,
    megatron_bridge,
    megatron_lm,
    torchrun,
    torchtitan,
)
from meshwright.planner.reports import SavedPlan, named
from meshwright.planner.tables import (
    Export,
    Facts,
    Framework,
    Keys,
    Launch,
    Program,
    hand_script,
    job_name,
    nodes_of,
    release_remark,
    slurm_script,
    write_keys,
)
from meshwright.simulator import PlanError, StepResult
from meshwright.simulator.launching import all_gaps, chosen_tables, refusal_text
from meshwright.simulator.layout import DP_CP, PLAN_FIELDS

PROGRAMS: Mapping[str, Program] = {
    "megatron-lm": megatron_lm.PROGRAM,
    "megatron-bridge": megatron_bridge.PROGRAM,
    "torchtitan": torchtitan.PROGRAM,
    "deepspeed": deepspeed.PROGRAM,
    "accelerate": accelerate.PROGRAM,
    "torchrun": torchrun.PROGRAM,
}
FRAMEWORKS: Mapping[str, Framework] = {
    name: Framework(profile=load_framework(name), program=program)
    for name, program in PROGRAMS.items()
}
BATCH_SCRIPT = "run.sbatch"


class ExportedFiles(NamedTuple):
    """Files of an export, and notes on what is left to be done by hand."""

    files: dict[str, str]
    notes: list[str]


def get_framework(name: str) -> Framework:
    """Return a framework by name.

    Raises:
        PlanError: If there is none.
    """
    if name not in FRAMEWORKS:
        raise PlanError(f"framework {shown(name)} is unknown; {suggestion(name, FRAMEWORKS)}")
    return FRAMEWORKS[name]


def export_plan(
    saved: SavedPlan, framework: Framework, version: str | None = None, *, slurm: bool = False
) -> ExportedFiles:
    """Return the files that start *saved* with a framework.

    Args:
        saved: The plan, with its model and its cluster.
        framework: That reads them.
        version: Of the framework; the usual one where it is None.
        slurm: Whether a Slurm script starts it.

    Raises:
        PlanError: If the framework cannot express it, and which field, or has no such version.
    """
    facts = facts_of(saved)
    profile, program = framework.profile, framework.program
    release = _version(framework, version, saved.stack)
    written, table = keys_of(saved, framework, facts, release)
    # Variables of the environment are set by the script that starts the job.
    variables = {key for each in table.fields.values() if each.of_launch for key in each.all_keys}
    before = [
        f"export {key}={shlex.quote(str(value))}"
        for key, value in written.items()
        if key in variables
    ]
    keys = {key: value for key, value in written.items() if key not in variables}
    is_started = slurm or program.is_script(release)
    facts.notes.extend(table.notes)
    # Without a script nobody sets them: they are told to the user.
    facts.notes.extend(() if is_started else (f"your launch: {each}" for each in before))
    release_lines, notes = _release_notes(
        saved.stack, table, has_remarks=is_started or program.has_remarks
    )
    facts.notes.extend(notes)
    remarks = [_summary(saved), f"for {profile.release_of(release)}", *release_lines, *facts.notes]
    export = Export(keys=keys, facts=facts, remarks=remarks, version=release)
    files = dict(program.files(export))
    if is_started:
        name, text = _script(framework, export, saved, before, slurm=slurm)
        files[name] = text
    return ExportedFiles(files, facts.notes)


def keys_of(
    saved: SavedPlan, framework: Framework, facts: Facts, version: str | None = None
) -> tuple[Keys, FrameworkTable]:
    """Return the framework's keys of a plan, and the table that they are from.

    Raises:
        PlanError: If the framework cannot be told, and what.
    """
    release, profile = _version(framework, version, saved.stack), framework.profile
    _check_gaps(saved, framework, release, facts)
    # Conditions of tables exclude each other: one holds.
    (table,) = (
        table
        for table, conditions in chosen_tables(profile, release, saved.stack)
        if all(map(facts.holds, conditions))
    )
    return _without_absent(write_keys(table, facts, framework.program.codecs), framework), table


def _release_notes(
    stack: StackProfile, table: FrameworkTable, *, has_remarks: bool
) -> tuple[list[str], list[str]]:
    """Return remarks and notes that name the release of a plan where its file would not."""
    name = stack.release if stack.release and not release_changes(stack) else stack.name
    if not table.is_of(name):
        of_table = f"of {table.stack}: meshwright simulate --plan PLAN --stack {table.stack}"
        return [], [f"memory and times of this plan are of stack {stack.name}; {of_table}"]
    if table.stack is None or name == load_stack(table.stack).name:
        return [], []
    return [release_remark(name)], [] if has_remarks else [f"import it with --stack {name}"]


def _check_gaps(saved: SavedPlan, framework: Framework, version: str, facts: Facts) -> None:
    """Raise PlanError for the first field of a plan that a framework has no key for."""
    profile = framework.profile
    for gap in all_gaps(profile, version, saved.stack, saved.job):
        if gap.lacks(saved.plan.number):
            raise PlanError(refusal_text(gap, facts.get(gap.field), profile.name))


def _without_absent(keys: Keys, framework: Framework) -> Keys:
    """Return the keys without those of switches that are off: a command has no option for them."""
    if not framework.profile.has_options:
        return keys
    return {key: each for key, each in keys.items() if each is not None and each is not False}


def _version(framework: Framework, version: str | None, stack: StackProfile) -> str:
    if version is None or not version:
        return framework.profile.version_for(stack.release or stack.name)
    if version not in framework.versions:
        allowed = ", ".join(framework.versions) or "leave it out"
        raise PlanError(
            f"--framework-version {shown(version)} is unknown for {framework.name}; "
            f"allowed: {allowed}"
        )
    return version


def _summary(saved: SavedPlan) -> str:
    job, degrees = saved.job, saved.plan.degrees
    layout = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    return f"{job.model.name}, global batch {job.batch_text}: {layout}"


def _script(
    framework: Framework, export: Export, saved: SavedPlan, before: list[str], *, slurm: bool
) -> tuple[str, str]:
    # Refuses ranks that do not fill their nodes.
    num_nodes, per_node = nodes_of(saved.plan.world_size, saved.cluster.devices_per_node)
    launch = Launch(
        name=job_name(f"{framework.name}-{saved.job.model.name}"),
        remarks=tuple(export.remarks),
        num_nodes=num_nodes,
        per_node=per_node,
        before=tuple(before),
        command=framework.program.command(export),
        starter=framework.program.starter,
    )
    if slurm:
        return BATCH_SCRIPT, slurm_script(launch)
    return "run.sh", hand_script(launch)


def facts_of(saved: SavedPlan) -> Facts:
    """Return the facts of a plan, by the names of its fields.

    Raises:
        PlanError: If the model is no transformer, or its ranks are not those of a mesh.
    """
    # Frameworks here lay ranks out as a mesh.
    if saved.stack.strategy is not Strategy.MESH:
        raise PlanError(
            f"stack={saved.stack.name} trains with a strategy of its own; allowed: stacks with "
            f"strategy {Strategy.MESH}"
        )
    model, plan, job = saved.job.transformer, saved.plan, saved.job
    values: dict[str, object] = {name: getattr(plan, name) for name in PLAN_FIELDS}
    values |= {
        DP_CP: plan.number(DP_CP),
        **named(job, "global_batch_size", "seq_len", "precision"),
        "world_size": plan.world_size,
        "num_nodes": -(-plan.world_size // saved.cluster.devices_per_node),
        "model": model.name,
        "prediction_layers": model.prediction_layers,
    }
    return Facts(values, model, saved.stack)


def export(
    step: StepResult | SavedPlan, to: str, version: str | None = None, *, slurm: bool = False
) -> ExportedFiles:
    """Return the files that start the plan of a simulated *step*, or of a plan file.

    Args:
        step: What has the plan, with its job, cluster and stack.
        to: Name of the framework.
        version: Of the framework; the usual one where it is None.
        slurm: Whether a Slurm script starts it.

    Raises:
        PlanError: As `export_plan`, or if there is no such framework.
    """
    saved = SavedPlan(job=step.job, plan=step.plan, cluster=step.cluster, stack=step.stack)
    return export_plan(saved, get_framework(to), version, slurm=slurm)
