"""Result of a simulated step: time, breakdown, memory and sources."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

from meshwright.hwprofiles import PS_PER_S, Cluster, Source, StackProfile, format_bytes
from meshwright.simulator.account.lanes import ResourceLane
from meshwright.simulator.account.shown import Shown
from meshwright.simulator.blocks import hardware_flops, model_flops
from meshwright.simulator.costs import COMMUNICATION, Category, peak_flops_per_s
from meshwright.simulator.engine import StepTimes, StepWork
from meshwright.simulator.layout import ResolvedPlan, TrainingJob
from meshwright.simulator.memory import (
    Fragmentation,
    MemoryEvent,
    Overheads,
    PeakBytes,
    RankMemory,
    States,
)
from meshwright.simulator.schedules import get_schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory(States[int]):
    """Bytes of one pipeline rank at its peak, the time of that, and bytes on its host.

    ``rank`` is the first of the ranks that are alike there.
    """

    stage: int
    rank: int
    activations_bytes: int
    buffers_bytes: int
    peak_time_ps: int
    peak_moment: str
    largest_tensor: str
    host_bytes: int = 0

    @classmethod
    def of(
        cls, memory: RankMemory, peak: MemoryEvent, *, stage: int, rank: int, largest_tensor: str
    ) -> Self:
        """Return the bytes of a rank with *memory* at its *peak*."""
        states = memory.by_name
        states["gradients_bytes"] -= peak.absent_bytes
        return cls(
            **states,
            stage=stage,
            rank=rank,
            activations_bytes=peak.activations_bytes,
            buffers_bytes=peak.buffers_bytes,
            peak_time_ps=peak.time_ps,
            peak_moment=peak.moment,
            largest_tensor=largest_tensor,
            host_bytes=memory.host_bytes,
        )

    @property
    def terms(self) -> dict[str, int]:
        """Bytes at the peak by name: states, activations and buffers."""
        states = {name.removesuffix("_bytes"): size for name, size in self.by_name.items()}
        return {**states, "activations": self.activations_bytes, "buffers": self.buffers_bytes}

    @property
    def peak_bytes(self) -> int:
        """Live bytes at the peak."""
        return sum(self.terms.values())

    def state_bytes(self, fragmentation: Fragmentation) -> int:
        """Return the bytes of these that live from step to step."""
        return fragmentation.state_bytes(self.weights_bytes, self.gradients_bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryResult:
    """Memory of the fullest rank by three rules of counting, against the capacity.

    ``peak_bytes`` are live tensors, ``reserved_bytes`` add library workspaces and fragmentation of
    the allocator, ``device_bytes`` context and communicators (`Overheads`); a plan fits when the
    last is at most ``usable_bytes``, and ``host_bytes`` of the fullest node at most
    ``host_capacity_bytes``. ``walk`` computes the memory of each pipeline rank on first use: a
    search knows ``known_peak`` of its layouts without, and of most pipelines it follows from few
    ranks; ``find_fullest`` finds from few the rank whose allocator reserves so much, or None.
    Results are equal if all their numbers are, wherever they are from.
    """

    known_peak: PeakBytes[int] | None = None
    overheads: Overheads
    capacity_bytes: int
    usable_bytes: int
    walk: Callable[[], Iterable[StageMemory]] = field(repr=False)
    find_fullest: Callable[[int], int | None] = field(default=lambda _: None, repr=False)
    host_bytes: int = 0
    host_capacity_bytes: int | None = None

    def __eq__(self, other: object) -> bool:
        """Return True if all numbers are equal."""
        return isinstance(other, MemoryResult) and self._numbers == other._numbers

    def __hash__(self) -> int:
        """Return the hash of all numbers."""
        return hash(self._numbers)

    @property
    def _numbers(self) -> tuple[object, ...]:
        limits = self.overheads, self.capacity_bytes, self.usable_bytes
        sizes = self.peak_bytes, self.reserved_bytes
        return *limits, self.host_bytes, self.host_capacity_bytes, *sizes, self.by_stage

    @property
    def peak_bytes(self) -> int:
        """Live bytes of the fullest rank at its peak."""
        return self.peak.live_bytes

    @cached_property
    def peak(self) -> PeakBytes[int]:
        """Most live bytes of a rank, and most bytes reserved for one."""
        if self.known_peak is not None:
            return self.known_peak
        parts = max(map(self._stage_parts, self.by_stage))
        return PeakBytes(self.worst_stage.peak_bytes, parts)

    def _stage_parts(self, stage: StageMemory) -> int:
        fragmentation = self.overheads.fragmentation
        return fragmentation.reserved_parts(stage.peak_bytes, stage.state_bytes(fragmentation))

    def stage_reserved_bytes(self, stage: StageMemory) -> int:
        """Return the bytes that a pipeline rank's allocator reserves."""
        return self.overheads.reserved_bytes(self._stage_parts(stage))

    def stage_device_bytes(self, stage: StageMemory) -> int:
        """Return the bytes that a pipeline rank's device shows as used."""
        return self.overheads.device_bytes(self._stage_parts(stage))

    @cached_property
    def by_stage(self) -> tuple[StageMemory, ...]:
        """Memory of each pipeline rank."""
        return tuple(self.walk())

    @property
    def reserved_bytes(self) -> int:
        """Most bytes that a rank's allocator reserves."""
        return self.overheads.reserved_bytes(self.peak.reserved_parts)

    @property
    def device_bytes(self) -> int:
        """Bytes that the same rank's device shows as used."""
        return self.overheads.device_bytes(self.peak.reserved_parts)

    @property
    def fits(self) -> bool:
        """Whether the plan fits device and host memory."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        """Whether the plan fits the memory of every device."""
        return self.device_bytes <= self.usable_bytes

    @property
    def fits_host(self) -> bool:
        """Whether offloaded bytes fit the memory of every host."""
        return self.host_bytes <= (self.host_capacity_bytes or 0)

    @property
    def worst_rank(self) -> int:
        """First rank with the most live bytes."""
        return self.worst_stage.rank

    @property
    def fullest_rank(self) -> int:
        """First rank whose device shows the most as used, not always that of most live bytes."""
        found = None
        if self.known_peak is not None:
            found = self.find_fullest(self.known_peak.reserved_parts)
        return max(self.by_stage, key=self._stage_parts).rank if found is None else found

    @property
    def worst_stage(self) -> StageMemory:
        """Pipeline rank with the most live bytes; the first of equals."""
        return max(self.by_stage, key=lambda stage: stage.peak_bytes)


class AsyncRun(NamedTuple):
    """Progress of asynchronous workers until the first of them has done its rounds.

    Args:
        rounds: Rounds that each worker has finished.
        round_ps: Mean time of a round, by worker; None where none was finished.
        staleness: Number of updates by staleness, ascending: updates of other workers that changed
            the parameters between pull and update.
    """

    rounds: tuple[int, ...]
    round_ps: tuple[int | None, ...]
    staleness: dict[int, int]

    @property
    def mean_staleness(self) -> float:
        """Mean staleness over all updates."""
        total = sum(updates * count for updates, count in self.staleness.items())
        return total / sum(self.staleness.values())

    @property
    def max_staleness(self) -> int:
        """Largest staleness of an update."""
        return max(self.staleness)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StepResult(Shown):
    """One simulated training step.

    Args:
        job: Model, sequence length and batch.
        plan: Parallel degrees, schedule and the like, resolved.
        cluster: Hardware.
        stack: Software stack.
        step_ps: Time of the step.
        breakdown_ps: That time by `Category`, averaged over ranks; adds up to ``step_ps``
            but for rounding down.
        source_fractions: Share of the busy time that rests on each kind of evidence.
        memory: Memory of the fullest rank and of each pipeline rank.
        warnings: Warnings about the plan or its prediction.
        work: Work that the engine ran, if the plan is a mesh of ranks.
        times: Times of that work, likewise.
        lanes: Tasks of each device, host and link, if the plan is no mesh.
        asynchronous: Progress of workers that do not wait for each other; ``step_ps`` is then the
            mean time in which they consume a global batch.
    """

    job: TrainingJob
    plan: ResolvedPlan
    cluster: Cluster
    stack: StackProfile
    step_ps: int
    breakdown_ps: dict[Category, int]
    source_fractions: dict[Source, float]
    memory: MemoryResult
    warnings: tuple[str, ...]
    work: StepWork | None = None
    times: StepTimes | None = None
    lanes: tuple[ResourceLane, ...] = ()
    asynchronous: AsyncRun | None = None

    def __repr__(self) -> str:
        """Return the step in a line: model, cluster, plan, time and memory."""
        size = format_bytes(self.memory.device_bytes)
        return (
            f"<StepResult {self.job.model.name} on {self.cluster.name}: {self.plan!r}, "
            f"{self.step_time_s:.4g} s, {size}>"
        )

    @property
    def step_time_s(self) -> float:
        """Seconds of the step."""
        return self.step_ps / PS_PER_S

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each data-parallel replica."""
        return self.plan.num_microbatches(self.job)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second over all ranks."""
        return self.job.tokens_per_step / self.step_time_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens a second and rank."""
        return self.tokens_per_s / self.plan.world_size

    @property
    def model_flops_per_s_per_gpu(self) -> float:
        """Model FLOPs a second and rank."""
        return model_flops(self.job) / self.step_time_s / self.plan.world_size

    @property
    def hardware_flops_per_s_per_gpu(self) -> float:
        """FLOPs a second and rank with recomputation counted."""
        flops = hardware_flops(self.job, self.plan, self.stack)
        return flops / self.step_time_s / self.plan.world_size

    @property
    def mfu_fraction(self) -> float:
        """Model FLOPs against the device's peak at the job's precision.

        In fp8 that is the fp8 peak, though attention and the head run in bf16: dgxc-benchmarking
        counts so, and no share can exceed 1.
        """
        return self.model_flops_per_s_per_gpu / self.peak_flops_per_s

    @property
    def hfu_fraction(self) -> float:
        """Model and recomputation FLOPs against the same peak."""
        return self.hardware_flops_per_s_per_gpu / self.peak_flops_per_s

    @property
    def peak_flops_per_s(self) -> float:
        """The device's dense peak at the job's precision."""
        return peak_flops_per_s(self.cluster.device, self.job.precision)

    @property
    def bubble_fraction(self) -> float:
        """Measured idle share of the step, whatever the cause."""
        return self.breakdown_ps[Category.BUBBLE] / self.step_ps

    @property
    def schedule_bubble_fraction(self) -> float:
        """Idle share of the schedule for equal stages and free communication."""
        plan = self.plan
        schedule = get_schedule(plan.schedule)
        return schedule.bubble_fraction(plan.pp, self.num_microbatches, plan.num_virtual_stages)

    @property
    def exposed_comm_s(self) -> float:
        """Seconds of exposed communication, averaged over ranks."""
        return sum(self.breakdown_ps[category] for category in COMMUNICATION) / PS_PER_S
