"""Boxes of the pipeline timeline of a step: their colours, and their lanes of ranks."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from matplotlib.colors import to_hex, to_rgb
from numpy.typing import NDArray

from meshwright.hwprofiles import PS_PER_S
from meshwright.planner.plots import canvas
from meshwright.simulator import Phase, StepResult
from meshwright.simulator.account import rank_passes
from meshwright.simulator.engine import SpanKind

MESSAGES = "pipeline messages"
WAIT = "wait for replicas"
TENSOR_SUM = SpanKind.TENSOR_SUM.value
OPTIMIZER = SpanKind.OPTIMIZER.value
OVERHEAD = "step overhead"
GATHER = SpanKind.PARAMETER_GATHER.value
REDUCTION = SpanKind.GRADIENT_REDUCTION.value
OTHER_COLLECTIVES = "gradient norm, tied table"
OTHER_COLOURS = {
    MESSAGES: canvas.YELLOW,
    WAIT: canvas.PURPLE,
    TENSOR_SUM: "#8FD3BE",
    OPTIMIZER: canvas.GREEN,
    OVERHEAD: canvas.DARK_GREY,
}
COLLECTIVE_COLOURS = {
    GATHER: canvas.INK,  # what is often thinner than a pixel needs contrast
    REDUCTION: canvas.VERMILION,
    OTHER_COLLECTIVES: canvas.SKY,
}
HUES = {1: canvas.BLUE, -1: canvas.ORANGE, 0: canvas.GREY}  # of phases, by their direction
PALEST_FRACTION = 0.62  # of the way to white: the last of many virtual stages


class Box(NamedTuple):
    """Stretch of a rank's row; ``number`` is its microbatch, -1 for none."""

    rank: int
    start_s: float
    end_s: float
    number: int = -1


def corners_of(
    across: tuple[float, float], along: tuple[float, float]
) -> list[tuple[float, float]]:
    """Return the corners of the shape between two times and two heights."""
    (left, right), (top, bottom) = across, along
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


class ColouredBoxes(NamedTuple):
    """Boxes of one colour and their name; collectives have a lane of their own."""

    name: str
    colour: str
    boxes: tuple[Box, ...]

    @property
    def is_collective(self) -> bool:
        """True if they are drawn in the lane of collectives, below computation."""
        return self.name in COLLECTIVE_COLOURS


class Window(NamedTuple):
    """A stretch of the step."""

    start_s: float
    end_s: float


def timeline_layers(step: StepResult) -> tuple[ColouredBoxes, ...]:
    """Return every box of the timeline, one layer a colour; empty ones are left out."""
    colours = _pass_colours(step) | OTHER_COLOURS | COLLECTIVE_COLOURS
    boxes: dict[str, list[Box]] = {name: [] for name in colours}
    for pp_rank in range(step.plan.pp):
        for name, start_ps, end_ps, number in _rank_boxes(step, pp_rank):
            if end_ps > start_ps:
                box = Box(pp_rank, start_ps / PS_PER_S, end_ps / PS_PER_S, number)
                boxes[name].append(box)
    return tuple(
        ColouredBoxes(name, colours[name], tuple(each)) for name, each in boxes.items() if each
    )


def _rank_boxes(step: StepResult, pp_rank: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield layer, start, end and number of each box in one row."""
    assert step.work is not None  # a pipeline has both
    assert step.times is not None
    rank, count = step.times.ranks[pp_rank], step.plan.num_virtual_stages
    for each in rank_passes(step.work.ranks[pp_rank], rank):
        phase, virtual_stage, microbatch = each.action
        for computed in each.computed:
            yield _pass_name(phase, virtual_stage, count), *computed, microbatch
        for wait in each.waits:
            yield WAIT, *wait, -1
    # Only messages that block take time of a rank's own row.
    if step.work.blocking_messages:
        for start_ps, end_ps in rank.sent_ps:
            yield MESSAGES, start_ps, end_ps, -1
    for span in rank.closing:
        # What ends a step is work of the rank, or waiting for other replicas.
        name = span.kind if span.kind in OTHER_COLOURS else WAIT
        yield name, span.start_ps, span.end_ps, -1
    end_ps = max(each.end_ps for each in step.times.ranks)
    yield OVERHEAD, end_ps, step.step_ps, -1
    for span in rank.streams().data_parallel:
        name = span.kind if span.kind in COLLECTIVE_COLOURS else OTHER_COLLECTIVES
        yield name, span.start_ps, span.end_ps, -1


def _pass_name(phase: Phase, virtual_stage: int, num_virtual_stages: int) -> str:
    name = phase.label
    return name if num_virtual_stages == 1 else f"{name}, virtual stage {virtual_stage}"


def _pass_colours(step: StepResult) -> dict[str, str]:
    """Return the colour of each kind of pass: a hue a direction, paler for later stages."""
    count = step.plan.num_virtual_stages
    return {
        _pass_name(phase, virtual_stage, count): _paler(
            HUES[phase.direction], PALEST_FRACTION * virtual_stage / max(1, count - 1)
        )
        for phase in Phase
        for virtual_stage in range(count)
    }


def _paler(colour: str, fraction: float) -> str:
    """Return a colour mixed with white; *fraction* 1 is white."""
    red, green, blue = (channel + (1 - channel) * fraction for channel in to_rgb(colour))
    return to_hex((red, green, blue))


def column_shares(
    boxes: tuple[Box, ...], window: Window, pp: int, num_columns: int
) -> NDArray[np.float64]:
    """Return the share of each column of time that *boxes* fill, by rank.

    Args:
        boxes: Of one rank in order of time and disjoint.
        window: What the columns cover.
        pp: Pipeline ranks.
        num_columns: Equal stretches of time.

    >>> column_shares((Box(0, 1.0, 2.5),), Window(0.0, 4.0), 1, 4).tolist()
    [[0.0, 1.0, 0.5, 0.0]]
    """
    edges_s = np.linspace(window.start_s, window.end_s, num_columns + 1)
    shares = np.zeros((pp, num_columns))
    rows = np.array(boxes)
    for rank in range(pp):
        times_s = rows[rows[:, 0] == rank, 1:3]
        if times_s.size:
            ends_s = np.cumsum(times_s[:, 1] - times_s[:, 0])
            busy_s = np.stack((ends_s - (times_s[:, 1] - times_s[:, 0]), ends_s), axis=1)
            # Busy time before each edge of a column, from a piecewise-linear running sum.
            until_s = np.interp(edges_s, times_s.ravel(), busy_s.ravel())
            shares[rank] = np.diff(until_s) / np.diff(edges_s)
    return shares
