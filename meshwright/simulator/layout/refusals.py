"""Refusals: plans that do not divide their job, or that their stack does not support."""

from collections.abc import Mapping

from meshwright.hwprofiles import (
    Attention,
    Device,
    PipelineRuntime,
    RecomputeMethod,
    StackProfile,
    Strategy,
    Units,
    changed_facts,
    counted,
    filled,
    frameworks_where,
    in_parentheses,
    load_stack,
    stacks_with,
)
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.axes import AXES, TP_CP
from meshwright.simulator.layout.capabilities import (
    JOB_FACTS,
    MAX_ZERO_STAGE,
    STACK_DEFAULTS,
    Gap,
    Numbers,
    job_gaps,
    stack_gaps,
)
from meshwright.simulator.layout.fields import PlanField
from meshwright.simulator.layout.formats import (
    Number,
    eight_bit_refusal,
    formats_refusal,
    syncs_by_default,
)
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.layout.plan import PLAN_FIELDS, ResolvedPlan
from meshwright.simulator.model import AnyModel, ModelSpec, has_mtp_layers


def check_sharding(job: TrainingJob, plan: ResolvedPlan) -> None:
    """Raise PlanError unless *plan* divides the tensors, batch and layers of *job* evenly.

    Raises:
        PlanError: Naming the first dimension that does not divide.
    """
    for axis, declaration in AXES.items():
        refusal = declaration.refusal(job, plan.degree(axis))
        if refusal is not None:
            raise PlanError(refusal)
    refusal = experts_refusal(job.model, plan.ep, plan.expert_tp)
    if refusal is not None:
        raise PlanError(refusal)
    # The tokens of a context-parallel rank are split once more, over tp.
    if plan.sequence_parallel and job.seq_len % plan.number(TP_CP):
        ranks = f"tp={plan.tp}" if plan.cp == 1 else f"tp={plan.tp} x cp={plan.cp}"
        raise PlanError(f"seq_len={job.seq_len} is not divisible by {ranks}")
    sequences = job.global_batch_size // plan.dp
    if sequences % plan.microbatch_size:
        raise PlanError(
            f"global_batch_size={job.global_batch_size} leaves {sequences} sequences a replica "
            f"at dp={plan.dp}, not divisible by microbatch_size={plan.microbatch_size}"
        )
    if sum(plan.stages) != job.model.num_layers:
        raise PlanError(
            f"stages hold {counted(sum(plan.stages), 'layer')} in all; {job.model.name} has "
            f"{job.model.num_layers}"
        )


def searched_zero_stages(stack: StackProfile) -> tuple[int, ...]:
    """Return the ZeRO stages of *stack* that are searched by default.

    Megatron-FSDP is another wrapper than Megatron-Core's DistributedDataParallel, with options and
    checkpoints of its own, so that stage 3 with it is searched only on request.
    """
    if stack.units is not Units.FLAT:
        return stack.zero_stages
    return tuple(each for each in stack.zero_stages if each < MAX_ZERO_STAGE)


def offers(stack: StackProfile, job: TrainingJob, numbers: Mapping[str, int]) -> bool:
    """Return True if no limit of *stack* that reads only fields in *numbers* refuses them."""
    gaps = (gap for gap in stack_gaps(stack, job) if gap.fields <= numbers.keys())
    return not any(gap.lacks(numbers.__getitem__) for gap in gaps)


def attention_kernels(job: TrainingJob, stack: StackProfile) -> tuple[Attention, ...]:
    """Return the attention kernels of *stack* that support the model, if that has attention."""
    if not isinstance(job.model, ModelSpec):
        return (stack.attention,)
    code = PLAN_FIELDS["attention"].code
    return tuple(
        each for each in stack.attention_kernels if offers(stack, job, {"attention": code(each)})
    )


