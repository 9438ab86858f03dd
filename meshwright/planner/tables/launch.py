"""Scripts that start a job, with Slurm or by hand."""

import re
import shlex
from dataclasses import dataclass
from enum import StrEnum

from meshwright.planner.tables.texts import remarks
from meshwright.simulator import PlanError

PORT = 29500  # torchrun's own


class Starter(StrEnum):
    """Launchers of the ranks of a node."""

    TORCHRUN = "torchrun"
    ACCELERATE = "accelerate launch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A job to start.

    Args:
        name: Of the job, letters that no scheduler misreads.
        remarks: What it is, in comments of a line each.
        num_nodes: Nodes that it fills.
        per_node: Ranks on each of them.
        command: What the starter starts, a line of the script each.
        before: Lines before it, as variables of the environment.
        results: Shell text of the folder for results; the run's name follows.
        starter: What starts the ranks of a node.
        directives: Further lines for the head of a Slurm script, by the line that they follow.
    """

    name: str
    remarks: tuple[str, ...]
    num_nodes: int
    per_node: int
    command: tuple[str, ...]
    before: tuple[str, ...] = ()
    results: str = ""
    starter: Starter = Starter.TORCHRUN
    gpus: bool = True
    cpus_per_rank: int | None = None
    time_limit: str = ""


def nodes_of(world_size: int, per_node: int) -> tuple[int, int]:
    """Return the nodes that ranks occupy and the ranks on each.

    Raises:
        PlanError: If the last node would be half empty: torchrun may number nodes otherwise than
            the plan does, and its ranks would sit elsewhere.

    >>> nodes_of(16, 8), nodes_of(4, 8)
    ((2, 8), (1, 4))
    """
    if world_size <= per_node:
        return 1, world_size
    if world_size % per_node:
        raise PlanError(
            f"world_size={world_size} does not fill nodes of {per_node} devices; a launch file "
            f"needs a multiple, nearest {world_size - world_size % per_node}"
        )
    return world_size // per_node, per_node


def job_name(text: str) -> str:
    """Return a name of letters that no scheduler misreads; directives know no quotes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:69]


def slurm_script(launch: Launch) -> str:
    """Return a script for ``sbatch`` that starts *launch* on every node."""
    cpus = launch.cpus_per_rank
    gpus = [f"#SBATCH --gpus-per-node={launch.per_node}"] if launch.gpus else []
    # One task a node starts all of its ranks.
    cpu_lines = [f"#SBATCH --cpus-per-task={launch.per_node * cpus}"] if cpus else []
    limit = [f"#SBATCH --time={launch.time_limit}"] if launch.time_limit else []
    results = [f'results={launch.results}/job-"$SLURM_JOB_ID"', 'mkdir -p "$results"', ""]
    srun_cpus = [
        "# From Slurm 22.05 on, srun does not take this from the job.",
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    ]
    before = [*launch.before, *(srun_cpus if cpus else [])]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={launch.name}",
        f"#SBATCH --nodes={launch.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        *gpus,
        *cpu_lines,
        "#SBATCH --exclusive",
        *limit,
        "#SBATCH --output=%x-%j.log",
        "",
        *remarks(launch.remarks).splitlines(),
        "# Where it may run is yours to say: sbatch --partition=... --account=... THIS-FILE",
        "",
        "set -euo pipefail",
        "",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        *(results if launch.results else [""]),
        *([*before, ""] if before else []),
        *_srun(launch),
    ]
    return "\n".join(lines) + "\n"


def hand_script(launch: Launch) -> str:
    """Return a script to be started by hand on each node of *launch*."""
    num_nodes = launch.num_nodes
    usage, checks, run_name = "Start it with: bash THIS-FILE", [], "$(date +%Y%m%d-%H%M%S)"
    if num_nodes > 1:
        named = " RUN_NAME=try-1" if launch.results else ""
        example = f"NODE_RANK=0 HEAD_NODE=first-node{named} bash THIS-FILE"
        usage, run_name = f"Start it on every node, with its number: {example}", "$RUN_NAME"
        checks = [
            f': "${{NODE_RANK:?is not set: 0 on the first node, up to {num_nodes - 1}}}"',
            ': "${HEAD_NODE:?is not set: the name of the first node}"',
            ': "${RUN_NAME:?is not set: a new one for each run, the same on all nodes}"',
            "",
        ]
        if not launch.results:
            checks.pop(2)
    results = [f'results={launch.results}/run-"{run_name}"', 'mkdir -p "$results"', ""]
    lines = [
        "#!/bin/bash",
        *remarks(launch.remarks).splitlines(),
        f"# {usage}",
        "",
        "set -euo pipefail",
        "",
        *checks,
        *(results if launch.results else []),
        *([*launch.before, ""] if launch.before else []),
        *_joined(launch.starter, [*_by_hand(launch), *launch.command]),
    ]
    return "\n".join(lines) + "\n"


def _by_hand(launch: Launch) -> list[str]:
    """Return the starter's own options on a node whose number the user gives."""
    if launch.starter is Starter.ACCELERATE:
        if launch.num_nodes == 1:
            return []
        return [
            '--machine_rank "$NODE_RANK"',
            '--main_process_ip "$HEAD_NODE"',
            f'--main_process_port "${{MASTER_PORT:-{PORT}}}"',
        ]
    ranks_option = [f"--nproc-per-node={launch.per_node}"]
    if launch.num_nodes == 1:
        return ["--standalone", *ranks_option]
    return [
        f"--nnodes={launch.num_nodes}",
        '--node-rank="$NODE_RANK"',
        '--master-addr="$HEAD_NODE"',
        f'--master-port="${{MASTER_PORT:-{PORT}}}"',
        *ranks_option,
    ]


def _srun(launch: Launch) -> list[str]:
    """Return the command that Slurm runs once on each node."""
    srun = "srun --kill-on-bad-exit=1"
    if launch.starter is Starter.ACCELERATE:
        meeting = [
            "--machine_rank $SLURM_NODEID",
            "--main_process_ip $HEAD_NODE",
            f"--main_process_port {PORT}",
        ]
        # A shell on each node fills in the number that Slurm gives it.
        inner = " ".join([launch.starter, *meeting, *launch.command])
        return ['export HEAD_NODE="${hosts[0]}"', f"{srun} bash -c {shlex.quote(inner)}"]
    return _joined(
        f"{srun} {launch.starter}",
        [
            f"--nnodes={launch.num_nodes}",
            f"--nproc-per-node={launch.per_node}",
            "--rdzv-backend=c10d",
            f'--rdzv-endpoint="${{hosts[0]}}:{PORT}"',
            '--rdzv-id="$SLURM_JOB_ID"',
            *launch.command,
        ],
    )


def _joined(start: str, options: list[str]) -> list[str]:
    """Return a command, a line for each option."""
    return " \\\n  ".join([start, *options]).split("\n")
