"""Ranks of workers and parameter servers, and the order of their messages."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from meshwright.hwprofiles import StackProfile, Strategy
from meshwright.simulator import ParameterServer, ResolvedPlan
from meshwright.simulator.replication import spread


def num_processes(plan: ResolvedPlan, stack: StackProfile) -> int:
    """Return the processes of a real run of *plan*: its ranks, and servers on hosts of their own.

    Workers come first. Replicas of one process are one process.

    >>> from meshwright.hwprofiles import load_stack
    >>> plan = ResolvedPlan(dp=4, stages=(1,), parameter_server=ParameterServer(servers=2))
    >>> num_processes(plan, load_stack("parameter-server"))
    6
    """
    if stack.strategy is Strategy.DATAPARALLEL:
        return 1
    if stack.strategy is Strategy.PARAMETER_SERVER:
        return ServerLayout.of(plan).num_processes
    return plan.world_size


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """Ranks of workers and servers.

    Args:
        num_workers: Ranks 0, 1, ...
        num_servers: Ranks after them, or all workers.
        on_workers: Whether each worker is a server, too.
    """

    num_workers: int
    num_servers: int
    on_workers: bool

    @classmethod
    def of(cls, plan: ResolvedPlan) -> "ServerLayout":
        """Return the layout of *plan*; one server unless it says how many."""
        servers = (plan.parameter_server or ParameterServer()).servers
        if servers == "all":
            return cls(plan.dp, plan.dp, on_workers=True)
        return cls(plan.dp, servers, on_workers=False)

    @property
    def num_processes(self) -> int:
        """Processes in all."""
        return self.num_workers + (0 if self.on_workers else self.num_servers)

    @property
    def server_ranks(self) -> tuple[int, ...]:
        """Ranks of the servers in their order."""
        first = 0 if self.on_workers else self.num_workers
        return tuple(range(first, first + self.num_servers))

    def is_worker(self, rank: int) -> bool:
        """Whether a process computes gradients."""
        return rank < self.num_workers

    def server_of(self, rank: int) -> int | None:
        """Return the index of the server that a process is, or None."""
        return self.server_ranks.index(rank) if rank in self.server_ranks else None

    def server_in_turn(self, worker: int, turn: int) -> int:
        """Return the server of a worker's turn: another in each, its own in the last one."""
        # Each turn shifts by one: of as many servers no two workers meet at the same.
        return (worker + self.on_workers + turn) % self.num_servers

    def workers_in_turn(self, server: int, turn: int) -> Iterator[int]:
        """Yield the workers that talk to a server in a turn.

        >>> [list(ServerLayout(3, 2, on_workers=False).workers_in_turn(0, t)) for t in range(2)]
        [[0, 2], [1]]
        """
        for worker in range(self.num_workers):
            if self.server_in_turn(worker, turn) == server:
                yield worker

    def shards(self, num_parameters: int) -> list[slice]:
        """Return the parameters of each server.

        >>> ServerLayout(1, 2, on_workers=False).shards(5)
        [slice(0, 3, None), slice(3, 5, None)]
        """
        sizes = spread(num_parameters, self.num_servers)
        ends = list(accumulate(sizes))
        return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
