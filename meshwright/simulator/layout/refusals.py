"""What can never run: a plan that does not divide its job, or that its stack does not offer.

What a stack lacks is said once, in whole numbers, and read for one plan and for columns of plans.
"""

import sys
from collections.abc import Iterator
from math import gcd
from operator import eq, gt

from meshwright.hwprofiles import (
    Attention,
    Offload,
    Precision,
    Recompute,
    StackProfile,
    Strategy,
    Units,
    counted,
)
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.axes import AXES, DP_CP, TP_CP, Axis
from meshwright.simulator.layout.fields import Condition, Gap, Number, PlanField
from meshwright.simulator.layout.formats import eight_bit_refusal, formats_refusal
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.layout.mesh import way_gaps
from meshwright.simulator.layout.parts import (
    MAX_ZERO_STAGE,
    layer_refusal,
    module_gaps,
    parts_refusal,
    passes_refusal,
    prediction_gaps,
    zero_gaps,
)
from meshwright.simulator.layout.plan import EXPERT_SHARDS, PLAN_FIELDS, SHARDS, ResolvedPlan
from meshwright.simulator.model import AnyModel, Experts, ModelSpec

OFFLOADS = Condition("offload", gt, PLAN_FIELDS["offload"].code(Offload.NONE))


def stack_gaps(stack: StackProfile, job: TrainingJob) -> Iterator[Gap]:
    """Yield what *stack* does not offer *job* of all that plans may have, as it is said."""
    for axis, known in AXES.items():
        if known.offered_by is not None and not getattr(stack, known.offered_by):
            yield Gap(axis, f"{axis} > 1", (Condition(axis, gt, 1),), (1,))
    if stack.tp_plan and isinstance(job.model, ModelSpec):
        yield from module_gaps(job.model, job)
    yield from _trait_gaps(stack)
    yield from zero_gaps(stack, job)
    if stack.context_parallel and isinstance(job.model, ModelSpec):
        yield from _context_gaps(stack, job.model, job.seq_len)
    if stack.casts_shards_alone:
        yield from _unwrapped_gaps(job.precision)
    if isinstance(job.model, ModelSpec):
        yield from (gap._replace(model=job.model.name) for gap in _part_gaps(stack, job.model))
        yield from prediction_gaps(job.model)


def _trait_gaps(stack: StackProfile) -> Iterator[Gap]:
    """Yield the values of fields that a trait of *stack* leaves out."""
    traits = [
        (field, getattr(stack, field.declaration.offered_by))
        for field in PLAN_FIELDS.values()
        if field.declaration.offered_by is not None and field.declaration.axis is None
    ]
    for field, offered in traits:
        if isinstance(offered, tuple):
            for value in field.choices:
                if value not in offered:
                    has_value = Condition(field.name, eq, field.code(value))
                    yield Gap(field.name, f"{field.name}={value}", (has_value,), offered)
    for field, offered in traits:
        if offered is False:
            acts_on = field.declaration.acts_on
            effect = () if acts_on is None else (Condition(acts_on, gt, 1),)
            is_on = Condition(field.name, gt, field.code(field.default))
            said = field.name if field.kind is bool else f"{field.name} > {field.default}"
            yield Gap(field.name, said, (is_on, *effect), (field.default,))


def _part_gaps(stack: StackProfile, model: ModelSpec) -> Iterator[Gap]:
    """Yield the plans with routed experts or latent attention that *stack* does not run."""
    if model.experts is None and model.latent is None:
        return
    modes, asked = PLAN_FIELDS["recompute"], Recompute.SELECTIVE_OP
    if asked in stack.recompute_modes:
        by_operator = Condition(modes.name, eq, modes.code(asked))
        others = tuple(each for each in stack.recompute_modes if each != asked)
        yield Gap(modes.name, f"recompute={asked} with such layers", (by_operator,), others)
    split, unsplit = Condition(Axis.TP, gt, 1), Condition("sequence_parallel", eq, 0)
    if not stack.fused_qkv:
        yield Gap(Axis.TP, "tp > 1 with such layers", (split,), (1,))
    # Megatron-Core leaves the gradient of the part that all keys have unsummed where ranks do not
    # share tokens (get_query_key_value_tensors of multi_latent_attention.py, core 0.16).
    kind = "latent attention" if model.experts is None else "experts"
    reason = f"{kind} and tp > 1 without sequence_parallel"
    yield Gap("sequence_parallel", reason, (split, unsplit), (True,))
    if model.experts is not None:
        yield from _expert_gaps(stack, model.experts, model.hidden_size)


