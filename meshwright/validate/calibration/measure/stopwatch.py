"""Time calls: events on a GPU, the clock on a processor; repeats of many cases interleaved."""

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, inf

import torch

from meshwright.hwprofiles import GIGA, KILO
from meshwright.validate.calibration.measure.kernels import Call, make_call
from meshwright.validate.calibration.rows import BenchmarkCase, Row, summarised

NUM_REPEATS = 9
FEW_REPEATS = 5
FEWEST_REPEATS = 3
LONG_VISIT_S, LONGEST_VISIT_S = 0.05, 0.5
# A visit of so long makes the resolution of the clocks and the cost of reading them small.
VISIT_S = 2e-3
MAX_CALLS = 200
NUM_WARM_UP = 2
# A GPU waits so long, and longer for each call that the host hands over; the wait counts cycles.
LEAD_S, CALL_LEAD_S, MAX_LEAD_S = 2e-4, 2e-5, 0.05
WAIT_CYCLES_PER_S = 2 * GIGA
WAKING_S, WAKING_SIZE = 1.0, 4096
_LOG = logging.getLogger(__name__)


def elapsed_s(call: Call, device: torch.device, num_calls: int) -> float:
    """Return the seconds of one call, the mean of *num_calls* of them back to back.

    One thread on a processor is timed by the processor time it took, which other programs on
    the machine do not lengthen; several by the clock.
    """
    if device.type == "cuda":
        return _elapsed_on_gpu_s(call, device, num_calls)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start_s = clock()
    for _ in range(num_calls):
        call()
    return (clock() - start_s) / num_calls


def _elapsed_on_gpu_s(call: Call, device: torch.device, num_calls: int) -> float:
    """Return the seconds of one call on the GPU, however slowly the host hands calls over.

    The GPU waits until they are all in its queue: small kernels run for less time than starting
    them takes. Where that wait was too short the calls are timed once more after a longer one.
    """
    lead_s = LEAD_S + num_calls * CALL_LEAD_S
    for _ in range(2):
        elapsed_s, handed_over_s = _after_wait_s(call, device, num_calls, lead_s)
        if handed_over_s <= lead_s:
            break
        lead_s = min(2 * handed_over_s, MAX_LEAD_S)
    return elapsed_s / num_calls


def _after_wait_s(
    call: Call, device: torch.device, num_calls: int, lead_s: float
) -> tuple[float, float]:
    """Return the seconds of all calls after a wait of the GPU, and of handing them over."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Earlier work in the queue would run into the wait.
    torch.cuda.synchronize(device)
    begin_s = time.perf_counter()
    torch.cuda._sleep(int(lead_s * WAIT_CYCLES_PER_S))  # noqa: SLF001 - PyTorch's own tests use it
    start.record()
    for _ in range(num_calls):
        call()
    end.record()
    handed_over_s = time.perf_counter() - begin_s
    end.synchronize()
    return float(start.elapsed_time(end)) / KILO, handed_over_s


def calls_of_visit(time_s: float) -> int:
    """Return the calls of a visit, so that it takes `VISIT_S` or more.

    >>> calls_of_visit(1.0), calls_of_visit(5e-4), calls_of_visit(1e-9)
    (1, 4, 200)
    """
    return max(1, min(MAX_CALLS, ceil(VISIT_S / max(time_s, 1e-9))))


def repeats_of(visit_s: float) -> int:
    """Return the visits of a case: fewer, the longer one takes.

    >>> repeats_of(0.002), repeats_of(0.1), repeats_of(2.0)
    (9, 5, 3)
    """
    if visit_s < LONG_VISIT_S:
        return NUM_REPEATS
    return FEW_REPEATS if visit_s < LONGEST_VISIT_S else FEWEST_REPEATS


def warmed_up_s(visit: Callable[[int], float]) -> float:
    """Return the seconds of a call after the first one, which may load code or join ranks.

    Args:
        visit: Times a number of calls and returns the seconds of one.

    >>> seconds = [9.0, 2.0]
    >>> warmed_up_s(lambda _: seconds.pop(0))
    2.0
    """
    first_s = visit(1)
    return visit(1 if first_s > LONG_VISIT_S else NUM_WARM_UP)


def warm_up_gpu(device: torch.device) -> None:
    """Keep a GPU busy for a second: an idle one has lowered its clocks."""
    if device.type != "cuda":
        return
    one, other, result = (
        torch.ones(WAKING_SIZE, WAKING_SIZE, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    end_s = time.monotonic() + WAKING_S
    while time.monotonic() < end_s:
        torch.matmul(one, other, out=result)
        torch.cuda.synchronize(device)


def interleaved(
    num_repeats: Mapping[BenchmarkCase, int],
    seed: int,
    visit: Callable[[BenchmarkCase], float],
    deadline_s: float = inf,
) -> dict[BenchmarkCase, list[float]]:
    """Return the times of each case, visited in rounds of changing order.

    A machine that slows down meanwhile slows all cases alike.

    Args:
        num_repeats: Visits of each case.
        seed: Of the order.
        visit: Times a case once.
        deadline_s: On the clock of `time.monotonic`; past it the fewest repeats will do.
    """
    order = random.Random(seed)  # noqa: S311
    times_s: dict[BenchmarkCase, list[float]] = {case: [] for case in num_repeats}
    for turn in range(max(num_repeats.values(), default=0)):
        if turn >= FEWEST_REPEATS and time.monotonic() >= deadline_s:
            break
        due = [case for case, count in num_repeats.items() if turn < count]
        # Another order each round, so that no case always follows the same one.
        order.shuffle(due)
        for case in due:
            times_s[case].append(visit(case))
    return times_s


def measure_batch(
    cases: Sequence[BenchmarkCase], device: torch.device, seed: int, deadline_s: float = inf
) -> list[Row]:
    """Return the rows of *cases*, whose tensors are all alive meanwhile.

    A case that a GPU has no kernel or no memory for has no row; a warning names it.
    """
    calls = {case: call for case in cases if (call := _tried(case, device)) is not None}
    num_calls: dict[BenchmarkCase, int] = {}
    num_repeats: dict[BenchmarkCase, int] = {}
    for case, call in calls.items():
        time_s = warmed_up_s(partial(elapsed_s, call, device))
        num_calls[case] = calls_of_visit(time_s)
        num_repeats[case] = repeats_of(time_s * num_calls[case])

    def visit(case: BenchmarkCase) -> float:
        return elapsed_s(calls[case], device, num_calls[case])

    times_s = interleaved(num_repeats, seed, visit, deadline_s)
    return [summarised(case, times_s[case]) for case in calls]


def _tried(case: BenchmarkCase, device: torch.device) -> Call | None:
    """Return the call of *case*; None where a GPU cannot run it."""
    try:
        call = make_call(case, device)
        if device.type == "cuda":
            call()
            torch.cuda.synchronize(device)
    except RuntimeError as error:  # an allocation that fails is one, too
        if device.type != "cuda":
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _LOG.warning("%s %s %s is not measured: %s", case.group, case.op, case.shape, reason)
        return None
    return call
