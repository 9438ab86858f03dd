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
class SearchCase:
    """Job, cluster, stack and limits of a search for the largest value."""

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
        """Return the free device memory of each layout of *space*; negative where it lacks some."""
        peaks = peak_bytes(space, ShapeTable.of(space), BlockTable())
        needed = device_bytes_column(space, self.cluster, peaks)
        most = usable_bytes(self.cluster, self.memory_limit_bytes)
        return np.asarray(most - needed, np.int64)


class ValueRange(NamedTuple):
    """Values along which the memory of each of some layouts only grows.

    Args:
        step: Distance of values, which are its multiples.
        first: Smallest value.
        last: Largest value.
        layouts: Returns the layouts at the first value.
        at: Returns layouts at another value.
    """

    step: int
    first: int
    last: int
    layouts: Callable[[], Space]
    at: Callable[[Space, int], Space]


class Growth(NamedTuple):
    """Layouts of a space as a function of a quantity.

    Args:
        value_ranges: Ranges that cover all layouts at all values between them.
        job: Returns the job at a value.
        limits: Returns the limits of the search at a value, given the layouts that fit, if any.
        end: Largest possible value, and its reason.
        steps: Divisors of which each value is a multiple of one.
        how: Text of the fixed quantities.
    """

    value_ranges: Iterator[ValueRange]
    job: Callable[[int], TrainingJob]
    limits: Callable[[int, Space | None], SpaceLimits]
    end: tuple[int, str]
    steps: list[int]
    how: str = ""


class LargestFit(NamedTuple):
    """Largest value of a range, and the layouts that fit there as they are at its first."""

    value: int
    value_range: ValueRange
    layouts: Space


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _length_multiples(space: Space) -> Column:
    """Return the number of which each layout's sequence length is a multiple (`check_sharding`)."""
    cp = space.column(Axis.CP)
    halves = np.where(cp > 1, 2 * cp, 1)
    split = np.where(space.column("sequence_parallel"), space.column(TP_CP), 1)
    return np.asarray(np.lcm(halves, split), np.int64)


