"""Measured against modelled times: row by row, and by group."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from meshwright.hwprofiles import (
    PS_PER_S,
    Cluster,
    CollectiveOp,
    Device,
    Link,
    Source,
    load_cluster,
)
from meshwright.planner.reports import output_file
from meshwright.simulator.costs import CollectiveCall, collective_cost, p2p_cost
from meshwright.simulator.layout import GroupSpan
from meshwright.validate.calibration.fit.calibrated import Misfit, misfit_of
from meshwright.validate.calibration.fit.cost_fit import LaunchFloor, modelled_s
from meshwright.validate.calibration.rows import BenchmarkCase, CaseGroup, Row

COLUMNS = (
    *("group", "op", "precision", "shape", "measured_s", "modelled_s", "error_fraction"),
    *("measured_rate", "modelled_rate", "rate_unit"),
)


class Residual(NamedTuple):
    """A row and its time by the written profiles, None where they have no model of it."""

    row: Row
    modelled_s: float | None

    @property
    def error_fraction(self) -> float | None:
        """Modelled over measured time, less 1."""
        return None if self.modelled_s is None else self.modelled_s / self.row.median_s - 1


class Summary(NamedTuple):
    """The residuals of one operation, or size of group, and the rates that were measured."""

    group: CaseGroup
    op: str
    num_rows: int
    lowest_rate: float
    highest_rate: float
    misfit: Misfit


def residuals_of(
    rows: Iterable[Row], device: Device | None, link: Link | None, floor: LaunchFloor
) -> list[Residual]:
    """Return the residuals of *rows* under the simulator's cost model."""

    def model(case: BenchmarkCase) -> float | None:
        if case.group is CaseGroup.COLLECTIVE:
            return None if link is None else _collective_s(case, link)
        return None if device is None else modelled_s(case, device, floor)

    return [Residual(row, model(row.case)) for row in rows]


def _collective_s(case: BenchmarkCase, link: Link) -> float:
    size_bytes, num_ranks = case.sizes
    cluster = _one_node(link, num_ranks)
    if case.op == CollectiveOp.P2P:
        message = p2p_cost(size_bytes, cluster, crosses_nodes=False, network_fraction=1.0)
        return (message.transfer.time_ps + message.latency.time_ps) / PS_PER_S
    call = CollectiveCall(
        op=CollectiveOp(case.op),
        size_bytes=size_bytes,
        span=GroupSpan(num_ranks, 1, num_ranks),
        cluster=cluster,
        network_fraction=1.0,
        network_source=Source.EXTRAPOLATED,
    )
    return collective_cost(call).time_ps / PS_PER_S


def _one_node(link: Link, num_ranks: int) -> Cluster:
    """Return a one-node cluster joined by *link*; its device has no effect here."""
    some = load_cluster("localhost-cpu")
    return some.model_copy(update={"intra_node": link, "devices_per_node": num_ranks})


def summaries(residuals: Iterable[Residual]) -> list[Summary]:
    """Return the residuals by group and operation, in the order of groups."""
    residuals_by_op: dict[tuple[CaseGroup, str], list[Residual]] = {}
    for each in residuals:
        case = each.row.case
        ranks = f", {case.sizes[1]} ranks" if case.group is CaseGroup.COLLECTIVE else ""
        residuals_by_op.setdefault((case.group, f"{case.op}{ranks}"), []).append(each)
    order = list(CaseGroup)
    result = []
    for (group, op), of_op in sorted(
        residuals_by_op.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
    ):
        rates = [each.row.rate for each in of_op]
        modelled = {each.row.case: each.modelled_s for each in of_op}
        misfit = misfit_of([each.row for each in of_op], modelled.get)
        result.append(Summary(group, op, len(of_op), min(rates), max(rates), misfit))
    return result


def rate_unit(group: CaseGroup) -> str:
    """Return the unit of a group's rates."""
    return "FLOP/s" if group in {CaseGroup.GEMM, CaseGroup.ATTENTION} else "B/s"


def write_residuals(residuals: Iterable[Residual], path: Path) -> None:
    """Write one CSV line per row; cells without a modelled time are empty."""
    with output_file(path) as draft, draft.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for each in residuals:
            row, case = each.row, each.row.case
            rate = "" if each.modelled_s is None else f"{case.work / each.modelled_s:.6g}"
            writer.writerow(
                [
                    *(case.group, case.op, case.precision, case.shape, f"{row.median_s:.6g}"),
                    *("" if value is None else f"{value:.6g}" for value in each[1:]),
                    "" if each.error_fraction is None else f"{each.error_fraction:.4f}",
                    *(f"{row.rate:.6g}", rate, rate_unit(case.group)),
                ]
            )
