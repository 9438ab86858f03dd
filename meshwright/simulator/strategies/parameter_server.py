"""Workers that pull parameters from servers and push gradients, synchronous or asynchronous.

A server on a host of its own has one device of the cluster's kind and one network port: a node has
as many ports as network cards, but no more than devices; neighbours share one where there are
fewer. ``all`` spreads the parameters over the workers' own devices, which then also sum gradients
and update. Nothing overlaps within a worker: it pulls everything, computes, pushes everything.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from meshwright.hwprofiles import Source
from meshwright.simulator.account import StepResult
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.costs import (
    BlockCost,
    Category,
    Cost,
    PhaseCost,
    port_bytes_per_s,
    ports_per_node,
)
from meshwright.simulator.engine import TaskKind, simulate_tasks
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout import ParameterServer, Stage, whole_model
from meshwright.simulator.memory import (
    RankMemory,
    RankStates,
    StateBytes,
    block_bytes,
    rank_memory,
    virtual_stage_memory,
)
from meshwright.simulator.replication import WireBytes, spread, stage_parameters
from meshwright.simulator.step import virtual_stage_cost
from meshwright.simulator.strategies.async_rounds import WorkerRound, account_rounds
from meshwright.simulator.strategies.graph_step import (
    GraphDevice,
    GraphRun,
    StrategyCase,
    TaskBytes,
    TaskGraph,
    TaskLabel,
    account_graph,
    transfer_cost,
)

ROUNDS = 50  # of each worker in an asynchronous run


class Participant(NamedTuple):
    """A worker or a server: its device, its node, its network port."""

    device: str
    node: int
    port: str

    @property
    def links(self) -> tuple[str, ...]:
        """Both directions of its link inside the node and of its port."""
        return tuple(
            f"{link} {way}" for link in (f"{self.device} link", self.port) for way in ("in", "out")
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Participants:
    """Workers and servers; ``shards`` are the parameters of each server."""

    case: StrategyCase
    options: ParameterServer
    shape: BlockShape
    workers: tuple[Participant, ...]
    servers: tuple[Participant, ...]
    shards: tuple[int, ...]

    @property
    def wire(self) -> WireBytes:
        """Bytes of a parameter; pulls and pushes are equally large."""
        return WireBytes.of(self.case.costs.stack, self.case.job.precision)

    @property
    def whole_stage(self) -> Stage:
        """The whole model, which a worker computes."""
        return whole_model(self.case.job.model)


def simulate_parameter_server(case: StrategyCase) -> StepResult:
    """Return the simulated step of workers and servers.

    Raises:
        PlanError: If the cluster lacks the hosts, or there is too much to simulate.
    """
    options = case.plan.parameter_server or ParameterServer()
    participants = _participants(
        case._replace(plan=replace(case.plan, parameter_server=options)), options
    )
    graph = TaskGraph()
    add_all = _add_asynchronous if options.asynchronous else _add_synchronous
    rounds = add_all(graph, participants)
    times = simulate_tasks(graph.tasks)
    end_ps = max(ran.end_ps for ran in times)
    run = GraphRun(
        graph=graph,
        times=times,
        devices=tuple(_devices(participants, rounds)),
        step_ps=end_ps,
        windows_ps=(end_ps,) * len(participants.workers),
        end_ps=end_ps,
    )
    if options.asynchronous:
        return account_rounds(participants.case, run, rounds, _notes(participants))
    return account_graph(participants.case, run, _notes(participants))


def _participants(case: StrategyCase, options: ParameterServer) -> Participants:
    """Return the workers and servers of a plan, spread over nodes and ports."""
    cluster, num_workers = case.costs.cluster, case.plan.dp
    node_size, num_ports = cluster.devices_per_node, ports_per_node(cluster)
    workers = tuple(
        Participant(
            f"worker {index}",
            index // node_size,
            f"node {index // node_size} port {index % node_size * num_ports // node_size}",
        )
        for index in range(num_workers)
    )
    servers, num_nodes = workers, workers[-1].node + 1
    if options.servers != "all":
        servers = tuple(
            Participant(f"server {index}", num_nodes + index, f"server {index} port")
            for index in range(options.servers)
        )
        if cluster.num_nodes is not None and servers[-1].node >= cluster.num_nodes:
            raise PlanError(
                f"servers={options.servers} beside {num_nodes} nodes of workers are more hosts "
                f"than the {cluster.num_nodes} of {cluster.name}; allowed: all"
            )
    shape = BlockShape.of(case.job, case.plan, case.costs.stack)
    shards = tuple(spread(stage_parameters(shape, whole_model(case.job.model)), len(servers)))
    return Participants(
        case=case, options=options, shape=shape, workers=workers, servers=servers, shards=shards
    )


def _notes(participants: Participants) -> list[str]:
    """Return the warning about servers' hosts beyond the plan's GPUs."""
    if participants.options.servers == "all":
        return []
    count, num_workers = len(participants.servers), len(participants.workers)
    hosts = "1 server has a host of its own" if count == 1 else f"{count} servers have own hosts"
    text = f"{hosts}, each with one device like a worker's and one network port, beside the "
    return [f"{text}{num_workers} GPUs; as devices they follow the workers"]


def _add_synchronous(graph: TaskGraph, participants: Participants) -> list[list[WorkerRound]]:
    """Add one round of each worker; servers update when all gradients are summed."""
    rounds = [WorkerRound() for _ in participants.workers]
    # In turns, so that workers spread over servers instead of queueing at the first.
    for turn in range(len(participants.servers)):
        for worker, each in enumerate(rounds):
            _add_pull(graph, participants, worker, turn, each, None)
    for worker, each in enumerate(rounds):
        _add_passes(graph, participants, worker, each)
    for turn in range(len(participants.servers)):
        for worker, each in enumerate(rounds):
            _add_push(graph, participants, worker, turn, each)
    for server, place in enumerate(participants.servers):
        sums = []
        for each in rounds:
            label = TaskLabel(f"gradient sum on {place.device}", TaskKind.SUM)
            cost = _sum_cost(participants, server)
            sums.append(graph.add(label, cost, (place.device,), (each.pushed[server],)))
        updated = _add_update(graph, participants, server, tuple(sums))
        for each in rounds:
            each.updates[server] = updated
    return [[each] for each in rounds]


def _add_asynchronous(graph: TaskGraph, participants: Participants) -> list[list[WorkerRound]]:
    """Add the rounds of each worker; it pulls the result of its own update."""
    rounds: list[list[WorkerRound]] = [[] for _ in participants.workers]
    turns = range(len(participants.servers))
    for _ in range(ROUNDS):
        for worker, worker_rounds in enumerate(rounds):
            each, before = WorkerRound(), worker_rounds[-1] if worker_rounds else None
            for turn in turns:
                _add_pull(graph, participants, worker, turn, each, before)
            _add_passes(graph, participants, worker, each)
            for turn in turns:
                _add_push(graph, participants, worker, turn, each)
            for server, pushed in each.pushed.items():
                each.updates[server] = _add_update(graph, participants, server, (pushed,))
            worker_rounds.append(each)
    return rounds


def _server_in_turn(participants: Participants, worker: int, turn: int) -> int:
    """Return the server of a worker's turn: in each turn workers spread over servers."""
    # Where servers are workers, each begins with the next one and its own shard comes last.
    offset = 1 if participants.options.servers == "all" else 0
    return (worker + offset + turn) % len(participants.servers)


