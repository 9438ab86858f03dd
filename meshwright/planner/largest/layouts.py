"""The largest value for which some layout of a space fits, and the fastest layouts at it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import lcm, prod
from typing import NamedTuple, TypeAlias, cast

import numpy as np

from meshwright.hwprofiles import Cluster, StackProfile, StageSplit, Strategy, format_bytes
from meshwright.planner.footprint import device_bytes_column, peak_bytes
from meshwright.planner.largest.climb import last_that_fits
from meshwright.planner.largest.quantity import (
    MOST_SEQUENCES,
    Largest,
    deeper_job,
    least_layers,
    microbatch_ranges,
    most_layers,
    most_tokens,
    step_tokens,
    stretches,
)
from meshwright.planner.search import Progress, SearchResult, search, with_kernels
from meshwright.planner.space import (
    Column,
    ShapeTable,
    Space,
    SpaceLimits,
    enumerate_space,
    lacks,
)
from meshwright.simulator import PlanError, TrainingJob
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.layout import TP_CP, Axis, Quantity
from meshwright.simulator.memory import usable_bytes


@dataclass(frozen=True, slots=True)
class Ground:
    """A job, what its layouts are laid out on, and which of them are searched."""

    job: TrainingJob
    cluster: Cluster
    stack: StackProfile
    num_gpus: int
    limits: SpaceLimits
    memory_limit_bytes: int | None

    def space(self, job: TrainingJob, limits: SpaceLimits) -> Space:
        """Return the layouts of *job* that the stack offers."""
        space = enumerate_space(job, self.stack, self.num_gpus, limits)
        return space.chosen(np.flatnonzero(~lacks(space)))

    def spare_bytes(self, space: Space) -> Column:
        """Return what each layout of *space* leaves of a device's memory; below 0 it lacks some."""
        peaks = peak_bytes(space, ShapeTable.of(space), BlockTable())
        needed = device_bytes_column(space, self.cluster, peaks)
        most = usable_bytes(self.cluster, self.memory_limit_bytes)
        return np.asarray(most - needed, np.int64)


class Stair(NamedTuple):
    """Values along which the memory of each of some layouts only grows.

    Args:
        step: Values are its multiples.
        first: The least.
        last: The largest.
        layouts: Returns the layouts at the first value.
        at: Returns layouts at another value.
    """

    step: int
    first: int
    last: int
    layouts: Callable[[], Space]
    at: Callable[[Space, int], Space]


class Growth(NamedTuple):
    """How the layouts of a space change with a quantity.

    Args:
        stairs: They have all layouts at all values between them.
        job: Returns the job at a value.
        limits: Returns what is searched at a value, of which some layouts fit if there are any.
        end: The largest value there is, and why.
        steps: Each value is a multiple of one of them.
        how: What is held, in words.
    """

    stairs: Iterator[Stair]
    job: Callable[[int], TrainingJob]
    limits: Callable[[int, Space | None], SpaceLimits]
    end: tuple[int, str]
    steps: list[int]
    how: str = ""


class Top(NamedTuple):
    """The largest value of a stair, and the layouts that fit there as they are at its first."""

    value: int
    stair: Stair
    layouts: Space


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _cuts(space: Space) -> Column:
    """Return of what the sequences of each layout must be multiples (`check_sharding`)."""
    cp = space.column(Axis.CP)
    halves = np.where(cp > 1, 2 * cp, 1)
    split = np.where(space.column("sequence_parallel"), space.column(TP_CP), 1)
    return np.asarray(np.lcm(halves, split), np.int64)


