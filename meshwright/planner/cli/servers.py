"""From options to the servers of a plan."""

import re
from typing import Literal

from meshwright.hwprofiles import StackProfile, Strategy
from meshwright.hwprofiles.names import shown
from meshwright.planner.options import ReplicaOptions
from meshwright.simulator import ParallelPlan, ParameterServer, PlanError

NUMBER = re.compile(r"[0-9]{1,30}")


def resolve_servers(
    options: ReplicaOptions, stack: StackProfile, old: ParallelPlan | None
) -> ParameterServer | None:
    """Return the servers that *options* ask for, completed from a plan file and the defaults.

    Raises:
        PlanError: If a value is at fault, or the stack has no servers.
    """
    if stack.strategy is not Strategy.PARAMETER_SERVER:
        _refuse(options, stack)
        return None
    usual = (old and old.parameter_server) or ParameterServer()
    is_async, slow_worker = options.asynchronous, options.slow_worker
    return ParameterServer(
        servers=usual.servers if options.servers is None else _servers(options.servers),
        asynchronous=usual.asynchronous if is_async is None else is_async,
        slow_worker=usual.slow_worker if slow_worker is None else slow_worker,
    )


def _refuse(options: ReplicaOptions, stack: StackProfile) -> None:
    given = {
        "--servers": options.servers is not None,
        "--async": options.asynchronous is not None,
        "--slow-worker": options.slow_worker is not None,
    }
    for option, is_given in given.items():
        if is_given:
            raise PlanError(
                f"{option} is not offered by stack {stack.name}; allowed: with a stack of "
                f"strategy {Strategy.PARAMETER_SERVER}"
            )


def _servers(text: str) -> int | Literal["all"]:
    if text == "all":
        return "all"
    if not NUMBER.fullmatch(text):
        raise PlanError(f"--servers {shown(text)} is no number; allowed: a whole number or all")
    return int(text)
