"""Constants of hosts that start experts, fitted again without each source of published runs."""

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import product
from typing import NamedTuple

from documents.tables import table
from meshwright.hwprofiles import load_cluster, load_stack
from meshwright.simulator import simulate
from meshwright.validate.published import PublishedRun, load_published_runs

HEAD = ("source", "rows", "without", "with", "left out", "fitted without it")


class Hosts(NamedTuple):
    """Seconds in which a host starts a pass, an expert's part of it, a cast; times their factor."""

    of_pass_s: float
    of_expert_s: float
    of_cast_s: float
    factor: float

    def __str__(self) -> str:
        """Return them as the page says them."""
        times = f"{self.of_pass_s * 1e3:.1f} ms, {self.of_expert_s * 1e3:.2f} ms"
        return f"{times}, {self.of_cast_s * 1e6:.0f} us, {self.factor:.2f}"


NONE = Hosts(0.0, 0.0, 0.0, 1.0)
TRIED = [
    Hosts(of_pass * 1e-4, of_expert * 1e-5, of_cast * 1e-6, factor / 100)
    for of_pass, of_expert, of_cast, factor in product(
        range(6, 15, 2), range(9, 18, 2), range(15, 31, 5), range(65, 81, 5)
    )
]

Errors = Mapping[PublishedRun, Mapping[Hosts, float]]


def hosts_left_out() -> str:
    """Return the errors of step times that the constants move, with them and fitted without."""
    found = _errors()
    sources = dict.fromkeys(run.source for run in found)
    every = _mean(found, found, _best(found, found))
    lines = [_line(found, source) for source in sources]
    whole = (_mean(found, found, NONE), every, "", str(_best(found, found)))
    return table(HEAD, [*lines, ("all", len(found), *whole)])


def _line(found: Errors, source: str) -> tuple[object, ...]:
    own = [run for run in found if run.source == source]
    others = _best(found, [run for run in found if run.source != source])
    means = (_mean(found, own, hosts) for hosts in (NONE, _best(found, found), others))
    return (source, len(own), *means, others)


def _best(found: Errors, runs: Iterable[PublishedRun]) -> Hosts:
    """Return the constants with the least mean error of *runs*, the first of equals."""
    known = [*runs]
    return min(TRIED, key=lambda hosts: sum(abs(found[run][hosts]) for run in known))


def _mean(found: Errors, runs: Iterable[PublishedRun], hosts: Hosts) -> str:
    errors = [abs(found[run][hosts]) for run in runs]
    return f"{sum(errors) / len(errors):.1%}".replace("%", " %")


@cache
def _errors() -> Errors:
    """Return the errors of every run that the largest of the constants move, with all of them."""
    largest = Hosts(*map(max, zip(*TRIED, strict=True)))
    runs = [
        run
        for run in load_published_runs()
        if run.step_time_s is not None
        and load_stack(run.stack).host_issue_pass_s
        and _error(run, NONE) != _error(run, largest)
    ]
    return {run: {hosts: _error(run, hosts) for hosts in (NONE, *TRIED)} for run in runs}


@cache
def _error(run: PublishedRun, hosts: Hosts) -> float:
    """Return the error of a step time; hosts that are the measure of all others stay so."""
    stack, cluster = load_stack(run.stack), load_cluster(run.cluster)
    times = {
        "host_issue_pass_s": hosts.of_pass_s,
        "host_issue_expert_s": hosts.of_expert_s,
        "host_issue_cast_s": hosts.of_cast_s,
    }
    stack = stack.model_copy(update=times)
    if cluster.host_time_factor != 1:
        cluster = cluster.model_copy(update={"host_time_factor": hosts.factor})
    assert run.step_time_s is not None
    return simulate(run.job, run.plan, cluster, stack).step_time_s / run.step_time_s - 1
