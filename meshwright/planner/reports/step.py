"""One simulated step as text for a terminal, at most 100 columns wide."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from meshwright.hwprofiles import (
    GIBI,
    GIGA,
    MEGA,
    PS_PER_S,
    TERA,
    Offload,
    Source,
    counted,
    format_bytes,
    format_flops_per_s,
    format_time,
)
from meshwright.planner.changes import Change
from meshwright.planner.reports.facts import changed_lines
from meshwright.planner.reports.money import Budget, TrainingRun
from meshwright.simulator import (
    AsyncRun,
    ParameterServer,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    count_parameters,
)
from meshwright.simulator.layout import PLAN_FIELDS, Axis, applicable_values, without_defaults

if TYPE_CHECKING:
    from meshwright.planner.largest import Largest

WIDTH = 100
WIDEST = 1000
BAR_WIDTH = 14
MAX_STAGES_LISTED = 8
# Fields of a plan that a report says in words of their own; the others are its switches.
FIELDS_WITH_LINES = {
    *(axis.value for axis in Axis),
    *("num_virtual_stages", "microbatch_size", "schedule", "stages", "parameter_server"),
    *("dp_shard", "reshard_after_forward", "gradient_precision", "reduce_precision"),
    *("sync_each_microbatch", "offload", "find_unused"),
}


def step_report(
    result: StepResult,
    budget: Budget | None = None,
    changes: Sequence[Change] = (),
    largest: "Largest | None" = None,
) -> RenderableType:
    """Return the report of one simulated step.

    Args:
        result: The step.
        budget: Adds days and cost of a number of tokens.
        changes: Of a plan that does not fit: what makes it fit.
        largest: The largest value of a quantity that fits, if it was asked for.
    """
    devices = f"{counted(result.plan.world_size, 'GPU')} of {result.cluster.name}"
    parts: list[RenderableType] = [
        Text(headline(result.job, devices, result.stack.name), style="bold"),
        facts_table([*_plan_facts(result), ("", ""), *_speed_facts(result, budget)]),
        Text(),
        SideBySide(_breakdown_table(result), _memory_table(result)),
        Text(),
        facts_table(
            [
                ("memory", _memory_line(result)),
                *([] if largest is None else [("largest", str(largest))]),
                *(change_facts(changes) if not result.memory.fits else ()),
                ("evidence", _evidence_line(result)),
            ]
        ),
    ]
    return Group(*parts, *warning_lines(result.warnings))


def headline(job: TrainingJob, place: str, stack: str) -> str:
    """Return model, cluster and stack in one line."""
    size = format_count(count_parameters(job.model))
    return f"{job.model.name} ({size} parameters) on {place}, stack {stack}"


def job_text(job: TrainingJob) -> str:
    """Return batch, sequence length and precision, and of experts how even they are."""
    text = f"global batch {job.batch_text}, {job.precision}"
    if job.experts is None:
        return text
    how = "balanced" if job.imbalance == 1 else "the hottest followed"
    return f"{text}, experts {how} (imbalance={job.imbalance:g})"


def run_text(run: TrainingRun, sample: str = "tokens") -> str:
    """Return days and cost of a whole run."""
    text = (
        f"{format_count(run.tokens)} {sample}: {run.days:,.1f} days, {run.gpu_hours:,.0f} GPU hours"
    )
    return text if run.cost_usd is None else f"{text}, {run.cost_usd:,.0f} USD"


def format_count(count: float) -> str:
    """Return a large number of things with M, B or T, three significant digits.

    >>> format_count(174_600_000_000), format_count(5e6), format_count(512)
    ('175 B', '5 M', '512')
    """
    for scale, name in ((TERA, "T"), (GIGA, "B"), (MEGA, "M")):
        if count >= scale:
            return f"{count / scale:.3g} {name}"
    return f"{count:,.0f}"


def format_stages(stages: tuple[int, ...]) -> str:
    """Return the layers of each virtual stage, equal neighbours together.

    >>> format_stages((1,)), format_stages((2, 2, 1)), format_stages((2,) * 32 + (1,) * 32)
    ('1 layer', '2 2 1 layers', '32 x 2, 32 x 1 layers')
    """
    if len(stages) == 1:
        return counted(stages[0], "layer")
    if len(stages) <= MAX_STAGES_LISTED:
        return f"{' '.join(map(str, stages))} layers"
    runs = (f"{len(list(group))} x {count}" for count, group in groupby(stages))
    return f"{', '.join(runs)} layers"


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Return names and values in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in facts:
        table.add_row(name, Text(value))
    return table


def change_facts(changes: Sequence[Change]) -> list[tuple[str, str]]:
    """Return the changes that make a plan fit, a line each."""
    lines = [str(each) for each in changes] or ["none of the changes that were tried"]
    return [("fits with" if number == 0 else "or", line) for number, line in enumerate(lines)]


def warning_lines(warnings: Iterable[str]) -> list[RenderableType]:
    """Return one line a warning."""
    return [Text(f"warning: {line}", style="yellow") for line in warnings]


def yes_no(value: bool) -> str:  # noqa: FBT001  (one value, nothing to mix it up with)
    """Return a boolean as a word."""
    return "yes" if value else "no"


def _plan_facts(result: StepResult) -> list[tuple[str, str]]:
    # Defaults of the stack are not shown.
    plan = without_defaults(result.job, result.stack, result.plan)
    microbatches = counted(result.num_microbatches, "microbatch")
    batches = f"{microbatches}, microbatch_size={plan.microbatch_size}"
    facts = [
        ("job", job_text(result.job)),
        ("layout", f"{degrees_text(plan)}, {batches}"),
        ("pipeline", f"schedule={plan.schedule} vpp={plan.num_virtual_stages}"),
        ("stages", format_stages(plan.stages)),
        ("switches", switches_text(plan, result.job)),
    ]
    facts += changed_lines(result.cluster, result.stack)
    if plan.dp_shard is not None:
        replicas = plan.dp // plan.dp_shard
        shards = f"{counted(replicas, 'replica')} of {counted(plan.dp_shard, 'shard')}"
        facts.append(("shards", f"{shards} (dp_shard)"))
    if plan.reshard_after_forward is not None:
        reshards = plan.reshard_after_forward
        lifetime = "freed after forward" if reshards else "kept from forward to backward"
        facts.append(("gathered", f"parameters are {lifetime}"))
    facts.extend(_gradient_facts(plan))
    if plan.offload is not Offload.NONE:
        facts.append(("host", f"keeps and updates what is offloaded (offload={plan.offload})"))
    if plan.offload_layers is not None or plan.offload_modules:
        tensors = f"{', '.join(plan.offload_modules)} of layers"
        if plan.offload_layers is not None:
            tensors = f"the first {counted(plan.offload_layers, 'layer')}"
        facts.append(("host", f"keeps activations of {tensors} from forward to backward"))
    if plan.parameter_server is not None:
        facts.append(("servers", _servers_text(plan.parameter_server)))
    return facts


def _gradient_facts(plan: ResolvedPlan) -> list[tuple[str, str]]:
    """Return the gradient fields that differ from the stack's defaults."""
    words = []
    if plan.gradient_precision is not None:
        words.append(f"kept in {plan.gradient_precision}")
    if plan.reduce_precision is not None:
        words.append(f"reduced in {plan.reduce_precision}")
    if plan.sync_each_microbatch is not None:
        words.append(f"sync_each_microbatch={yes_no(plan.sync_each_microbatch)}")
    if plan.find_unused:
        words.append("unused weights are searched for (find_unused)")
    return [("gradients", ", ".join(words))] if words else []


