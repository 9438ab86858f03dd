"""Stages of one rank of a large plan, computed on one device that the plan need not have.

Torch is imported late: whoever only reads results does not wait for it.
"""
# ruff: noqa: PLC0415

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from meshwright.hwprofiles import GIBI, PS_PER_S, Offload, Precision, Strategy
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import COMMUNICATION, CostModel, Phase, PlanError, build_step, simulate
from meshwright.simulator.costs import PhaseCost
from meshwright.simulator.layout import rank_stages
from meshwright.simulator.model import HEAD, parameters_by_kind
from meshwright.validate.ranks import capped, pipeline_rank
from meshwright.validate.runs import check_torch, host_bytes, run_counted

if TYPE_CHECKING:
    import torch

    from meshwright.validate.probe.stage_clock import ProbedStepTimes
    from meshwright.validate.programs.contract import RankProgram


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Seconds of something that ran several times: the median, the least and the most."""

    median_s: float
    least_s: float
    most_s: float
    num_samples: int

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> "Spread":
        """Return the spread of at least one sample.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median_s=2.0, least_s=1.0, most_s=3.0, num_samples=3)
        """
        return cls(
            median_s=median(samples_s),
            least_s=min(samples_s),
            most_s=max(samples_s),
            num_samples=len(samples_s),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTimes:
    """Forward and backward of one microbatch through a virtual stage, the loss included."""

    forward: Spread
    backward: Spread


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProbe:
    """Times and peak of one rank's stages, without any communication.

    Args:
        rank: Rank, from 0.
        world_size: Of the plan; the other ranks are not there.
        device: Name of the device that computed.
        num_steps: Timed steps.
        num_microbatches: Of each: no more than fill the rank's memory as the plan does.
        stages: The rank's virtual stages in model order.
        update: All after the last backward: sums and norm of gradients, the optimizer.
        versions: Of software and device, by name.
        peak_bytes: Most bytes that tensors had at one time; on a GPU those that the allocator was
            asked for, kernels' own among them and libraries' workspaces not.
    """

    rank: int
    world_size: int
    device: str
    num_steps: int
    num_microbatches: int
    stages: tuple[PassTimes, ...]
    update: Spread
    peak_bytes: int
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePrediction:
    """Predicted times and peak of the same stages, for the device of the plan's cluster.

    Args:
        device: Name of that device.
        passes_s: Forward and backward of each virtual stage, without communication.
        update_s: The optimizer's step.
        peak_bytes: Most bytes that are live at one time.
    """

    device: str
    passes_s: tuple[tuple[float, float], ...]
    update_s: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """Predicted and measured."""

    predicted: StagePrediction
    measured: StageProbe


def run_probe(saved: SavedPlan, rank: int, *, device: str, steps: int) -> ProbeReport:
    """Return the prediction of a rank's stages, and their measurement on *device*.

    Args:
        saved: The plan.
        rank: Rank of the plan.
        device: "cpu", "cuda" or "cuda:1", ...
        steps: Timed steps, after one that warms up.

    Raises:
        PlanError: If the plan, the rank or the device cannot be probed.
    """
    short = shortened(saved, rank)
    return ProbeReport(
        predicted=predict_stage(short, rank),
        measured=probe_stage(short, rank, device=device, steps=steps),
    )


def predict_stage(saved: SavedPlan, rank: int) -> StagePrediction:
    """Return the simulator's times and memory of one rank's stages."""
    job, plan, index = saved.job, saved.plan, pipeline_rank(saved.plan, rank)
    costs = CostModel(saved.cluster, saved.stack, plan.world_size)
    built = build_step(job, plan, costs)
    # A stage that runs alone has no module around it that would keep gradients in buckets as well.
    stack = saved.stack.model_copy(update={"gradient_as_bucket_view": True})
    memory = simulate(job, plan, saved.cluster, stack).memory
    return StagePrediction(
        device=saved.cluster.device.name,
        passes_s=tuple(
            (_computing_s(each[Phase.FORWARD]), _computing_s(each[Phase.BACKWARD]))
            for each in built.virtual_stage_costs[index]
        ),
        update_s=built.update_costs[index].time_ps / PS_PER_S,
        peak_bytes=memory.by_stage[index].peak_bytes,
    )


def probe_stage(saved: SavedPlan, rank: int, *, device: str, steps: int) -> StageProbe:
    """Return the times and peak bytes of the stages of *rank*, computed on a device.

    Weights and tokens are those of real training; what other ranks would send is random, and
    collectives leave their buffers as they are. Arguments as of `run_probe`.

    Raises:
        PlanError: If the plan, the rank or the device cannot be probed, or its memory is too small.
    """
    check_torch()
    import torch

    from meshwright.validate.device import device_facts

    if steps < 1:
        raise PlanError(f"steps={steps} is out of range; allowed: at least 1")
    saved = shortened(saved, rank)
    place = _checked_device(device)
    _refuse_offload(saved, place)
    needed_bytes = predict_stage(saved, rank).peak_bytes
    _refuse_too_large(needed_bytes, rank, place)
    _refuse_too_large(_built_on_host_bytes(saved, rank), rank, torch.device("cpu"))
    with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
        try:
            times, peak_bytes = _run(saved, rank, place, steps)
        except torch.OutOfMemoryError as error:
            raise PlanError(
                f"rank={rank} ran out of memory on device={place}, where {needed_bytes / GIBI:.1f} "
                f"GiB by prediction must fit with what kernels need: {_first_line(error)}"
            ) from None
    return StageProbe(
        rank=rank,
        world_size=saved.plan.world_size,
        device=_device_name(place),
        num_steps=steps,
        num_microbatches=saved.plan.num_microbatches(saved.job),
        stages=_pass_times(times),
        update=Spread.of([step.update_s for step in times]),
        peak_bytes=peak_bytes,
        versions=device_facts(place),
    )


def _refuse_offload(saved: SavedPlan, place: "torch.device") -> None:
    """Raise PlanError if a device with one memory cannot offload as the plan says."""
    if saved.plan.offload is not Offload.NONE and place.type == "cpu":
        raise PlanError(
            f"device=cpu has one memory, where offload={saved.plan.offload} takes two; allowed: "
            "cuda, or --backend fake"
        )


def _pass_times(times: Sequence["ProbedStepTimes"]) -> tuple[PassTimes, ...]:
    """Return the spread of each stage's passes over the steps of *times*."""
    return tuple(
        PassTimes(
            forward=Spread.of([each for step in times for each in step.stages[i].forward_s]),
            backward=Spread.of([each for step in times for each in step.stages[i].backward_s]),
        )
        for i in range(len(times[0].stages))
    )