def _add_pull(
    graph: TaskGraph,
    participants: Participants,
    worker: int,
    turn: int,
    each: WorkerRound,
    before: WorkerRound | None,
) -> None:
    """Add a pull; a worker's own shard is up to date after its update."""
    server = _server_in_turn(participants, worker, turn)
    after = () if before is None else (before.updates[server],)
    target, source = participants.workers[worker], participants.servers[server]
    each.read_after[server] = after
    if source is not target:
        size_bytes = participants.shards[server] * participants.wire.reduce_bytes
        label = TaskLabel(f"pull of {target.device} from {source.device}", TaskKind.PULL)
        cost, links = _transfer(participants, source, target, size_bytes)
        each.pulls[server] = graph.add(label, cost, links, after, size_bytes)


def _add_push(
    graph: TaskGraph, participants: Participants, worker: int, turn: int, each: WorkerRound
) -> None:
    """Add a push; a worker pushes to one server at a time, so that no other is blocked."""
    server = _server_in_turn(participants, worker, turn)
    source, target = participants.workers[worker], participants.servers[server]
    if source is target:
        each.pushed[server] = each.passes[-1]
    else:
        size_bytes = participants.shards[server] * participants.wire.reduce_bytes
        label = TaskLabel(f"push of {source.device} to {target.device}", TaskKind.PUSH)
        cost, links = _transfer(participants, source, target, size_bytes)
        after = [each.passes[-1], *each.pushed.values()][-1]
        each.pushed[server] = graph.add(label, cost, links, (after,), size_bytes)


