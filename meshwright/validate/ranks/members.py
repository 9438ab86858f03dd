"""Predictions of each rank, device or process of a plan, whatever its strategy."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshwright.hwprofiles import PS_PER_S, CollectiveOp, Strategy
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import AsyncRun, ParameterServer, PlanError, StepResult, simulate
from meshwright.simulator.account import rank_flops
from meshwright.simulator.engine import TaskKind
from meshwright.simulator.ledger import NORM_BYTES
from meshwright.validate.ranks.measurement import CollectiveCount
from meshwright.validate.ranks.prediction import (
    RECEIVE,
    SEND,
    RankPrediction,
    bytes_of,
    default_ranks,
    pipeline_rank,
    predict_ranks,
)
from meshwright.validate.ranks.server_layout import ServerLayout, num_processes

SERVERS = "servers"  # axis of all messages between workers and servers


def num_members(saved: SavedPlan) -> int:
    """Return the number of ranks, of workers and servers, or of devices to compare."""
    if saved.stack.strategy is Strategy.DATAPARALLEL:
        return saved.plan.dp
    return num_processes(saved.plan, saved.stack)


def member_kind(saved: SavedPlan, rank: int) -> int:
    """Return the kind of a rank: its stage, device 0 or another one, a worker or a server."""
    if saved.stack.strategy is Strategy.DATAPARALLEL:
        return min(rank, 1)
    if saved.stack.strategy is Strategy.PARAMETER_SERVER:
        return int(rank >= saved.plan.dp)
    return pipeline_rank(saved.plan, rank)


def representative_members(saved: SavedPlan) -> tuple[int, ...]:
    """Return one rank of each kind."""
    if saved.stack.strategy is Strategy.MESH:
        return default_ranks(saved.plan)
    members = range(num_members(saved))
    first = {member_kind(saved, rank): rank for rank in reversed(members)}
    return tuple(sorted(first.values()))


def predict_members(saved: SavedPlan, ranks: Iterable[int]) -> dict[int, RankPrediction]:
    """Return the predictions of some ranks, devices, workers or servers of a plan.

    Raises:
        PlanError: If the plan cannot be simulated, or has no such rank.
    """
    if saved.stack.strategy is Strategy.MESH:
        return predict_ranks(saved, ranks)
    return {rank: predict_member(saved, rank) for rank in ranks}


def predicted_async_run(saved: SavedPlan) -> AsyncRun | None:
    """Return the predicted run of asynchronous workers; None where all wait for each other."""
    if not is_asynchronous(saved):
        return None
    return simulate(saved.job, saved.plan, saved.cluster, saved.stack).asynchronous


def is_asynchronous(saved: SavedPlan) -> bool:
    """Return True if each worker of a plan loops on its own."""
    options = saved.plan.parameter_server
    is_served = saved.stack.strategy is Strategy.PARAMETER_SERVER
    return is_served and options is not None and options.asynchronous


def predict_member(saved: SavedPlan, rank: int) -> RankPrediction:
    """Return the prediction for a device of one process, or for a worker or a server.

    Of messages between devices the axis is their kind. Workers come before servers; a server's
    step is one round of every worker, asynchronous or not. Servers that update together sum the
    norm of their gradients: one number, whose time the simulator leaves out.

    Args:
        saved: A plan of a stack whose strategy is not a mesh.
        rank: Index of the device, worker or server.

    Raises:
        PlanError: If the plan cannot be simulated, or has no such rank.
    """
    result = simulate(saved.job, saved.plan, saved.cluster, saved.stack)
    members = result.memory.by_stage
    if not 0 <= rank < len(members):
        raise PlanError(f"rank={rank} is out of range; allowed: 0 to {len(members) - 1}")
    is_module = saved.stack.strategy is Strategy.DATAPARALLEL
    messages = _device_messages(result, rank) if is_module else _server_messages(saved, rank)
    calls = [
        CollectiveCount(axis, direction, 2, size_bytes, count)
        for (axis, direction, size_bytes), count in Counter(messages).items()
    ]
    calls += [] if is_module else _norm_sums(saved, rank)
    microbatches = saved.plan.num_microbatches(saved.job)
    flops = rank_flops(saved.job, saved.plan, saved.stack, 0, microbatches=microbatches)
    return RankPrediction(
        rank=rank,
        flops=flops if rank < saved.plan.dp else 0,
        collectives=tuple(sorted(calls)),
        peak_bytes=members[rank].peak_bytes,
        reserved_bytes=result.memory.stage_reserved_bytes(members[rank]),
        bytes_at_peak=bytes_of(members[rank]),
        step_time_s=result.step_ps / PS_PER_S,
    )


def _norm_sums(saved: SavedPlan, rank: int) -> list[CollectiveCount]:
    """Return the sum of the gradient norm over servers that update together."""
    layout = ServerLayout.of(saved.plan)
    together = layout.num_servers > 1 and not is_asynchronous(saved)
    if not together or layout.server_of(rank) is None:
        return []
    op = CollectiveOp.ALL_REDUCE.value
    return [CollectiveCount(SERVERS, op, layout.num_servers, NORM_BYTES, 1)]


def _device_messages(result: StepResult, device: int) -> Iterator[tuple[str, str, int]]:
    """Yield kind, direction and size of the messages over the links of a device."""
    directions = {f"device {device} link out": SEND, f"device {device} link in": RECEIVE}
    for lane in result.lanes:
        if lane.name in directions:
            for span in lane.spans:
                yield span.kind.value, directions[lane.name], span.size_bytes


def _server_messages(saved: SavedPlan, rank: int) -> Iterator[tuple[str, str, int]]:
    """Yield axis, direction and size of the messages of a worker or server in one round."""
    options = saved.plan.parameter_server or ParameterServer()
    # A round has the messages of a synchronous step.
    in_step = replace(options, asynchronous=False)
    plan = replace(saved.plan, parameter_server=in_step)
    result = simulate(saved.job, plan, saved.cluster, saved.stack)
    workers = [f"worker {index}" for index in range(plan.dp)]
    alone = [] if options.servers == "all" else range(options.servers)
    members = [*workers, *(f"server {index}" for index in alone)]
    member = members[rank]
    directions: dict[str, str] = {}
    for other in members:
        directions |= {f"pull of {other} from {member}": SEND, f"push of {member} to {other}": SEND}
        directions |= {
            f"pull of {member} from {other}": RECEIVE,
            f"push of {other} to {member}": RECEIVE,
        }
    for lane in result.lanes:
        for span in lane.spans:
            is_transfer = span.kind in (TaskKind.PULL, TaskKind.PUSH)
            if is_transfer and lane.name.endswith(" out") and span.name in directions:
                yield SERVERS, directions[span.name], span.size_bytes
