"""One process with N replicas, as torch.nn.DataParallel: device 0 scatters and gathers all.

In each pass device 0 scatters the token ids and broadcasts every parameter, one copy after another
over its own link; replicas run forward; device 0 gathers the logits (in the job's precision),
computes the loss of the whole batch and scatters the gradient of the logits; replicas run backward;
device 0 sums their gradients, and it alone updates. One interpreter launches the kernels of all
replicas, whose threads take turns a layer at a time. A pass ends when its gradients are summed.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.simulator.account import StepResult
from meshwright.simulator.blocks import (
    LOGITS,
    OUTPUT,
    BlockShape,
    KernelLaunches,
    MemoryBound,
    Operator,
)
from meshwright.simulator.costs import Category, PhaseCost, constant_cost
from meshwright.simulator.engine import TaskKind, simulate_tasks
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout import whole_model
from meshwright.simulator.memory import RankMemory, RankStates, Shards, StateBytes, rank_memory
from meshwright.simulator.model import EMBEDDING, HEAD
from meshwright.simulator.replication import WireBytes, stage_parameters
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
from meshwright.simulator.strategies.module_memory import (
    backward_workspace_bytes,
    forward_workspace_bytes,
    saved_bytes,
)

HOST = "host"


class LaunchedBlock(NamedTuple):
    """One direction of a block on a replica: its time, and that of launching its kernels."""

    name: str
    cost: PhaseCost
    launch: PhaseCost


class Route(NamedTuple):
    """Kind of a copy, and its source and target device."""

    kind: TaskKind
    source: int
    target: int


class PassTasks(NamedTuple):
    """Tasks of one pass: last of forward and backward on each device, loss, gradient sums."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    loss: int
    sums: tuple[int, ...]


@dataclass(frozen=True)
class Replica:
    """Blocks, sizes and costs of one replica."""

    case: StrategyCase

    @cached_property
    def shape(self) -> BlockShape:
        """Sizes of its blocks."""
        return BlockShape.of(self.case.job, self.case.plan, self.case.costs.stack)

    @cached_property
    def wire(self) -> WireBytes:
        """Bytes of a parameter: a gradient has its parameter's dtype, also when copied."""
        return WireBytes.of(self.case.costs.stack, self.case.job.precision)

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        return stage_parameters(self.shape, whole_model(self.case.job.model))

    @property
    def weight_bytes(self) -> int:
        """Bytes of a broadcast, and of a gradient reduction."""
        return self.num_parameters * self.wire.reduce_bytes

    @property
    def input_bytes(self) -> int:
        """Bytes of a replica's samples: ids of tokens, or images."""
        return self.case.costs.blocks.memory(self.shape, EMBEDDING).received

    @property
    def num_logits(self) -> int:
        """Number of logits of a replica's microbatch."""
        return self.shape.num_logits

    @property
    def logit_bytes(self) -> int:
        """Bytes of the logits as they are gathered."""
        return self.num_logits * self.shape.element_bytes

    @cached_property
    def forward_blocks(self) -> tuple[LaunchedBlock, ...]:
        """Blocks in model order; the head without the loss."""
        return tuple(forward for forward, _ in self._blocks)

    @cached_property
    def backward_blocks(self) -> tuple[LaunchedBlock, ...]:
        """Blocks from the head to the embedding, with recomputation."""
        return tuple(backward for _, backward in reversed(self._blocks))

    @cached_property
    def _blocks(self) -> list[tuple[LaunchedBlock, LaunchedBlock]]:
        """Forward and backward of each block in model order."""
        blocks, costs = [], self.case.costs
        for kind, count in whole_model(self.case.job.model).blocks:
            # The loss is computed on device 0 alone, of the whole batch.
            run = OUTPUT if kind == HEAD else kind
            operators = costs.blocks.operators(self.shape, run)
            cost = costs.block_cost(self.shape, run)
            again = operators.recompute + operators.backward
            passes = (
                self._launched(kind, operators.forward, cost.forward),
                self._launched(kind, again, cost.backward),
            )
            blocks += [passes] * count
        return blocks

    def _launched(
        self, name: str, operators: tuple[Operator, ...], cost: PhaseCost
    ) -> LaunchedBlock:
        count = sum(item.num_kernels for item in operators if isinstance(item, KernelLaunches))
        launch = constant_cost(count, self.case.costs.stack.host_per_launch_s)
        return LaunchedBlock(name, cost, PhaseCost.total([(Category.HOST, launch)]))

    @cached_property
    def loss_cost(self) -> PhaseCost:
        """Loss of the whole batch and its gradient, on device 0."""
        blocks, dp = self.case.costs.blocks, self.case.plan.dp
        head, rest = (blocks.operators(self.shape, kind) for kind in (HEAD, OUTPUT))
        # The loss is the difference of the head with and without it.
        whole = [
            MemoryBound("loss", dp * (_traffic_bytes(one) - _traffic_bytes(other)))
            for one, other in ((head.forward, rest.forward), (head.backward, rest.backward))
        ]
        return self.case.costs.phase_cost(tuple(whole), self.shape)


