"""Constants that were fitted on published step times, fitted again without each of the sources."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import fmean
from typing import Generic, NamedTuple, TypeVar

from documents.tables import table
from meshwright.hwprofiles import Cluster, Precision, StackProfile, load_cluster, load_stack
from meshwright.simulator import simulate
from meshwright.validate.published import PublishedRun, load_published_runs

HEAD = ("source", "rows", "without", "with", "left out", "fitted without it")
Constants = TypeVar("Constants")


@dataclass(frozen=True)
class Fit(Generic[Constants]):
    """What was tried, and the errors of the runs that it moves.

    Args:
        tried: Constants, in the order in which the first of equals is taken.
        error: Of a run's step time with constants.
        runs: Those that the constants move.
        by_source: Each source has the same weight, however many rows it has.
    """

    tried: Sequence[Constants]
    error: Callable[[PublishedRun, Constants], float]
    runs: Sequence[PublishedRun]
    by_source: bool = False

    def best(self, without: str | None = None) -> Constants:
        """Return the constants with the least mean error of all runs, or of all other sources."""
        found = [run for run in self.runs if run.source != without]
        sources = [run.source for run in found]
        weights = [1 / sources.count(each) if self.by_source else 1.0 for each in sources]

        def total(constants: Constants) -> float:
            errors = (abs(self.error(run, constants)) for run in found)
            return sum(map(float.__mul__, errors, weights))

        return min(self.tried, key=total)

    def mean(self, constants: Constants, source: str | None = None) -> str:
        """Return the mean error of the runs of one source, or of all runs."""
        found = (run for run in self.runs if source in (None, run.source))
        mean = fmean(abs(self.error(run, constants)) for run in found)
        return f"{mean:.1%}".replace("%", " %")

    def lines(self, *known: Constants) -> list[tuple[object, ...]]:
        """Return a line a source: its errors with *known* constants, and with those without it."""
        found = []
        for source in dict.fromkeys(run.source for run in self.runs):
            count = sum(run.source == source for run in self.runs)
            others = (self.best(source),) if count < len(self.runs) else ()
            means = [self.mean(each, source) for each in (*known, *others)]
            found.append((source, count, *means, *(others or ("", "no other source"))))
        whole = (self.mean(each) for each in known)
        return [*found, ("all", len(self.runs), *whole, "", self.best())]


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


NO_HOSTS = Hosts(0.0, 0.0, 0.0, 1.0)
HOSTS = [
    Hosts(of_pass * 1e-4, of_expert * 1e-5, of_cast * 1e-6, factor / 100)
    for of_pass, of_expert, of_cast, factor in product(
        range(6, 15, 2), range(9, 18, 2), range(15, 31, 5), range(65, 81, 5)
    )
]


class Waits(NamedTuple):
    """Seconds that the device waits for a pass through experts, and for each one of the rank."""

    of_pass_s: float
    of_expert_s: float

    def __str__(self) -> str:
        """Return them as the page says them."""
        return f"{self.of_pass_s * 1e3:.2f} ms, {self.of_expert_s * 1e6:.0f} us"


WAITS = [
    Waits(of_pass * 1e-5, of_expert * 1e-6)
    for of_pass, of_expert in product((5, 10, 15, 20, 25, 30, 40), (0, *range(20, 61, 5)))
]


class ScaledProducts(NamedTuple):
    """Plateaus of products in MXFP8 on the two kinds of modules, and the `prologue_k` of both."""

    gb200: float
    gb300: float
    prologue_k: int

    def __str__(self) -> str:
        """Return them as the page says them."""
        return f"{self.gb200:.2f}, {self.gb300:.2f}, {self.prologue_k:,}"


SCALED_PRODUCTS = [
    ScaledProducts(gb200 / 100, gb300 / 100, prologue_k)
    for gb200, gb300, prologue_k in product(
        range(46, 71, 2), range(60, 87, 2), (300, 500, 750, 1000, 1250, 1500, 1829)
    )
]
# Devices that have constants of their own; B200 has those of GB200, B300 a tenth more.
SHARES = {"b200": 1.0, "b300": 1.1, "gb200": 1.0, "gb300": 1.0}


class Plateau(NamedTuple):
    """The plateau of a device's products with tensor-wise scaling."""

    fraction: float

    def __str__(self) -> str:
        """Return it as the page says it."""
        return f"{self.fraction:.2f}"


PLATEAUS = [Plateau(each / 100) for each in range(44, 91, 2)]


def hosts_left_out() -> str:
    """Return the errors of step times that the constants of hosts move, with and without them."""
    largest = Hosts(*map(max, zip(*HOSTS, strict=True)))
    runs = [
        run
        for run in _timed_runs()
        if load_stack(run.stack).host_issue_pass_s
        and _host_error(run, NO_HOSTS) != _host_error(run, largest)
    ]
    fit = Fit(HOSTS, _host_error, runs)
    return table(HEAD, fit.lines(NO_HOSTS, fit.best()))


