"""Matrix products on several devices as text for a terminal, as JSON and as files."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from meshwright.hwprofiles import PS_PER_S, Source, counted, format_time, single_line
from meshwright.planner.matmul.study import MatmulStudy, Pipeline, ProductRow, Refusal, shape_text
from meshwright.planner.matmul.wording import boxing_text, chain_text, format_sent, product_text
from meshwright.planner.reports import (
    Column,
    ColumnTable,
    Json,
    facts_table,
    format_count,
    json_text,
    names_in,
    new_folder,
)
from meshwright.simulator.matmul import Boxing, Chain, LocalRun, Signature


class Rows:
    """Rows of a table whose columns stack where the terminal is narrow.

    Args:
        names: Of the columns; numbers, whose name starts with >, are aligned on the right.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Add a row."""
        self._rows.append(cells)

    def __rich_console__(
        self, _console: Console, _options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield the table."""
        yield ColumnTable(
            [
                Column(
                    head=name.removeprefix(">"),
                    cells=[row[index] for row in self._rows],
                    is_word=not name.startswith(">"),
                )
                for index, name in enumerate(self._names)
            ]
        )


def matmul_report(study: MatmulStudy) -> RenderableType:
    """Return the report of a product of matrices: signatures, or chains and the pipeline."""
    matrices = " x ".join(shape_text(shape) for shape in study.shapes)
    devices = f"{counted(study.num_devices, 'device')} of {study.cluster.name}"
    parts: list[RenderableType] = [
        Text(f"{matrices} on {devices}, {study.precision}", style="bold"),
        Text(),
    ]
    if len(study.products) == 1:
        parts.append(_signature_table(study))
    else:
        parts += [_chain_table(study), Text(), *_step_part(study)]
    return Group(*parts, Text(), facts_table(_facts(study)))


def _signature_table(study: MatmulStudy) -> Rows:
    table = Rows(
        "signature",
        *("A", "B", "C", "each device computes"),
        *(">FLOPs", ">compute", "boxing", ">sends", ">takes", ">total"),
    )
    for row in study.rows:
        placements = _placement_cells(row.signature)
        if isinstance(row, Refusal):
            table.add_row(*placements, f"refused: {row.reason}", *["-"] * 6)
            continue
        table.add_row(
            *placements,
            product_text(row.run),
            format_count(row.run.flops),
            _time(row.run.time_ps),
            boxing_text(row.boxing),
            format_sent(row.boxing.sent_bytes),
            _time(row.boxing.time_ps),
            _time(row.time_ps),
        )
    return table


def _placement_cells(signature: Signature) -> list[str]:
    return [signature.name, *(repr(each) for each in signature.inputs), repr(signature.out)]


def _chain_table(study: MatmulStudy) -> Rows:
    """Return the best chain for each signature of the first product, and the pipeline."""
    table = Rows(
        "signatures, product by product",
        *("boxing", ">FLOPs", ">compute", ">sends", ">takes", ">total", ""),
    )
    for chain in study.chains:
        table.add_row(
            chain_text(chain),
            ", ".join(name for each in chain.boxings for name in each.op_names) or "-",
            format_count(chain.flops),
            _time(chain.compute_ps),
            format_sent(chain.sent_bytes),
            _time(chain.boxing_ps),
            _time(chain.time_ps),
            "best" if chain is study.best else "",
        )
    for row in study.rows:
        if isinstance(row, Refusal):
            name = f"{row.signature.name}: refused, {row.reason}"
            table.add_row(name, *["-"] * 6, "")
    if study.pipeline is not None:
        table.add_row(*_pipeline_cells(study.pipeline), "")
    return table


def _pipeline_cells(pipeline: Pipeline) -> list[str]:
    return [
        f"pipeline: products on {counted(len(pipeline.stages), 'device')}",
        f"{len(pipeline.messages)} x p2p",
        format_count(max(sum(run.flops for run in stage) for stage in pipeline.stages)),
        _time(pipeline.compute_ps),
        format_sent(Fraction(max(each.size_bytes for each in pipeline.messages))),
        _time(pipeline.message_ps),
        _time(pipeline.time_ps),
    ]


