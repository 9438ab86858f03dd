"""Runs of real processes: started, watched, reported; launch files for clusters."""

from validate.launch.collect import RunOutcome, collect_run
from validate.launch.diagnosis import RunFailure
from validate.launch.emit import Launcher, emit_slurm, emit_torchrun, write_launch_folder
from validate.launch.local import run_local
from validate.launch.progress import enter_phase
from validate.launch.records import FailureKind
from validate.launch.spec import Phase, RunSpec, read_spec, write_spec

__all__ = [
    "FailureKind",
    "Launcher",
    "Phase",
    "RunFailure",
    "RunOutcome",
    "RunSpec",
    "collect_run",
    "emit_slurm",
    "emit_torchrun",
    "enter_phase",
    "read_spec",
    "run_local",
    "write_launch_folder",
    "write_spec",
]