def _expert_gaps(stack: StackProfile, experts: Experts, width: int) -> Iterator[Gap]:
    """Yield the plans with routed experts that *stack* does not run.

    Megatron-Core refuses experts and tensor parallelism without sequence parallelism (MoELayer of
    core 0.16).  fully_shard cuts no expert: shards that do not divide them would be filled up.
    """
    if stack.is_fully_sharded:
        num = experts.num_experts
        cuts = Condition(SHARDS, lambda ranks, total: total % ranks != 0, num)
        reason = f"a set of shards that does not divide the {num} experts"
        ranks = "dp_shard x cp" if stack.context_parallel else "dp_shard"
        allowed = f"a divisor of the {num} experts for {ranks}"
        yield Gap(Axis.DP, reason, (cuts, Condition("ep", eq, 1)), (allowed,))
        yield from _sharded_expert_gaps(stack, experts, width)
    reason = "offload with ep > 1"
    yield Gap("offload", reason, (OFFLOADS, Condition("ep", gt, 1)), (Offload.NONE,))
    if experts.bias:
        yield from _bias_gaps()


def _sharded_expert_gaps(stack: StackProfile, experts: Experts, width: int) -> Iterator[Gap]:
    """Yield the plans whose ranks of experts share no equal shards of them, or not so many ranks.

    transformers shards whole experts alone (`apply_fully_sharded_data_parallelism` of 5.23).
    torchtitan knows as many ranks of an expert as of other layers, or one (`_validate` of 0.2.2,
    distributed/parallel_dims.py).  Where a set of shards has more ranks than there are experts, it
    cuts each along its widths (`apply_fsdp`, models/llama4/infra/parallelize.py), which fully_shard
    takes in equal parts alone.
    """
    num, divided = experts.num_experts, Condition("ep", gt, 1)
    yield Gap("etp", "etp beside tp", (divided, Condition("etp", gt, 1)), ("1, or that of tp",))
    most = num if not stack.transformers_layers else sys.maxsize
    cuts = Condition(SHARDS, lambda ranks, total: (total % ranks != 0) & (ranks <= most), num)
    reason = f"ep > 1 and a set of shards that does not divide the {num} experts"
    allowed = (f"a divisor of the {num} experts for dp_shard x cp",)
    yield Gap(Axis.DP, reason, (divided, cuts), allowed)
    if stack.transformers_layers:
        return
    widths = gcd(experts.hidden_size, width)
    uneven = Condition(EXPERT_SHARDS, lambda ranks, size: size % ranks != 0, widths)
    reason = f"shards of an expert that do not divide its widths, {experts.hidden_size} and {width}"
    allowed = (f"a divisor of {widths} for dp_shard x cp / ep",)
    yield Gap(Axis.DP, reason, (divided, Condition(SHARDS, gt, num), uneven), allowed)


def _bias_gaps() -> Iterator[Gap]:
    """Yield the plans that split the widths of experts with biases: by etp, or by tp without it.

    Megatron-Core refuses them (TransformerConfig of core 0.16).
    """
    yield Gap("etp", "etp > 1 with biases of experts", (Condition("etp", gt, 1),), (1,))
    untold = Condition("etp", eq, PLAN_FIELDS["etp"].code(None))
    reason, allowed = "tp > 1 with biases of experts and no etp", (1, "another one with etp=1")
    yield Gap(Axis.TP, reason, (Condition(Axis.TP, gt, 1), untold), allowed)


def _context_gaps(stack: StackProfile, model: ModelSpec, seq_len: int) -> Iterator[Gap]:
    """Yield the plans with context parallelism that *stack* does not run.

    No way goes with attention whose scores lie in memory (attn_forward_func_with_cp of 2.9).
    """
    split = Condition(Axis.CP, gt, 1)
    kernels, modes = PLAN_FIELDS["attention"], PLAN_FIELDS["recompute"]
    unfused = Condition(kernels.name, eq, kernels.code(Attention.UNFUSED))
    yield Gap(kernels.name, "cp > 1 with attention=unfused", (split, unfused), (Attention.FLASH,))
    by_operator = Condition(modes.name, eq, modes.code(Recompute.SELECTIVE_OP))
    others = tuple(each for each in stack.recompute_modes if each is not Recompute.SELECTIVE_OP)
    reason = f"cp > 1 with recompute={Recompute.SELECTIVE_OP}"
    yield Gap(modes.name, reason, (split, by_operator), others)
    yield from way_gaps(stack, model, seq_len)


