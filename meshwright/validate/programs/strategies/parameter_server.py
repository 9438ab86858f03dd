"""Program of workers and parameter servers, synchronous or asynchronous."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.simulator import ParameterServer, PlanError
from meshwright.validate.programs.contract import ProgramRequest
from meshwright.validate.programs.strategies.worker_and_server import (
    Server,
    Worker,
    flattened,
    whole_model,
)
from meshwright.validate.ranks import SERVERS, ByteKind, ServerLayout

FIRST_COME, IN_TURN = "gloo", "fake"  # backends that take a message from whoever comes first


def build_servers(request: ProgramRequest) -> "ServerProgram":
    """Return the program of one worker or server, which `ServerLayout` numbers.

    Raises:
        PlanError: If the program cannot express the request, or not on this backend.
    """
    options = request.plan.parameter_server or ParameterServer()
    if not options.asynchronous:
        return SynchronousServers(request)
    if options.servers == "all":
        raise PlanError(
            "servers=all with asynchronous=True has no PyTorch program; allowed: a number of "
            "servers of their own"
        )
    if dist.get_backend() not in (FIRST_COME, IN_TURN):
        raise PlanError(
            f"backend={dist.get_backend()} cannot take a message from whoever comes first, as "
            f"asynchronous servers do; allowed: {FIRST_COME}"
        )
    return AsynchronousServers(request)


class ServerProgram(ABC):
    """A worker, a server, or both.

    Args:
        request: Job and plan to build; its process group is that of all workers and servers.
    """

    settling_steps = 1

    def __init__(self, request: ProgramRequest) -> None:
        self.layout = ServerLayout.of(request.plan)
        self.options = request.plan.parameter_server or ParameterServer()
        self._rank, last = request.rank, self.layout.num_workers - 1
        self._index = self.layout.server_of(self._rank)
        self.worker: Worker | None = None
        self.server: Server | None = None
        if self.layout.is_worker(self._rank):
            slowdown = self.options.slow_worker if self._rank == last else 1.0
            self.worker = Worker(request, self._rank, slowdown)
        whole = self.worker.weights if self.worker is not None else flattened(whole_model(request))
        self._shards = self.layout.shards(whole.numel())
        if self._index is not None:
            shard = whole[self._shards[self._index]].clone()
            self.server = Server(shard, sums_gradients=not self.options.asynchronous)
        servers = self.layout.server_ranks
        everybody = tuple(range(self.layout.num_processes))
        self._groups = {ranks: SERVERS for ranks in (servers, everybody) if len(ranks) > 1}
        self._norm_group = None
        if len(servers) > 1 and not self.options.asynchronous:
            whole_world = servers == everybody
            group = dist.group.WORLD if whole_world else dist.new_group(list(servers))
            self._norm_group = group if self.server is not None else None

    @property
    def groups(self) -> Mapping[tuple[int, ...], str]:
        """Axis of each process group, by its ranks."""
        return self._groups

    @abstractmethod
    def run_step(self, step: int) -> list[Tensor]:
        """Run one round; return the losses of its microbatches on a worker."""

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield the tensors that live between steps."""
        for part in (self.worker, self.server):
            if part is not None:
                yield from part.persistent_tensors()


