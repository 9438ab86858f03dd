"""Outcome of a run from its folder: measurements of all ranks, or why there are none."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.hwprofiles import shown_path
from meshwright.simulator import PlanError
from meshwright.validate.launch.diagnosis import RankOutcome, RunFailure, diagnose
from meshwright.validate.launch.records import (
    SPEC_NAME,
    measurement_path,
    read_failure,
    read_heartbeat,
)
from meshwright.validate.launch.spec import RunSpec, read_spec
from meshwright.validate.ranks import RankMeasurement, read_measurement

_RANK_FILE = re.compile(r"rank-(\d{5,7})\.(heartbeat|failure)\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """Outcome of a run.

    Args:
        spec: Spec that the ranks ran.
        world_size: Number of ranks that were started.
        measurements: For each plan, what each rank measured; all of them if nothing failed.
        failure: Why the run failed, if it did.
    """

    spec: RunSpec
    world_size: int
    measurements: tuple[Mapping[int, RankMeasurement], ...]
    failure: RunFailure | None


def collect_run(folder: Path, num_ranks: int | None = None) -> RunOutcome:
    """Return the outcome of a run, as of a cluster's job, from *folder*.

    Args:
        folder: Of the results.
        num_ranks: Number that there must have been; None allows any.

    Raises:
        PlanError: If no rank left anything there, a file is damaged, or the number is another.
    """
    spec = read_spec(folder / SPEC_NAME)
    world_size = _world_size(folder)
    if num_ranks not in (None, world_size):
        raise PlanError(
            f"--collect {shown_path(folder)} is of {world_size} ranks; the plan has {num_ranks}"
        )
    states = [rank_state(folder, rank) for rank in range(world_size)]
    return outcome(replace(spec, results=folder), states)


def rank_state(folder: Path, rank: int) -> RankOutcome:
    """Return the state of a rank from its files."""
    return RankOutcome(
        rank=rank, heartbeat=read_heartbeat(folder, rank), failure=read_failure(folder, rank)
    )


def outcome(
    spec: RunSpec,
    states: Sequence[RankOutcome],
    *,
    stopped_s: float | None = None,
) -> RunOutcome:
    """Return measurements and diagnosis of a run.

    Args:
        spec: Spec of the run.
        states: Last state of each rank, in order.
        stopped_s: When the launcher gave up waiting, if it did.
    """
    measurements = tuple(
        {
            state.rank: _measurement(path, state.rank, len(states))
            for state in states
            for path in [measurement_path(spec.results, state.rank, plan)]
            if path.exists()
        }
        for plan in range(len(spec.plans))
    )
    return RunOutcome(
        spec=spec,
        world_size=len(states),
        measurements=measurements,
        failure=diagnose(states, spec, stopped_s=stopped_s),
    )


def _measurement(path: Path, rank: int, world_size: int) -> RankMeasurement:
    """Return the measurement of *rank*; raises PlanError if the file is another's, or damaged."""
    measured = read_measurement(path)
    for name, value in (("rank", rank), ("world_size", world_size)):
        if getattr(measured, name) != value:
            raise PlanError(
                f"{shown_path(path)}: {name}: {getattr(measured, name)} is another one; "
                f"allowed: {value}"
            )
    return measured


def _world_size(folder: Path) -> int:
    """Return the world size, as any one rank's heartbeat has it."""
    for path in sorted(folder.iterdir()):
        named = _RANK_FILE.fullmatch(path.name)
        heartbeat = read_heartbeat(folder, int(named[1])) if named else None
        if heartbeat is not None:
            return heartbeat.world_size
    raise PlanError(
        f"{shown_path(folder)}: no rank left a file here; name the results folder of a run"
    )