def default_attention(device: Device, job: TrainingJob, stack: StackProfile) -> Attention:
    """Return the stack's attention kernel; unfused, if allowed, where the device lacks flash."""
    flash, unfused = Attention.FLASH, Attention.UNFUSED
    lacks_kernel = stack.flash_kernel not in device.flash
    if stack.attention is flash and lacks_kernel and unfused in attention_kernels(job, stack):
        return unfused
    return stack.attention


def applicable_values(field: PlanField, model: AnyModel) -> tuple[object, ...] | None:
    """Return the values of *field* that *model* may have, None for all."""
    if field.declaration.of_experts and model.experts is None:
        return (field.default,)
    return None if isinstance(model, ModelSpec) else field.declaration.without_attention


def experts_refusal(model: AnyModel, ep: int, etp: int) -> str | None:
    """Return the reason *ep* or *etp* do not divide the experts of *model*, or None."""
    experts = model.experts
    if experts is None:
        return None
    if experts.num_experts % ep:
        return f"num_experts={experts.num_experts} is not divisible by ep={ep}"
    if experts.hidden_size % etp:
        return f"hidden_size={experts.hidden_size} of experts is not divisible by etp={etp}"
    return None


def model_refusal(field: PlanField, value: object, model: AnyModel) -> str | None:
    """Return the reason *value* of *field* does not apply to *model*, or None."""
    known = applicable_values(field, model)
    if known is None or value in known:
        return None
    allowed = ", ".join(str(each) for each in known) or "leave it out"
    lacks = "experts" if field.declaration.of_experts else "attention"
    return (
        f"{field.name}={value} does not go with {model.name}, which has no {lacks}; "
        f"allowed: {allowed}"
    )


def stack_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return the reason *stack* cannot run *plan*, or None when it can."""
    if plan.parameter_server is not None and stack.strategy is not Strategy.PARAMETER_SERVER:
        return f"parameter_server is not offered by stack {stack.name}; it has no servers"
    refusal = _job_refusal(job, plan, stack) or _stages_refusal(job, plan, stack)
    if refusal is not None:
        return refusal
    for gap in stack_gaps(stack, job):
        if gap.lacks(plan.number):
            return _message(gap, plan)
    return formats_refusal(stack, job.precision, plan.gradient_formats)


def other_stacks(
    job: TrainingJob, plan: ResolvedPlan | None, stack: StackProfile
) -> tuple[str, ...]:
    """Return the launchable stacks, by `frameworks_where`, that run what *stack* refuses.

    They must run the job, and the plan fields that the refusing rule reads; none are returned where
    the refusal comes from facts of the stack that the user set.
    """
    numbers: dict[str, int] = {}
    if plan is not None and job_refusal(job, stack) is None:
        gaps = (gap for gap in stack_gaps(stack, job) if gap.lacks(plan.number))
        numbers = {name: plan.number(name) for gap in [*gaps][:1] for name in gap.fields}

    if not numbers and changed_facts(stack) and _runs(load_stack(stack.name), job, numbers):
        return ()

    def runs(other: StackProfile) -> bool:
        if not other.launched_by or other.name == stack.name:
            return False
        if other.name.partition("@")[0] == stack.name.partition("@")[0]:
            # Another release is no way out of what the user's own switches refuse.
            tables = {each.partition(" ")[0].partition(".")[0] for each in stack.switches}
            other = other.model_copy(update={each: getattr(stack, each) for each in tables})
        return _runs(other, job, numbers)

    return frameworks_where(runs)


def _runs(stack: StackProfile, job: TrainingJob, numbers: Mapping[str, int]) -> bool:
    return offers(stack, job, numbers) and job_refusal(job, stack) is None


def check_offered(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> None:
    """Raise PlanError where *stack* cannot run *plan*, with the stacks that can.

    Raises:
        PlanError: Naming the field, what is allowed, and by which rule.
    """
    refusal = stack_refusal(job, plan, stack)
    if refusal is None:
        return
    # Of stages, servers and formats no rule says which stacks have them.
    is_ruled = job_refusal(job, stack) is not None or any(
        gap.lacks(plan.number) for gap in stack_gaps(stack, job)
    )
    is_said = "stacks with it:" in refusal
    others = other_stacks(job, plan, stack) if is_ruled and not is_said else ()
    raise PlanError(f"{refusal}; stacks with it: {', '.join(others)}" if others else refusal)


def conflict_of(
    field: str, job: TrainingJob, plan: ResolvedPlan, stack: StackProfile
) -> str | None:
    """Return the part of *plan* that its *field* conflicts with, or None."""
    gaps = (each for each in stack_gaps(stack, job) if each.field == field and each.conflict)
    return next((_message(gap, plan) for gap in gaps if gap.lacks(plan.number)), None)


def _job_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return the reason no plan runs *job*, or that a field does not apply to its model."""
    for field in PLAN_FIELDS.values():
        refusal = model_refusal(field, getattr(plan, field.name), job.model)
        if refusal is not None and applicable_values(field, job.model):
            return refusal
    return job_refusal(job, stack)


