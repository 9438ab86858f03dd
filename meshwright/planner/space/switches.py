"""Settings of a layout's other fields: each that the stack offers and that has an effect, once.

A field at the stack's default is None in a plan, so that no layout is listed twice.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple, TypeAlias, cast

from meshwright.hwprofiles import (
    EIGHT_BITS,
    ContextParallel,
    Offload,
    Precision,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    StackProfile,
    Strategy,
    Units,
)
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.simulator.layout import (
    MAX_ZERO_STAGE,
    PLAN_FIELDS,
    SEARCHED_FIELDS,
    Formats,
    PlanField,
    applicable_values,
    chosen_formats,
    conflict_of,
    offered_formats,
    syncs_by_default,
)
from meshwright.simulator.schedules import SCHEDULES, any_core_group
from meshwright.simulator.step import OFFLOAD_STAGES

Setting: TypeAlias = dict[str, object]
Wanted: TypeAlias = dict[str, tuple[object, ...]]

SWITCHES = tuple(
    each.name
    for each in SEARCHED_FIELDS
    if not (each.declaration.is_basic or each.declaration.axis or each.divides_experts)
)
# All other fields: layouts that are equal in them are one for all settings.
BASIC_FIELDS = tuple(each for each in SEARCHED_FIELDS if each.name not in SWITCHES)
BASIC = tuple(each.name for each in BASIC_FIELDS)
USUAL: Setting = {name: PLAN_FIELDS[name].default for name in SWITCHES}
OF_GRADIENTS = "gradient_precision", "reduce_precision"  # kept, and on the wire
ACTIVATIONS = "offload_layers", "offload_modules"
FIRST_IS_DEFAULT = "cp_type", "dispatcher"  # the first one that a stack lists is its default


class Place(NamedTuple):
    """Numbers that decide which fields of a layout have an effect.

    ``has_several`` says that a step has more than one microbatch, ``is_lacking`` that the stack
    does not offer such layouts, whatever their other fields. The last ones, from the schedule to
    the ranks of experts, keep their defaults here where no field that depends on them is asked for;
    ``most_layers`` is of a virtual stage, ``common_layers`` divides those of each.
    """

    pp: int
    cp: int
    dp: int
    zero_stage: int
    has_several: int
    is_lacking: int
    recompute: int = 0
    schedule: int = 0
    num_microbatches: int = 0
    most_layers: int = 0
    common_layers: int = 0
    ep: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether no other rank holds the same parameters."""
        return self.cp * self.dp == 1


def settings(job: TrainingJob, stack: StackProfile, place: Place, wanted: Wanted) -> list[Setting]:
    """Return the settings of fields at *place* with *wanted* values, defaults first."""
    if stack.strategy is not Strategy.MESH or place.is_lacking:
        return [USUAL]
    choices = (
        _modules(place, wanted),
        _layers(place, wanted),
        _groups(place, wanted),
        _context(stack, place, wanted),
        _dispatch(job, stack, wanted),
        _overlaps(job, stack, place, wanted),
        _shards(stack, place, wanted),
        _resharding(stack, place, wanted),
        _formats(job, stack, place, wanted),
        _moments(job, stack, place, wanted),
        _offloads(stack, place, wanted),
        _activations(place, wanted),
        _syncs(stack, place, wanted),
    )
    combined = (
        USUAL | {name: value for part in parts for name, value in part.items()}
        for parts in product(*map(list, choices))
    )
    # One rank shards nothing: without these two its states are as at stage 0.
    is_stage_0 = place.is_whole and place.zero_stage and "zero_stage" not in wanted
    plain = {name: USUAL[name] for name in ("moment_precision", "offload")}.items()
    kept = (each for each in combined if not (is_stage_0 and plain <= each.items()))
    return [each for each in kept if _can_combine(each)]


def _can_combine(setting: Setting) -> bool:
    """Return True if offloading and F/B overlap can be combined with a *setting*."""
    if setting["offload"] is Offload.PARAMETERS and setting["gradient_precision"] is not None:
        return False  # on the host a gradient has the format of its parameter
    recomputed = cast("tuple[RecomputeModule, ...]", setting["recompute_modules"])
    is_refused = RecomputeModule.MOE in recomputed or bool(setting["sync_each_microbatch"])
    return setting["expert_overlap"] is None or not is_refused