def _transfer(
    participants: Participants, source: Participant, target: Participant, size_bytes: int
) -> tuple[PhaseCost, tuple[str, str]]:
    """Return time and links of a transfer: inside a node, or from one port to another."""
    costs = participants.case.costs
    if source.node == target.node:
        cost = costs.message(size_bytes, crosses_nodes=False)
        links = (f"{source.device} link out", f"{target.device} link in")
        return transfer_cost(cost.transfer, cost.latency), links
    rate = port_bytes_per_s(costs.cluster) * costs.stack.p2p_bandwidth_fraction
    latency_s = costs.cluster.inter_node.latency_s
    sent = Cost.from_seconds(size_bytes / rate, Source.FITTED)
    latency = Cost.from_seconds(latency_s, costs.cluster.inter_node.kind)
    return transfer_cost(sent, latency), (f"{source.port} out", f"{target.port} in")


def _add_passes(
    graph: TaskGraph, participants: Participants, worker: int, each: WorkerRound
) -> None:
    """Add forward and backward of each microbatch; the last worker may be slow."""
    case, device = participants.case, participants.workers[worker].device
    pass_cost = virtual_stage_cost(case.costs, participants.shape, participants.whole_stage)
    if worker == len(participants.workers) - 1:
        slow = participants.options.slow_worker
        pass_cost = BlockCost(
            stretched(pass_cost.forward, slow), stretched(pass_cost.backward, slow)
        )
    after = (*each.pulls.values(), *(task for tasks in each.read_after.values() for task in tasks))
    for microbatch in range(case.plan.num_microbatches(case.job)):
        for kind, cost in (
            (TaskKind.FORWARD, pass_cost.forward),
            (TaskKind.BACKWARD, pass_cost.backward),
        ):
            label = TaskLabel(f"{kind} {microbatch} of {device}", kind)
            after = (graph.add(label, cost, (device,), after),)
            each.passes.extend(after)