def _servers_text(options: ParameterServer) -> str:
    where = "all workers" if options.servers == "all" else f"{options.servers} of their own"
    pace = "asynchronous" if options.asynchronous else "synchronous"
    return f"servers={where}, {pace}, slow_worker={options.slow_worker:g}"


def _async_text(run: AsyncRun) -> str:
    times = [time_ps / PS_PER_S for time_ps in run.round_ps if time_ps is not None]
    rounds = f"a round takes {format_time(min(times))} to {format_time(max(times))}"
    stale = f"{run.mean_staleness:.2f} updates on average, {run.max_staleness} at most"
    return f"{rounds}; stale by {stale}"


def degrees_text(plan: ResolvedPlan) -> str:
    """Return the degrees of a plan in one line."""
    return " ".join(f"{axis}={degree}" for axis, degree in plan.degrees.items())


def value_text(value: object) -> str:
    """Return the value of a field for people."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return yes_no(value) if isinstance(value, bool) else str(value)


def switches_text(plan: ResolvedPlan, job: TrainingJob) -> str:
    """Return the switches of a plan, and other fields without a line that are not defaults."""
    shown = (
        each
        for each in PLAN_FIELDS.values()
        if each.name not in FIELDS_WITH_LINES
        and applicable_values(each, job.model) != ()
        and (each.declaration.is_basic or getattr(plan, each.name) != each.default)
    )
    return " ".join(f"{each.name}={value_text(getattr(plan, each.name))}" for each in shown)


def _speed_facts(result: StepResult, budget: Budget | None) -> list[tuple[str, str]]:
    rate = format_flops_per_s(result.model_flops_per_s_per_gpu)
    shares = f"MFU {result.mfu_fraction:.1%}, HFU {result.hfu_fraction:.1%}"
    precision = result.job.precision
    if precision.is_eight_bit:  # only the linear layers could reach that
        shares += f" of the {precision} peak"
    per_gpu = f"{result.tokens_per_s_per_gpu:,.1f} a GPU"
    measured, closed = result.bubble_fraction, result.schedule_bubble_fraction
    facts = [
        ("step time", format_time(result.step_time_s)),
        ("throughput", f"{result.tokens_per_s:,.0f} {result.job.model.sample}/s, {per_gpu}"),
        ("efficiency", f"{shares}, {rate} a GPU (attention not halved)"),
        ("bubble", f"{measured:.1%} measured idle, {closed:.1%} closed form for equal stages"),
        ("comm", f"{format_time(result.exposed_comm_s)} exposed"),
    ]
    if result.asynchronous is not None:
        facts.append(("workers", _async_text(result.asynchronous)))
    if budget is not None:
        facts.append(("run", run_text(budget.run(result), result.job.model.sample)))
    return facts


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two tables side by side, or one below the other where the terminal is narrow."""

    left: Table
    right: Table

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield the tables."""
        grid = Table.grid(padding=(0, 6))
        grid.add_row(self.left, self.right)
        is_narrow = widest(console, options, grid) > options.max_width
        yield Group(self.left, Text(), self.right) if is_narrow else grid


def widest(console: Console, options: ConsoleOptions, table: Table) -> int:
    """Return the columns that *table* takes where there is room."""
    return Measurement.get(console, options.update(width=WIDEST), table).maximum


def _breakdown_table(result: StepResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="cyan")
    table.add_column("time, mean of ranks", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", width=BAR_WIDTH, no_wrap=True)
    for category, time_ps in sorted(result.breakdown_ps.items(), key=lambda item: -item[1]):
        if time_ps > 0:
            fraction = time_ps / result.step_ps
            time, bar = format_time(time_ps / PS_PER_S), "#" * round(BAR_WIDTH * fraction)
            table.add_row(category.replace("_", " "), time, f"{fraction:.1%}", bar)
    return table


def _memory_table(result: StepResult) -> Table:
    memory = result.memory
    table = Table(box=None, pad_edge=False, header_style="cyan")
    table.add_column(f"memory of rank {memory.worst_rank}, the fullest", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    sizes = {
        **{name.replace("_", " "): size for name, size in memory.worst_stage.terms.items()},
        "allocated": memory.peak_bytes,
        "reserved": memory.reserved_bytes,
        "device": memory.device_bytes,
        "usable": memory.usable_bytes,
        "capacity": memory.capacity_bytes,
    }
    if memory.host_bytes:
        sizes["host of a node"] = memory.host_bytes
        sizes["host capacity"] = memory.host_capacity_bytes or 0
    for name, size_bytes in sizes.items():
        style = "bold" if name in {"allocated", "reserved", "device"} else None
        table.add_row(name, f"{size_bytes / GIBI:,.2f}", style=style)
    return table


def _memory_line(result: StepResult) -> str:
    memory, stage = result.memory, result.memory.worst_stage
    need, have = format_bytes(memory.device_bytes), format_bytes(memory.usable_bytes)
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    if memory.host_bytes:
        host = format_bytes(memory.host_bytes)
        have += f", {host} of {format_bytes(memory.host_capacity_bytes or 0)} on a host"
    moment = f"peak at {stage.peak_moment} ({format_time(stage.peak_time_ps / PS_PER_S)})"
    return f"{verdict}: {need} of {have}; {moment}, largest tensor {stage.largest_tensor}"


def _evidence_line(result: StepResult) -> str:
    shares = [f"{source} {result.source_fractions[source]:.1%}" for source in Source]
    return f"{', '.join(shares)} of the busy time"
