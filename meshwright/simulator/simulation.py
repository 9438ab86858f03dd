"""Simulation of one training step of a plan, and the accounting of its time and memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from meshwright.hwprofiles import (
    DEFAULT_STACK,
    Cluster,
    Source,
    StackProfile,
    Strategy,
    load_cluster,
    load_stack,
)
from meshwright.simulator.account import (
    MemoryResult,
    StageMemory,
    StepResult,
    copy_warnings,
    plan_warnings,
    time_breakdown,
)
from meshwright.simulator.blocks import LOGITS, BlockShape, BlockTable, NamedBytes
from meshwright.simulator.costs import CostModel, peak_flops_per_s
from meshwright.simulator.engine import RankTimes, StepTimes, simulate_folded
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout import (
    Axis,
    ParallelPlan,
    ResolvedPlan,
    Stage,
    TrainingJob,
    check_offered,
    check_sharding,
    resolve,
)
from meshwright.simulator.memory import (
    Fragmentation,
    MemoryEvent,
    Overheads,
    PeakBytes,
    PeriodGrowth,
    RankMemory,
    memory_timeline,
    peak_event,
    peak_upper_bound,
    usable_bytes,
)
from meshwright.simulator.model import HEAD
from meshwright.simulator.schedules import Action, Periodic, Phase
from meshwright.simulator.step import (
    BuiltStep,
    activation_refusal,
    build_step,
    node_host_bytes,
    offload_refusal,
)

# All that a stage with nothing but the embedding holds to speak of.
TABLE = NamedBytes("embedding table", 0)


def simulate(  # noqa: PLR0913 -- what a step is of, and who pays for its prices
    job: TrainingJob,
    plan: ParallelPlan | ResolvedPlan,
    cluster: Cluster | str,
    stack: StackProfile | str = DEFAULT_STACK,
    *,
    num_gpus: int | None = None,
    memory_limit_bytes: int | None = None,
    costs: CostModel | None = None,
) -> StepResult:
    """Return the simulated training step of *plan*.

    Args:
        job: Model, sequence length, global batch and precision.
        plan: Parallel degrees, schedule and the like; unset fields take the stack's default.
        cluster: A cluster, or its name or path.
        stack: A software stack, or its name or path.
        num_gpus: World size, from which an unset ``dp`` follows.
        memory_limit_bytes: Limit of a device; by default all that processes can have.
        costs: A cost model for this cluster, stack and world size to share between plans.

    Raises:
        PlanError: If the plan can never run: it does not divide the model or the batch, the
            schedule or the stack cannot express it, or the cluster is too small.
    """
    cluster, stack = load_cluster(cluster), load_stack(stack)
    plan = resolve(job, cluster, stack, plan, num_gpus=num_gpus)
    check_plan(job, plan, cluster, stack)
    costs = costs or CostModel(cluster, stack, plan.world_size)
    # Parameter servers and DataParallel have no mesh: their tasks are a graph of their own.
    if stack.strategy is not Strategy.MESH:
        from meshwright.simulator.strategies import STRATEGIES, StrategyCase  # noqa: PLC0415 -- of other stacks alone

        return STRATEGIES[stack.strategy](StrategyCase(job, plan, costs, memory_limit_bytes))
    built = build_step(job, plan, costs)
    return account(built, simulate_folded(built.work), costs, memory_limit_bytes)


def check_plan(job: TrainingJob, plan: ResolvedPlan, cluster: Cluster, stack: StackProfile) -> None:
    """Raise PlanError when *plan* can never run."""
    check_sharding(job, plan)
    # For its error: a device without this precision cannot run the job.
    peak_flops_per_s(cluster.device, job.precision)
    schedule = plan.schedule_of(stack.pipeline_runtime)
    num_microbatches = plan.num_microbatches(job)
    refusal = schedule.refusal(plan.pp, num_microbatches, plan.num_virtual_stages)
    if refusal is None:
        check_offered(job, plan, stack)
        refusal = offload_refusal(job, plan, cluster, stack) or activation_refusal(plan, cluster)
    if refusal is not None:
        raise PlanError(refusal)
    if cluster.num_nodes is not None:
        most = cluster.num_nodes * cluster.devices_per_node
        if plan.world_size > most:
            raise PlanError(f"gpus={plan.world_size} is more than the {most} of {cluster.name}")


def account(
    built: BuiltStep,
    times: StepTimes,
    costs: CostModel,
    memory_limit_bytes: int | None = None,
    *,
    peak: PeakBytes[int] | None = None,
) -> StepResult:
    """Return the result of a simulated step: time breakdown, and memory of each rank.

    Args:
        built: Work and memory of each rank.
        times: Simulated times of each rank.
        costs: Cost model that priced the work.
        memory_limit_bytes: Limit of a device; by default all that processes can have.
        peak: Largest peaks over ranks, if known: then no rank is walked before its memory is asked
            for.
    """
    breakdown_ps, source_fractions = time_breakdown(built, times)
    memory = _memory(built, times, costs, memory_limit_bytes, peak)
    # Sources outside of their measured range become a warning.
    extrapolated = source_fractions[Source.EXTRAPOLATED]
    return StepResult(
        job=built.setting.job,
        plan=built.setting.plan,
        cluster=costs.cluster,
        stack=costs.stack,
        step_ps=times.step_ps,
        breakdown_ps=breakdown_ps,
        source_fractions=source_fractions,
        memory=memory,
        warnings=(
            *plan_warnings(built.setting.job, built.setting.plan, memory, costs, extrapolated),
            *copy_warnings(built.setting.plan, times),
        ),
        work=built.work,
        times=times,
    )


def rank_timeline(built: BuiltStep, times: StepTimes, pp_rank: int) -> list[MemoryEvent]:
    """Return the live bytes over time of a simulated rank, beyond its static ones."""
    rank = times.ranks[pp_rank]
    passes, update_ps = list(rank.passes()), rank.update_start_ps
    return memory_timeline(built.memory[pp_rank], passes, update_ps, rank.pairs)


def _memory(
    built: BuiltStep,
    times: StepTimes,
    costs: CostModel,
    memory_limit_bytes: int | None,
    peak: PeakBytes[int] | None,
) -> MemoryResult:
    """Return the memory of the plan, whose ranks are walked when asked for."""
    peaks = RankPeaks(built, times)
    overheads = Overheads.of_plan(built.setting.job, built.setting.plan, costs.cluster, costs.stack)
    return MemoryResult(
        known_peak=peaks.peak(overheads.fragmentation) if peak is None else peak,
        overheads=overheads,
        capacity_bytes=costs.cluster.device.memory_capacity_bytes,
        usable_bytes=usable_bytes(costs.cluster, memory_limit_bytes),
        # Of most results nobody reads each rank's memory: it is walked on first use.
        walk=partial(_stages, built, peaks, costs),
        find_fullest=partial(peaks.fullest_rank, overheads.fragmentation),
        host_bytes=node_host_bytes(
            built.setting.mesh, [memory.host_bytes for memory in built.memory]
        ),
        host_capacity_bytes=costs.cluster.host_memory_capacity_bytes,
    )


@dataclass(frozen=True, slots=True)
class RankPeaks:
    """Memory peaks of simulated ranks, each computed on first use."""

    built: BuiltStep
    times: StepTimes
    _events: dict[int, MemoryEvent] = field(default_factory=dict)

    def of(self, pp_rank: int) -> MemoryEvent:
        """Return the first peak of a rank."""
        if pp_rank not in self._events:
            memory, rank = self.built.memory[pp_rank], self.times.ranks[pp_rank]
            self._events[pp_rank] = _fullest(memory, rank)
        return self._events[pp_rank]

    def live_bytes(self, pp_rank: int) -> int:
        """Return the live bytes of a rank at its peak."""
        return self.built.memory[pp_rank].static_bytes + self.of(pp_rank).dynamic_bytes

    def peak(self, fragmentation: Fragmentation) -> PeakBytes[int] | None:
        """Return the largest peak over ranks; ranks with a lower upper bound are not walked.

        Args:
            fragmentation: Share that allocators reserve beyond live bytes.

        Returns:
            None where a rank has no upper bound without a walk.
        """
        bounds = self._upper_bounds()
        if bounds is None:
            return None
        peak = PeakBytes(0, 0)
        # Largest bounds first, so that most others can be skipped.
        for pp_rank in sorted(bounds, key=bounds.__getitem__, reverse=True):
            parts = self._parts(fragmentation, pp_rank, bounds[pp_rank])
            if bounds[pp_rank] > peak.live_bytes or parts > peak.reserved_parts:
                live_bytes = self.live_bytes(pp_rank)
                rank_peak = live_bytes, self._parts(fragmentation, pp_rank, live_bytes)
                peak = PeakBytes(*map(max, peak, rank_peak))
        return peak

    def fullest_rank(self, fragmentation: Fragmentation, reserved_parts: int) -> int | None:
        """Return the first rank whose allocator reserves *reserved_parts*, the most of all ranks.

        Ranks with a lower upper bound are not walked; None where no bounds are known.
        """
        for pp_rank, most in (self._upper_bounds() or {}).items():
            if self._parts(fragmentation, pp_rank, most) >= reserved_parts:
                live_bytes = self.live_bytes(pp_rank)
                if self._parts(fragmentation, pp_rank, live_bytes) == reserved_parts:
                    return self.built.setting.mesh.rank({Axis.PP: pp_rank})
        return None

    def _upper_bounds(self) -> dict[int, int] | None:
        """Return an upper bound of each rank's live bytes; None where only a walk can tell."""
        setting = self.built.setting
        pp, vpp, count = setting.plan.pp, setting.plan.num_virtual_stages, setting.num_microbatches
        schedule = setting.plan.schedule_of(setting.shape.stack.pipeline_runtime)
        # Where groups of microbatches exceed pp, more p2p buffers are alive.
        larger = schedule.group(pp, count) - pp
        bounds: dict[int, int] = {}
        for pp_rank, memory in enumerate(self.built.memory):
            in_flight = schedule.most_in_flight(pp_rank, pp, count, vpp)
            bound = peak_upper_bound(memory, in_flight, larger)
            if bound is None:
                return None
            bounds[pp_rank] = bound
        return bounds

    def _parts(self, fragmentation: Fragmentation, pp_rank: int, live_bytes: int) -> int:
        """Return the bytes that an allocator reserves on a rank, in `PARTS`."""
        memory = self.built.memory[pp_rank]
        states = fragmentation.state_bytes(memory.weights_bytes, memory.gradients_bytes)
        return fragmentation.reserved_parts(live_bytes, states)