class SynchronousServers(ServerProgram):
    """All workers pull, compute and push; then servers update by the mean."""

    def run_step(self, step: int) -> list[Tensor]:
        """Run one step; return the losses of its microbatches on a worker."""
        for turn in range(self.layout.num_servers):
            self._pull(turn)
        losses = self.worker.compute(step) if self.worker is not None else []
        for turn in range(self.layout.num_servers):
            self._push(turn)
        if self.server is not None:
            self.server.update_by_mean(self.layout.num_workers, self._norm_group)
        return losses

    def _pull(self, turn: int) -> None:
        """Send parameters to the workers of this turn; receive those of one server."""
        messages = []
        if self.worker is not None:
            source, part = self._partner(self.worker.weights, turn)
            if source == self._rank and self.server is not None:
                part.copy_(self.server.weights)
            else:
                messages.append(dist.P2POp(dist.irecv, part, source))
        for target in self._visitors(turn):
            assert self.server is not None
            messages.append(dist.P2POp(dist.isend, self.server.weights, target))
        exchange(messages)

    def _push(self, turn: int) -> None:
        """Send a gradient to one server; add up those of this turn's workers, one at a time."""
        messages = []
        if self.worker is not None:
            target, part = self._partner(self.worker.gradients, turn)
            if target == self._rank and self.server is not None:
                self.server.add(part)
            else:
                messages.append(dist.P2POp(dist.isend, part, target))
        visitors = list(self._visitors(turn))
        received = torch.empty_like(self.server.weights) if visitors and self.server else None
        for source in visitors:
            assert self.server is not None
            assert received is not None
            exchange([*messages, dist.P2POp(dist.irecv, received, source)])
            self.server.add(received)
            messages = []
        exchange(messages)

    def _partner(self, buffer: Tensor, turn: int) -> tuple[int, Tensor]:
        """Return the rank of the server that this worker talks to, and its part of *buffer*."""
        server = self.layout.server_in_turn(self._rank, turn)
        return self.layout.server_ranks[server], buffer[self._shards[server]]

    def _visitors(self, turn: int) -> Iterator[int]:
        """Yield the other workers that talk to this server, if it is one."""
        if self._index is not None:
            for worker in self.layout.workers_in_turn(self._index, turn):
                if worker != self._rank:
                    yield worker


class AsynchronousServers(ServerProgram):
    """Server that updates by each gradient that comes, and answers with the new weights.

    A worker clips its gradient itself: no server has all of it. A step is a round of a worker; a
    server serves as many rounds as there are workers in each of its steps, whosever they are.
    """

    def __init__(self, request: ProgramRequest) -> None:
        super().__init__(request)
        self.arrivals: list[int] = []
        self.staleness: Counter[int] = Counter()
        self._pulled_at = [0] * self.layout.num_workers
        self._has_begun = False

    def run_step(self, step: int) -> list[Tensor]:
        """Run one round; return the losses of its microbatches on a worker."""
        begins, self._has_begun = not self._has_begun, True
        if self.worker is None:
            self._serve(begins=begins)
            return []
        pulls = self._messages(dist.irecv, self.worker.weights)
        if begins:
            exchange(pulls)
        losses = self.worker.compute(step)
        self.worker.clip()
        # The answer to a push is the next pull.
        exchange(self._messages(dist.isend, self.worker.gradients) + pulls)
        return losses

    def _messages(self, operation: Callable[..., object], buffer: Tensor) -> list[dist.P2POp]:
        """Return a worker's messages with all servers."""
        places = zip(self.layout.server_ranks, self._shards, strict=True)
        return [dist.P2POp(operation, buffer[shard], server) for server, shard in places]

    def _serve(self, *, begins: bool) -> None:
        assert self.server is not None
        workers = range(self.layout.num_workers)
        if begins:
            exchange([dist.P2POp(dist.isend, self.server.weights, worker) for worker in workers])
        received = torch.empty_like(self.server.weights)
        for _ in workers:
            worker = self._receive(received)
            self.staleness[len(self.arrivals) - self._pulled_at[worker]] += 1
            self.arrivals.append(worker)
            self._pulled_at[worker] = len(self.arrivals)
            self.server.update(received)
            exchange([dist.P2POp(dist.isend, self.server.weights, worker)])

    def _receive(self, received: Tensor) -> int:
        """Fill *received* from whichever worker comes first; return its rank."""
        if dist.get_backend() == FIRST_COME:
            return dist.recv(received)
        worker = len(self.arrivals) % self.layout.num_workers
        exchange([dist.P2POp(dist.irecv, received, worker)])
        return worker


def exchange(messages: list[dist.P2POp]) -> None:
    """Send and receive, and wait for all of it."""
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
