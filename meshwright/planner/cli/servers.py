"""From options to the servers of a plan."""

import re
from dataclasses import replace
from typing import Any, Literal, cast

from meshwright.hwprofiles import StackProfile, Strategy, shown
from meshwright.planner.options import Given, option_of
from meshwright.simulator import ParallelPlan, ParameterServer, PlanError
from meshwright.simulator.layout import SERVER_FIELDS

NUMBER = re.compile(r"[0-9]{1,30}")


def resolve_servers(
    given: Given, stack: StackProfile, saved: ParallelPlan | None, free_hosts: int | None
) -> ParameterServer | None:
    """Return the servers that are asked for, completed from a plan file and the defaults.

    They are on all workers unless told otherwise where these leave no host (*free_hosts*).

    Raises:
        PlanError: If a value is at fault, or the stack has no servers.
    """
    wanted = {name: given[name] for name in SERVER_FIELDS if name in given}
    if stack.strategy is not Strategy.PARAMETER_SERVER:
        for name in wanted:
            raise PlanError(
                f"{option_of(name)} is not offered by stack {stack.name}; allowed: with a stack of "
                f"strategy {Strategy.PARAMETER_SERVER}"
            )
        return None
    if "servers" in wanted:
        wanted["servers"] = _servers(str(wanted["servers"]))
    default = ParameterServer(servers="all" if free_hosts == 0 else 1)
    usual = (saved and saved.parameter_server) or default
    return replace(usual, **cast("dict[str, Any]", wanted))


def _servers(text: str) -> int | Literal["all"]:
    if text == "all":
        return "all"
    if not NUMBER.fullmatch(text):
        raise PlanError(f"--servers {shown(text)} is no number; allowed: a whole number or all")
    return int(text)
