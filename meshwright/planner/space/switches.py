"""Settings of a layout's switches: each that the stack offers and that has an effect, once.

A switch that is at the stack's habit is None in a plan, so that no layout is there twice.
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
    chosen_formats,
    conflict_of,
    known_values,
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
# Fields but for switches: one layout of those that are alike in them has every setting.
BASIC_FIELDS = tuple(each for each in SEARCHED_FIELDS if each.name not in SWITCHES)
BASIC = tuple(each.name for each in BASIC_FIELDS)
USUAL: Setting = {name: PLAN_FIELDS[name].default for name in SWITCHES}
OF_GRADIENTS = "gradient_precision", "reduce_precision"  # kept, and on the wire
ACTIVATIONS = "offload_layers", "offload_modules"
HABITS = "cp_type", "dispatcher"  # of which the first that a stack lists is its habit


class Place(NamedTuple):
    """What decides which switches of a layout have an effect.

    ``has_several`` says that a step has more than one microbatch, ``is_lacking`` that the stack
    does not offer such layouts, whatever their switches.  What the last ones say, from the schedule
    and its microbatches to the most layers of a virtual stage, what divides those of each, and the
    ranks of experts, is as here where no switch that depends on it is asked for.
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
    """Return the settings of switches at *place* with values that are *wanted*, habits first."""
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
    known = (
        USUAL | {name: value for part in parts for name, value in part.items()}
        for parts in product(*map(list, choices))
    )
    # One rank shards nothing: without these two its states are as at stage 0.
    is_stage_0 = place.is_whole and place.zero_stage and "zero_stage" not in wanted
    plain = {name: USUAL[name] for name in ("moment_precision", "offload")}.items()
    kept = (each for each in known if not (is_stage_0 and plain <= each.items()))
    return [each for each in kept if _go_together(each)]


def _go_together(setting: Setting) -> bool:
    """Return whether what is offloaded, and passes beside each other, go with a *setting*."""
    if setting["offload"] is Offload.PARAMETERS and setting["gradient_precision"] is not None:
        return False  # on the host a gradient has the format of its parameter
    again = cast("tuple[RecomputeModule, ...]", setting["recompute_modules"])
    is_refused = RecomputeModule.MOE in again or bool(setting["sync_each_microbatch"])
    return setting["expert_overlap"] is None or not is_refused


def askable_values(field: PlanField, job: TrainingJob, stack: StackProfile) -> tuple[object, ...]:
    """Return the values of a field that a search varies where it is asked to, the habit first.

    Formats in 16 bits are those of the training alone.
    """
    if not field.declaration.is_asked or known_values(field, job.model) is not None:
        return (field.default,)
    if field.name in OF_GRADIENTS:
        usual = {Precision.FP32, job.precision.storage}
        pairs = offered_formats(stack, job.precision)
        listed = [pair[OF_GRADIENTS.index(field.name)] for pair in pairs]
        own = chosen_formats(stack, job.precision, Formats(None, None))
        others = {*listed} & usual - {own[OF_GRADIENTS.index(field.name)]}
        return field.default, *(each for each in Precision if each in others)
    offered = cast("tuple[object, ...]", getattr(stack, field.declaration.offered_by or ""))
    if field.name in HABITS:
        offered = offered[1:]
    if field.name == "moment_precision":
        is_full = job.precision is Precision.FP32  # which no such optimizer trains in
        usual_moments = {} if is_full else {Precision.FP32, job.precision.storage, *EIGHT_BITS}
        offered = tuple(each for each in offered if each in usual_moments)
    return field.default, *(each for each in offered if each != field.default)


def _chosen(
    name: str, habit: object, others: Iterable[object], wanted: Wanted
) -> Iterator[Setting]:
    """Yield the values of a switch that are asked for, if any are; the habit is None."""
    values = wanted.get(name)
    if values is None or None in values or habit in values:
        yield {name: None}
    yield from ({name: each} for each in others if values is None or each in values)


