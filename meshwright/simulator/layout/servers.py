"""Servers of parameters, of a plan whose data-parallel ranks are workers."""

from dataclasses import dataclass
from typing import Literal

from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.fields import Declaration, fields_of

MAX_SERVERS = 1024
MAX_SLOWDOWN = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServer:
    """Where parameters live when workers pull them, and how workers keep step."""

    servers: int | Literal["all"] = Declaration(
        help="Parameter servers: own hosts, or all [1].", metavar="N|all", group="replication"
    ).field(1)
    """Hosts of their own over which parameters are spread, or all workers."""

    asynchronous: bool = Declaration(
        help="Workers loop on their own.", option="async", group="replication"
    ).field(False)
    """Each worker loops on its own; if not, all wait for the update."""

    slow_worker: float = Declaration(
        help="How much slower the last worker is [1].", metavar="FACTOR", group="replication"
    ).field(1.0)
    """How many times longer the last worker computes than the others."""

    def __post_init__(self) -> None:
        """Refuse values that no run can have."""
        if self.servers != "all" and not 1 <= self.servers <= MAX_SERVERS:
            raise PlanError(f"servers={self.servers} is out of range; allowed 1 to {MAX_SERVERS}")
        if not 1 <= self.slow_worker <= MAX_SLOWDOWN:
            raise PlanError(
                f"slow_worker={self.slow_worker:g} is out of range; allowed 1 to {MAX_SLOWDOWN:g}"
            )


SERVER_FIELDS = {each.name: each for each in fields_of(ParameterServer)}
