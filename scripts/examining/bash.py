"""What a launch script starts, told by bash itself, where every program is one that only notes.

Nothing is trained: PATH holds harmless programs of the system and stand-ins that write down their
arguments.  ``srun`` and ``sbatch`` run what they are given, once, as Slurm does on each node.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

HARMLESS = (
    "basename",
    "bc",
    "cat",
    "cut",
    "date",
    "env",
    "grep",
    "head",
    "hostname",
    "readlink",
    "realpath",
    "sed",
    "seq",
    "shuf",
    "sort",
    "tail",
    "tee",
    "tr",
    "uname",
    "wc",
    "whoami",
)
# Programs that a script may call beside what it trains with; they do nothing.
IDLE = (
    "chmod",
    "cp",
    "curl",
    "find",
    "git",
    "ln",
    "mv",
    "pip",
    "rm",
    "scontrol",
    "sleep",
    "wget",
)
NOTED = ("torchrun", "deepspeed", "accelerate", "ray", "colossalai", "numactl")
NOTE = '#!{bash}\nprintf "%s\\0" "$#" "${{0##*/}}" "$@" >> {record}\n'
# Where a script asks PyTorch how many devices there are, its machine has those of the run.
PYTHON = (
    NOTE
    + """case "$1 $2" in
    "-c "*device_count*) echo {devices} ;;
esac
"""
)
# Of a variable that is not set there is no folder, and no error either.
DIRNAME = """#!{bash}
exec {dirname} "${{1:-.}}"
"""
SMI = """#!{bash}
for each in $(seq {devices}); do echo GPU; done
"""
# Only folders below the one that a script runs in are made.
MKDIR = """#!{bash}
for each do
    case $each in
        -*) ;;
        {folder}/*) {mkdir} -p -- "$each" ;;
        /*) ;;
        *) {mkdir} -p -- "$each" ;;
    esac
done
"""
# Options of Slurm and MPI are over where a program stands.
SRUN = (
    NOTE
    + """while [ $# -gt 0 ]; do
    case $1 in
        bash|sh|env|python|python3|torchrun|accelerate|deepspeed) exec "$@" ;;
    esac
    shift
done
"""
)
SBATCH = """#!{bash}
while [ $# -gt 0 ]; do
    case $1 in
        -*) shift ;;
        *) exec {bash} "$@" ;;
    esac
done
exec {bash} -s
"""
LIMIT_S = 20
NOBODY = 65534
HEADER = re.compile(r"^#SBATCH\s+(?:--([a-z-]+)(?:[= ]\s*|$)|-(\w)\s*)(\S*)", re.MULTILINE)
SHORT = {"N": "nodes", "n": "ntasks"}

Argv = list[str]


def batch_header(text: str) -> dict[str, str]:
    r"""Return the options of a batch script's header.

    >>> batch_header("#SBATCH --nodes=4  # of eight\n#SBATCH -n 32\n#SBATCH --exclusive\n")
    {'nodes': '4', 'ntasks': '32', 'exclusive': ''}
    """
    found = HEADER.findall(text)
    return {long or SHORT.get(short, short): value for long, short, value in found}


def started(
    script: Path,
    words: Sequence[str],
    variables: Mapping[str, str],
    scratch: Path,
    devices: int = 8,
) -> list[Argv]:
    """Return the commands that bash starts for a script, in order, each as its words.

    Args:
        script: The file; its folder is where it runs, and may be written.
        words: Its positional parameters.
        variables: Its whole environment, but for PATH, HOME and what Slurm sets.
        scratch: An empty folder for the stand-ins.
        devices: Of its machine.
    """
    record = scratch / "record"
    record.touch()
    paths = {"record": record, "folder": script.parent, "devices": devices}
    programs = _stand_ins(scratch / "bin", paths)
    bash = shutil.which("bash") or "bash"
    header = batch_header(script.read_text(encoding="utf-8", errors="replace"))
    environment = {**_slurm(header), **variables, "PATH": str(programs), "HOME": str(script.parent)}
    give_away(scratch)
    nobody = NOBODY if os.geteuid() == 0 else None
    with subprocess.Popen(  # noqa: S603  (its PATH has stand-ins alone)
        [bash, str(script), *words],
        cwd=script.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        user=nobody,
        group=nobody,
        extra_groups=None if nobody is None else [],
        start_new_session=True,
    ) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return _records(record.read_text(encoding="utf-8", errors="replace"))


def give_away(folder: Path) -> None:
    """Let scripts, which run as nobody where that is possible, write in a folder and below."""
    for each in (folder, *folder.rglob("*")) if os.geteuid() == 0 else ():
        os.chown(each, NOBODY, NOBODY, follow_symlinks=False)


def _stand_ins(folder: Path, values: Mapping[str, object]) -> Path:
    """Make the programs that a script finds, and return their folder."""
    folder.mkdir()
    real = {name: shutil.which(name) or name for name in ("bash", "dirname", "mkdir")}
    for name in ("bash", "sh", *HARMLESS):
        found = shutil.which("bash" if name == "sh" else name)
        if found is not None:
            (folder / name).symlink_to(found)
    texts = dict.fromkeys(NOTED, NOTE) | dict.fromkeys((*IDLE, "xargs", "rsync"), "#!{bash}\n")
    texts |= {
        "python": PYTHON,
        "python3": PYTHON,
        "dirname": DIRNAME,
        "mkdir": MKDIR,
        "nvidia-smi": SMI,
        "ds_ssh": SMI + "echo; echo\n",
        "srun": SRUN,
        "mpirun": SRUN,
        "sbatch": SBATCH,
    }
    for name, text in texts.items():
        each = folder / name
        each.write_text(text.format(**real, **values))
        each.chmod(0o755)
    return folder


def _slurm(header: Mapping[str, str]) -> dict[str, str]:
    """Return what Slurm tells a script whose header asks for nodes."""
    nodes = header.get("nodes", "")
    if not nodes.isdecimal():
        return {}
    return dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes)


def _records(text: str) -> list[Argv]:
    r"""Return noted commands: each the number of its arguments, its name and these.

    >>> _records("2\0torchrun\0a.py\0--x\0" "0\0python\0")
    [['torchrun', 'a.py', '--x'], ['python']]
    """
    words, found = text.split("\0")[:-1], []
    while words:
        end = int(words[0]) + 2
        found.append(words[1:end])
        words = words[end:]
    return found