def _fullest(memory: RankMemory, rank: RankTimes) -> MemoryEvent:
    """Return the first memory peak of a rank."""
    order, update_ps = rank.actions, rank.update_start_ps
    if not isinstance(order, Periodic):
        return peak_event(memory, order, rank.ran, update_ps, rank.pairs)
    first, size = order.end - order.size, order.size * order.copies
    # Sent p2p buffers that live until the step ends grow with every period.
    growth_bytes = order.copies * memory.growth_bytes(order.once[first : order.end])
    if not growth_bytes:  # each copy of the period finds what the one before it found
        return peak_event(memory, order.once, rank.ran_once, update_ps, rank.pairs_without_repeats)

    def ran(position: int) -> tuple[Action, int, int]:
        """Return a pass, of those of the period that of its last copy, which is the fullest."""
        return rank.ran(position + size if position >= first else position)

    growth = PeriodGrowth(first, growth_bytes)
    return peak_event(memory, order.once, ran, update_ps, growth=growth)


def _stages(built: BuiltStep, peaks: RankPeaks, costs: CostModel) -> Iterator[StageMemory]:
    """Yield the memory of each pipeline rank at its peak."""
    for pp_rank, memory in enumerate(built.memory):
        peak = peaks.of(pp_rank)
        largest = largest_tensor(
            costs.blocks, built.setting.shape, built.setting.rank_stages(pp_rank), peak.action
        )
        rank = built.setting.mesh.rank({Axis.PP: pp_rank})
        yield StageMemory.of(memory, peak, stage=pp_rank, rank=rank, largest_tensor=largest)


def largest_tensor(
    blocks: BlockTable, shape: BlockShape, stages: tuple[Stage, ...], action: Action | None
) -> str:
    """Return the name of the largest tensor that lives during *action* (None: the update)."""
    if action is None:
        return "optimizer states"
    # Backward recomputes: its largest tensor may be one that was discarded.
    again = action.phase is not Phase.FORWARD
    kinds = dict.fromkeys(
        kind for stage in stages for kind, _ in stage.checkpoints.passes(stage.layers)
    )
    tensors = [
        each for kind in kinds for each in blocks.saved_tensors(shape, kind, repeats=not again)
    ]
    if stages[action.virtual_stage].has_head:
        tensors += [each for each in blocks.saved_tensors(shape, HEAD) if each.name == LOGITS]
    return max(tensors, key=lambda tensor: tensor.size_bytes, default=TABLE).name
