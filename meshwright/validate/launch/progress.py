"""Heartbeats of a measured program, which its launcher watches."""

import time
from dataclasses import replace

from meshwright.validate.launch.records import read_heartbeat, write_heartbeat
from meshwright.validate.launch.spec import RunPhase, RunSpec

WITHOUT_A_GROUP = {RunPhase.INIT, RunPhase.DONE}


def enter_phase(spec: RunSpec, rank: int, phase: str, *, plan: int | None = None) -> None:
    """Record that *rank* begins *phase*, and give its groups the timeout of that phase.

    A program calls this with ``RunPhase.WARM_UP`` before its first step, when its process groups
    exist, and with ``RunPhase.step(n)`` before each timed one: `torch.distributed` gives a new
    group half an hour, whatever the default group was told.

    Args:
        spec: The run.
        rank: The caller.
        phase: One of `RunPhase`.
        plan: Index of the plan that it begins; by default the one it was at.

    Raises:
        ValueError: If the rank was not started by the worker.
    """
    last = read_heartbeat(spec.results, rank)
    if last is None:
        raise ValueError(f"rank {rank} has no heartbeat in {spec.results}")
    now = replace(last, phase=phase, plan=last.plan if plan is None else plan, time_s=time.time())
    write_heartbeat(now, spec.results)
    if phase not in WITHOUT_A_GROUP:
        from meshwright.validate.launch.process_group import set_timeouts  # noqa: PLC0415 - imports torch

        set_timeouts(spec.limit_s(phase))
