"""Runs of real processes: started, watched, reported; launch files for clusters."""

from meshwright.validate.launch.collect import RunOutcome, collect_run
from meshwright.validate.launch.diagnosis import RunFailure, rank_words
from meshwright.validate.launch.emit import Launcher, emit_slurm, emit_torchrun, write_launch_folder
from meshwright.validate.launch.local import run_local
from meshwright.validate.launch.progress import enter_phase
from meshwright.validate.launch.records import (
    SPEC_NAME,
    FailureKind,
    measurement_path,
    rank_path,
    read_heartbeat,
)
from meshwright.validate.launch.spec import RunPhase, RunSpec, read_spec, write_spec

__all__ = [
    "SPEC_NAME",
    "FailureKind",
    "Launcher",
    "RunFailure",
    "RunOutcome",
    "RunPhase",
    "RunSpec",
    "collect_run",
    "emit_slurm",
    "emit_torchrun",
    "enter_phase",
    "measurement_path",
    "rank_path",
    "rank_words",
    "read_heartbeat",
    "read_spec",
    "run_local",
    "write_launch_folder",
    "write_spec",
]
