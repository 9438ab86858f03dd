"""What a simulated step came to: time, where it went, memory, and what the numbers rest on."""

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
    """Bytes of one pipeline rank at its fullest instant, when that is, and bytes on its host.

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
        """Return those of a rank with *memory*, whose fullest instant is *peak*."""
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
        """What fills it then: its states, activations and buffers."""
        states = {name.removesuffix("_bytes"): size for name, size in self.by_name.items()}
        return {**states, "activations": self.activations_bytes, "buffers": self.buffers_bytes}

    @property
    def peak_bytes(self) -> int:
        """Live bytes at that instant."""
        return sum(self.terms.values())

    def state_bytes(self, fragmentation: Fragmentation) -> int:
        """Return those of them that live from step to step."""
        return fragmentation.state_bytes(self.weights_bytes, self.gradients_bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryResult:
    """Memory of the fullest rank by three rules of counting, against what there is.

    ``peak_bytes`` are live tensors, ``reserved_bytes`` add libraries' workspaces and what the
    allocator holds beside, ``device_bytes`` context and communicators (`Overheads`); a plan fits
    when the last is at most ``usable_bytes``, and ``host_bytes``, what the fullest node keeps on
    its host, at most ``host_capacity_bytes``.  ``walk`` finds the memory of each pipeline rank when
    that is read: ``known_peak`` is known of a search's layouts without, and of most pipelines
    from few ranks; ``find_fullest`` finds from few the rank that an allocator holds so much for, or
    None.  Results are equal if all that they tell is, wherever it is from.
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
        """Whether both tell the same."""
        return isinstance(other, MemoryResult) and self._told == other._told

    def __hash__(self) -> int:
        """Return one number for all that tell the same."""
        return hash(self._told)

    @property
    def _told(self) -> tuple[object, ...]:
        limits = self.overheads, self.capacity_bytes, self.usable_bytes
        sizes = self.peak_bytes, self.reserved_bytes
        return *limits, self.host_bytes, self.host_capacity_bytes, *sizes, self.by_stage

    @property
    def peak_bytes(self) -> int:
        """Live bytes of the fullest rank at its fullest instant."""
        return self.peak.live_bytes

    @cached_property
    def peak(self) -> PeakBytes[int]:
        """The most live bytes of a rank, and the most that an allocator holds for one."""
        if self.known_peak is not None:
            return self.known_peak
        parts = max(map(self._stage_parts, self.by_stage))
        return PeakBytes(self.worst_stage.peak_bytes, parts)

    def _stage_parts(self, stage: StageMemory) -> int:
        fragmentation = self.overheads.fragmentation
        return fragmentation.reserved_parts(stage.peak_bytes, stage.state_bytes(fragmentation))

    def stage_reserved_bytes(self, stage: StageMemory) -> int:
        """Return what the allocator of a pipeline rank holds."""
        return self.overheads.reserved_bytes(self._stage_parts(stage))

    def stage_device_bytes(self, stage: StageMemory) -> int:
        """Return what the device of a pipeline rank shows as used."""
        return self.overheads.device_bytes(self._stage_parts(stage))

    @cached_property
    def by_stage(self) -> tuple[StageMemory, ...]:
        """The memory of each pipeline rank."""
        return tuple(self.walk())

    @property
    def reserved_bytes(self) -> int:
        """What the allocator that holds the most holds."""
        return self.overheads.reserved_bytes(self.peak.reserved_parts)

    @property
    def device_bytes(self) -> int:
        """What its device shows as used."""
        return self.overheads.device_bytes(self.peak.reserved_parts)

    @property
    def fits(self) -> bool:
        """Whether the plan can run."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        """Whether every device has room."""
        return self.device_bytes <= self.usable_bytes

    @property
    def fits_host(self) -> bool:
        """Whether every host has room for what is offloaded to it."""
        return self.host_bytes <= (self.host_capacity_bytes or 0)

    @property
    def worst_rank(self) -> int:
        """The first rank that needs the most."""
        return self.worst_stage.rank

    @property
    def fullest_rank(self) -> int:
        """The first rank whose device shows the most as used: one that needs less may hold more."""
        found = None
        if self.known_peak is not None:
            found = self.find_fullest(self.known_peak.reserved_parts)
        return max(self.by_stage, key=self._stage_parts).rank if found is None else found

    @property
    def worst_stage(self) -> StageMemory:
        """The pipeline rank that needs the most; the first of equals."""
        return max(self.by_stage, key=lambda stage: stage.peak_bytes)


class AsyncRun(NamedTuple):
    """What asynchronous workers did in a run that ends when the first of them has done its rounds.

    Args:
        rounds: Rounds that each worker has finished.
        round_ps: Mean time of one, by worker; None where not one was finished.
        staleness: How many updates (by number of updates, ascending) were computed from
            parameters that so many updates of other workers had changed since they were pulled.
    """

    rounds: tuple[int, ...]
    round_ps: tuple[int | None, ...]
    staleness: dict[int, int]

    @property
    def mean_staleness(self) -> float:
        """Mean over all updates."""
        total = sum(updates * count for updates, count in self.staleness.items())
        return total / sum(self.staleness.values())

    @property
    def max_staleness(self) -> int:
        """The most."""
        return max(self.staleness)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StepResult(Shown):
    """One simulated training step.

    Args:
        job: What is trained.
        plan: How it is laid out.
        cluster: On what.
        stack: With what software.
        step_ps: Time of the step.
        breakdown_ps: That time by `Category`, averaged over ranks; adds up to ``step_ps``
            but for rounding down.
        source_fractions: Share of the busy time that rests on each kind of evidence.
        memory: Memory of the fullest rank and of each pipeline rank.
        warnings: What a user should know before relying on the numbers.
        work: What the engine ran, if the plan is a mesh of ranks.
        times: When it ran, likewise.
        lanes: What each device, host and link did, if it is not.
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
        """Return the step in a line: of what, its time and its memory."""
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
        """Seconds of communication that no computation hides, averaged over ranks."""
        return sum(self.breakdown_ps[category] for category in COMMUNICATION) / PS_PER_S