def waits_left_out() -> str:
    """Return the errors of step times that the waits for hosts move, as taken and left out."""
    core = load_stack("megatron-core")
    taken = Waits(core.host_per_expert_pass_s, core.host_per_own_expert_s)
    most = Waits(*map(max, zip(*WAITS, strict=True)))
    runs = [
        run
        for run in _timed_runs()
        if run.num_experts and _wait_error(run, WAITS[0]) != _wait_error(run, most)
    ]
    fit = Fit(WAITS, _wait_error, runs, by_source=True)
    return table(_taken_head(taken), fit.lines(taken))


def mxfp8_left_out() -> str:
    """Return the errors of step times in MXFP8 with constants of products, taken and left out."""
    one, other = (load_cluster(f"{name}-nvl72").device.gemm.mxfp8 for name in ("gb200", "gb300"))
    assert one is not None
    assert other is not None
    taken = ScaledProducts(one.plateau_fraction, other.plateau_fraction, int(one.prologue_k))
    runs = [run for run in _timed_runs() if run.precision is Precision.MXFP8]
    fit = Fit(SCALED_PRODUCTS, _scaled_error, runs)
    return table(_taken_head(taken), fit.lines(taken))


def fp8_left_out() -> str:
    """Return the errors of step times in fp8 with the plateau of each device, and left out."""
    lines = []
    for name in ("b200", "gb200", "gb300"):
        runs = [run for run in _timed_runs() if run.precision is Precision.FP8]
        runs = [run for run in runs if load_cluster(run.cluster).device.name == name]
        fit = Fit(PLATEAUS, _plateau_error, runs)
        products = load_cluster(runs[0].cluster).device.gemm.fp8
        assert products is not None
        taken = Plateau(products.plateau_fraction)
        lines += [(name.upper(), *line[:2], taken, *line[2:]) for line in fit.lines(taken)]
    head = ("device", "source", "rows", "taken", "with it", "left out", "fitted without it")
    return table(head, lines)


def _taken_head(taken: object) -> tuple[str, ...]:
    return ("source", "rows", f"with {taken}", "left out", "fitted without it")


def _timed_runs() -> list[PublishedRun]:
    return [run for run in load_published_runs() if run.step_time_s is not None]


@cache
def _host_error(run: PublishedRun, hosts: Hosts) -> float:
    """Return the error of a step time; hosts that are the measure of all others stay so."""
    stack, cluster = load_stack(run.stack), load_cluster(run.cluster)
    times = {
        "host_issue_pass_s": hosts.of_pass_s,
        "host_issue_expert_s": hosts.of_expert_s,
        "host_issue_cast_s": hosts.of_cast_s,
    }
    if cluster.host_time_factor != 1:
        cluster = cluster.model_copy(update={"host_time_factor": hosts.factor})
    return _error(run, cluster, stack.model_copy(update=times))


@cache
def _wait_error(run: PublishedRun, waits: Waits) -> float:
    """Return the error of a step time; stacks that have waits of their own keep them."""
    stack, core = load_stack(run.stack), load_stack("megatron-core")
    times = {
        "host_per_expert_pass_s": waits.of_pass_s,
        "host_per_own_expert_s": waits.of_expert_s,
    }
    changes = {
        name: time_s
        for name, time_s in times.items()
        if getattr(stack, name) == getattr(core, name)
    }
    return _error(run, load_cluster(run.cluster), stack.model_copy(update=changes))


def _scaled_error(run: PublishedRun, products: ScaledProducts) -> float:
    """Return the error of a step time with the constants of its own device."""
    name = load_cluster(run.cluster).device.name
    plateau = products.gb300 if name == "gb300" else products.gb200
    return _product_error(run, SHARES[name] * plateau, products.prologue_k)


def _plateau_error(run: PublishedRun, plateau: Plateau) -> float:
    return _product_error(run, plateau.fraction, None)


@cache
def _product_error(run: PublishedRun, plateau: float, prologue_k: int | None) -> float:
    """Return the error of a step time with other constants of products in its format of 8 bits."""
    cluster = load_cluster(run.cluster)
    device, gemm, name = cluster.device, cluster.device.gemm, run.precision.value
    changes: dict[str, float] = {"plateau_fraction": plateau}
    if prologue_k is not None:
        changes["prologue_k"] = prologue_k
    products = gemm.of(run.precision).model_copy(update=changes)
    device = device.model_copy(update={"gemm": gemm.model_copy(update={name: products})})
    return _error(run, cluster.model_copy(update={"device": device}), load_stack(run.stack))


def _error(run: PublishedRun, cluster: Cluster, stack: StackProfile) -> float:
    assert run.step_time_s is not None
    return simulate(run.job, run.plan, cluster, stack).step_time_s / run.step_time_s - 1
