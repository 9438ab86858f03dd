"""Numbers of a plan, or of columns of plans, with what its stack does where nothing is said."""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from meshwright.hwprofiles import Number, Precision, StackProfile
from meshwright.simulator.layout import (
    AXES,
    PLAN_FIELDS,
    Formats,
    TrainingJob,
    chosen_formats,
    syncs_by_default,
)

FORMAT = "gradient_precision"  # whose codes formats of a job have, too
JOB_FACTS = ("model", "precision", "storage", "seq_len", "global_batch_size")


def is_fact(name: str) -> bool:
    """Return whether a name is of the job, its model or its stack, not of the plan."""
    return name in JOB_FACTS or name.partition(".")[0] in {"model", "stack"}


class JobFacts(NamedTuple):
    """Facts of a job and its stack, by the names that conditions have for them."""

    job: TrainingJob
    stack: StackProfile

    def value(self, name: str) -> object:
        """Return a fact; None where the model has no such part."""
        root, *path = name.split(".")
        if name == "model":
            return self.job.model.name
        if name == "storage":
            return self.job.precision.storage
        value: object = self.stack if root == "stack" else getattr(self.job, root)
        for word in path:
            value = getattr(value, word, None)
        return value


def fact_number(name: str, value: object) -> Number:
    """Return a fact as conditions compare it: formats by their codes, nothing as 0."""
    if name in ("precision", "storage"):
        return PLAN_FIELDS[FORMAT].code(value)
    return 0 if value is None else value


def code_of(name: str, value: object) -> Number:
    """Return what *value* is where a condition compares it with *name*."""
    if name in PLAN_FIELDS:
        return PLAN_FIELDS[name].code(value)
    return fact_number(name, Precision(str(value)) if name in ("precision", "storage") else value)


class Resolved(NamedTuple):
    """Numbers of a plan, or of columns of plans, with what the stack does where nothing is said."""

    field: Callable[[str], Number]
    facts: JobFacts

    def number(self, name: str) -> Number:
        """Return the number of a field, of ranks or of microbatches, or a fact."""
        if is_fact(name):
            return fact_number(name, self.facts.value(name))
        if name == "num_microbatches":
            sequences = self.field("dp") * self.field("microbatch_size")
            return self.facts.job.global_batch_size // sequences
        if name == "world_size":
            return prod(map(self.field, AXES))
        said = self.field(name)
        usual = HABITS.get(name)
        return said if usual is None else said + (said == 0) * usual(self)

    def code(self, name: str, value: object) -> Number:
        """Return what *value* is where a condition compares it with *name*."""
        return code_of(name, value)

    def first(self, name: str, values: Sequence[object], where: Number) -> Number:
        """Return the code of the first of *values*, 0 where they have no effect."""
        return where * PLAN_FIELDS[name].code(values[0]) if values else 0


def _reshard(resolved: Resolved) -> Number:
    is_freed = (resolved.field("pp") == 1) | resolved.facts.stack.reshards_in_pipelines
    return (resolved.field("zero_stage") >= 3) * (1 + is_freed)


def _formats(resolved: Resolved, kept: Precision | None) -> Formats:
    job, stack = resolved.facts
    return chosen_formats(stack, job.precision, Formats(kept, None))


def _reduced(resolved: Resolved) -> Number:
    """Return the format of reduction that goes with that in which gradients are kept."""
    kept = resolved.field(FORMAT)
    field, found = PLAN_FIELDS[FORMAT], 0
    for each in (None, *Precision):
        reduced = field.code(_formats(resolved, each).reduced)
        found = found + (kept == field.code(each)) * reduced
    return found


def _sync(resolved: Resolved) -> Number:
    zero_stage, pp = resolved.field("zero_stage"), resolved.field("pp")
    return 1 + (syncs_by_default(resolved.facts.stack, zero_stage, pp) != 0)


# What a column has no number of until it is said, as `resolve` completes a plan.
HABITS: dict[str, Callable[[Resolved], Number]] = {
    "cp_type": lambda of: of.first("cp_type", of.facts.stack.context_parallel, of.field("cp") > 1),
    "etp": lambda of: of.field("tp") * (of.facts.job.experts is not None),
    "dispatcher": lambda of: of.first("dispatcher", of.facts.stack.dispatchers, of.field("ep") > 1),
    "recompute_method": lambda of: of.first(
        "recompute_method", of.facts.stack.recompute_methods, of.field("recompute_layers") > 0
    ),
    "dp_shard": lambda of: of.field("dp"),
    "reshard_after_forward": _reshard,
    FORMAT: lambda of: PLAN_FIELDS[FORMAT].code(_formats(of, None).kept),
    "reduce_precision": _reduced,
    "sync_each_microbatch": _sync,
}
