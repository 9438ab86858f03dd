"""Workers that do not wait for each other: how fast they go, and how stale what they compute is."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from meshwright.simulator.account import AsyncRun, StepResult
from meshwright.simulator.strategies.graph_step import GraphRun, StrategyCase, account_graph


@dataclass(frozen=True, slots=True)
class WorkerRound:
    """Tasks of one round of a worker; all but its passes by server.

    ``read_after`` are the updates it waits for before it reads a server's parameters, ``pushed``
    the task that leaves its gradient there.
    """

    read_after: dict[int, tuple[int, ...]] = field(default_factory=dict)
    pulls: dict[int, int] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)
    pushed: dict[int, int] = field(default_factory=dict)
    updates: dict[int, int] = field(default_factory=dict)


def account_rounds(
    case: StrategyCase, run: GraphRun, rounds: Sequence[Sequence[WorkerRound]], notes: Sequence[str]
) -> StepResult:
    """Return the result of asynchronous workers, up to when the first has done all its rounds.

    Until then every worker is at work, so the rates are those of a run that goes on and on.  The
    time of a step is that in which all of them together finish as many rounds as they are.
    """
    ends = [[_end_ps(run, each) for each in mine] for mine in rounds]
    last_ps = min(mine[-1] for mine in ends)
    done = [bisect_right(mine, last_ps) for mine in ends]
    windows = [mine[count - 1] if count else 0 for mine, count in zip(ends, done, strict=True)]
    pairs = list(zip(done, windows, strict=True))
    rate = sum((Fraction(count, window) for count, window in pairs if count), Fraction(0))
    asynchronous = AsyncRun(
        rounds=tuple(done),
        round_ps=tuple(round(Fraction(time, count)) if count else None for count, time in pairs),
        staleness=_staleness(run, rounds, last_ps),
    )
    seen = replace(run, step_ps=round(len(done) / rate), windows_ps=tuple(windows), end_ps=last_ps)
    return account_graph(case, seen, notes, asynchronous)


def _end_ps(run: GraphRun, each: WorkerRound) -> int:
    return max(run.times[task].end_ps for task in each.updates.values())


def _staleness(
    run: GraphRun, rounds: Sequence[Sequence[WorkerRound]], last_ps: int
) -> dict[int, int]:
    """Return how many updates of a shard came between an update's pull and itself."""
    counted: Counter[int] = Counter()
    for server in range(len(rounds[0][0].updates)):
        updates = sorted(run.times[each.updates[server]].end_ps for mine in rounds for each in mine)
        for read_ps, update_ps in _reads(run, rounds, server):
            if update_ps <= last_ps:
                before = bisect_right(updates, update_ps) - 1
                counted[before - bisect_right(updates, read_ps)] += 1
    return {updates: counted[updates] for updates in sorted(counted)}


def _reads(
    run: GraphRun, rounds: Sequence[Sequence[WorkerRound]], server: int
) -> Iterator[tuple[int, int]]:
    """Yield when each round read a server's parameters (a pull reads as it starts) and wrote."""
    for mine in rounds:
        for each in mine:
            update_ps = run.times[each.updates[server]].end_ps
            if server in each.pulls:
                yield run.times[each.pulls[server]].start_ps, update_ps
            else:
                read_ps = [run.times[task].end_ps for task in each.read_after[server]]
                yield max(read_ps, default=0), update_ps
