"""Times of the passes of each virtual stage of a running program."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from meshwright.validate.programs.layers import VirtualStage

FORWARD, FORWARD_END = "forward", "forward end"
BACKWARD, BACKWARD_END = "backward", "backward end"
STEP_END = "step end"
Reading: TypeAlias = "float | torch.cuda.Event"


class Mark(NamedTuple):
    """Begin or end of a pass: event, stage (-1 where of none) and clock reading."""

    event: str
    stage: int
    reading: Reading


class Passes(NamedTuple):
    """Seconds of each forward and each backward of a virtual stage."""

    forward_s: list[float]
    backward_s: list[float]


class ProbedStepTimes(NamedTuple):
    """Compute seconds of a rank in a step; ``update_s`` is all after the last backward."""

    stages: list[Passes]
    update_s: float


class StageClock:
    """Reads the clock around the passes of stages: on a GPU that of its stream.

    Args:
        device: Device of the stages.
        stages: Virtual stages in model order.
    """

    def __init__(self, device: torch.device, stages: Sequence[VirtualStage]) -> None:
        self._on_gpu = device.type == "cuda"
        self._device, self._stages = device, stages
        self._marks: list[Mark] = []
        self._in_backward = -1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Read the clock in what runs inside."""
        backward = torch.autograd.backward

        def timed(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of torch's
            self._in_backward = -1
            begin = len(self._marks)
            self._mark(BACKWARD, -1)
            backward(*args, **kwargs)
            self._marks[begin] = self._marks[begin]._replace(stage=self._in_backward)
            self._mark(BACKWARD_END, self._in_backward)

        with ExitStack() as hooks:
            for index, stage in enumerate(self._stages):
                hooks.enter_context(stage.register_forward_pre_hook(partial(self._begin, index)))
                hooks.enter_context(stage.register_forward_hook(partial(self._end, index)))
            hooks.enter_context(patch.object(torch.autograd, "backward", timed))
            yield

    def end_step(self) -> ProbedStepTimes:
        """Return the times of the step that has just run."""
        self._mark(STEP_END, -1)
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        marks, self._marks = self._marks, []
        passes = [Passes([], []) for _ in self._stages]
        update_s = 0.0
        for index, (begin, after) in enumerate(pairwise(marks)):
            if begin.event == FORWARD:
                # The loss comes after the stage with the head, and belongs to its pass.
                has_head = self._stages[begin.stage].head is not None
                end = marks[index + 2] if has_head else after
                passes[begin.stage].forward_s.append(_seconds(begin, end))
            elif begin.event == BACKWARD:
                assert begin.stage >= 0
                passes[begin.stage].backward_s.append(_seconds(begin, after))
            elif after.event == STEP_END:
                update_s = _seconds(begin, after)
        return ProbedStepTimes(passes, update_s)

    def _begin(self, stage: int, _module: nn.Module, _inputs: object) -> None:
        self._mark(FORWARD, stage)

    def _end(self, stage: int, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        self._mark(FORWARD_END, stage)
        # A call of backward is known to be of this stage once its output's gradient arrives.
        output.register_hook(partial(self._note_backward, stage))

    def _note_backward(self, stage: int, _gradient: Tensor) -> None:
        self._in_backward = stage

    def _mark(self, event: str, stage: int) -> None:
        reading: Reading = time.perf_counter()
        # The host runs ahead of the GPU: only events on the stream have its time.
        if self._on_gpu:
            reading = torch.cuda.Event(enable_timing=True)
            reading.record(torch.cuda.current_stream(self._device))
        self._marks.append(Mark(event, stage, reading))


@contextmanager
def stages_seen() -> Iterator[list[VirtualStage]]:
    """Yield a list that gets the stages that run inside, in model order when it ends."""
    stages: list[VirtualStage] = []

    def look(module: nn.Module, _inputs: object) -> None:
        if isinstance(module, VirtualStage) and module not in stages:
            stages.append(module)

    with register_module_forward_pre_hook(look):
        yield stages
    stages.sort(key=_first_layer)


def _first_layer(stage: VirtualStage) -> float:
    if stage.embedding is not None:
        return -1
    return min((int(name) for name in stage.layers), default=inf)


def _seconds(begin: Mark, end: Mark) -> float:
    first, last = begin.reading, end.reading
    if isinstance(first, float) or isinstance(last, float):
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first
    return float(first.elapsed_time(last)) / 1e3