def _modules(place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the parts of a layer that run again: the usual one unless others are asked for."""
    name, mode = "recompute_modules", PLAN_FIELDS["recompute"].code(Recompute.SELECTIVE)
    for modules in wanted.get(name, ((),)):
        if not modules or place.recompute == mode:
            yield {name: modules or ()}


def _layers(place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield how many layers run again in full: all, one by one, unless others are asked for.

    Of a range of numbers those that say of a stage what another one does are left out.
    """
    numbers = wanted.get("recompute_layers", (None,))
    (method,) = wanted.get("recompute_method", (None,))
    is_full = place.recompute == PLAN_FIELDS["recompute"].code(Recompute.FULL)
    for number in cast("tuple[int | None, ...]", numbers):
        if number is None:
            yield {}
        elif is_full and _counts(number, method, place, is_asked=None not in numbers):
            yield {"recompute_layers": number, "recompute_method": method}


def _counts(number: int, method: object, place: Place, *, is_asked: bool) -> bool:
    """Return whether *number* is one of a *method* at *place*, and no other layout's."""
    match method:
        case RecomputeMethod.UNIFORM:
            return place.common_layers % number == 0 and (is_asked or number > 1)
        case RecomputeMethod.EVERY:
            return is_asked or number > 1
        case _:
            return is_asked or number < place.most_layers


def _groups(place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the microbatches of a group: the fewest unless others are asked for."""
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
    """Yield how ranks attend to each other's tokens: the stack's habit unless asked for."""
    name, inner, swaps = "cp_type", "cp_inner", ContextParallel.RING_OF_SWAPS
    asked = wanted.get(name, ())
    others = [each for each in stack.context_parallel[1:] if each in asked]
    habit = stack.context_parallel[0] if stack.context_parallel else None
    if place.cp == 1:
        yield {name: None}
        return
    for setting in _chosen(name, habit, others, wanted):
        if setting[name] is not swaps:
            yield setting
            continue
        # A group of one makes a ring, which is a layout of its own.
        sizes = [each for each in divisors(place.cp) if each in wanted.get(inner, (each,))]
        yield from (setting | {inner: each} for each in sizes if each > 1 or inner in wanted)


def _dispatch(job: TrainingJob, stack: StackProfile, wanted: Wanted) -> Iterator[Setting]:
    """Yield how tokens go to experts: the stack's habit unless asked for."""
    name, habit = "dispatcher", next(iter(stack.dispatchers), None)
    if known_values(PLAN_FIELDS[name], job.model) is not None:
        return _chosen(name, habit, [], {})
    asked = wanted.get(name, ())
    return _chosen(name, habit, [each for each in stack.dispatchers[1:] if each in asked], wanted)


def _overlaps(
    job: TrainingJob, stack: StackProfile, place: Place, wanted: Wanted
) -> Iterator[Setting]:
    """Yield what another microbatch hides of exchanges with experts: nothing unless asked for."""
    name = "expert_overlap"
    names = "pp", "ep", "zero_stage", "recompute", "schedule"
    for overlap in wanted.get(name, (None,)):
        if overlap is None:
            yield {name: None}
            continue
        said = {each: PLAN_FIELDS[each].value(getattr(place, each)) for each in names}
        plan = ResolvedPlan.of({**said, "dp": place.ep, name: overlap})
        schedule = plan.schedule_of(stack.pipeline_runtime)
        is_plain = schedule.interleaves or schedule.refusal(place.pp, 1, 1) is None
        if is_plain and conflict_of(name, job, plan, stack) is None:
            yield {name: overlap}


def _shards(stack: StackProfile, place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the ranks that share a set of shards: of optimizers and flat units all unless asked."""
    name, stage = "dp_shard", place.zero_stage
    in_instances = stack.optimizer_instances and stage == 1
    in_sets = stack.units is Units.FLAT and stage == MAX_ZERO_STAGE
    is_asked = (in_instances or in_sets) and name in wanted
    is_offered = is_asked or (stack.hybrid_sharding and stage > 0)
    others = divisors(place.dp)[-2::-1] if is_offered else []
    return _chosen(name, place.dp, others, wanted)


def _resharding(stack: StackProfile, place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield whether gathered parameters are freed after a forward pass."""
    name = "reshard_after_forward"
    if place.zero_stage < MAX_ZERO_STAGE or place.is_whole:
        return _chosen(name, True, [], wanted)  # noqa: FBT003
    frees = place.pp == 1 or stack.reshards_in_pipelines
    return _chosen(name, frees, [not frees] if stack.hybrid_sharding or not frees else [], wanted)


def _syncs(stack: StackProfile, place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield whether gradients are reduced in every microbatch."""
    name, habit = "sync_each_microbatch", bool(syncs_by_default(stack, place.zero_stage, place.pp))
    if place.pp > 1:
        return _chosen(name, habit, [], wanted)
    if place.is_whole or not place.has_several:
        return _chosen(name, habit, [], {})
    return _chosen(name, habit, [not habit] if stack.optional_microbatch_sync else [], wanted)


def _formats(
    job: TrainingJob, stack: StackProfile, place: Place, wanted: Wanted
) -> Iterator[Setting]:
    """Yield the formats of gradients: the stack's unless others are asked for.

    A format on the wire that is asked for alone may need gradients that are kept so, too.
    """
    known: dict[Formats, Formats] = {}
    for kept, reduced in offered_formats(stack, job.precision):
        usual = chosen_formats(stack, job.precision, Formats(None, None))
        said = None if kept == usual.kept else kept
        follows = chosen_formats(stack, job.precision, Formats(said, None)).reduced
        pair = Formats(said, None if reduced == follows or place.is_whole else reduced)
        known.setdefault(pair, Formats(kept, reduced))
    kept_asked, reduced_asked = (wanted.get(name) for name in OF_GRADIENTS)
    going = [
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
        going = [pair for pair in going if pair.kept is None] or (going if reduced_asked else [])
    for pair in going:
        yield dict(zip(OF_GRADIENTS, pair, strict=True))


def _moments(
    job: TrainingJob, stack: StackProfile, place: Place, wanted: Wanted
) -> Iterator[Setting]:
    """Yield the formats of Adam's moments: the stack's unless asked for."""
    name = "moment_precision"
    for moments in cast("tuple[Precision | None, ...]", wanted.get(name, (None,))):
        plan = ResolvedPlan(zero_stage=place.zero_stage, moment_precision=moments)
        if moments is None or conflict_of(name, job, plan, stack) is None:
            yield {name: moments}


def _offloads(stack: StackProfile, place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield what is kept and updated on the host: nothing unless asked for."""
    name, accumulates = "offload", stack.offload_accumulates or not place.has_several
    for offload in wanted.get(name, (None,)):
        if offload in {None, Offload.NONE}:
            yield {name: Offload.NONE}
        elif place.zero_stage in OFFLOAD_STAGES[Offload(str(offload))] and accumulates:
            yield {name: offload}


def _activations(place: Place, wanted: Wanted) -> Iterator[Setting]:
    """Yield the layers, or the parts of layers, whose saved tensors wait on the host: if asked."""
    layers, modules = (wanted.get(each, (PLAN_FIELDS[each].default,)) for each in ACTIVATIONS)
    for number, parts in product(layers, modules):
        is_whole = place.recompute == PLAN_FIELDS["recompute"].code(Recompute.NONE)
        if not (number or parts):
            yield {}
        elif place.pp == 1 and not (number and (parts or not is_whole)):
            yield {"offload_layers": number, "offload_modules": parts}


def _is_wanted(
    wanted: tuple[object, ...] | None, value: Precision | None, said: Precision | None
) -> bool:
    return wanted is None or value in wanted or (said is None and None in wanted)


def divisors(number: int) -> list[int]:
    """Return the divisors of *number* in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return small + [number // value for value in reversed(small) if value * value != number]
