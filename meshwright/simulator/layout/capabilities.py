"""Limits of a stack: plan values that its lists leave out, and plans that its rules refuse.

Both are conditions in the language of stack files, evaluated for one plan or columns of plans.
"""

from ast import expr
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from math import prod
from typing import NamedTuple

from meshwright.hwprofiles import (
    ContextParallel,
    Number,
    Precision,
    ProfileError,
    RecomputeMethod,
    Refusal,
    StackProfile,
    Strategy,
    all_hold,
    common_refusals,
    filled,
    names_of,
    parsed,
    shown,
    suggestion,
)
from meshwright.simulator.layout.axes import AXES, JOINT_AXES
from meshwright.simulator.layout.fields import PlanField
from meshwright.simulator.layout.formats import Formats, chosen_formats, syncs_by_default
from meshwright.simulator.layout.job import TABLES, TrainingJob, check_fact
from meshwright.simulator.layout.mesh import context_parallel_types
from meshwright.simulator.layout.plan import EXPERT_SHARDS, PLAN_FIELDS, SHARDS
from meshwright.simulator.model import ModelSpec

MAX_ZERO_STAGE = 3
PRECISIONS = ("precision", "storage")  # facts that conditions compare with gradient_precision
GRADIENTS = "gradient_precision"
JOB_FACTS = ("model", *PRECISIONS, "seq_len", "global_batch_size", "imbalance")
# Counts that are no plan field, with the fields that they are computed from.
COUNTED = {"num_microbatches": ("dp", "microbatch_size"), "world_size": tuple(AXES)}
COUNTS = (*JOINT_AXES, SHARDS, EXPERT_SHARDS, *COUNTED)
# Stack traits that list the supported values of a field, where its declaration names none.
LISTS = {"zero_stage": "zero_stages", "recompute_modules": "recompute_modules"}
NONE_OFFERED = {"recompute_method": "leave recompute_layers out"}  # what helps then


class Facts(NamedTuple):
    """Facts of a job and its stack, by the names that conditions have for them."""

    job: TrainingJob
    stack: StackProfile

    def value(self, name: str) -> object:
        """Return a fact; None if the model lacks the part; of a list whether it has a member."""
        root, *path = name.split(".")
        if name in {"model", "storage"}:
            return self.job.model.name if name == "model" else self.job.precision.storage
        value: object = self.stack if root == "stack" else getattr(self.job, root)
        for word in path:
            value = word in value if isinstance(value, tuple) else getattr(value, word, None)
        return value

    def filled(self, text: object) -> object:
        """Return *text* with facts in the place of their names in braces."""

        def value(name: str) -> object:
            try:
                return self.value(name) if is_fact(name) else None
            except ProfileError:  # braces of a text that mean nothing here
                return None

        return filled(text, value)


def code_of(name: str, value: object) -> Number:
    """Return the number of a field's or fact's *value* in conditions: None is 0, a list its length.

    Raises:
        ProfileError: If a field has no such value.
    """
    field = PLAN_FIELDS.get(GRADIENTS if name in PRECISIONS else name)
    if field is None:
        return len(value) if isinstance(value, tuple) else 0 if value is None else value
    if field.choices and not (field.is_optional and value is None):
        known = [str(each) for each in field.choices]
        if str(value) not in known:
            raise ProfileError(f"{name}={value} is unknown; {suggestion(str(value), known)}")
    return field.code(value)


class Numbers(NamedTuple):
    """Values of the names of a condition: numbers of plan fields, and facts."""

    field: Callable[[str], Number]
    facts: Facts

    def number(self, name: str) -> Number:
        """Return a fact, or the number of a field, where it is unset the stack's default."""
        if is_fact(name):
            return code_of(name, self.facts.value(name))
        if name in COUNTED:
            ranks = prod(map(self.field, COUNTED[name]))
            return ranks if name == "world_size" else self.facts.job.global_batch_size // ranks
        field, _, member = name.partition(".")
        number = self.field(field)
        if member:
            return number >> PLAN_FIELDS[field].declaration.members.index(member) & 1
        is_optional = name in STACK_DEFAULTS  # of which 0 is None, and no value
        return number + (number == 0) * self.stack_default(name) if is_optional else number

    def stack_default(self, name: str) -> Number:
        """Return the number of the stack's default of a field in `STACK_DEFAULTS`."""
        return STACK_DEFAULTS[name].number(self)

    def code(self, name: str, value: object) -> Number:
        """Return the number of *value*, which a condition compares with *name*."""
        return code_of(name, value)