def _step_part(study: MatmulStudy) -> list[RenderableType]:
    """Return the best chain and the pipeline product by product."""
    parts: list[RenderableType] = [Text("best sequence", style="bold"), _step_table(study.best)]
    if study.pipeline is not None:
        parts += [Text(), Text("pipeline", style="bold"), _stage_table(study.pipeline)]
    return parts


def _step_table(chain: Chain) -> Rows:
    table = Rows(
        *("signature", "A", "B", "C", "each device computes", ">FLOPs", ">compute"),
        *("boxing before", ">sends", ">takes"),
    )
    for boxing, run in chain.steps:
        cells = [*_placement_cells(run.signatures[0]), product_text(run)]
        times = [format_count(run.flops), _time(run.time_ps)]
        table.add_row(*cells, *times, *_boxing_cells(boxing))
    table.add_row("result", "", "", "R", "", "", "", *_boxing_cells(chain.last_boxing))
    return table


def _boxing_cells(boxing: Boxing) -> list[str]:
    return [boxing_text(boxing), format_sent(boxing.sent_bytes), _time(boxing.time_ps)]


def _stage_table(pipeline: Pipeline) -> Rows:
    table = Rows(
        *("device", "computes", ">FLOPs", ">compute", "then sends", ">message", ">wire", ">latency")
    )
    for device, stage in enumerate(pipeline.stages):
        products = ", ".join(product_text(run) for run in stage)
        flops = format_count(sum(run.flops for run in stage))
        cells = [str(device), products, flops, _time(pipeline.stage_ps[device])]
        if device == len(pipeline.messages):
            table.add_row(*cells, "-", "-", "-", "-")
            continue
        message = pipeline.messages[device]
        table.add_row(
            *cells,
            f"{shape_text(message.shape)} to device {device + 1}",
            format_sent(Fraction(message.size_bytes)),
            _time(message.transfer.time_ps),
            _time(message.latency.time_ps),
        )
    return table


def _facts(study: MatmulStudy) -> Iterator[tuple[str, str]]:
    best, cluster = study.best, study.cluster
    yield "fastest", f"{chain_text(best)}, {_time(best.time_ps)} to a replicated result"
    if study.pipeline is not None:
        one, period = _time(study.pipeline.time_ps), _time(study.pipeline.period_ps)
        idle = study.num_devices - len(study.pipeline.stages)
        rest = f"; {idle} of {study.num_devices} devices idle" if idle else ""
        yield "pipeline", f"{one} for one input, a result every {period} in a stream{rest}"
    yield "placements", "S(i) split along dim i, R replicated, P partial sum; all start replicated"
    yield "boxing", f"{_boxing_meaning(study)}; FLOPs and bytes are those of one device"
    device = cluster.device
    source = single_line(device.gemm.source)
    yield "compute", f"{device.gemm.kind}, without kernel launch: {source}"
    kinds = _comm_sources(study)
    if kinds:
        yield "comm", ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    for link in (cluster.intra_node, cluster.inter_node):
        if link is cluster.intra_node or study.num_devices > cluster.devices_per_node:
            yield "link", f"{link.title}, {link.kind}: {single_line(link.source)}"
    shares = {source: _source_ps(study, source) for source in Source}
    total = sum(shares.values()) or 1
    text = ", ".join(f"{source} {time / total:.1%}" for source, time in shares.items())
    yield "evidence", f"{text} of the fastest time"


def _boxing_meaning(study: MatmulStudy) -> str:
    if len(study.products) == 1:
        return "what makes C replicated"
    return "what changes placements between the products and makes the result replicated"


def _comm_sources(study: MatmulStudy) -> dict[str, Source]:
    """Return the evidence behind each kind of communication that the tables show."""
    boxings = [row.boxing for row in study.rows if isinstance(row, ProductRow)]
    boxings += [boxing for chain in study.chains for boxing in chain.boxings]
    steps = [step for each in boxings for step in each.steps]
    kinds = {step.change.op.value: step.cost.source for step in steps if step.change.op is not None}
    if study.pipeline is not None:
        kinds["p2p"] = study.pipeline.messages[0].transfer.source
    return kinds


