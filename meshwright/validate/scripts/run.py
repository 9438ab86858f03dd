"""A user's own script as one rank of a world: run, counted, and stopped after some steps."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.hwprofiles import counted
from meshwright.simulator import PlanError
from meshwright.validate.counting import (
    RankOracle,
    StorageGroup,
    fake_tensors,
    gpu_kernels,
    library_on_fakes,
    measurement_of,
)
from meshwright.validate.ranks import SCRIPT_STEPS, RankMeasurement
from meshwright.validate.scripts.gpu import (
    GpuNames,
    ScriptMemories,
    ScriptTensors,
    gpu_attention,
    gpu_autocast,
    gpu_of_fakes,
    idle_gpu,
)
from meshwright.validate.scripts.libraries import libraries_answered
from meshwright.validate.scripts.mail import (
    MissingObjectError,
    ObjectExchange,
    ObjectKey,
    ObjectSentError,
)
from meshwright.validate.scripts.process_groups import GroupNames, groups_on_demand
from meshwright.validate.scripts.steps import ScriptSteps, StepsCounted
from meshwright.validate.scripts.torchrun import (
    as_rank,
    check_script,
    launched,
    launches_answered,
    run_script,
)

MOST_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptRun:
    """Script to run, and the rank and world size that it sees.

    Args:
        words: The script and its arguments, or ``-m``, a module and its.
        rank: Rank, from 0.
        world_size: Number of ranks.
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
    """Counts of a script.

    Args:
        run: Run that was counted.
        measurement: Of the last step.
        flops_by_operator: Its FLOPs, by operator.
        largest: Tensors that took most bytes at its peak, largest first.
        notes: Answers that the script was given without data, where, and how often.
    """

    run: ScriptRun
    measurement: RankMeasurement
    flops_by_operator: dict[str, int]
    largest: tuple[StorageGroup, ...]
    notes: tuple[tuple[str, str, int], ...]


class ScriptFailedError(Exception):
    """A script ended by an exception of its own, its cause.

    Args:
        num_steps: Steps that it had made.
    """

    def __init__(self, num_steps: int) -> None:
        super().__init__(f"the script failed after {counted(num_steps, 'step')}")


class ScriptOracle(RankOracle):
    """Counts a script, whose groups get their names as they are made."""

    def __init__(self, names: GroupNames, memories: ScriptMemories) -> None:
        super().__init__({})
        self.memories = memories
        self._names = names

    def __torch_dispatch__(self, *call: Any) -> object:  # noqa: ANN401
        """Count one operator, which is no longer to be answered for a GPU."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            return super().__torch_dispatch__(*call)

    def axis_of(self, ranks: tuple[int, ...]) -> str:
        """Return the name of a group."""
        return self._names.name(ranks)


def count_script(run: ScriptRun, progress: Callable[[int], None]) -> ScriptCount:
    """Run a script as one rank, on tensors without data; return the counts of its last step.

    What it prints goes to standard error. Where it waits for an object of another rank, it is run
    as that one first, until that has sent it.

    Raises:
        ScriptFailedError: If it raises, or ends with a status of failure.
        PlanError: If it ends before it has made its steps, or asks for what only data can answer.
    """
    mail, wanted = ObjectExchange(), list[ObjectKey]()
    while True:
        key = wanted[-1] if wanted else None
        runner = replace(run, rank=key.source) if key else run
        try:
            count = _count(runner, mail.delivered(runner.rank, key), progress)
        except ObjectSentError:
            wanted.pop()
        except MissingObjectError as missing:
            if missing.letter in wanted:
                raise PlanError(f"ranks wait for each other's objects: {missing.letter}") from None
            wanted.append(missing.letter)
        else:
            if key is None:
                return count
            raise PlanError(f"rank {key.source} never sends what rank {key.target} waits for")


def _count(
    run: ScriptRun, mail: AbstractContextManager[None], progress: Callable[[int], None]
) -> ScriptCount:
    names = GroupNames(run.world_size, run.groups)
    memories = ScriptMemories()
    oracle, fakes = ScriptOracle(names, memories), fake_tensors()
    tensors = ScriptTensors(memories, fakes)
    steps = ScriptSteps(oracle, run.num_steps, progress)
    contexts = (  # of dispatch modes the last one sees an operator first
        redirect_stdout(sys.stderr),
        as_rank(run.words, run.rank, run.world_size),
        launches_answered(run.rank, run.world_size),
        groups_on_demand(run.rank, run.world_size, names),
        library_on_fakes(),
        mail,
        *_gpu(run, memories),
        libraries_answered(tensors),
        fakes,
        tensors,
        GpuNames(memories, _gpu_number(run)),
        steps.followed(),
        oracle,
    )
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        try:
            run_script(run.words)
        except StepsCounted:
            return _result(run, oracle, tensors)
        except PlanError:  # of a launcher
            raise
        except (Exception, SystemExit) as error:
            if tensors.refused is not None:
                raise tensors.refused from error
            if not isinstance(error, SystemExit) or error.code:
                raise ScriptFailedError(steps.num_done) from error
    if tensors.refused is not None:
        raise tensors.refused
    raise PlanError(
        f"the script ended after {steps.num_done} of {counted(run.num_steps, 'step')} of an "
        "optimizer; allowed: a script that trains, or fewer --steps"
    )


def _gpu(run: ScriptRun, memories: ScriptMemories) -> Iterator[AbstractContextManager[object]]:
    number = _gpu_number(run)
    yield gpu_kernels()
    yield gpu_of_fakes(number)
    yield gpu_attention(memories)
    yield gpu_autocast(memories)
    count = int(launched(run.rank, run.world_size)["LOCAL_WORLD_SIZE"])
    yield idle_gpu(number, count, memories)


def _gpu_number(run: ScriptRun) -> int:
    return int(launched(run.rank, run.world_size)["LOCAL_RANK"])


def _result(run: ScriptRun, oracle: RankOracle, tensors: ScriptTensors) -> ScriptCount:
    """Return the counts; of a script that never names a GPU, those of its host."""
    memories = oracle.memories
    has_gpu = memories.device.peak_bytes > 0
    place = memories.device if has_gpu else memories.host
    return ScriptCount(
        run=run,
        measurement=replace(
            measurement_of(oracle, run.rank, run.world_size),
            peak_bytes=place.peak_bytes,
            bytes_at_peak=place.bytes_at_peak(),
            host_bytes=memories.host.peak_bytes if has_gpu else 0,
            versions={"torch": torch.__version__},
        ),
        flops_by_operator=oracle.flops_by_operator,
        largest=tuple(place.largest_at_peak(MOST_SHOWN)),
        notes=tuple((what, where, n) for (what, where), n in sorted(tensors.notes.items())),
    )


def count(
    *words: str, rank: int = 0, world_size: int = 1, num_steps: int = SCRIPT_STEPS
) -> ScriptCount:
    """Return FLOPs, communication and bytes of one rank in a step of a script, without GPUs.

    Args:
        words: The script and its arguments, as after ``torchrun``.
        rank: Rank that the script sees.
        world_size: Number of ranks.
        num_steps: Optimizer steps to run; the last is counted.

    Raises:
        ScriptFailedError: If it raises, or ends with a status of failure.
        PlanError: If it cannot be counted.
    """
    check_script(words)
    run = ScriptRun(words=words, rank=rank, world_size=world_size, num_steps=num_steps)
    return count_script(run, lambda _done: None)