class StackDefault(NamedTuple):
    """A stack's default of an optional plan field, and the fields on which it depends."""

    number: Callable[[Numbers], Number]
    reads: tuple[str, ...]


def _first(name: str, where: str, least: int) -> StackDefault:
    """Return the default of the stack's first listed value, where field *where* exceeds *least*."""

    def number(of: Numbers) -> Number:
        field = PLAN_FIELDS[name]
        values = listed(field, of.facts.stack)
        return (of.field(where) > least) * field.code(values[0]) if values else 0

    return StackDefault(number, (where,))


def _reshard(of: Numbers) -> Number:
    is_freed = (of.field("pp") == 1) | of.facts.stack.reshards_in_pipelines
    return (of.field("zero_stage") >= MAX_ZERO_STAGE) * (1 + is_freed)


@lru_cache(maxsize=512)
def _formats(facts: Facts, kept: Precision | None) -> Formats:
    job, stack = facts
    is_mesh, wanted = stack.strategy is Strategy.MESH, Formats(kept, None)
    return chosen_formats(stack, job.precision, wanted) if is_mesh else Formats(None, None)


def _reduced(of: Numbers) -> Number:
    """Return the number of the reduction format that follows from the format of kept gradients."""
    code, kept = PLAN_FIELDS[GRADIENTS].code, of.field(GRADIENTS)
    return sum(
        (kept == code(each)) * code(_formats(of.facts, each).reduced) for each in (None, *Precision)
    )


def _sync(of: Numbers) -> Number:
    syncs = syncs_by_default(of.facts.stack, of.field("zero_stage"), of.field("pp"))
    return (of.facts.stack.strategy is Strategy.MESH) * (1 + (syncs != 0))


STACK_DEFAULTS: dict[str, StackDefault] = {
    "cp_type": _first("cp_type", "cp", 1),
    "etp": StackDefault(lambda of: of.field("tp") * (of.facts.job.experts is not None), ("tp",)),
    "dispatcher": _first("dispatcher", "ep", 1),
    "recompute_method": _first("recompute_method", "recompute_layers", 0),
    "dp_shard": StackDefault(lambda of: of.field("dp"), ("dp",)),
    "reshard_after_forward": StackDefault(_reshard, ("zero_stage", "pp")),
    GRADIENTS: StackDefault(lambda of: code_of(GRADIENTS, _formats(of.facts, None).kept), ()),
    "reduce_precision": StackDefault(_reduced, (GRADIENTS,)),
    "sync_each_microbatch": StackDefault(_sync, ("zero_stage", "pp")),
}


def listed(field: PlanField, stack: StackProfile) -> tuple[object, ...] | None:
    """Return the values of a field that *stack* lists, None where it has no list."""
    offered = getattr(stack, field.declaration.offered_by or LISTS.get(field.name, ""), None)
    return offered if isinstance(offered, tuple) and not field.declaration.axis else None


@cache
def is_fact(name: str) -> bool:
    """Return True if a name is a fact of the job or the stack, False if it is a plan field.

    Raises:
        ProfileError: If it is neither.
    """
    root, *path = name.split(".")
    if root in TABLES and path:
        check_fact(root, path)
        return True
    members = PLAN_FIELDS[root].declaration.members if root in PLAN_FIELDS else ()
    known = [f"{root}.{each}" for each in members] if path else []
    known = known or [*PLAN_FIELDS, *COUNTS, *JOB_FACTS]
    if name not in known:
        raise ProfileError(f"{shown(name)} is no field or fact; {suggestion(name, known)}")
    return name in JOB_FACTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Plans that a stack does not run, or that a framework cannot be told.

    Args:
        field: Name of the refused field; a fact where `fields` is empty, and no plan runs.
        reason: The plans in words.
        parts: Conditions, all of which hold of them.
        facts: Of the job and the stack.
        allowed: Values that a plan may have instead.
        model: Name of the model, if the limit depends on it.
        why: The rule of the framework.
        conflict: The value that the field's conflicts with.
        names: Names that the conditions read of a plan.
        fields: Plan fields and counts of ranks behind these names.
    """

    field: str
    reason: str
    parts: tuple[expr, ...]
    facts: Facts
    allowed: tuple[object, ...]
    model: str = ""
    why: str = ""
    conflict: str = ""
    names: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Derive the names and fields that the conditions read."""
        names = frozenset(name for name in names_of(self.parts) if not is_fact(name))
        read = [each for name in names for each in COUNTED.get(name, (name.partition(".")[0],))]
        defaults = [STACK_DEFAULTS[name].reads for name in read if name in STACK_DEFAULTS]
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "fields", frozenset(read).union(*defaults))

    def lacks(self, number: Callable[[str], Number]) -> Number:
        """Return True for a refused plan, whose fields *number* gives by name."""
        return all_hold(self.parts, Numbers(number, self.facts))