def askable_values(field: PlanField, job: TrainingJob, stack: StackProfile) -> tuple[object, ...]:
    """Return the values of a field that a search tries when asked to, the default first.

    Formats in 16 bits are those of the training alone.
    """
    if not field.declaration.is_asked or applicable_values(field, job.model) is not None:
        return (field.default,)
    if field.name in OF_GRADIENTS:
        usual = {Precision.FP32, job.precision.storage}
        pairs = offered_formats(stack, job.precision)
        listed = [pair[OF_GRADIENTS.index(field.name)] for pair in pairs]
        own = chosen_formats(stack, job.precision, Formats(None, None))
        others = {*listed} & usual - {own[OF_GRADIENTS.index(field.name)]}
        return field.default, *(each for each in Precision if each in others)
    offered = cast("tuple[object, ...]", getattr(stack, field.declaration.offered_by or ""))
    if field.name in FIRST_IS_DEFAULT:
        offered = offered[1:]
    if field.name == "moment_precision":
        is_full = job.precision is Precision.FP32  # which no such optimizer trains in
        usual_moments = {} if is_full else {Precision.FP32, job.precision.storage, *EIGHT_BITS}
        offered = tuple(each for each in offered if each in usual_moments)
    return field.default, *(each for each in offered if each != field.default)


def _chosen(
    name: str, default: object, others: Iterable[object], wanted: Wanted
) -> Iterator[Setting]:
    """Yield the values of a field that are asked for, if any are; the default is None."""
    values = wanted.get(name)
    if values is None or None in values or default in values:
        yield {name: None}
    yield from ({name: each} for each in others if values is None or each in values)