def job_refusal(job: TrainingJob, stack: StackProfile) -> str | None:
    """Return the reason *stack* cannot train this model in this precision, or None when it can."""
    facts = job.model.layer_facts(job.seq_len) if isinstance(job.model, ModelSpec) else ()
    for fact in facts:
        if fact not in stack.layer_facts:
            said, known = f"{fact} of {job.model.name}", ", ".join(stacks_with(facts)) or "none"
            why = in_parentheses(stack.rule("layer_facts"))
            return f"{said} is not offered by stack {stack.name}; stacks with it: {known}{why}"
    # Of these no plan runs, so that a default one serves for the message.
    for gap in job_gaps(stack, job):
        return _message(gap, ResolvedPlan())
    if job.precision not in stack.precisions:
        known = ", ".join(stack.precisions)
        said = f"precision={job.precision} is not offered by stack {stack.name}"
        return f"{said}; allowed: {known}{in_parentheses(stack.rule('precisions'))}"
    return eight_bit_refusal(job, stack)


def _stages_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return the reason stages cannot hold or recompute the layers of *plan*, or None.

    Uniform checkpoints must divide a stage: Megatron-Core indexes layers beyond it otherwise.
    """
    number, uniform = plan.recompute_layers, RecomputeMethod.UNIFORM
    uneven = [count for count in plan.stages if number and count % number]
    if uneven and plan.recompute_method is uniform and uniform in stack.recompute_methods:
        return (
            f"recompute_layers={number} of method {uniform} does not divide a stage of {uneven[0]} "
            f"layers; allowed: a divisor of each of {', '.join(map(str, plan.stages))}"
        )
    return mtp_refusal(job, plan, stack) or empty_refusal(job, plan, stack)


def _message(gap: Gap, plan: ResolvedPlan) -> str:
    """Return the message that refuses *plan*, to which *gap* applies."""
    stack, field, why = gap.facts.stack.name, gap.field, in_parentheses(gap.why)
    if field == "model":
        text = f"{gap.model} has {gap.reason}, which stack {stack} is not known to run{why}"
    else:
        known = ", ".join(map(str, gap.allowed)) or f"none at pp={plan.pp}"
        whose = f" for {gap.model}" if gap.model else ""
        offer = f"is not offered by stack {stack}{whose}"
        said = f"does not go with {gap.conflict}" if gap.conflict else offer
        text = f"{field}={_value(gap, plan)} {said}; allowed: {known}{why}"
    return str(filled(text, lambda name: getattr(plan, name, None)))


def _value(gap: Gap, plan: ResolvedPlan) -> object:
    """Return the value that *gap* refuses: of a list only the members in its conditions."""
    field = PLAN_FIELDS.get(gap.field)
    if field is None:
        return gap.facts.value(gap.field if gap.field in JOB_FACTS else f"stack.{gap.field}")
    value = getattr(plan, gap.field)
    if field.declaration.members:
        return ",".join(each for each in value if f"{gap.field}.{each}" in gap.names)
    if value is None and gap.field == "recompute_method":
        return RecomputeMethod.BLOCK  # the default with recompute_layers
    if value is None and gap.field in STACK_DEFAULTS:
        return field.value(Numbers(plan.number, gap.facts).stack_default(gap.field))
    return value


def reshards_units(plan: ResolvedPlan, stack: StackProfile) -> bool:
    """Return True if *plan* frees a unit's parameters after its forward pass."""
    if plan.reshard_after_forward is None:
        return plan.pp == 1 or stack.reshards_in_pipelines
    return plan.reshard_after_forward