def stack_gaps(stack: StackProfile, job: TrainingJob) -> tuple[Gap, ...]:
    """Return the limits of *stack* for *job* that depend on the plan.

    Raises:
        ProfileError: If a condition names what is neither a field nor a fact.
    """
    return _gaps(stack, job)[1]


def job_gaps(stack: StackProfile, job: TrainingJob) -> tuple[Gap, ...]:
    """Return the limits of *stack* that refuse *job* in any plan; raises as `stack_gaps`."""
    return _gaps(stack, job)[0]


@lru_cache(maxsize=64)
def _gaps(stack: StackProfile, job: TrainingJob) -> tuple[tuple[Gap, ...], tuple[Gap, ...]]:
    facts = Facts(job, stack)
    rules = stack.refused | {
        name: rule for name, rule in common_refusals().items() if name not in stack.refused
    }
    gaps = [*_lists(facts)]
    for name, rule in rules.items():
        gaps += _refused(name, rule, facts)
    gaps += _stages_in_pipelines(facts)
    of_job = tuple(gap for gap in gaps if not gap.fields)
    return of_job, tuple(gap for gap in gaps if gap.fields)


def _refused(name: str, rule: Refusal, facts: Facts) -> Iterator[Gap]:
    """Yield the plans that a rule refuses, if its conditions on the job hold."""
    if not rule.when:  # a stack's own file lifts a refusal of its base
        return
    try:
        condition = parsed(rule.when)
        of_job, of_plan = condition.about(is_fact)
        if not all_hold(of_job, Numbers(lambda _: 0, facts)):
            return
        field = PLAN_FIELDS.get(rule.field)
        if field is None and rule.field != "model":
            is_fact(rule.field if rule.field in JOB_FACTS else f"stack.{rule.field}")
    except (ProfileError, TypeError) as error:
        text = str(error) if isinstance(error, ProfileError) else f"{shown(rule.when)}: {error}"
        raise ProfileError(f"stack {facts.stack.name}: refused.{name}: {text}") from None
    offered = None if field is None else listed(field, facts.stack)
    is_of_model = any(each.startswith("model.") for each in condition.names)
    yield Gap(
        field=rule.field,
        reason=str(facts.filled(rule.reason or rule.when)),
        parts=of_plan,
        facts=facts,
        allowed=tuple(
            facts.filled(each)
            for each in rule.allowed
            if not (field and offered and each in field.choices and each not in offered)
        ),
        model=facts.job.model.name if is_of_model else "",
        why=str(facts.filled(rule.words(facts.stack.ruled_by))),
        conflict=str(facts.filled(rule.conflict)),
    )


def _lists(facts: Facts) -> Iterator[Gap]:
    """Yield the plan values that the lists and flags of a stack leave out."""
    stack, model = facts.stack, facts.job.model
    for axis, known in AXES.items():
        if known.offered_by is not None and not getattr(stack, known.offered_by):
            yield _gap(facts, axis, f"{axis} > 1", (1,))
    fields = [each for each in PLAN_FIELDS.values() if each.declaration.axis is None]
    for field in fields:
        yield from _values_left_out(field, facts)
    for field in fields:
        if getattr(stack, field.declaration.offered_by or "", True) is False:
            acts_on, usual = field.declaration.acts_on, field.code(field.default)
            is_named = field.kind is bool or field.default is None
            said = field.name if is_named else f"{field.name} > {field.default}"
            when = f"{field.name} > {usual}" + (f" and {acts_on} > 1" if acts_on else "")
            usual_value = "leave it out" if field.default is None else field.default
            yield _gap(facts, field.name, when, (usual_value,), said)
    if RecomputeMethod.BLOCK not in stack.recompute_methods:
        when = "recompute_layers > 0 and recompute_method == None"
        allowed = stack.recompute_methods or (NONE_OFFERED["recompute_method"],)
        yield _gap(facts, "recompute_method", when, allowed, "recompute_layers without a method")
    yield from _zero_stages(facts)
    if stack.context_parallel and isinstance(model, ModelSpec):
        yield from _cp_types(facts, model)


