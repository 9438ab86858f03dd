"""What the simulator says of one device or process of a strategy that is not a mesh."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from hwprofiles import PS_PER_S, Strategy
from planner.plan_file import SavedPlan
from simulator import ParameterServer, PlanError, StageMemory, StepResult, simulate
from simulator.engine import TaskKind
from simulator.memory import reserved_bytes
from simulator.rank_counts import rank_flops
from validate.measurement import ByteKind, CollectiveCount
from validate.prediction import RECEIVE, SEND, RankPrediction

SERVERS = "servers"  # axis of all messages between workers and servers


def predict_member(saved: SavedPlan, rank: int) -> RankPrediction:
    """Return the prediction for a device of one process, or for a worker or a server.

    Of messages between devices the axis is their kind. Workers come before servers; a server's
    step is one round of every worker, asynchronous or not.

    Args:
        saved: A plan of a stack whose strategy is not a mesh.
        rank: Which device, worker or server.

    Raises:
        PlanError: If the plan cannot be simulated, or has no such rank.
    """
    result = simulate(saved.job, saved.plan, saved.cluster, saved.stack)
    members = result.memory.by_stage
    if not 0 <= rank < len(members):
        raise PlanError(f"rank={rank} is out of range; allowed: 0 to {len(members) - 1}")
    is_module = saved.stack.strategy is Strategy.DATAPARALLEL
    messages = _device_messages(result, rank) if is_module else _server_messages(saved, rank)
    counted = Counter(messages)
    computes = rank < saved.plan.dp
    microbatches = saved.plan.num_microbatches(saved.job)
    flops = rank_flops(saved.job, saved.plan, saved.stack, 0, microbatches=microbatches)
    return RankPrediction(
        rank=rank,
        flops=flops if computes else 0,
        collectives=tuple(
            sorted(
                CollectiveCount(axis, way, 2, size_bytes, count)
                for (axis, way, size_bytes), count in counted.items()
            )
        ),
        peak_bytes=members[rank].peak_bytes,
        reserved_bytes=reserved_bytes(members[rank].peak_bytes, saved.stack),
        bytes_at_peak=_kinds(members[rank]),
        step_time_s=result.step_ps / PS_PER_S,
    )


def _kinds(memory: StageMemory) -> dict[ByteKind, int]:
    return {
        ByteKind.PARAMETERS: memory.parameters_bytes,
        ByteKind.GRADIENTS: memory.gradients_bytes,
        ByteKind.OPTIMIZER: memory.optimizer_states_bytes,
        ByteKind.ACTIVATIONS: memory.activations_bytes + memory.buffers_bytes,
    }


def _device_messages(result: StepResult, device: int) -> Iterator[tuple[str, str, int]]:
    """Yield kind, way and size of what crosses the links of a device."""
    ways = {f"device {device} link out": SEND, f"device {device} link in": RECEIVE}
    for lane in result.lanes:
        if lane.name in ways:
            for span in lane.spans:
                yield span.kind.value, ways[lane.name], span.size_bytes


def _server_messages(saved: SavedPlan, rank: int) -> Iterator[tuple[str, str, int]]:
    """Yield axis, way and size of what a worker or server sends and receives in one round."""
    options = saved.plan.parameter_server or ParameterServer()
    in_step = replace(options, asynchronous=False)
    plan = replace(saved.plan, parameter_server=in_step)
    result = simulate(saved.job, plan, saved.cluster, saved.stack)
    workers = [f"worker {index}" for index in range(plan.dp)]
    alone = [] if options.servers == "all" else range(options.servers)
    members = [*workers, *(f"server {index}" for index in alone)]
    own = members[rank]
    ways: dict[str, str] = {}
    for other in members:
        ways |= {f"pull of {other} from {own}": SEND, f"push of {own} to {other}": SEND}
        ways |= {f"pull of {own} from {other}": RECEIVE, f"push of {other} to {own}": RECEIVE}
    for lane in result.lanes:
        for span in lane.spans:
            is_transfer = span.kind in (TaskKind.PULL, TaskKind.PUSH)
            if is_transfer and lane.name.endswith(" out") and span.name in ways:
                yield SERVERS, ways[span.name], span.size_bytes
