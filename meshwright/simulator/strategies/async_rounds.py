"""Asynchronous workers of a parameter server: their throughput and the staleness of updates."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from meshwright.simulator.account import AsyncRun, StepResult
from meshwright.simulator.strategies.graph_step import GraphRun, StrategyCase, account_graph


@dataclass(frozen=True, slots=True)
class WorkerRound:
    """Tasks of one round of a worker, by server but for its passes.

    ``read_after`` are the updates that it waits for before it reads a server's parameters,
    ``pushed`` is the task that leaves its gradient there.
    """

    read_after: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pulls: dict[int, int] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)
    pushed: dict[int, int] = field(default_factory=dict)
    updates: dict[int, int] = field(default_factory=dict)


def account_rounds(
    case: StrategyCase, run: GraphRun, rounds: Sequence[Sequence[WorkerRound]], notes: Sequence[str]
) -> StepResult:
    """Return the result of asynchronous workers until the first has done all its rounds.

    Until then every worker is at work, so that the rates are those of an endless run. A step is the
    time in which all workers together finish as many rounds as there are workers.
    """
    ends = [[_end_ps(run, each) for each in worker_rounds] for worker_rounds in rounds]
    # Later rounds of the others would run with a worker less.
    last_ps = min(worker_rounds[-1] for worker_rounds in ends)
    num_done = [bisect_right(worker_rounds, last_ps) for worker_rounds in ends]
    # A whole number of rounds, so that rates are not cut in the middle of one.
    windows = [
        worker_rounds[count - 1] if count else 0
        for worker_rounds, count in zip(ends, num_done, strict=True)
    ]
    pairs = list(zip(num_done, windows, strict=True))
    rate = sum((Fraction(count, window) for count, window in pairs if count), Fraction(0))
    asynchronous = AsyncRun(
        rounds=tuple(num_done),
        round_ps=tuple(round(Fraction(time, count)) if count else None for count, time in pairs),
        staleness=_staleness(run, rounds, last_ps),
    )
    observed = replace(
        run, step_ps=round(len(num_done) / rate), windows_ps=tuple(windows), end_ps=last_ps
    )
    return account_graph(case, observed, notes, asynchronous)


def _end_ps(run: GraphRun, each: WorkerRound) -> int:
    """Return the time at which a round's last update ends."""
    return max(run.times[task].end_ps for task in each.updates.values())


def _staleness(
    run: GraphRun, rounds: Sequence[Sequence[WorkerRound]], last_ps: int
) -> dict[int, int]:
    """Return the number of updates of a shard between an update's pull and itself, counted."""
    counted: Counter[int] = Counter()
    for server in range(len(rounds[0][0].updates)):
        updates = sorted(
            run.times[each.updates[server]].end_ps
            for worker_rounds in rounds
            for each in worker_rounds
        )
        for read_ps, update_ps in _reads(run, rounds, server):
            if update_ps <= last_ps:
                preceding = bisect_right(updates, update_ps) - 1
                counted[preceding - bisect_right(updates, read_ps)] += 1
    return {updates: counted[updates] for updates in sorted(counted)}


def _reads(
    run: GraphRun, rounds: Sequence[Sequence[WorkerRound]], server: int
) -> Iterator[tuple[int, int]]:
    """Yield the read time (a pull reads as it starts) and the update time of each round."""
    for worker_rounds in rounds:
        for each in worker_rounds:
            update_ps = run.times[each.updates[server]].end_ps
            # A worker's own shard is not pulled: it is read as its update ends.
            if server in each.pulls:
                yield run.times[each.pulls[server]].start_ps, update_ps
            else:
                read_ps = [run.times[task].end_ps for task in each.read_after[server]]
                yield max(read_ps, default=0), update_ps