def shortened(saved: SavedPlan, rank: int) -> SavedPlan:
    """Return the plan with the fewest microbatches that fill the memory of *rank* as all do.

    Raises:
        PlanError: If the plan has no such rank, or no stages.
    """
    if saved.stack.strategy is not Strategy.MESH:
        raise PlanError(
            f"stack {saved.stack.name} has no stages to probe; allowed: one of strategy "
            f"{Strategy.MESH}"
        )
    if not 0 <= rank < saved.plan.world_size:
        raise PlanError(f"rank={rank} is out of range; allowed: 0 to {saved.plan.world_size - 1}")
    return capped(saved, (rank,))


def _computing_s(cost: PhaseCost) -> float:
    waiting_ps = sum(cost.category_ps(category) for category in COMMUNICATION)
    return (cost.time_ps - waiting_ps) / PS_PER_S


def first_device() -> str:
    """Return the default device: a GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _checked_device(name: str) -> "torch.device":
    """Return the device of that name; PlanError where it is not here."""
    import torch

    count = torch.cuda.device_count()
    devices = ["cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    if name not in devices:
        raise PlanError(f"device={name} is not here; allowed: {', '.join(devices)}")
    # Programs and their tensors name the device by its number.
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


def _device_name(device: "torch.device") -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _refuse_too_large(peak_bytes: int, rank: int, device: "torch.device") -> None:
    """Raise PlanError where a stage would need more memory than there is."""
    import torch

    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_bytes()
    if peak_bytes > free_bytes:
        raise PlanError(
            f"rank={rank} needs {peak_bytes / GIBI:.1f} GiB by prediction, more than device="
            f"{device} has; allowed: at most {free_bytes / GIBI:.1f} GiB"
        )


def _built_on_host_bytes(saved: SavedPlan, rank: int) -> int:
    """Return the host bytes of a stage before FSDP2 shards it: whole, in fp32."""
    from meshwright.validate.programs import PROGRAMS
    from meshwright.validate.programs.pytorch import build_fully_sharded

    if PROGRAMS.get(saved.stack.name) is not build_fully_sharded:
        return 0
    model, fp32_bytes = saved.job.transformer, Precision.FP32.num_bytes
    parameters = parameters_by_kind(model)
    if model.tied_embeddings:  # a copy, until both are tied
        parameters[HEAD] += model.vocab_size * model.hidden_size
    return fp32_bytes * max(
        sum(count * parameters[kind] for kind, count in stage.blocks)
        for stage in rank_stages(model, saved.plan, pipeline_rank(saved.plan, rank))
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _run(
    saved: SavedPlan, rank: int, device: "torch.device", steps: int
) -> tuple[list["ProbedStepTimes"], int]:
    """Return the times of each step, and the most bytes in one."""
    from meshwright.validate.counting import fake_ranks
    from meshwright.validate.device import DeviceMemory
    from meshwright.validate.probe.stage_clock import StageClock, stages_seen
    from meshwright.validate.programs import build_program
    from meshwright.validate.programs.contract import ProgramRequest

    memory = DeviceMemory(device)
    with fake_ranks(rank, saved.plan.world_size):
        program = build_program(ProgramRequest.of(saved, rank, device, initialise=True))
        with stages_seen() as stages:
            program.run_step(0)
        memory.forget_peaks()
        clock = StageClock(device, stages)
        times = []
        with clock.running():
            for step in range(1, steps + 1):
                program.run_step(step)
                times.append(clock.end_step())
        if memory.has_allocator:
            return times, memory.peaks()["requested"]
        return times, _live_peak_bytes(program)


def _live_peak_bytes(program: "RankProgram") -> int:
    """Return the most bytes of live tensors in one more step."""
    from meshwright.validate.counting import RankOracle

    oracle = RankOracle(program.groups)
    with oracle:
        for _ in run_counted(program, oracle, num_steps=1):
            pass  # what it counts is kept
    return oracle.peak_bytes