def _source_ps(study: MatmulStudy, source: Source) -> int:
    """Return the picoseconds of the fastest chain whose costs are of *source*."""
    steps = [step for each in study.best.boxings for step in each.steps]
    costs = [cost for step in study.best.steps for cost in step.run.costs]
    costs += [step.cost for step in steps]
    return sum(cost.time_ps for cost in costs if cost.source is source)


def _time(time_ps: int) -> str:
    return format_time(time_ps / PS_PER_S) if time_ps else "-"


def matmul_document(study: MatmulStudy) -> dict[str, Json]:
    """Return the JSON document of a product of matrices."""
    return {
        "shapes": [list(shape) for shape in study.shapes],
        "num_devices": study.num_devices,
        "cluster": study.cluster.name,
        "precision": study.precision,
        "element_bytes": study.precision.num_bytes,
        "signatures": [_row_fields(row) for row in study.rows],
        "sequences": [_chain_fields(chain) for chain in study.chains],
        "best": _chain_fields(study.best),
        "pipeline": None if study.pipeline is None else _pipeline_fields(study.pipeline),
    }


def _row_fields(row: ProductRow | Refusal) -> dict[str, Json]:
    if isinstance(row, Refusal):
        return {**_signature_fields(row.signature), "refused": row.reason}
    return {
        **_run_fields(row.run),
        "boxing": _boxing_fields(row.boxing),
        "total_time_s": row.time_ps / PS_PER_S,
        "refused": None,
    }


def _signature_fields(signature: Signature) -> dict[str, Json]:
    a, b = signature.inputs
    return {"name": signature.name, "a": repr(a), "b": repr(b), "c": repr(signature.out)}


def _run_fields(run: LocalRun) -> dict[str, Json]:
    a, b = run.shapes.inputs
    return {
        **_signature_fields(run.signatures[0]),
        "local_shapes": {"a": list(a), "b": list(b), "c": list(run.shapes.out)},
        "flops": run.flops,
        "compute_time_s": run.time_ps / PS_PER_S,
        "compute_source": run.costs[0].source,
    }


def _boxing_fields(boxing: Boxing) -> dict[str, Json]:
    return {
        "collectives": list(boxing.op_names),
        "sent_bytes": _number(boxing.sent_bytes),
        "time_s": boxing.time_ps / PS_PER_S,
        "sources": [step.cost.source for step in boxing.steps if step.change.op is not None],
    }


def _chain_fields(chain: Chain) -> dict[str, Json]:
    return {
        "steps": [
            {"boxing": _boxing_fields(boxing), **_run_fields(run)} for boxing, run in chain.steps
        ],
        "last_boxing": _boxing_fields(chain.last_boxing),
        "flops": chain.flops,
        "sent_bytes": _number(chain.sent_bytes),
        "compute_time_s": chain.compute_ps / PS_PER_S,
        "boxing_time_s": chain.boxing_ps / PS_PER_S,
        "total_time_s": chain.time_ps / PS_PER_S,
    }


def _pipeline_fields(pipeline: Pipeline) -> dict[str, Json]:
    return {
        "stages": [
            {"device": device, "products": [_run_fields(run) for run in stage]}
            for device, stage in enumerate(pipeline.stages)
        ],
        "messages": [
            {
                "shape": list(message.shape),
                "size_bytes": message.size_bytes,
                "time_s": message.time_ps / PS_PER_S,
                "sources": [message.transfer.source, message.latency.source],
            }
            for message in pipeline.messages
        ],
        "compute_time_s": pipeline.compute_ps / PS_PER_S,
        "message_time_s": pipeline.message_ps / PS_PER_S,
        "total_time_s": pipeline.time_ps / PS_PER_S,
        "period_s": pipeline.period_ps / PS_PER_S,
    }


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def write_matmul(study: MatmulStudy, folder: Path) -> tuple[str, ...]:
    """Write result.json and the picture of the split, matmul.png; return names."""
    from meshwright.planner.matmul.picture import plot_matmul_split  # noqa: PLC0415  (slow to import)
    from meshwright.planner.plots import save_figure  # noqa: PLC0415

    with new_folder(folder) as files:
        document = json_text(matmul_document(study))
        (files / "result.json").write_text(document, encoding="utf-8", newline="\n")
        save_figure(plot_matmul_split(study), files / "matmul.png")
        return names_in(files)
