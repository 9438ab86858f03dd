"""Profiles made of rows: constants with a source that says what they rest on."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from meshwright.hwprofiles import (
    CollectiveFact,
    CollectiveOp,
    Device,
    FlashKernels,
    Link,
    Precision,
    Profile,
    Source,
    counted,
)
from meshwright.simulator.blocks import MemoryBound
from meshwright.simulator.costs import ring_steps
from meshwright.validate.calibration.fit.cost_fit import (
    ENDINGS,
    LaunchFloor,
    attention_rows,
    by_operation,
    fit_collective,
    fit_flash,
    fit_gemm,
    fit_memory,
    launch_floor,
    modelled_s,
)
from meshwright.validate.calibration.fit.datasheet import known_device, starting_device
from meshwright.validate.calibration.rows import (
    BenchmarkCase,
    CaseGroup,
    Machine,
    Row,
    RowFile,
    median,
)


class Misfit(NamedTuple):
    """Error of a model on some rows: |modelled / measured - 1|."""

    num_rows: int
    median_fraction: float
    worst_fraction: float

    def __str__(self) -> str:
        """Return number of rows, median and worst error in words."""
        return (
            f"{counted(self.num_rows, 'row')}, |error| median {self.median_fraction:.1%}, "
            f"worst {self.worst_fraction:.1%}"
        )


def misfit_of(rows: list[Row], model: Callable[[BenchmarkCase], float | None]) -> Misfit:
    """Return the errors of *model* on the rows that it has a time for."""
    pairs = [(row.median_s, model(row.case)) for row in rows]
    errors = [abs(modelled / measured - 1) for measured, modelled in pairs if modelled is not None]
    return Misfit(len(errors), median(errors), max(errors)) if errors else Misfit(0, 0.0, 0.0)


def evidence(machine: Machine, date: str) -> str:
    """Return date, device and versions of a measurement, for the ``source`` of a profile."""
    threads = f", {machine.threads} threads" if machine.threads > 1 else ""
    return (
        f"meshwright calibrate, {date}, {machine.device}{threads}, driver {machine.driver}, "
        f"{machine.versions}"
    )


def calibrated_device(
    file: RowFile, name: str, *, like: str | None, peak: dict[Precision, float]
) -> Device:
    """Return the device fitted to the rows of *file*.

    Raises:
        PlanError: If the rows are too few.
    """
    rows, machine = file.rows, file.machine
    known = known_device(machine, like)
    device = starting_device(machine, rows, name, known=known, peak=peak)
    floor = launch_floor(rows, machine.accelerator)
    source = evidence(machine, file.date)
    # Memory comes first: the fit of GEMMs reads its bandwidth fraction.
    memory = [row for row in rows if isinstance(row.case.operator, MemoryBound)]
    if memory:
        kernels = {"memory": fit_memory(rows, device, floor)}
        device = _with_fit(device, kernels, memory, floor, source)
    products = [row for row in rows if row.case.group is CaseGroup.GEMM]
    if products:
        device = _with_fit(device, {"gemm": fit_gemm(rows, device, floor)}, products, floor, source)
    return _with_flash(device, rows, floor, source, known)


def _with_fit(
    device: Device, kernels: Mapping[str, Profile], used: list[Row], floor: LaunchFloor, source: str
) -> Device:
    """Return *device* with fitted *kernels*, whose source states their error on the rows *used*."""
    fitted = device.model_copy(update=kernels)
    errors = misfit_of(used, lambda case: modelled_s(case, fitted, floor))
    provenance = {"kind": Source.FITTED, "source": f"{source}; {errors}"}
    with_source = {name: each.model_copy(update=provenance) for name, each in kernels.items()}
    return device.model_copy(update=with_source)


def _with_flash(
    device: Device, rows: list[Row], floor: LaunchFloor, source: str, known: Device | None
) -> Device:
    """Return *device* with measured attention; other kernels stay those of the datasheet."""
    flash: dict[str, FlashKernels] = {}
    if known is not None:
        for kernel, facts in known.flash.items():
            origin = f"from {known.name}: {facts.source}"
            flash[kernel] = facts.model_copy(update={"source": origin})
    for kernel in ENDINGS:
        measured = fit_flash(rows, device, floor, kernel)
        if measured is None:
            continue
        fitted = device.model_copy(update={"flash": {kernel: measured}})
        errors = misfit_of(
            attention_rows(rows, kernel), partial(modelled_s, device=fitted, floor=floor)
        )
        flash[kernel] = measured.model_copy(
            update={"kind": Source.FITTED, "source": f"{source}; {errors}"}
        )
    return device.model_copy(update={"flash": flash})


def calibrated_link(rows: list[Row], name: str, title: str, sources: dict[Row, str]) -> Link:
    """Return the link fitted to rows of collectives.

    Its line rate is the best bus bandwidth of any row; the latency of a hop is the smallest
    that an operation's start-up time leaves for each step of a ring.

    Args:
        rows: Of collectives, at least one.
        name: Of the profile.
        title: Of the profile.
        sources: Source of each row.
    """
    facts = []
    for (op, num_ranks), of_op in by_operation(rows).items():
        link = fit_collective(of_op)
        errors = misfit_of(of_op, link.time_s)
        facts.append(
            CollectiveFact(
                op=op,
                num_ranks=num_ranks,
                busbw_bytes_per_s=link.busbw_bytes_per_s,
                latency_s=link.latency_s,
                kind=Source.FITTED,
                source=f"{sources[of_op[0]]}; {errors}",
            )
        )
    # Bus bandwidth nears the line rate as buffers grow: the best row is nearest.
    rate = float(f"{max(row.rate for row in rows):.4g}")
    # The median operation: one slow collective must not lower the whole link.
    typical = median([fact.busbw_bytes_per_s for fact in facts])
    return Link(
        name=name,
        title=title,
        bandwidth_bytes_per_s=rate,
        latency_s=min(fact.latency_s / ring_steps(fact.op, fact.num_ranks) for fact in facts),
        busbw_fraction=float(f"{min(1.0, typical / rate):.4g}"),
        collectives=tuple(facts),
        kind=Source.FITTED,
        source=f"bandwidth: best bus bandwidth of {len(rows)} rows; share: median of "
        f"{len(facts)} fitted operations; {sources[rows[0]]}",
    )


def combined_rows(measured: list[Row], read: list[Row]) -> list[Row]:
    """Return rows of collectives; those of nccl-tests replace measured ones of their operation.

    >>> combined_rows([], [])
    []
    """
    given = by_operation(read)

    def key(row: Row) -> tuple[CollectiveOp, int]:
        return CollectiveOp(row.case.op), row.case.sizes[1]

    kept = [
        row for row in measured if row.case.group is CaseGroup.COLLECTIVE and key(row) not in given
    ]
    return kept + read