def _values_left_out(field: PlanField, facts: Facts) -> Iterator[Gap]:
    """Yield the values of *field* that the stack does not list; ZeRO stages: `_zero_stages`."""
    offered = listed(field, facts.stack)
    if offered is None or field.name == "zero_stage":
        return
    if field.declaration.members:
        others = [each for each in field.declaration.members if each not in offered]
        when = " or ".join(f"{field.name}.{each}" for each in others)
        if others:
            yield _gap(facts, field.name, when, offered or ("leave it out",), field.name)
        return
    known = offered or (NONE_OFFERED.get(field.name, "leave it out"),) * field.is_optional
    for value in field.choices:
        if value not in offered:
            when, said = f"{field.name} == {str(value)!r}", f"{field.name}={value}"
            yield _gap(facts, field.name, when, known, said)


def _zero_stages(facts: Facts) -> Iterator[Gap]:
    """Yield the ZeRO stages that a stack lacks; on one rank a stage has no effect."""
    name, offered = "zero_stage", facts.stack.zero_stages
    in_pipelines = _pipeline_stages(facts.stack)
    for stage in sorted({*range(MAX_ZERO_STAGE + 1)} - {*offered}):
        when, said = f"{name} == {stage} and dp_cp > 1", f"{name}={stage}"
        yield _gap(facts, name, f"{when} and pp > 1", in_pipelines, said)
        yield _gap(facts, name, when, offered, said)


def _stages_in_pipelines(facts: Facts) -> Iterator[Gap]:
    """Yield the ZeRO stages that a stack supports only without a pipeline."""
    in_pipelines = _pipeline_stages(facts.stack)
    for stage in facts.stack.zero_stages:
        if stage not in in_pipelines:
            when, said = f"zero_stage == {stage} and dp_cp > 1 and pp > 1", f"zero_stage={stage}"
            gap = _gap(facts, "zero_stage", when, in_pipelines, f"{said} in a pipeline")
            rule = facts.stack.rules.get("pipeline_zero_stages")
            why = "pp=1 goes with it" + (f"; {rule.words()}" if rule else "")
            yield replace(gap, why=why)


def _pipeline_stages(stack: StackProfile) -> tuple[int, ...]:
    return tuple(each for each in stack.zero_stages if each in stack.pipeline_zero_stages)


def _cp_types(facts: Facts, model: ModelSpec) -> Iterator[Gap]:
    """Yield the types of context parallelism that do not support the head widths of *model*.

    Keys wider than values: in Transformer Engine 2.5 to 2.14 only ring attention takes them; a
    hybrid whose inner group is all ranks has no ring (attn_forward_func_with_cp).
    """
    known, said = context_parallel_types(model, facts.stack), "with latent attention"
    of_latent = partial(replace, model=model.name, why=facts.stack.rule("latent_context_parallel"))
    if not known:
        yield of_latent(_gap(facts, "cp", "cp > 1", (1,), f"cp > 1 {said}"))
        return
    for cp_type in facts.stack.context_parallel:
        if cp_type not in known:
            when, words = f"cp > 1 and cp_type == '{cp_type}'", f"cp_type={cp_type} {said}"
            yield of_latent(_gap(facts, "cp_type", when, known, words))
    if ContextParallel.HYBRID_RING in known and ContextParallel.ALL_TO_ALL not in known:
        when, allowed = "cp > 1 and cp_inner == cp", ("a smaller divisor of cp",)
        yield of_latent(_gap(facts, "cp_inner", when, allowed, f"cp_inner=cp {said}"))


def _gap(facts: Facts, field: str, when: str, allowed: tuple[object, ...], reason: str = "") -> Gap:
    trait = PLAN_FIELDS[field].declaration.offered_by or LISTS.get(field, "")
    parts, why = parsed(when).parts, facts.stack.rule(trait)
    gap = Gap(field=field, reason=reason or when, parts=parts, facts=facts, allowed=allowed)
    return replace(gap, why=why)
