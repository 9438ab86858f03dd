"""What docs/clusters.md and docs/run_on_a_cluster.md show: defaults, a mistake, files of a run."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from documents.pages import DocumentError
from documents.tables import block, table
from documents.terminal import Terminal, run, scratch_folder
from meshwright import ProfileError, list_clusters, list_stacks, load_cluster, load_stack
from meshwright.hwprofiles import ChangedFact, list_releases, release_changes, stack_frameworks
from meshwright.planner.reports.facts import fact_text

# The plan of docs/run_on_a_cluster.md, 16 ranks on two nodes of 8, and its number of steps.
PLAN = ("gpt2", "--cluster", "dgx-a100", "--gpus", "16", "--tp", "4", "--pp", "2")
BATCH, STEPS = ("--global-batch", "8"), ("--steps", "3")
# What stacks are asked for on each cluster.
STEP = ("simulate", "gpt2", "--gpus", "4", "--global-batch", "8")


def stack_defaults() -> str:
    """Return precision and attention of each framework, a column for clusters that are alike."""
    devices: dict[str, list[str]] = {}
    for name in list_clusters():
        devices.setdefault(load_cluster(name).device.name, []).append(name)
    alike: dict[tuple[str, ...], list[str]] = {}
    for clusters in devices.values():
        column = tuple(_cell(stack, clusters[0]) for stack in stack_frameworks())
        alike.setdefault(column, []).extend(clusters)
    head = ("stack", *(_names(clusters) for clusters in alike.values()))
    return table(head, zip(map(_code, stack_frameworks()), *alike, strict=True))


def releases() -> str:
    """Return the dated stacks, newest first, with the releases that count as they do."""
    rows = [
        (_code(name), stack.date, ", ".join(stack.alike), stack.title)
        for framework in stack_frameworks()
        for name in reversed(list_releases(framework))
        for stack in [load_stack(name)]
    ]
    return table(("stack", "date", "counts alike", "what it is"), rows)


def published_stacks() -> str:
    """Return the stacks of published runs: a release, and what they have otherwise."""
    stacks = [load_stack(name) for name in list_stacks()]
    rows = [
        (_code(each.name), _code(each.release), "; ".join(map(_change, release_changes(each))))
        for each in stacks
        if each.release
    ]
    return table(("stack", "release", "otherwise"), rows)


def _change(fact: ChangedFact) -> str:
    return f"`{fact.key}` {fact_text(fact.field, fact.value)}"


def _cell(stack: str, cluster: str) -> str:
    try:
        step = json.loads(run([*STEP, "--cluster", cluster, "--stack", stack, "--json", "-"]))
    except DocumentError as error:
        return str(error).partition("error: ")[2]
    return f"{step['job']['precision']}, {step['plan']['attention']}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(_code, names))


def _code(name: str) -> str:
    return f"`{name}`"


def silent_hosts() -> str:
    """Return the clusters that say nothing of their hosts, as words."""
    names = [_code(name) for name in list_clusters() if load_cluster(name).host_link is None]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def mistake(page: str) -> str:
    """Return what is said of the page's own cluster file after a slip in one key."""
    path = Terminal(page).folder / "my-cluster.toml"
    path.write_text(path.read_text("utf-8").replace("nics_per_node", "nics_per_nod"), "utf-8")
    try:
        load_cluster(path)
    except ProfileError as error:
        return block(f"```text\n{str(error).replace(str(path), path.name)}\n```")
    raise DocumentError("nics_per_nod is taken for a key of a cluster file")


def slurm_script() -> str:
    """Return what starts the plan under Slurm."""
    return block(f"```bash\n{_script('slurm', 'run.sbatch')}```")


def torchrun_script() -> str:
    """Return what starts the plan by torchrun."""
    return block(f"```bash\n{_script('torchrun', 'run.sh')}```")


def _script(launcher: str, name: str) -> str:
    out = _plan_folder() / launcher
    run(["validate", "plan/plan.json", "--emit", launcher, *STEPS, "--out", launcher], out.parent)
    return (out / name).read_text(encoding="utf-8")


@cache
def _plan_folder() -> Path:
    """Return the folder in which the plan is ``plan/plan.json``."""
    folder = scratch_folder()
    run(["simulate", *PLAN, *BATCH, "--out", "plan"], folder)
    return folder
