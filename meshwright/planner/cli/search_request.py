"""Limits of a search from options, with pins that no layout could meet refused at once."""

from math import prod
from typing import Any, cast

from meshwright.hwprofiles import (
    ContextParallel,
    Recompute,
    StageSplit,
    in_parentheses,
    shown,
    suggestion,
)
from meshwright.planner.cli.request import Setting
from meshwright.planner.options import (
    ALL,
    ALSO,
    ANY,
    FOR,
    OPT_IN_FIELDS,
    TOGETHER,
    Given,
    check_given,
    option_of,
)
from meshwright.planner.space import SpaceLimits, askable_values, is_searched
from meshwright.simulator import (
    PlanError,
    ResolvedPlan,
    TrainingJob,
    get_schedule,
    parse_stages,
)
from meshwright.simulator.costs import peak_flops_per_s
from meshwright.simulator.layout import (
    AXES,
    PLAN_FIELDS,
    SEARCHED_FIELDS,
    SHARDS,
    Axis,
    check_offered,
    experts_refusal,
    model_refusal,
    near_multiples,
    offers,
    read_modules,
    resolve,
)


def read_limits(setting: Setting, given: Given) -> SpaceLimits:
    """Return the limits of a search: each option of a field pins it, ``--max-...`` limits it.

    Raises:
        PlanError: If pins contradict each other, the model or the number of devices.
    """
    given = _with_recompute(given)
    check_given(given)
    for name, value in given.items():
        field = PLAN_FIELDS.get(name)
        refusal = None if field is None else model_refusal(field, value, setting.job.model)
        if refusal is not None:
            raise PlanError(refusal)
    check_pins(setting, given)
    schedule, rule = given.get("schedule"), _stage_rule(cast("str | None", given.get("stages")))
    pins = {each.name: (given[each.name],) for each in SEARCHED_FIELDS if each.name in given}
    if rule is not None:
        pins["stages"] = (rule,)
    if schedule is not None:
        pins["schedule"] = (get_schedule(cast("str", schedule)).name,)
    limits = {each.limit: given[each.limit] for each in SEARCHED_FIELDS if each.limit in given}
    launching = {each.key: given[each.key] for each in (FOR, ANY) if each.key in given}
    return SpaceLimits(**cast("Any", pins | limits | _searched_also(setting, given) | launching))


def _searched_also(setting: Setting, given: Given) -> dict[str, tuple[object, ...]]:
    """Return all values of the fields that ``--also`` adds to those that are searched.

    Raises:
        PlanError: If one is unknown, pinned, or of a field with one value.
    """
    if ALSO.key not in given:
        return {}
    text, job, stack = str(given[ALSO.key]), setting.job, setting.stack
    every = {name: askable_values(each, job, stack) for name, each in OPT_IN_FIELDS.items()}
    offered = [name for name, values in every.items() if len(values) > 1]
    names = list(dict.fromkeys(each.strip().replace("_", "-") for each in text.split(",")))
    for group, parts in TOGETHER.items():
        if group in names:
            index = names.index(group)
            names[index : index + 1] = [each for each in parts if each in offered] or [group]
    for name in names:
        if name in TOGETHER:
            raise PlanError(
                f"--also {name}: {stack.name} has one value of each for {job.model.name} in "
                f"{job.precision}; allowed: {', '.join(offered) or 'leave it out'}"
            )
        if name != ALL and name not in OPT_IN_FIELDS:
            every_name = [*OPT_IN_FIELDS, *TOGETHER, ALL]
            raise PlanError(f"--also {shown(name)} is unknown; {suggestion(name, every_name)}")
        if name != ALL and name not in offered:
            allowed = ", ".join(offered) or "leave it out"
            why = in_parentheses(stack.rule(OPT_IN_FIELDS[name].declaration.offered_by or ""))
            raise PlanError(
                f"--also {name}: {stack.name} has one value of it for {job.model.name} in "
                f"{job.precision}; allowed: {allowed}{why}"
            )
        if name != ALL and OPT_IN_FIELDS[name].name in given:
            raise PlanError(f"--also {name} and --{name} contradict each other")
    chosen = names
    if ALL in names:  # what a cluster says nothing of is refused where it is named alone
        refused = {"offload"} if setting.cluster.host_link is None else set()
        chosen = [name for name in offered if name not in refused]
    return {key: every[name] for name in chosen if (key := OPT_IN_FIELDS[name].name) not in given}


def _with_recompute(given: Given) -> Given:
    """Return *given* with the recompute mode that modules, or numbers of layers, imply.

    Raises:
        PlanError: If another one is given.
    """
    modules, number = given.get("recompute_modules"), given.get("recompute_layers")
    most, mode = given.get("max_recompute_layers"), given.get("recompute")
    if most is not None and mode not in {None, Recompute.FULL}:
        raise PlanError(
            f"{option_of('max_recompute_layers')} {most} and {option_of('recompute')} {mode} "
            "contradict each other"
        )
    implied: dict[str, object] = {} if number is None else {"recompute": Recompute.FULL}
    if isinstance(modules, str):
        implied = {"recompute": Recompute.SELECTIVE}
    parsed = {
        name: read_modules(value, name)
        for name, value in given.items()
        if isinstance(value, str) and name in PLAN_FIELDS and PLAN_FIELDS[name].members
    }
    return {**implied, **given, **parsed}


def _stage_rule(text: str | None) -> StageSplit | None:
    rule = None if text is None else parse_stages(text)
    if isinstance(rule, tuple):
        raise PlanError(
            f"--stages {text} fixes one number of stages, which a search varies; "
            f"allowed: {', '.join(StageSplit)}"
        )
    return rule


