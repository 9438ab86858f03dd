"""A user's own script as one rank of a world: run, counted, and stopped after some steps."""

import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.simulator import PlanError
from meshwright.validate.counting import (
    Memories,
    RankOracle,
    StorageGroup,
    fake_tensors,
    gpu_kernels,
    library_on_fakes,
    tensors_in,
)
from meshwright.validate.ranks import ByteKind, RankMeasurement
from meshwright.validate.scripts.gpu import GpuNames, NoGpu, without_gpu
from meshwright.validate.scripts.host import HostValues
from meshwright.validate.scripts.libraries import libraries_answered
from meshwright.validate.scripts.process_groups import GroupNames, groups_on_demand
from meshwright.validate.scripts.steps import ScriptSteps, StepsCounted
from meshwright.validate.scripts.torchrun import as_rank, launched, run_script

MOST_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptRun:
    """What to run, and as whom.

    Args:
        words: The script and its arguments, or ``-m``, a module and its.
        rank: Which one, from 0.
        world_size: How many there are.
        num_steps: Steps to run; the last is counted.
        groups: Names of process groups by their ranks, where somebody has names.
    """

    words: tuple[str, ...]
    rank: int
    world_size: int
    num_steps: int
    groups: dict[tuple[int, ...], str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptCount:
    """What a script was seen to do.

    Args:
        run: What was run.
        measurement: Of the last step.
        flops_by_operator: Its FLOPs, by operator.
        largest: The tensors that took most bytes at its peak, largest first.
        notes: What the script was answered without data, where, and how often.
    """

    run: ScriptRun
    measurement: RankMeasurement
    flops_by_operator: dict[str, int]
    largest: tuple[StorageGroup, ...]
    notes: tuple[tuple[str, str, int], ...]


class ScriptMemories(Memories):
    """Tensors with data are the host's, until the script puts them on its GPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and tensor not in self.device


class ScriptOracle(RankOracle):
    """Counts a script, whose groups get their names as they are made."""

    def __init__(self, names: GroupNames) -> None:
        super().__init__({})
        self.memories = ScriptMemories()
        self._names = names

    def axis_of(self, ranks: tuple[int, ...]) -> str:
        """Return the name of a group."""
        return self._names.name(ranks)

    def put_on_device(self, tensor: torch.Tensor) -> None:
        """Count a tensor as the device's from now on."""
        for local in tensors_in(tensor):
            self.memories.device.add(local, ByteKind.ACTIVATIONS, "a copy from the host")


def count_script(run: ScriptRun, progress: Callable[[int], None]) -> ScriptCount:
    """Run a script as one rank, on tensors without data, and return what its last step does.

    What it prints goes to standard error.  An exception of the script comes out as it is.

    Raises:
        PlanError: If it ends before it has made its steps, or asks for what only data can answer.
    """
    names = GroupNames(run.world_size, run.groups)
    oracle, values = ScriptOracle(names), HostValues()
    steps = ScriptSteps(oracle, run.num_steps, progress)
    memory = oracle.memories.device
    gpu = NoGpu(
        int(launched(run.rank, run.world_size)["LOCAL_RANK"]),
        run.world_size,
        lambda: memory.live_bytes,
        lambda: memory.peak_bytes,
    )
    on_gpu = GpuNames(oracle.put_on_device)
    with ExitStack() as stack:
        for context in (
            redirect_stdout(sys.stderr),
            as_rank(run.words, run.rank, run.world_size),
            groups_on_demand(run.rank, run.world_size, names),
            library_on_fakes(),
            gpu_kernels(),
            libraries_answered(values),
            without_gpu(gpu, on_gpu),
            fake_tensors(),
            values,
            steps.followed(),
            oracle,
        ):
            stack.enter_context(context)
        try:
            run_script(run.words)
        except StepsCounted:
            return _result(run, oracle, values)
        except SystemExit as end:
            if end.code:
                raise
    raise PlanError(
        f"the script ended after {steps.num_done} of {run.num_steps} steps of an optimizer; "
        "allowed: a script that trains, or fewer --steps"
    )


def _result(run: ScriptRun, oracle: RankOracle, values: HostValues) -> ScriptCount:
    memories = oracle.memories
    return ScriptCount(
        run=run,
        measurement=RankMeasurement(
            rank=run.rank,
            world_size=run.world_size,
            backend="fake",
            flops=oracle.flops,
            collectives=oracle.collectives,
            peak_bytes=oracle.peak_bytes,
            bytes_at_peak=oracle.bytes_at_peak,
            host_bytes=memories.host.peak_bytes,
            host_traffic=memories.traffic,
            versions={"torch": torch.__version__},
        ),
        flops_by_operator=oracle.flops_by_operator,
        largest=tuple(oracle.largest_at_peak(MOST_SHOWN)),
        notes=tuple((what, where, n) for (what, where), n in sorted(values.notes.items())),
    )