def _traffic_bytes(operators: tuple[Operator, ...]) -> int:
    return sum(item.size_bytes for item in operators if isinstance(item, MemoryBound))


def simulate_data_parallel_module(case: StrategyCase) -> StepResult:
    """Return the simulated step of replicas on the devices of one node.

    Raises:
        PlanError: If a node has fewer devices than the plan replicas.
    """
    cluster, plan = case.costs.cluster, case.plan
    if plan.dp > cluster.devices_per_node:
        raise PlanError(
            f"dp={plan.dp} is more than the one process of stack {case.costs.stack.name} drives; "
            f"allowed: at most the {cluster.devices_per_node} devices of a node of {cluster.name}"
        )
    replica, graph = Replica(case), TaskGraph()
    passes: list[PassTasks] = []
    before: tuple[int, ...] = ()
    for _ in range(plan.num_microbatches(case.job)):
        passes.append(_add_pass(graph, replica, before))
        before = (*passes[-1].backward, *passes[-1].sums)
    update = case.costs.memory_traffic(replica.num_parameters * replica.wire.update_traffic_bytes)
    total = PhaseCost.total([(Category.OPTIMIZER, update)])
    updated = graph.add(TaskLabel("optimizer", TaskKind.OPTIMIZER), total, (_device(0),), before)
    times = simulate_tasks(graph.tasks)
    first = _first_device(replica, passes, updated)
    others = (_other_device(replica, passes, index) for index in range(1, plan.dp))
    end_ps = max(ran.end_ps for ran in times)
    run = GraphRun(
        graph=graph,
        times=times,
        devices=(first, *others),
        step_ps=end_ps,
        windows_ps=(end_ps,) * plan.dp,
        end_ps=end_ps,
    )
    return account_graph(case, run)


def _device(index: int) -> str:
    return f"device {index}"


def _add_pass(graph: TaskGraph, replica: Replica, before: tuple[int, ...]) -> PassTasks:
    """Add forward and backward of a microbatch of each replica."""
    plan = replica.case.plan
    devices, others = range(plan.dp), range(1, plan.dp)

    def send(kind: TaskKind, size_bytes: int, after: tuple[int, ...]) -> dict[int, int]:
        return {
            index: _add_copy(graph, replica, Route(kind, 0, index), size_bytes, after)
            for index in others
        }

    def collect(kind: TaskKind, size_bytes: int, after: tuple[int, ...]) -> list[int]:
        return [
            _add_copy(graph, replica, Route(kind, index, 0), size_bytes, (after[index],))
            for index in others
        ]

    # torch.nn.DataParallel scatters inputs before it replicates the module.
    ids = send(TaskKind.SCATTER, replica.input_bytes, before)
    weights = send(TaskKind.BROADCAST, replica.weight_bytes, before)
    launched, forward = _add_chains(
        graph,
        replica.forward_blocks,
        TaskKind.FORWARD,
        before,
        [(*before, ids[index], weights[index]) if index else before for index in devices],
    )
    # torch.nn.DataParallel gathers outputs to device 0, where the loss is.
    outputs = collect(TaskKind.GATHER, replica.logit_bytes, forward)
    label = TaskLabel("loss of the whole batch", TaskKind.LOSS)
    loss = graph.add(label, replica.loss_cost, (_device(0),), (*outputs, forward[0]))
    logit_gradients = send(TaskKind.SCATTER, replica.logit_bytes, (loss,))
    _, backward = _add_chains(
        graph,
        replica.backward_blocks,
        TaskKind.BACKWARD,
        launched,
        [(logit_gradients[index],) if index else (loss,) for index in devices],
    )
    gradients = collect(TaskKind.REDUCTION, replica.weight_bytes, backward)
    sums = tuple(_add_sum(graph, replica, (task, backward[0])) for task in gradients)
    return PassTasks(forward, backward, loss, sums)


def _add_copy(
    graph: TaskGraph,
    replica: Replica,
    route: Route,
    size_bytes: int,
    after: tuple[int, ...],
) -> int:
    """Add a copy from one device to another, over both devices' links."""
    kind, source, target = route
    cost = replica.case.costs.message(size_bytes, crosses_nodes=False)
    where = f"to device {target}" if target else f"from device {source}"
    links = (f"{_device(source)} link out", f"{_device(target)} link in")
    total = transfer_cost(cost.transfer, cost.latency)
    return graph.add(TaskLabel(f"{kind} {where}", kind), total, links, after, size_bytes)