def _unwrapped_gaps(precision: Precision) -> Iterator[Gap]:
    """Yield plans without shards that run without offload, or in fp32, whatever is asked for."""
    alone = Condition(DP_CP, eq, 1)
    allowed = ("none, or more than 1 for dp",)
    yield Gap("offload", "offload without dp", (alone, OFFLOADS), allowed)
    computed = f"more than 1 in {precision}", f"1 in {Precision.FP32}, as it computes then"
    for axis in (Axis.TP, Axis.PP) if precision is not Precision.FP32 else ():
        reason = f"{precision} with {axis} but without dp"
        yield Gap(Axis.DP, reason, (alone, Condition(axis, gt, 1)), computed)


def check_sharding(job: TrainingJob, plan: ResolvedPlan) -> None:
    """Raise PlanError unless *plan* divides the tensors and the batch of *job* evenly.

    Raises:
        PlanError: Naming the first dimension that does not divide.
    """
    for axis, known in AXES.items():
        refusal = known.refusal(job, plan.degree(axis))
        if refusal is not None:
            raise PlanError(refusal)
    refusal = experts_refusal(job.model, plan.ep, plan.expert_tp)
    if refusal is not None:
        raise PlanError(refusal)
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


def known_values(field: PlanField, model: AnyModel) -> tuple[object, ...] | None:
    """Return the values of *field* that *model* may have, None for all."""
    if field.declaration.of_experts and _experts_of(model) is None:
        return (field.default,)
    return None if isinstance(model, ModelSpec) else field.declaration.without_attention


def _experts_of(model: AnyModel) -> Experts | None:
    return model.experts if isinstance(model, ModelSpec) else None


def experts_refusal(model: AnyModel, ep: int, etp: int) -> str | None:
    """Return why the experts of *model* cannot be divided or split so, or None when they can."""
    experts = _experts_of(model)
    if experts is None:
        return None
    if experts.num_experts % ep:
        return f"num_experts={experts.num_experts} is not divisible by ep={ep}"
    if experts.hidden_size % etp:
        return f"hidden_size={experts.hidden_size} of experts is not divisible by etp={etp}"
    return None


def model_refusal(field: PlanField, value: object, model: AnyModel) -> str | None:
    """Return why *value* of *field* cannot be asked for with *model*, or None when it can."""
    known = known_values(field, model)
    if known is None or value in known:
        return None
    allowed = ", ".join(str(each) for each in known) or "leave it out"
    lacks = "experts" if field.declaration.of_experts else "attention"
    return (
        f"{field.name}={value} does not go with {model.name}, which has no {lacks}; "
        f"allowed: {allowed}"
    )


def stack_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return why *stack* cannot run *plan*, or None when it can."""
    if plan.parameter_server is not None and stack.strategy is not Strategy.PARAMETER_SERVER:
        return f"parameter_server is not offered by stack {stack.name}; it has no servers"
    refusal = _job_refusal(job, plan, stack) or passes_refusal(job, plan, stack)
    refusal = refusal or moments_refusal(job, plan, stack)
    if refusal is not None:
        return refusal
    for gap in stack_gaps(stack, job):
        if gap.lacks(plan.number):
            value = getattr(plan, gap.field)
            whose = f" for {gap.model}" if gap.model else ""
            refusal = _not_offered(gap.field, value, gap.allowed, plan, stack, whose)
            return f"{refusal} ({gap.why})" if gap.why else refusal
    if plan.num_shards < plan.dp_cp and not (stack.hybrid_sharding and plan.zero_stage):
        return _not_offered("dp_shard", plan.dp_shard, (plan.dp,), plan, stack)
    if plan.reshard_after_forward is False and not (stack.hybrid_sharding and plan.zero_stage >= 3):
        kept = plan.reshard_after_forward
        return _not_offered("reshard_after_forward", kept, (True,), plan, stack)
    return _gradient_refusal(job, plan, stack)


def moments_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return why moments cannot have the format of *plan*, or None when they can.

    Megatron-Core's precision-aware optimizer is its distributed one, on the device; Megatron
    Bridge turns it off where Megatron-FSDP is on (scripts/performance/utils/helpers.py, v0.2.0).
    """
    if plan.moment_precision is None:
        return None
    refused = {
        f"zero_stage={plan.zero_stage}; allowed: 1": plan.zero_stage == 0
        or (stack.units is Units.FLAT and plan.zero_stage == MAX_ZERO_STAGE),
        "precision=fp32; allowed: training in 16 or 8 bits": job.precision is Precision.FP32,
        f"offload={plan.offload}; allowed: {Offload.NONE}": plan.offload is not Offload.NONE,
    }
    why = next((reason for reason, is_so in refused.items() if is_so), None)
    return why and f"moment_precision={plan.moment_precision} does not go with {why}"


