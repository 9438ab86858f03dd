"""Time calls: events on a GPU, the clock on a processor; repeats of many cases interleaved."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, inf

import torch

from validate.calibration.kernels import Call, make_call
from validate.calibration.rows import Case, Row, summarised

NUM_REPEATS = 9
FEW_REPEATS = 5
FEWEST_REPEATS = 3
LONG_VISIT_S, LONGEST_VISIT_S = 0.05, 0.5
# A visit of so long makes the resolution of the clocks and the cost of reading them small.
VISIT_S = 2e-3
MAX_CALLS = 200
NUM_WARM_UP = 2


def elapsed_s(call: Call, device: torch.device, num_calls: int) -> float:
    """Return the seconds of one call, the mean of *num_calls* of them back to back.

    One thread on a processor is timed by the processor time it took, which other programs on
    the machine do not lengthen; several by the clock.
    """
    if device.type != "cuda":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start_s = clock()
        for _ in range(num_calls):
            call()
        return (clock() - start_s) / num_calls
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / num_calls


def calls_of_visit(time_s: float) -> int:
    """Return how many calls make a visit long enough.

    >>> calls_of_visit(1.0), calls_of_visit(5e-4), calls_of_visit(1e-9)
    (1, 4, 200)
    """
    return max(1, min(MAX_CALLS, ceil(VISIT_S / max(time_s, 1e-9))))


def repeats_of(visit_s: float) -> int:
    """Return how many visits a case gets.

    >>> repeats_of(0.002), repeats_of(0.1), repeats_of(2.0)
    (9, 5, 3)
    """
    if visit_s < LONG_VISIT_S:
        return NUM_REPEATS
    return FEW_REPEATS if visit_s < LONGEST_VISIT_S else FEWEST_REPEATS


def warmed_up_s(visit: Callable[[int], float]) -> float:
    """Return the seconds of a call after the first ones; a long call is its own warm-up.

    Args:
        visit: Times a number of calls and returns the seconds of one.
    """
    first_s = visit(1)
    return first_s if first_s > LONG_VISIT_S else visit(NUM_WARM_UP)


def interleaved(
    num_repeats: Mapping[Case, int],
    seed: int,
    visit: Callable[[Case], float],
    deadline_s: float = inf,
) -> dict[Case, list[float]]:
    """Return the times of each case, visited in rounds of changing order.

    A machine that slows down meanwhile slows all cases alike.

    Args:
        num_repeats: Visits of each case.
        seed: Of the order.
        visit: Times a case once.
        deadline_s: On the clock of `time.monotonic`; past it the fewest repeats will do.
    """
    order = random.Random(seed)  # noqa: S311
    times_s: dict[Case, list[float]] = {case: [] for case in num_repeats}
    for turn in range(max(num_repeats.values(), default=0)):
        if turn >= FEWEST_REPEATS and time.monotonic() >= deadline_s:
            break
        due = [case for case, count in num_repeats.items() if turn < count]
        order.shuffle(due)
        for case in due:
            times_s[case].append(visit(case))
    return times_s


def measure_chunk(
    cases: Sequence[Case], device: torch.device, seed: int, deadline_s: float = inf
) -> list[Row]:
    """Return the rows of *cases*, whose tensors are all alive meanwhile."""
    calls = {case: make_call(case, device) for case in cases}
    num_calls: dict[Case, int] = {}
    num_repeats: dict[Case, int] = {}
    for case, call in calls.items():
        time_s = warmed_up_s(partial(elapsed_s, call, device))
        num_calls[case] = calls_of_visit(time_s)
        num_repeats[case] = repeats_of(time_s * num_calls[case])

    def visit(case: Case) -> float:
        return elapsed_s(calls[case], device, num_calls[case])

    times_s = interleaved(num_repeats, seed, visit, deadline_s)
    return [summarised(case, times_s[case]) for case in cases]