def _modules(place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the modules of a layer that are recomputed: the default unless others are asked for."""
    name, mode = "recompute_modules", PLAN_FIELDS["recompute"].code(Recompute.SELECTIVE)
    for modules in wanted.get(name, ((),)):
        if not modules or place.recompute == mode:
            yield {name: modules or ()}


def _layers(place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the number of fully recomputed layers: all, one by one, unless others are asked for.

    Of a range of numbers those with the same effect as another one are excluded.
    """
    numbers = wanted.get("recompute_layers", (None,))
    (method,) = wanted.get("recompute_method", (None,))
    is_full = place.recompute == PLAN_FIELDS["recompute"].code(Recompute.FULL)
    for number in cast("tuple[int | None, ...]", numbers):
        if number is None:
            yield {}
        elif is_full and _is_distinct(number, method, place, is_asked=None not in numbers):
            yield {"recompute_layers": number, "recompute_method": method}


def _is_distinct(number: int, method: object, place: Place, *, is_asked: bool) -> bool:
    """Return True if *number* is one of a *method* at *place*, and equals no other layout's."""
    match method:
        case RecomputeMethod.UNIFORM:
            return place.common_layers % number == 0 and (is_asked or number > 1)
        case RecomputeMethod.EVERY:
            return is_asked or number > 1
        case _:
            return is_asked or number < place.most_layers


def _groups(place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the microbatch group sizes: the smallest unless others are asked for."""
    name = "microbatch_group_size"
    for size in cast("tuple[int | None, ...]", wanted.get(name, (None,))):
        if size is None:
            yield {}
            continue
        schedule = str(PLAN_FIELDS["schedule"].value(place.schedule))
        if SCHEDULES[schedule].interleaves and any_core_group(size)(
            place.pp, place.num_microbatches
        ):
            yield {name: size}


def _context(stack: StackProfile, place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the kinds of context parallelism: the stack's default unless others are asked for."""
    name, inner, hybrid = "cp_type", "cp_inner", ContextParallel.HYBRID_RING
    values = wanted.get(name, ())
    others = [each for each in stack.context_parallel[1:] if each in values]
    default = stack.context_parallel[0] if stack.context_parallel else None
    if place.cp == 1:
        yield {name: None}
        return
    for setting in _chosen(name, default, others, wanted):
        if setting[name] is not hybrid:
            yield setting
            continue
        # A group of one makes a ring, which is a layout of its own.
        sizes = [each for each in divisors(place.cp) if each in wanted.get(inner, (each,))]
        yield from (setting | {inner: each} for each in sizes if each > 1 or inner in wanted)


def _dispatch(job: TrainingJob, stack: StackProfile, wanted: Wanted) -> Iterator[Setting]:
    """Yield the token dispatchers of experts: the stack's default unless others are asked for."""
    name, default = "dispatcher", next(iter(stack.dispatchers), None)
    if applicable_values(PLAN_FIELDS[name], job.model) is not None:
        return _chosen(name, default, [], {})
    values = wanted.get(name, ())
    return _chosen(
        name, default, [each for each in stack.dispatchers[1:] if each in values], wanted
    )


def _overlaps(
    job: TrainingJob, stack: StackProfile, place: Place, wanted: Wanted
) -> Iterator[Setting]:
    """Yield the modes of expert all-to-all overlap: none unless asked for."""
    name = "expert_overlap"
    names = "pp", "ep", "zero_stage", "recompute", "schedule"
    for overlap in wanted.get(name, (None,)):
        if overlap is None:
            yield {name: None}
            continue
        fields = {each: PLAN_FIELDS[each].value(getattr(place, each)) for each in names}
        plan = ResolvedPlan.of({**fields, "dp": place.ep, name: overlap})
        schedule = plan.schedule_of(stack.pipeline_runtime)
        is_plain = schedule.interleaves or schedule.refusal(place.pp, 1, 1) is None
        if is_plain and conflict_of(name, job, plan, stack) is None:
            yield {name: overlap}


def _shards(stack: StackProfile, place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the sizes of shard groups: of optimizers and flat units all ranks unless asked for."""
    name, stage = "dp_shard", place.zero_stage
    in_instances = stack.optimizer_instances and stage == 1
    in_sets = stack.units is Units.FLAT and stage == MAX_ZERO_STAGE
    is_asked = (in_instances or in_sets) and name in wanted
    is_offered = is_asked or (stack.hybrid_sharding and stage > 0)
    others = divisors(place.dp)[-2::-1] if is_offered else []
    return _chosen(name, place.dp, others, wanted)


def _resharding(stack: StackProfile, place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the values of ``reshard_after_forward``."""
    name = "reshard_after_forward"
    if place.zero_stage < MAX_ZERO_STAGE or place.is_whole:
        return _chosen(name, True, [], wanted)  # noqa: FBT003
    # Pipeline runtimes keep units gathered from microbatch to microbatch by default.
    frees = place.pp == 1 or stack.reshards_in_pipelines
    return _chosen(name, frees, [not frees] if stack.hybrid_sharding or not frees else [], wanted)


def _syncs(stack: StackProfile, place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the values of ``sync_each_microbatch``: reductions in every microbatch or the last."""
    name, default = (
        "sync_each_microbatch",
        bool(syncs_by_default(stack, place.zero_stage, place.pp)),
    )
    if place.pp > 1:
        return _chosen(name, default, [], wanted)
    if place.is_whole or not place.has_several:
        return _chosen(name, default, [], {})
    return _chosen(name, default, [not default] if stack.optional_microbatch_sync else [], wanted)


def _formats(
    job: TrainingJob, stack: StackProfile, place: Place, wanted: Wanted
) -> Iterator[Setting]:
    """Yield the formats of gradients: the stack's unless others are asked for.

    A reduction format that is asked for alone may need gradients kept in that format, too.
    """
    known: dict[Formats, Formats] = {}
    for kept, reduced in offered_formats(stack, job.precision):
        default = chosen_formats(stack, job.precision, Formats(None, None))
        kept_option = None if kept == default.kept else kept
        follows = chosen_formats(stack, job.precision, Formats(kept_option, None)).reduced
        pair = Formats(kept_option, None if reduced == follows or place.is_whole else reduced)
        known.setdefault(pair, Formats(kept, reduced))
    kept_asked, reduced_asked = (wanted.get(name) for name in OF_GRADIENTS)
    pairs = [
        pair
        for pair, (kept, reduced) in known.items()
        if _is_wanted(kept_asked, kept, pair.kept)
        and (
            pair.reduced is None
            if reduced_asked is None
            else place.is_whole or _is_wanted(reduced_asked, reduced, pair.reduced)
        )
    ]
    if kept_asked is None:
        pairs = [pair for pair in pairs if pair.kept is None] or (pairs if reduced_asked else [])
    for pair in pairs:
        yield dict(zip(OF_GRADIENTS, pair, strict=True))


def _moments(
    job: TrainingJob, stack: StackProfile, place: Place, wanted: Wanted
) -> Iterator[Setting]:
    """Yield the formats of Adam's moments: the stack's unless asked for."""
    name = "moment_precision"
    for moments in cast("tuple[Precision | None, ...]", wanted.get(name, (None,))):
        # Whether a stack has such an optimizer at this ZeRO stage is one rule for all commands.
        plan = ResolvedPlan(zero_stage=place.zero_stage, moment_precision=moments)
        if moments is None or conflict_of(name, job, plan, stack) is None:
            yield {name: moments}


def _offloads(stack: StackProfile, place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the states that are kept and updated on the host: none unless asked for."""
    name, accumulates = "offload", stack.offload_accumulates or not place.has_several
    for offload in wanted.get(name, (None,)):
        if offload in {None, Offload.NONE}:
            yield {name: Offload.NONE}
        elif place.zero_stage in OFFLOAD_STAGES[Offload(str(offload))] and accumulates:
            yield {name: offload}


def _activations(place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the layers, or modules of layers, with offloaded activations: none unless asked for."""
    layers, modules = (wanted.get(each, (PLAN_FIELDS[each].default,)) for each in ACTIVATIONS)
    for number, parts in product(layers, modules):
        is_whole = place.recompute == PLAN_FIELDS["recompute"].code(Recompute.NONE)
        if not (number or parts):
            yield {}
        # Offloaded activations are modelled without a pipeline alone.
        elif place.pp == 1 and not (number and (parts or not is_whole)):
            yield {"offload_layers": number, "offload_modules": parts}


def _is_wanted(
    wanted: tuple[object, ...] | None, value: Precision | None, said: Precision | None
) -> bool:
    """Return True if a format is asked for, by its name or as the default."""
    return wanted is None or value in wanted or (said is None and None in wanted)


def divisors(number: int) -> list[int]:
    """Return the divisors of *number* in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return small + [number // value for value in reversed(small) if value * value != number]
