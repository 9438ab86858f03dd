"""The frameworks that plans are handed to and read from, and the way there and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from meshwright.hwprofiles import Strategy, shown, suggestion
from meshwright.planner.export import (
    accelerate,
    deepspeed,
    megatron_bridge,
    megatron_lm,
    torchrun,
    torchtitan,
)
from meshwright.planner.export.launch import (
    Export,
    Framework,
    Launch,
    hand_script,
    job_name,
    nodes_of,
    slurm_script,
)
from meshwright.planner.export.table import Facts, Keys, read_keys, write_keys
from meshwright.planner.reports import SavedPlan, named
from meshwright.simulator import PlanError
from meshwright.simulator.layout import (
    DP_CP,
    PLAN_FIELDS,
    without_defaults,
)

FRAMEWORKS: Mapping[str, Framework] = {
    each.FRAMEWORK.name: each.FRAMEWORK
    for each in (megatron_lm, megatron_bridge, torchtitan, deepspeed, accelerate, torchrun)
}
BATCH_SCRIPT = "run.sbatch"


class Handover(NamedTuple):
    """What an export writes, and what it leaves to be done by hand."""

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
) -> Handover:
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
    wanted = _version(framework, version)
    keys = write_keys(framework.write_table(wanted, facts), facts, framework.name)
    own = framework.stack(keys)
    if saved.stack.name != own:
        facts.notes.append(
            f"memory and times of this plan are of stack {saved.stack.name}; of {own}: "
            f"meshwright simulate --plan PLAN --stack {own}"
        )
    release = framework.releases.get(wanted, framework.source)
    remarks = [_summary(saved), f"for {release}", *facts.notes]
    export = Export(keys=keys, facts=facts, remarks=remarks, version=wanted)
    files = dict(framework.files(export))
    if slurm or framework.is_script(wanted):
        name, text = _script(framework, export, saved, slurm=slurm)
        files[name] = text
    return Handover(files, facts.notes)


def read_framework_file(
    path: Path, text: str, framework: Framework | None, facts: Facts
) -> tuple[Framework, dict[str, object], str]:
    """Return the framework of a file, the values that it says, and the name of its stack.

    Args:
        path: Of the file, whose suffix tells the framework where none is named.
        text: Of the file.
        framework: That it is of, if that is known.
        facts: What is known beside it.

    Raises:
        PlanError: If it cannot be read, or says what no plan can say.
    """
    chosen = framework or _framework_of(path)
    if chosen.read is None:
        known = (each.name for each in FRAMEWORKS.values() if each.read is not None)
        raise PlanError(f"--from {chosen.name} has no file to read; allowed: {', '.join(known)}")
    keys: Keys = chosen.read(text)
    values = read_keys(
        chosen.read_table(keys), keys, facts, framework=chosen.name, harmless=chosen.harmless
    )
    return chosen, values, chosen.stack(keys)


def _framework_of(path: Path) -> Framework:
    for each in FRAMEWORKS.values():
        if path.suffix.lower() in each.suffixes:
            return each
    known = sorted(each.name for each in FRAMEWORKS.values() if each.read is not None)
    raise PlanError(f"--from is missing; allowed for {path.name}: {', '.join(known)}")


def _version(framework: Framework, version: str | None) -> str:
    if version is None:
        return framework.versions[0] if framework.versions else ""
    if version not in framework.versions:
        known = ", ".join(framework.versions) or "leave it out"
        raise PlanError(
            f"--framework-version {shown(version)} is unknown for {framework.name}; "
            f"allowed: {known}"
        )
    return version


def _summary(saved: SavedPlan) -> str:
    job, degrees = saved.job, saved.plan.degrees
    layout = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    return f"{job.model.name}, global batch {job.batch_text}: {layout}"


def _script(
    framework: Framework, export: Export, saved: SavedPlan, *, slurm: bool
) -> tuple[str, str]:
    num_nodes, per_node = nodes_of(saved.plan.world_size, saved.cluster.devices_per_node)
    launch = Launch(
        name=job_name(f"{framework.name}-{saved.job.model.name}"),
        remarks=tuple(export.remarks),
        num_nodes=num_nodes,
        per_node=per_node,
        command=framework.command(export),
        starter=framework.starter,
    )
    if slurm:
        return BATCH_SCRIPT, slurm_script(launch)
    return "run.sh", hand_script(launch)


def facts_of(saved: SavedPlan) -> Facts:
    """Return all that a plan says, by the names of the fields.

    Raises:
        PlanError: If the model is no transformer, or its ranks are not those of a mesh.
    """
    if saved.stack.strategy is not Strategy.MESH:
        raise PlanError(
            f"stack={saved.stack.name} trains with a strategy of its own; allowed: stacks with "
            f"strategy {Strategy.MESH}"
        )
    model, plan, job = saved.job.transformer, saved.plan, saved.job
    values: dict[str, object] = {name: getattr(plan, name) for name in PLAN_FIELDS}
    departing = without_defaults(job, saved.stack, plan)
    values |= {name: getattr(departing, name) for name in ("etp", "dispatcher")}
    values |= {
        DP_CP: plan.number(DP_CP),
        **named(job, "global_batch_size", "seq_len", "precision"),
        "world_size": plan.world_size,
        "num_nodes": -(-plan.world_size // saved.cluster.devices_per_node),
        "model": model.name,
        "prediction_layers": model.prediction_layers,
    }
    return Facts(values, model, saved.stack)