def sums_microbatches(syncs_each: Number, pp: Number, num_microbatches: Number) -> Number:
    """Return True if gradients are accumulated over microbatches before they are reduced.

    In a pipeline they always are, even of one microbatch.
    """
    # Bitwise operators, as arguments may be columns.
    return (pp > 1) | ((num_microbatches > 1) & (syncs_each == 0))


def reduces_once(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> bool:
    """Return True if *plan* accumulates gradients over microbatches before it reduces them."""
    syncs = plan.sync_each_microbatch
    if syncs is None:
        syncs = syncs_by_default(stack, plan.zero_stage, plan.pp)
    return bool(sums_microbatches(syncs, plan.pp, plan.num_microbatches(job)))


def mtp_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return the reason MTP layers cannot be on the stage of *plan*, or None.

    Megatron-Core takes any stage behind all layers that is its rank's last virtual stage, except on
    a first rank with several (`validate_layer_layout` of
    megatron/core/transformer/pipeline_parallel_layer_layout.py, core 0.16).  It also takes the last
    stage, on which it would leave the copy of the embedding at zero
    (`setup_embeddings_and_output_layer` of language_module.py).
    """
    stage = plan.prediction_stage
    if stage is None:
        return None
    said, usual = f"prediction_stage={stage}", "leave it out, for that of the loss"
    if not has_mtp_layers(job.model):
        return (
            f"{said} does not go with {job.model.name}, which predicts none; allowed: leave it out"
        )
    if stack.pipeline_runtime is not PipelineRuntime.MEGATRON_CORE:
        return f"{said} is not offered by stack {stack.name}; allowed: {usual}"
    first = max(index for index, count in enumerate(plan.stages) if count)
    is_several = plan.num_virtual_stages > 1
    # The last virtual stages of ranks; of several virtual stages, not those of the first rank.
    places = range(max(first, plan.num_stages - plan.pp + is_several), plan.num_stages - 1)
    if stage not in places:
        known = [f"{places[0]} to {places[-1]}"] if places else []
        ranks = "between the first and the last" if is_several else "ahead of the last"
        return (
            f"{said} of {plan.num_stages} stages is not behind all layers, on the last virtual "
            f"stage of a rank {ranks}; allowed: {', '.join([*known, usual])}"
        )
    if plan.expert_overlap is not None:  # its passes were never counted with F/B overlap
        return f"expert_overlap={plan.expert_overlap} does not go with {said}; allowed: {usual}"
    return None


def empty_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return the reason a stage between the first and the last cannot be empty, or None."""
    if 0 not in plan.stages[1:-1]:
        return None
    lacking = "a stage without layers between the first and the last one"
    if not isinstance(job.model, ModelSpec):
        return f"{job.model.name} does not go with {lacking}; allowed: 1 layer or more"
    if stack.pipeline_runtime is not PipelineRuntime.MEGATRON_CORE:
        return f"{lacking} is not offered by stack {stack.name}; allowed: 1 layer or more"
    if plan.expert_overlap is not None:  # its passes were never counted with F/B overlap
        said = f"expert_overlap={plan.expert_overlap} does not go with {lacking}"
        return f"{said}; allowed: 1 layer or more"
    return None