def _growth_of_sequences(case: SearchCase) -> Growth:
    """Return the growth of layouts with longer sequences."""
    unit, limits = step_tokens(case.job), case.limits
    if case.stack.context_parallel and not limits.asks_for(Axis.CP):
        limits = limits.pinned(max_cp=case.num_gpus)
    # Context parallelism needs multiples of twice its degree, sequence parallelism of its ranks.
    steps = {lcm(unit, cut) for each in _divisors(case.num_gpus) for cut in (each, 2 * each)}

    def job(value: int) -> TrainingJob:
        return replace(case.job, seq_len=value)

    def at(layouts: Space, value: int) -> Space:
        return replace(layouts, job=job(value))

    def layouts(step: int, first: int) -> Space:
        space = case.space(job(first), limits)
        own = np.lcm(unit, _length_multiples(space))
        # Those of smaller steps have these values in ranges of their own.
        return space.chosen(np.flatnonzero((step % own == 0) & (own == step).any()))

    value_ranges = (
        ValueRange(step, first, last, partial(layouts, step, first), at)
        for low, high in stretches(case.job)
        for step in sorted(steps, reverse=True)
        if (first := -(-low // step) * step) <= (last := high // step * step)
    )
    return Growth(
        value_ranges, job, lambda _value, _fit: limits, most_tokens(case.job), sorted(steps)
    )


def _growth_of_batches(case: SearchCase) -> Growth:
    """Return the growth of layouts without gradient accumulation with the global batch."""
    limits, name = case.limits, "microbatch_size"
    degrees = [each for each in _divisors(case.num_gpus) if limits.allows(Axis.DP, each)]

    def job(value: int) -> TrainingJob:
        return replace(case.job, global_batch_size=value)

    def at(layouts: Space, value: int) -> Space:
        columns = {**layouts.columns, name: value // layouts.column(Axis.DP)}
        return replace(layouts, job=job(value), columns=columns)

    def layouts(dp: int, size: int) -> Space:
        return case.space(job(dp * size), limits.pinned(dp=(dp,), microbatch_size=(size,)))

    def searched(value: int, fit: Space | None) -> SpaceLimits:
        replicas = sorted({*degrees} if fit is None else {*fit.column(Axis.DP).tolist()})
        sizes = {value // dp for dp in replicas if value % dp == 0}
        return limits.pinned(dp=tuple(replicas), microbatch_size=tuple(sorted(sizes)))

    value_ranges = (
        ValueRange(dp, dp * low, dp * high, partial(layouts, dp, low), at)
        for dp in sorted(degrees, reverse=True)
        for low, high in _sizes(limits, MOST_SEQUENCES // dp)
    )
    end = MOST_SEQUENCES, f"batches beyond {MOST_SEQUENCES:,} sequences are not looked at"
    return Growth(value_ranges, job, searched, end, degrees, "one microbatch a replica; ")


def _growth_of_layers(case: SearchCase) -> Growth:
    """Return the growth of layouts with more layers, equally many on each stage.

    Interleaved layouts hold more than others of as many stages: they are searched if asked for.
    """
    limits, most = case.limits, most_layers(case.job)
    least = least_layers(case.job.transformer)
    counts = cast("tuple[int, ...]", limits.values("num_virtual_stages") or (1,))
    degrees = [each for each in _divisors(case.num_gpus) if limits.allows(Axis.PP, each)]
    stages = [(pp, vpp) for pp in degrees for vpp in counts if pp > 1 or vpp == 1]

    def at(layouts: Space, value: int) -> Space:
        return replace(layouts, job=deeper_job(case.job, value))

    def layouts(pp: int, vpp: int, first: int) -> Space:
        pins = {"pp": (pp,), "num_virtual_stages": (vpp,), "stages": (StageSplit.EVEN,)}
        return case.space(deeper_job(case.job, first), limits.pinned(**pins))

    value_ranges = (
        ValueRange(step, first, most[0] // step * step, partial(layouts, pp, vpp, first), at)
        for pp, vpp in sorted(stages, key=prod, reverse=True)
        if (first := -(-least // (step := pp * vpp)) * step) <= most[0]
    )
    return Growth(
        value_ranges,
        partial(deeper_job, case.job),
        lambda _value, _fit: limits,
        most,
        sorted({prod(each) for each in stages}),
        "stages of as many layers each; ",
    )


def _sizes(limits: SpaceLimits, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of microbatch sizes in which layouts are the same.

    For a single sequence some tensors are views that are copies for more (`Tape.copy_tokens`).
    """
    pinned = limits.values("microbatch_size")
    if pinned is not None:
        yield from ((cast("int", each), cast("int", each)) for each in pinned)
        return
    yield from microbatch_ranges(min(most, limits.most("microbatch_size") or most))


GROWTHS = {
    Quantity.SEQ_LEN: _growth_of_sequences,
    Quantity.GLOBAL_BATCH: _growth_of_batches,
    Quantity.LAYERS: _growth_of_layers,
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

    Feasibility is decided by the exact memory of layouts, without simulation. Where nothing fits
    the search is that at the smallest value.

    Args:
        job: Model, sequence length and batch, but for the quantity.
        cluster: Hardware.
        stack: Software stack.
        num_gpus: Devices that every layout occupies.
        quantity: Quantity that grows: sequence length, the microbatch of the job's global batch,
            the global batch without gradient accumulation, one microbatch a replica, or the layers
            of the model.
        limits: Limits of the search.
        memory_limit_bytes: Limit of a device; by default all that processes can have.
        top: Layouts to report.
        progress: Called with the name of the work, the number done, and the total.

    Raises:
        PlanError: If the quantity does not go with model, stack or limits, or as `search` does.
    """
    if stack.strategy is not Strategy.MESH:
        raise PlanError(
            f"--max {quantity} of a search does not go with stack {stack.name}, whose ranks are no "
            "mesh; allowed: --max of simulate"
        )
    user_limits = limits or SpaceLimits()
    kernels = with_kernels(job, user_limits, cluster, stack)
    case = SearchCase(job, cluster, stack, num_gpus, kernels, memory_limit_bytes)
    tell = progress or (lambda _what, _done, _total: None)
    largest, largest_job, searched = (
        _microbatch(case, user_limits)
        if quantity is Quantity.MICRO_BATCH
        else _climb_all(case, quantity, tell)
    )
    result = search(
        largest_job,
        cluster,
        stack,
        num_gpus,
        limits=searched,
        memory_limit_bytes=memory_limit_bytes,
        top=top,
        progress=progress,
    )
    return largest, result


Found: TypeAlias = tuple[Largest, TrainingJob, SpaceLimits]


def _microbatch(case: SearchCase, asked: SpaceLimits) -> Found:
    """Return the largest microbatch: all that divide a replica's sequences are in the space."""
    if asked.values("microbatch_size") is not None:
        raise PlanError(f"--max {Quantity.MICRO_BATCH} and --micro-batch contradict each other")
    space = case.space(case.job, case.limits)
    spare, sizes = case.spare_bytes(space), space.column("microbatch_size")
    fitting = sizes[spare >= 0]
    value = int(fitting.max()) if len(fitting) else None
    larger = sizes[sizes > (value or 0)]
    next_size = int(larger.min()) if len(larger) else None
    if next_size is None:
        why = f"no replica has more of {case.job.global_batch_size:,} sequences"
    else:
        why = _lack(next_size, int(spare[sizes == next_size].max()))
    found = Largest(quantity=Quantity.MICRO_BATCH, value=value, next_value=next_size, why=why)
    pins = case.limits if value is None else asked.pinned(microbatch_size=(value,))
    return found, case.job, pins


def _climb_all(case: SearchCase, quantity: Quantity, tell: Progress) -> Found:
    """Return the largest value over all ranges of a quantity."""
    growth = GROWTHS[quantity](case)
    top: LargestFit | None = None
    least = growth.end[0]
    for value_range in growth.value_ranges:
        least = min(least, value_range.first)
        if top is None or value_range.last > top.value:
            top = _climb_range(
                case, value_range, top, partial(tell, f"looking for the largest {quantity}")
            )
    value = None if top is None else top.value
    above = [((value or 0) // step + 1) * step for step in growth.steps]
    most, why = growth.end
    following = min((each for each in above if each <= most), default=None)
    if following is not None:
        why = f"{growth.how}{_reason(case, top, following)}"
    found = Largest(quantity=quantity, value=value, next_value=following, why=why)
    at = least if value is None else value
    return found, growth.job(at), growth.limits(at, None if top is None else top.layouts)


def _climb_range(
    case: SearchCase,
    value_range: ValueRange,
    top: LargestFit | None,
    tell: Callable[[int, int], None],
) -> LargestFit | None:
    """Return the top of a range if it is higher than *top*, else *top*."""
    layouts = value_range.layouts()

    def fits(value: int) -> bool:
        """Whether some layout fits at *value*; others cannot fit at larger ones."""
        nonlocal layouts
        tell(value, 0)
        if not len(layouts):
            return False
        spare = case.spare_bytes(value_range.at(layouts, value))
        if (spare >= 0).any():
            layouts = layouts.chosen(np.flatnonzero(spare >= 0))
        return bool((spare >= 0).any())

    # Where the first value of a range does not fit, no larger one does.
    if not fits(value_range.first):
        return top
    start = value_range.first
    if top is not None:
        start = max(start, (top.value // value_range.step + 1) * value_range.step)
    value = last_that_fits(start, value_range.last, value_range.step, fits)
    return top if value is None else LargestFit(value, value_range, layouts)


def _reason(case: SearchCase, top: LargestFit | None, following: int) -> str:
    """Return the reason why the value after a top does not fit."""
    if top is None:
        return f"no layout fits at {following:,}"
    value_range, after = top.value_range, top.value + top.value_range.step
    if after != following or after > value_range.last:
        return f"no layout fits at {following:,}"
    return _lack(after, int(case.spare_bytes(value_range.at(top.layouts, after)).max()))


def _lack(value: int, spare_bytes: int) -> str:
    """Return the text of the memory that the nearest layout lacks."""
    return f"at {value:,} the nearest layout lacks {format_bytes(-spare_bytes)}"