def check_pins(setting: Setting, given: Given) -> None:
    """Raise PlanError when no layout at all could have the pinned values."""
    for field in SEARCHED_FIELDS:
        value, most = given.get(field.name), given.get(field.limit)
        if isinstance(value, int) and isinstance(most, int) and value > most:
            names = f"{option_of(field.name)} {value} and {option_of(field.limit)} {most}"
            raise PlanError(f"{names} contradict each other")
    _check_degrees(setting, given)
    _check_division(setting.job, given)
    _check_overlap(given)
    # Raises if the device has no peak in this precision: no layout could be timed.
    peak_flops_per_s(setting.cluster.device, setting.job.precision)
    check_offered(setting.job, _probe(given, setting), setting.stack)


def _number(given: Given, name: str) -> int:
    """Return a pinned number, 1 where it is free."""
    return cast("int", given.get(name, 1))


def _check_degrees(setting: Setting, given: Given) -> None:
    degrees = {
        each.name: _number(given, each.name) for each in SEARCHED_FIELDS if each.declaration.axis
    }
    product = prod(degrees.values())
    num_gpus = setting.world_size
    shards = _number(given, "dp_shard")
    if shards < 1 or num_gpus % shards:
        raise PlanError(f"gpus={num_gpus} is not a multiple of dp_shard={shards}")
    limits = SpaceLimits(**{name: (given[name],) for name in degrees if name in given})
    free = {each for each in AXES if is_searched(each, setting.job, setting.stack, limits)}
    is_complete = free <= given.keys()
    # A degree that is free may make up for a product smaller than the GPUs.
    if num_gpus % product or (is_complete and product != num_gpus):
        text = " x ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)
        word = "is not" if is_complete else "is not a multiple of"
        raise PlanError(f"gpus={num_gpus} {word} {text} = {product}")


def _check_division(job: TrainingJob, given: Given) -> None:
    model = job.model
    tp, dp, microbatch_size = (_number(given, each) for each in ("tp", "dp", "microbatch_size"))
    num_stages = _number(given, "pp") * _number(given, "num_virtual_stages")
    refusal = model.split_refusal(tp)
    if refusal is not None:
        raise PlanError(f"{refusal}: {model.name} cannot be split by tp={tp}")
    if num_stages > model.num_layers:
        raise PlanError(f"{num_stages} stages are more than the {model.num_layers} layers")
    refusal = experts_refusal(model, _number(given, "ep"), _number(given, "etp"))
    if refusal is not None:
        raise PlanError(refusal)
    if job.global_batch_size % (dp * microbatch_size):
        raise PlanError(
            f"global_batch_size={job.global_batch_size} is not divisible by dp={dp} x "
            f"microbatch_size={microbatch_size}; "
            f"{near_multiples(job.global_batch_size, dp * microbatch_size)}"
        )
    if "schedule" in given and "num_virtual_stages" in given:
        # Interleaved schedules need virtual stages, all others have none.
        schedule = get_schedule(cast("str", given["schedule"]))
        if schedule.interleaves != (_number(given, "num_virtual_stages") > 1):
            raise PlanError(
                f"--vpp {given['num_virtual_stages']} and --schedule {schedule.name} contradict "
                "each other"
            )


def _check_overlap(given: Given) -> None:
    """Raise PlanError where forward and backward passes are to overlap and cannot.

    That is a pipeline of pinned ranks which may have no virtual stages.
    """
    vpp = PLAN_FIELDS["num_virtual_stages"]
    most, name = given.get(vpp.name, given.get(vpp.limit)), cast("str", given.get("schedule", ""))
    is_plain = most == 1 or (name != "" and not get_schedule(name).interleaves)
    if "expert_overlap" in given and is_plain:
        refusal = get_schedule("1f1b", beside=True).refusal(_number(given, "pp"), 1, 1)
        if refusal is not None:
            raise PlanError(refusal)


def _probe(given: Given, setting: Setting) -> ResolvedPlan:
    """Return a plan with the pinned fields, to ask a stack whether it offers them.

    A free degree is one at which a pinned field has an effect, where the stack has the axis for
    the model.
    """
    stack, model = setting.stack, setting.job.model
    tp = given.get("tp", 2 if model.experts is None and _splits_tensors(given, setting) else 1)
    pinned = {
        each.name: given[each.name]
        for each in SEARCHED_FIELDS
        if each.name in given
        and not (each.declaration.is_limited or each.name in {"etp", "dispatcher"})
        and each.name != "stages"
    }
    ep = cast("int", given.get("ep", 2 if "expert_overlap" in given else 1))
    number = given.get("recompute_layers")
    if number is None and "max_recompute_layers" in given:
        number, pinned["recompute"] = 1, Recompute.FULL
    plain = "1f1b" if "expert_overlap" in given else stack.schedules[0]
    defaults = {
        "tp": tp,
        "cp": given.get("cp", given.get("cp_inner", 1)),
        # Only hybrid ring + all-to-all has an inner group.
        "cp_inner": 1 if given.get("cp_type") is ContextParallel.HYBRID_RING else None,
        "dp": ep * cast("int", given.get("dp", 2 * _number(given, "dp_shard"))),
        "ep": ep,
        "attention": stack.attention,
        "schedule": "interleaved" if "microbatch_group_size" in given else plain,
        "recompute_layers": number,
        "stages": (number or 1,),
    }
    return resolve(setting.job, setting.cluster, stack, {**defaults, **pinned})


def _splits_tensors(given: Given, setting: Setting) -> bool:
    """Return True if the stack splits the model's tensors over two ranks, with pinned shards."""
    shards = cast("int", given.get("dp_shard", given.get("dp", 2)))
    return offers(setting.stack, setting.job, {Axis.TP: 2, SHARDS: shards})
