"""The largest value for which one plan fits, by simulation at some values."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import lcm
from typing import NamedTuple, TypeAlias

from meshwright.hwprofiles import Cluster, StackProfile, format_bytes
from meshwright.planner.largest.climb import last_that_fits
from meshwright.planner.largest.quantity import (
    MOST_SEQUENCES,
    Largest,
    deeper_job,
    least_layers,
    microbatch_ranges,
    most_layers,
    most_tokens,
    step_tokens,
    stretches,
)
from meshwright.planner.search import Progress
from meshwright.simulator import PlanError, ResolvedPlan, StepResult, TrainingJob, simulate
from meshwright.simulator.layout import TP_CP, Quantity, check_sharding

PlanOf: TypeAlias = Callable[[TrainingJob, int | None], ResolvedPlan]
"""Returns the plan of a job, with a microbatch size if it is not the plan's own."""


class Values(NamedTuple):
    """Possible values of a quantity of a plan.

    Args:
        ranges: First and last value of ranges along which memory only grows, the largest first.
        step: Distance of neighbours in a range.
        end: Text of the reason why there are none above.
        how: Text of the fixed quantities.
    """

    ranges: list[tuple[int, int]]
    step: int
    end: str
    how: str = ""


@dataclass
class Trials:
    """Simulations of a plan at values of a quantity; each is run once."""

    job: TrainingJob
    cluster: Cluster
    stack: StackProfile
    plan_of: PlanOf
    quantity: Quantity
    memory_limit_bytes: int | None
    progress: Progress | None = None
    steps: dict[int, StepResult | PlanError] = field(default_factory=dict)

    def plan(self, value: int) -> tuple[TrainingJob, ResolvedPlan]:
        """Return job and plan at *value*."""
        if self.quantity is Quantity.SEQ_LEN:
            job = replace(self.job, seq_len=value)
            return job, self.plan_of(job, None)
        if self.quantity is Quantity.MICRO_BATCH:
            return self.job, self.plan_of(self.job, value)
        if self.quantity is Quantity.LAYERS:
            job = deeper_job(self.job, value)
            return job, self.plan_of(job, None)
        base = self.plan_of(self.job, None)
        job = replace(self.job, global_batch_size=value)
        size = value // (base.dp * base.num_microbatches(self.job))
        return job, self.plan_of(job, size)

    def step(self, value: int) -> StepResult:
        """Return the simulated step at *value*.

        Raises:
            PlanError: If the plan does not go with it.
        """
        if value not in self.steps:
            if self.progress is not None:
                self.progress(f"looking for the largest {self.quantity}", value, 0)
            try:
                job, plan = self.plan(value)
                self.steps[value] = self._run(job, plan)
            except PlanError as error:
                # Refusals are kept, too: bisection may come to the same value again.
                self.steps[value] = error
        found = self.steps[value]
        if isinstance(found, PlanError):
            raise found
        return found

    def _run(self, job: TrainingJob, plan: ResolvedPlan) -> StepResult:
        limit = self.memory_limit_bytes
        return simulate(job, plan, self.cluster, self.stack, memory_limit_bytes=limit)

    def fits(self, value: int) -> bool:
        """Return True if the plan can run at *value* and fits."""
        try:
            return self.step(value).memory.fits
        except PlanError:
            return False


def find_largest_of_plan(  # noqa: PLR0913 -- the public entry; what is optional is keyword-only
    job: TrainingJob,
    cluster: Cluster,
    stack: StackProfile,
    plan_of: PlanOf,
    quantity: Quantity,
    *,
    memory_limit_bytes: int | None = None,
    progress: Progress | None = None,
) -> tuple[Largest, StepResult]:
    """Return the largest value for which a plan fits, and the step at it.

    Where nothing fits the step is that at the smallest value.

    Args:
        job: Model, sequence length and batch, but for the quantity.
        cluster: Hardware.
        stack: Software stack.
        plan_of: Returns the plan of a job, from which a rule for stages may follow.
        quantity: Quantity that grows: sequence length, the microbatch of the job's global batch,
            the global batch with as many microbatches as the job's, or the layers of the model.
        memory_limit_bytes: Limit of a device; by default all that processes can have.
        progress: Called with the name of the work, and the value that is tried.

    Raises:
        PlanError: If the quantity does not go with the model, or no value with the plan.
    """
    trials = Trials(job, cluster, stack, plan_of, quantity, memory_limit_bytes, progress)
    plan = plan_of(job, None)
    values = _VALUES[quantity](job, plan)
    for first, last in values.ranges:
        value = last_that_fits(first, last, values.step, trials.fits)
        if value is not None:
            return _largest(trials, values, value), trials.step(value)
    return _none_fits(trials, values)


