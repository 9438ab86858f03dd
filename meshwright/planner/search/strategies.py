"""Search space of stacks without a mesh: microbatches, recomputation and servers.

A layout of one process or of parameter servers has no closed form here: its memory is that of a
simulation of two microbatches, which a further one does not change, and its bound is the compute
time of a replica.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster, Recompute, StackProfile, Strategy
from meshwright.planner.footprint import device_bytes_column
from meshwright.planner.search.finalists import Field, Runs
from meshwright.planner.space import Column, Space, SpaceLimits, enumerate_space
from meshwright.simulator import (
    CostModel,
    ParameterServer,
    ResolvedPlan,
    StepResult,
    TooManyTasksError,
    TrainingJob,
    simulate,
)
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.engine import with_overhead
from meshwright.simulator.layout import AXES
from meshwright.simulator.memory import PeakBytes
from meshwright.simulator.step import overhead_per_million

Servers = int | Literal["all"] | None
# A pass starts when the one before it has ended, so that two show the peak.
REPRESENTATIVE_MICROBATCHES = 2
# Results of up to so many passes are kept, below a megabyte each.
KEPT_PASSES = 5_000


@dataclass(frozen=True)
class StrategySpace(Space):
    """Layouts of replicas; ``servers`` has one entry for each layout, None without servers."""

    servers: tuple[Servers, ...] = ()

    def plan(self, index: int) -> ResolvedPlan:
        """Return layout *index* as a plan."""
        servers = self.servers[index]
        wanted = None if servers is None else ParameterServer(servers=servers)
        return replace(super().plan(index), parameter_server=wanted)


def enumerate_strategies(
    job: TrainingJob, cluster: Cluster, stack: StackProfile, num_gpus: int, limits: SpaceLimits
) -> StrategySpace:
    """Return every layout of *job* that a stack of replicas can run on *num_gpus*.

    Servers are on all workers, or one, two, four and so on, up to as many as workers, on hosts of
    their own where the cluster has them.
    """
    modes = tuple(mode for mode in Recompute if mode in stack.recompute_modes)
    wanted = modes if limits.values("recompute") is None else limits.values("recompute") or ()
    only_dp = {
        axis.value: tuple(degree for degree in limits.values(axis) or (1,) if degree == 1)
        for axis, known in AXES.items()
        if not known.takes_rest
    }
    strategy_limits = limits.pinned(
        **only_dp,
        zero_stage=(0,),
        attention=limits.values("attention") or (stack.attention,),
        recompute=tuple(mode for mode in wanted if mode in modes),
        schedule=limits.values("schedule") or stack.schedules,
    )
    space = enumerate_space(job, stack, num_gpus, strategy_limits)
    choices = _server_choices(cluster, stack, num_gpus)
    return StrategySpace(
        job=job,
        stack=stack,
        num_gpus=num_gpus,
        columns=space.chosen(np.tile(np.arange(len(space)), len(choices))).columns,
        servers=tuple(servers for servers in choices for _ in range(len(space))),
    )


def _server_choices(cluster: Cluster, stack: StackProfile, num_workers: int) -> tuple[Servers, ...]:
    """Return the numbers of servers to search: on all workers, or powers of two on own hosts."""
    if stack.strategy is not Strategy.PARAMETER_SERVER:
        return (None,)
    hosts = num_workers
    if cluster.num_nodes is not None:
        hosts = cluster.num_nodes - -(-num_workers // cluster.devices_per_node)
    powers = (1 << exponent for exponent in range(num_workers.bit_length()))
    return ("all", *(count for count in powers if count <= min(hosts, num_workers)))


@dataclass
class StrategyRuns(Runs):
    """Simulated layouts of replicas; short runs are kept whole to be reported."""

    results: dict[int, StepResult] = field(default_factory=dict)

    def run(self, index: int) -> int:
        """Return the simulated step time of layout *index*."""
        if index not in self.step_ps:
            result = self._simulated(index, None)
            self.step_ps[index] = result.step_ps
            # Forward and backward of each worker in each microbatch.
            num_passes = 2 * self.space.num_gpus * result.num_microbatches
            self.num_passes += num_passes
            if num_passes <= KEPT_PASSES:
                self.results[index] = result
        return self.step_ps[index]

    def result(self, index: int, memory_limit_bytes: int | None) -> StepResult:
        """Return the full result of layout *index*."""
        # Kept results were simulated without a user's memory limit.
        if index in self.results and memory_limit_bytes is None:
            return self.results[index]
        return self._simulated(index, memory_limit_bytes)

    def is_too_long(self, index: int) -> bool:
        """Whether layout *index* has too many tasks to simulate, which only a run may tell."""
        if index not in self.too_long:
            try:
                self.run(index)
            except TooManyTasksError:
                self.too_long.add(index)
        return index in self.too_long

    def _simulated(self, index: int, memory_limit_bytes: int | None) -> StepResult:
        costs = self.costs
        return simulate(
            self.space.job,
            self.space.plan(index),
            costs.cluster,
            costs.stack,
            memory_limit_bytes=memory_limit_bytes,
            costs=costs,
        )


def strategy_field(
    job: TrainingJob, cluster: Cluster, stack: StackProfile, num_gpus: int, limits: SpaceLimits
) -> Field:
    """Return the layouts of replicas, ready to be simulated best first.

    Raises:
        PlanError: If the stack cannot drive so many devices.
    """
    space = enumerate_strategies(job, cluster, stack, num_gpus, limits)
    costs = CostModel(cluster, stack, num_gpus)
    peaks = PeakBytes(*(np.zeros(len(space), np.int64) for _ in range(2)))
    too_long: set[int] = set()
    for index in range(len(space)):
        try:
            for column, peak in zip(peaks, _peak_bytes(space, index, costs), strict=True):
                column[index] = peak
        except TooManyTasksError:
            too_long.add(index)
    device_bytes = device_bytes_column(space, cluster, peaks)
    runs = StrategyRuns(space, costs, peaks, device_bytes, too_long=too_long)

    def lower_bounds_ps(indices: NDArray[np.int64]) -> Column:
        bounds = [computing_ps(space, index, costs) for index in indices.tolist()]
        return np.array(bounds, np.int64)

    return Field(runs, lower_bounds_ps)


def _peak_bytes(space: StrategySpace, index: int, costs: CostModel) -> PeakBytes[int]:
    """Return the memory of layout *index*, from as few microbatches as show it."""
    plan = space.plan(index)
    num_microbatches = min(plan.num_microbatches(space.job), REPRESENTATIVE_MICROBATCHES)
    job = replace(space.job, global_batch_size=plan.dp * plan.microbatch_size * num_microbatches)
    result = simulate(job, plan, costs.cluster, costs.stack, costs=costs)
    return result.memory.peak


def computing_ps(space: Space, index: int, costs: CostModel) -> int:
    """Return the time of a replica in layers alone, a lower bound of layout *index*'s step."""
    plan = space.plan(index)
    shape = BlockShape.of(space.job, plan, costs.stack)
    runs = [(costs.block_cost(shape, kind), count) for kind, count in space.job.model.layer_runs]
    pass_ps = sum(count * (each.forward.time_ps + each.backward.time_ps) for each, count in runs)
    time_ps = pass_ps * plan.num_microbatches(space.job)
    return with_overhead(time_ps, overhead_per_million(costs.stack))