def _job_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return why *stack* cannot train such a model in such a format, or None when it can."""
    if not isinstance(job.model, ModelSpec):
        if stack.is_fully_sharded:
            return f"stack {stack.name} shards layers of transformers; {job.model.name} has none"
        if job.precision.is_eight_bit:
            return (
                f"precision={job.precision} is not offered for {job.model.name}; "
                "allowed: another one"
            )
    for field in PLAN_FIELDS.values():
        refusal = model_refusal(field, getattr(plan, field.name), job.model)
        if refusal is not None and known_values(field, job.model):
            return refusal
    if isinstance(job.model, ModelSpec):
        refusal = layer_refusal(job.model, job.seq_len, plan, stack)
        refusal = refusal or parts_refusal(job, job.model, stack)
        if refusal is not None:
            return refusal
    if job.precision not in stack.precisions:
        return _not_offered("precision", job.precision, stack.precisions, plan, stack)
    return eight_bit_refusal(job, stack)


def _not_offered(
    field: str,
    value: object,
    allowed: tuple[object, ...],
    plan: ResolvedPlan,
    stack: StackProfile,
    whose: str = "",
) -> str:
    known = ", ".join(str(each) for each in allowed) or f"none at pp={plan.pp}"
    return f"{field}={value} is not offered by stack {stack.name}{whose}; allowed: {known}"


def syncs_by_default(stack: StackProfile, zero_stage: Number, pp: Number) -> Number:
    """Return whether *stack* reduces gradients in each microbatch unless told otherwise.

    In a pipeline they stay whole until the last microbatch, whatever the stage; fully_shard reduces
    over one rank, too, which has any stage.
    """
    return ((zero_stage >= 2) | stack.is_fully_sharded) & (pp == 1) & stack.reduces_each_microbatch


def reshards_units(plan: ResolvedPlan, stack: StackProfile) -> bool:
    """Return whether *plan* frees a unit's parameters after its forward pass."""
    if plan.reshard_after_forward is None:
        return plan.pp == 1 or stack.reshards_in_pipelines
    return plan.reshard_after_forward


def sums_microbatches(syncs_each: Number, pp: Number, num_microbatches: Number) -> Number:
    """Return whether gradients are summed over several microbatches before they are reduced.

    So they are in a pipeline, however few its microbatches.
    """
    return (pp > 1) | ((num_microbatches > 1) & (syncs_each == 0))


def reduces_once(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> bool:
    """Return whether *plan* sums gradients over microbatches before it reduces them."""
    each = plan.sync_each_microbatch
    if each is None:
        each = syncs_by_default(stack, plan.zero_stage, plan.pp)
    return bool(sums_microbatches(each, plan.pp, plan.num_microbatches(job)))


def _gradient_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return why *stack* cannot treat gradients as *plan* wants, or None when it can."""
    sync = plan.sync_each_microbatch
    if plan.find_unused and sync:
        return "find_unused=True does not go with sync_each_microbatch=True; allowed: False"
    if stack.strategy is not Strategy.MESH:
        for field in ("gradient_precision", "reduce_precision", "sync_each_microbatch"):
            if getattr(plan, field) is not None:
                return (
                    f"{field}={getattr(plan, field)} is not offered by stack {stack.name}; "
                    f"allowed: with a stack of strategy {Strategy.MESH}"
                )
    if sync and plan.pp > 1:
        return f"sync_each_microbatch=True does not go with pp={plan.pp}; allowed: False"
    usual = syncs_by_default(stack, plan.zero_stage, plan.pp)
    if sync is not None and sync != usual and not stack.optional_microbatch_sync:
        return (
            f"sync_each_microbatch={sync} is not offered by stack {stack.name} at "
            f"zero_stage={plan.zero_stage}; allowed: {usual}"
        )
    return formats_refusal(stack, job.precision, plan.gradient_formats)