def _add_chains(
    graph: TaskGraph,
    blocks: tuple[LaunchedBlock, ...],
    kind: TaskKind,
    launch_after: tuple[int, ...],
    run_after: list[tuple[int, ...]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Add the blocks of each replica, each after its launch; return the last of both."""
    launches: list[int] = []
    runs: list[int] = []
    for index, first in enumerate(run_after):
        launched, ran = launch_after, first
        for number, block in enumerate(blocks):
            name = f"{kind} {block.name} {number}, device {index}"
            label = TaskLabel(f"launch of {name}", TaskKind.LAUNCH)
            # One Python interpreter: all launches share the host, in order of the graph.
            launched = (graph.add(label, block.launch, (HOST,), launched),)
            after = (*launched, *ran)
            ran = (graph.add(TaskLabel(name, kind), block.cost, (_device(index),), after),)
        launches.extend(launched)
        runs.extend(ran)
    return tuple(launches), tuple(runs)


def _add_sum(graph: TaskGraph, replica: Replica, after: tuple[int, ...]) -> int:
    """Add an arrived gradient to the sum: two values read, one written."""
    cost = replica.case.costs.memory_traffic(3 * replica.weight_bytes)
    total = PhaseCost.total([(Category.DP_COMM, cost)])
    return graph.add(TaskLabel("gradient sum", TaskKind.SUM), total, (_device(0),), after)


def _pass_bytes(
    replica: Replica, passes: list[PassTasks], index: int, logit_gradient_bytes: int
) -> list[TaskBytes]:
    """Return the bytes of passes on a device whose part of the logits' gradient is *slope_bytes*.

    A replica's gradients are those of weight copies: on device 0 they are beside the module's own.
    """
    shape, blocks = replica.shape, replica.case.costs.blocks
    saved = saved_bytes(blocks, shape)
    forward = forward_workspace_bytes(blocks, shape)
    backward = backward_workspace_bytes(blocks, shape, logit_gradient_bytes)
    return [
        live
        for each in passes
        for live in (
            TaskBytes(each.forward[index], saved, forward),
            TaskBytes(each.backward[index], saved, backward),
        )
    ]


def _first_device(replica: Replica, passes: list[PassTasks], updated: int) -> GraphDevice:
    """Return device 0: all states, the logits of the whole batch, the gradients that arrive."""
    case, dp = replica.case, replica.case.plan.dp
    state = StateBytes.of(case.costs.stack, case.job.precision)
    memory = rank_memory(RankStates.of(replica.num_parameters, state, Shards(1, 1, 1)))
    blocks, shape = case.costs.blocks, replica.shape
    saved = saved_bytes(blocks, shape)
    kept = blocks.saved_tensors(shape, HEAD)
    logits = sum(each.size_bytes for each in kept if each.name == LOGITS)
    # Forward, or in the loss's backward the losses' gradient beside its own.
    workspace = dp * max(blocks.memory(shape, HEAD).forward, 2 * logits)
    # Its part of the gradient is a view of the whole.
    task_bytes = _pass_bytes(replica, passes, 0, dp * replica.logit_bytes)
    for each in passes:
        task_bytes.append(TaskBytes(each.loss, saved + dp * logits, workspace))
        # The sums, beside the gradients of device 0's own replica.
        task_bytes.extend(TaskBytes(task, 0, 2 * replica.weight_bytes) for task in each.sums)
    task_bytes.append(TaskBytes(updated, 0, memory.update_temporary_bytes))
    return GraphDevice(
        compute=_device(0),
        links=_links(0),
        host=HOST,
        memory=memory,
        task_bytes=tuple(task_bytes),
        largest_tensor="logits of the whole batch",
    )


def _other_device(replica: Replica, passes: list[PassTasks], index: int) -> GraphDevice:
    """Return another device: a copy of the parameters, and their gradients until they leave."""
    case = replica.case
    state = StateBytes.of(case.costs.stack, case.job.precision)
    memory = RankMemory(
        parameters_bytes=replica.num_parameters * state.parameter,
        gradients_bytes=0,  # they are made and leave in the backward pass, whose holds count them
    )
    tensors = [
        each
        for kind, _ in case.job.model.layer_runs
        for each in case.costs.blocks.saved_tensors(replica.shape, kind)
    ]
    largest = max(tensors, key=lambda item: item.size_bytes)
    return GraphDevice(
        compute=_device(index),
        links=_links(index),
        host=HOST,
        memory=memory,
        task_bytes=tuple(_pass_bytes(replica, passes, index, replica.logit_bytes)),
        largest_tensor=largest.name,
    )


def _links(index: int) -> tuple[str, str]:
    return f"{_device(index)} link in", f"{_device(index)} link out"