def _lengths(job: TrainingJob, plan: ResolvedPlan) -> Values:
    """Return the lengths of sequences that the plan's context and sequence parallelism divide."""
    _, end = most_tokens(job)
    # Context parallelism gives each rank an early and a late part, to balance causal masks.
    cp_multiple = 2 * plan.cp if plan.cp > 1 else 1
    tp_multiple = plan.number(TP_CP) if plan.sequence_parallel else 1
    step = lcm(step_tokens(job), cp_multiple, tp_multiple)
    ranges = ((-(-low // step) * step, high // step * step) for low, high in stretches(job))
    return Values([(low, high) for low, high in ranges if low <= high], step, end)


def _microbatches(job: TrainingJob, plan: ResolvedPlan) -> Values:
    """Return the divisors of a replica's sequences, each a range of its own: all are tried."""
    check_sharding(job, plan)
    sequences = job.global_batch_size // plan.dp
    sizes = [size for size in range(sequences, 0, -1) if sequences % size == 0]
    end = f"a replica has {sequences:,} of the {job.global_batch_size:,} sequences"
    return Values([(size, size) for size in sizes], 1, end)


def _batches(job: TrainingJob, plan: ResolvedPlan) -> Values:
    """Return the global batches with as many microbatches as the job's."""
    check_sharding(job, plan)
    step = plan.dp * plan.num_microbatches(job)
    ranges = microbatch_ranges(MOST_SEQUENCES // step)
    end = f"batches beyond {MOST_SEQUENCES:,} sequences are not looked at"
    how = f"microbatches a replica as in the job, {plan.num_microbatches(job):,}; "
    return Values([(low * step, high * step) for low, high in ranges], step, end, how)


def _layers(job: TrainingJob, plan: ResolvedPlan) -> Values:
    """Return the numbers of layers that give all stages equally many."""
    most, end = most_layers(job)
    step = plan.pp * plan.num_virtual_stages
    first = -(-least_layers(job.transformer) // step) * step
    return Values([(first, most // step * step)], step, end, "stages of as many layers each; ")


_VALUES: dict[Quantity, Callable[[TrainingJob, ResolvedPlan], Values]] = {
    Quantity.SEQ_LEN: _lengths,
    Quantity.MICRO_BATCH: _microbatches,
    Quantity.GLOBAL_BATCH: _batches,
    Quantity.LAYERS: _layers,
}


def _largest(trials: Trials, values: Values, value: int) -> Largest:
    """Return the result for the largest value."""
    quantity = trials.quantity
    following = _next_value(values, value)
    if following is None:
        return Largest(quantity=quantity, value=value, next_value=None, why=values.end)
    return Largest(
        quantity=quantity,
        value=value,
        next_value=following,
        why=f"{values.how}{_reason(trials, following)}",
    )


def _next_value(values: Values, value: int) -> int | None:
    """Return the next value after *value*."""
    ahead: Iterable[int] = (
        value + values.step if first <= value < last else first
        for first, last in values.ranges
        if last > value
    )
    return min(ahead, default=None)


def _reason(trials: Trials, value: int) -> str:
    """Return the reason why the plan does not fit at *value*."""
    try:
        memory = trials.step(value).memory
    except PlanError as error:
        return f"at {value:,}: {error}"
    need, have = format_bytes(memory.device_bytes), format_bytes(memory.usable_bytes)
    return f"at {value:,} rank {memory.fullest_rank} needs {need} of {have}"


def _none_fits(trials: Trials, values: Values) -> tuple[Largest, StepResult]:
    """Return the result where no value fits, of the smallest that the plan can run."""
    least = values.ranges[-1][0]
    step = trials.step(least)
    return (
        Largest(quantity=trials.quantity, value=None, next_value=least, why=_reason(trials, least)),
        step,
    )
