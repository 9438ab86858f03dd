"""The script of docs/sweep.md that asks Slurm for workers, with commands of Slurm that run here."""

import os
import re
import subprocess
import sys
from pathlib import Path

from dask_jobqueue import SLURMCluster

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/sweep.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"^```python\n(# submit\.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(ASKED,) = re.findall(r"SLURMCluster\(\s*(.*?)\s*\)", SCRIPT)
# A job runs where it is submitted, and its number is that of its process.
SBATCH = """#!/bin/sh
for script; do :; done
cp "$script" job.sh
setsid bash job.sh > job.log 2>&1 < /dev/null &
echo "Submitted batch job $!"
"""
SCANCEL = """#!/bin/sh
echo "$@" >> cancelled
for job; do kill -TERM -- "-$job" 2> /dev/null; done
"""
# As much smaller as a test has to be.
SMALLER = {
    ASKED: 'interface="lo", queue="cpu", cores=2, processes=2, memory="4GB", walltime="01:00:00"',
    "jobs=4": "jobs=1",
    "[256, 512, 1024]": "[8, 16]",
    "llama3-70b": "gpt2",
    "global_batch=1024": "global_batch=64, max_tp=2, max_pp=1",
}


def test_slurm_is_asked_for_what_the_page_says() -> None:
    with eval(f"SLURMCluster({ASKED}, scheduler_options={{'dashboard': False}})") as cluster:
        assert isinstance(cluster, SLURMCluster)
        script = cluster.job_script()
    head = [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]
    assert {"-p cpu", "-n 1", "--cpus-per-task=64", "--mem=120G", "-t 01:00:00"} < {*head}
    assert "--nthreads 1 " in script
    assert "--nworkers 64 " in script


def test_the_script_of_the_page_sweeps_on_workers_that_slurm_started(tmp_path: Path) -> None:
    text = SCRIPT
    for said, smaller in SMALLER.items():
        assert said in text
        text = text.replace(said, smaller)
    (tmp_path / "submit.py").write_text(text, encoding="utf-8")
    for name, command in (("sbatch", SBATCH), ("scancel", SCANCEL)):
        (tmp_path / name).write_text(command, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "submit.py"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PATH": path}, check=True, timeout=300)
    assert "#SBATCH -p cpu" in (tmp_path / "job.sh").read_text(encoding="utf-8")
    rows = (tmp_path / "llama3" / "sweep.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + 2 * 2
    assert (tmp_path / "cancelled").read_text(encoding="utf-8").split()  # the job was given back