def _longer(ground: Ground) -> Growth:
    """Return how layouts change with longer sequences, which are cut at any length."""
    unit, limits = step_tokens(ground.job), ground.limits
    if ground.stack.context_parallel and not limits.asks_for(Axis.CP):
        limits = limits.pinned(max_cp=ground.num_gpus)
    steps = {lcm(unit, cut) for each in _divisors(ground.num_gpus) for cut in (each, 2 * each)}

    def job(value: int) -> TrainingJob:
        return replace(ground.job, seq_len=value)

    def at(layouts: Space, value: int) -> Space:
        return replace(layouts, job=job(value))

    def layouts(step: int, first: int) -> Space:
        space = ground.space(job(first), limits)
        own = np.lcm(unit, _cuts(space))
        # Those of smaller steps have these values on stairs of their own.
        return space.chosen(np.flatnonzero((step % own == 0) & (own == step).any()))

    stairs = (
        Stair(step, first, last, partial(layouts, step, first), at)
        for low, high in stretches(ground.job)
        for step in sorted(steps, reverse=True)
        if (first := -(-low // step) * step) <= (last := high // step * step)
    )
    return Growth(stairs, job, lambda _value, _fit: limits, most_tokens(ground.job), sorted(steps))


def _more_at_once(ground: Ground) -> Growth:
    """Return how layouts without gradient accumulation change with more sequences in a step."""
    limits, name = ground.limits, "microbatch_size"
    degrees = [each for each in _divisors(ground.num_gpus) if limits.allows(Axis.DP, each)]

    def job(value: int) -> TrainingJob:
        return replace(ground.job, global_batch_size=value)

    def at(layouts: Space, value: int) -> Space:
        columns = {**layouts.columns, name: value // layouts.column(Axis.DP)}
        return replace(layouts, job=job(value), columns=columns)

    def layouts(dp: int, size: int) -> Space:
        return ground.space(job(dp * size), limits.pinned(dp=(dp,), microbatch_size=(size,)))

    def searched(value: int, fit: Space | None) -> SpaceLimits:
        replicas = sorted({*degrees} if fit is None else {*fit.column(Axis.DP).tolist()})
        sizes = {value // dp for dp in replicas if value % dp == 0}
        return limits.pinned(dp=tuple(replicas), microbatch_size=tuple(sorted(sizes)))

    stairs = (
        Stair(dp, dp * low, dp * high, partial(layouts, dp, low), at)
        for dp in sorted(degrees, reverse=True)
        for low, high in _sizes(limits, MOST_SEQUENCES // dp)
    )
    end = MOST_SEQUENCES, f"batches beyond {MOST_SEQUENCES:,} sequences are not looked at"
    return Growth(stairs, job, searched, end, degrees, "one microbatch a replica; ")


def _deeper(ground: Ground) -> Growth:
    """Return how layouts change with more layers, as many on each stage.

    Interleaved layouts hold more than others of as many stages: they are looked at if asked for.
    """
    limits, most = ground.limits, most_layers(ground.job)
    least = least_layers(ground.job.transformer)
    counts = cast("tuple[int, ...]", limits.values("num_virtual_stages") or (1,))
    degrees = [each for each in _divisors(ground.num_gpus) if limits.allows(Axis.PP, each)]
    stages = [(pp, vpp) for pp in degrees for vpp in counts if pp > 1 or vpp == 1]

    def at(layouts: Space, value: int) -> Space:
        return replace(layouts, job=deeper_job(ground.job, value))

    def layouts(pp: int, vpp: int, first: int) -> Space:
        pins = {"pp": (pp,), "num_virtual_stages": (vpp,), "stages": (StageSplit.EVEN,)}
        return ground.space(deeper_job(ground.job, first), limits.pinned(**pins))

    stairs = (
        Stair(step, first, most[0] // step * step, partial(layouts, pp, vpp, first), at)
        for pp, vpp in sorted(stages, key=prod, reverse=True)
        if (first := -(-least // (step := pp * vpp)) * step) <= most[0]
    )
    return Growth(
        stairs,
        partial(deeper_job, ground.job),
        lambda _value, _fit: limits,
        most,
        sorted({prod(each) for each in stages}),
        "stages of as many layers each; ",
    )


def _sizes(limits: SpaceLimits, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of microbatch sizes in which layouts are the same.

    Of one sequence alone some tensors are views that are copies of more (`Tape.copy_tokens`).
    """
    pinned = limits.values("microbatch_size")
    if pinned is not None:
        yield from ((cast("int", each), cast("int", each)) for each in pinned)
        return
    yield from microbatch_ranges(min(most, limits.most("microbatch_size") or most))


GROWTHS = {
    Quantity.SEQ_LEN: _longer,
    Quantity.GLOBAL_BATCH: _more_at_once,
    Quantity.LAYERS: _deeper,
}


def find_largest(  # noqa: PLR0913 -- the public entry; what is optional is keyword-only
    job: TrainingJob,
    cluster: Cluster,
    stack: StackProfile,
    num_gpus: int,
    quantity: Quantity,
    *,
    limits: SpaceLimits | None = None,
    memory_limit_bytes: int | None = None,
    top: int = 10,
    progress: Progress | None = None,
) -> tuple[Largest, SearchResult]:
    """Return the largest value for which some layout fits, and the search at that value.

    Feasibility is decided by the exact memory of layouts, without simulating any.  Where nothing
    fits the search is that at the smallest value.

    Args:
        job: What is trained, but for the quantity.
        cluster: On what.
        stack: With what software.
        num_gpus: Devices that every layout occupies.
        quantity: What grows: the length of sequences, the microbatch of the job's global batch,
            the global batch without gradient accumulation, one microbatch a replica, or the layers
            of the model.
        limits: What of the space to search.
        memory_limit_bytes: What a device may use; by default all that processes can have.
        top: Layouts to report.
        progress: Called with what is being done, how much is done, and of how much.

    Raises:
        PlanError: If the quantity does not go with model, stack or limits, or as `search` does.
    """
    if stack.strategy is not Strategy.MESH:
        raise PlanError(
            f"--max {quantity} of a search does not go with stack {stack.name}, whose ranks are no "
            "mesh; allowed: --max of simulate"
        )
    asked = limits or SpaceLimits()
    kernels = with_kernels(job, asked, cluster, stack)
    ground = Ground(job, cluster, stack, num_gpus, kernels, memory_limit_bytes)
    tell = progress or (lambda _what, _done, _total: None)
    found, at, searched = (
        _microbatch(ground, asked)
        if quantity is Quantity.MICRO_BATCH
        else _grown(ground, quantity, tell)
    )
    result = search(
        at,
        cluster,
        stack,
        num_gpus,
        limits=searched,
        memory_limit_bytes=memory_limit_bytes,
        top=top,
        progress=progress,
    )
    return found, result


Found: TypeAlias = tuple[Largest, TrainingJob, SpaceLimits]


def _microbatch(ground: Ground, asked: SpaceLimits) -> Found:
    """Return the largest microbatch: all that divide a replica's sequences are in the space."""
    if asked.values("microbatch_size") is not None:
        raise PlanError(f"--max {Quantity.MICRO_BATCH} and --micro-batch contradict each other")
    space = ground.space(ground.job, ground.limits)
    spare, sizes = ground.spare_bytes(space), space.column("microbatch_size")
    fitting = sizes[spare >= 0]
    value = int(fitting.max()) if len(fitting) else None
    larger = sizes[sizes > (value or 0)]
    following = int(larger.min()) if len(larger) else None
    if following is None:
        why = f"no replica has more of {ground.job.global_batch_size:,} sequences"
    else:
        why = _lack(following, int(spare[sizes == following].max()))
    found = Largest(quantity=Quantity.MICRO_BATCH, value=value, next_value=following, why=why)
    pins = ground.limits if value is None else asked.pinned(microbatch_size=(value,))
    return found, ground.job, pins


def _grown(ground: Ground, quantity: Quantity, tell: Progress) -> Found:
    growth = GROWTHS[quantity](ground)
    top: Top | None = None
    least = growth.end[0]
    for stair in growth.stairs:
        least = min(least, stair.first)
        if top is None or stair.last > top.value:
            top = _climbed(ground, stair, top, partial(tell, f"looking for the largest {quantity}"))
    value = None if top is None else top.value
    above = [((value or 0) // step + 1) * step for step in growth.steps]
    most, why = growth.end
    following = min((each for each in above if each <= most), default=None)
    if following is not None:
        why = f"{growth.how}{_reason(ground, top, following)}"
    found = Largest(quantity=quantity, value=value, next_value=following, why=why)
    at = least if value is None else value
    return found, growth.job(at), growth.limits(at, None if top is None else top.layouts)


def _climbed(
    ground: Ground, stair: Stair, top: Top | None, tell: Callable[[int, int], None]
) -> Top | None:
    """Return the top of a stair if it is higher than *top*, else *top*."""
    layouts = stair.layouts()

    def fits(value: int) -> bool:
        """Whether some layout fits at *value*; those that do not cannot fit at larger ones."""
        nonlocal layouts
        tell(value, 0)
        if not len(layouts):
            return False
        spare = ground.spare_bytes(stair.at(layouts, value))
        if (spare >= 0).any():
            layouts = layouts.chosen(np.flatnonzero(spare >= 0))
        return bool((spare >= 0).any())

    if not fits(stair.first):
        return top
    start = stair.first
    if top is not None:
        start = max(start, (top.value // stair.step + 1) * stair.step)
    value = last_that_fits(start, stair.last, stair.step, fits)
    return top if value is None else Top(value, stair, layouts)


def _reason(ground: Ground, top: Top | None, following: int) -> str:
    """Return why the value that follows a top does not fit."""
    if top is None:
        return f"no layout fits at {following:,}"
    stair, after = top.stair, top.value + top.stair.step
    if after != following or after > stair.last:
        return f"no layout fits at {following:,}"
    return _lack(after, int(ground.spare_bytes(stair.at(top.layouts, after)).max()))


def _lack(value: int, spare_bytes: int) -> str:
    return f"at {value:,} the nearest layout lacks {format_bytes(-spare_bytes)}"