def stretched(cost: PhaseCost, factor: float) -> PhaseCost:
    """Return *cost* made *factor* times longer, its parts in proportion.

    >>> stretched(PhaseCost(10, (10, 0), (4, 6)), 1.5)
    PhaseCost(time_ps=15, by_category_ps=(15, 0), by_source_ps=(6, 9))
    """
    time_ps = round(cost.time_ps * factor)

    def scaled(parts: tuple[int, ...]) -> tuple[int, ...]:
        new = [part * time_ps // max(1, cost.time_ps) for part in parts]
        # The largest part takes the rounding: parts add up to the whole.
        new[new.index(max(new))] += time_ps - sum(new)
        return tuple(new)

    return PhaseCost(time_ps, scaled(cost.by_category_ps), scaled(cost.by_source_ps))


def _sum_cost(participants: Participants, server: int) -> PhaseCost:
    """Return the time to add an arrived gradient: it and the sum read, the sum written."""
    state = StateBytes.of(participants.case.costs.stack, participants.case.job.precision)
    per_parameter = participants.wire.reduce_bytes + 2 * state.gradient
    cost = participants.case.costs.memory_traffic(participants.shards[server] * per_parameter)
    return PhaseCost.total([(Category.DP_COMM, cost)])


def _add_update(
    graph: TaskGraph, participants: Participants, server: int, after: tuple[int, ...]
) -> int:
    """Add the optimizer's update of a server's shard."""
    device = participants.servers[server].device
    traffic = participants.shards[server] * participants.wire.update_traffic_bytes
    cost = PhaseCost.total([(Category.OPTIMIZER, participants.case.costs.memory_traffic(traffic))])
    return graph.add(
        TaskLabel(f"optimizer of {device}", TaskKind.OPTIMIZER), cost, (device,), after
    )


def _largest_tensor(participants: Participants) -> str:
    """Return the name of the largest activation that a layer saves."""
    table, kinds = participants.case.costs.blocks, participants.whole_stage.layers
    kept = [table.saved_tensors(participants.shape, kind) for kind, _ in kinds]
    return max(chain.from_iterable(kept), key=lambda item: item.size_bytes).name


def _devices(participants: Participants, rounds: list[list[WorkerRound]]) -> Iterator[GraphDevice]:
    """Yield the devices of workers, then of servers on hosts of their own."""
    num_parameters = sum(participants.shards)
    shape, blocks = participants.shape, participants.case.costs.blocks
    sizes = block_bytes(blocks, shape)
    virtual_stage = virtual_stage_memory(shape, participants.whole_stage, sizes)
    workspace_pair = virtual_stage.forward_workspace_bytes, virtual_stage.backward_workspace_bytes
    saved, *workspaces = map(int, (virtual_stage.saved_bytes, *workspace_pair))
    largest = _largest_tensor(participants)
    state = StateBytes.of(participants.case.costs.stack, participants.case.job.precision)
    for worker, place in enumerate(participants.workers):
        task_bytes = [
            TaskBytes(task, saved, workspaces[number % 2])
            for each in rounds[worker]
            for number, task in enumerate(each.passes)
        ]
        memory = RankMemory(
            parameters_bytes=num_parameters * state.parameter,
            gradients_bytes=num_parameters * state.gradient,
        )
        if place in participants.servers:
            own, own_holds = _server_memory(participants, state, worker, rounds)
            memory, task_bytes = memory.beside(own), [*task_bytes, *own_holds]
        yield GraphDevice(
            compute=place.device,
            links=place.links,
            memory=memory,
            task_bytes=tuple(task_bytes),
            largest_tensor=largest,
        )
    for server, place in enumerate(participants.servers):
        if place not in participants.workers:
            memory, task_bytes = _server_memory(participants, state, server, rounds)
            yield GraphDevice(
                compute=place.device,
                links=place.links,
                memory=memory,
                task_bytes=tuple(task_bytes),
                largest_tensor="gradient that arrives",
            )


def _server_memory(
    participants: Participants, state: StateBytes, server: int, rounds: list[list[WorkerRound]]
) -> tuple[RankMemory, list[TaskBytes]]:
    """Return a server's shard, and its workspace in an update: one arrived gradient."""
    shard = participants.shards[server]
    # The update reads a gradient in fp32; of a sum, what arrived last has been added by then.
    is_asynchronous = participants.options.asynchronous
    arrived_bytes = shard * (
        participants.wire.reduce_bytes + state.update_temporary * is_asynchronous
    )
    arrived_bytes = max(arrived_bytes, shard * state.update_temporary)
    updates = dict.fromkeys(
        each.updates[server] for worker_rounds in rounds for each in worker_rounds
    )
    # Asynchronous servers apply each gradient as it arrives: no sum is kept.
    gradients = 0 if participants.options.asynchronous else shard * state.gradient
    states = RankStates.of_share(shard, state, shard * state.parameter, gradients)
    memory = rank_memory(states)
    return memory, [TaskBytes(task, 0, arrived_bytes) for task in updates]
