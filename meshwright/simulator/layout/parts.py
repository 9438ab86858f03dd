"""Models with layers or parts that a stack is not known to run."""

from collections.abc import Iterator
from operator import eq, gt, ne

from meshwright.hwprofiles import (
    Attention,
    Device,
    Kernels,
    LayerFact,
    PipelineRuntime,
    Precision,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    StackProfile,
    Units,
    stacks_with,
)
from meshwright.simulator.layout.axes import DP_CP, Axis
from meshwright.simulator.layout.fields import Condition, Gap
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.layout.plan import PLAN_FIELDS, SHARDS, ResolvedPlan
from meshwright.simulator.layout.stages import empty_refusal, prediction_refusal
from meshwright.simulator.model import (
    EXPERT_LAYER,
    EXPERT_LAYERS,
    TRANSFORMER_LAYER,
    WINDOWED_EXPERT_LAYER,
    WINDOWED_LAYER,
    AnyModel,
    BlockKind,
    Experts,
    ModelSpec,
)
from meshwright.simulator.schedules import SCHEDULES

# Schedules that run a forward pass of one microbatch beside a backward pass of another.
OVERLAPPED = "1f1b", "interleaved"
MAX_ZERO_STAGE = 3
# Facts of layers with a tp_plan that needs no more than Llama's (configuration_*.py).
PLANNED_FACTS = {LayerFact.HEAD_DIM, LayerFact.WINDOW}
# Parts whose output is freed behind the product that reads it, and made again ahead of backward.
GIVEN_UP = RecomputeModule.LAYERNORM, RecomputeModule.MOE_ACT


def usual_zero_stages(stack: StackProfile) -> tuple[int, ...]:
    """Return the ZeRO stages of *stack* that are searched where none is asked for.

    Megatron-FSDP is another wrapper of a model than Megatron-Core's usual one, with options and
    checkpoints of its own, which who asks for stage 3 chooses.
    """
    if stack.units is not Units.FLAT:
        return stack.zero_stages
    return tuple(each for each in stack.zero_stages if each < MAX_ZERO_STAGE)


def zero_gaps(stack: StackProfile, job: TrainingJob) -> Iterator[Gap]:
    """Yield the ZeRO stages that *stack* lacks for *job*; at dp=1 a stage has no effect.

    Megatron-FSDP is told of transformer layers alone (`FullyShardedDataParallel` of core 0.16).
    Weights in 8 bits, which it gathers so and transposes for a backward pass, are not modelled.
    """
    offered = stack.zero_stages
    if not _has_flat_units(job):
        offered = usual_zero_stages(stack)
    if MAX_ZERO_STAGE in offered and stack.units is Units.FLAT:
        yield _checkpoints_gap()
    in_pipelines = tuple(each for each in offered if each in stack.pipeline_zero_stages)
    for stage in range(MAX_ZERO_STAGE + 1):
        name = f"zero_stage={stage}"
        has_stage = (Condition("zero_stage", eq, stage), Condition(DP_CP, gt, 1))
        if stage not in in_pipelines:
            conditions = (*has_stage, Condition("pp", gt, 1))
            if stage in offered:
                reason, why = f"{name} in a pipeline", "pp=1 goes with it"
                yield Gap("zero_stage", reason, conditions, in_pipelines, why=why)
            else:
                yield Gap("zero_stage", name, conditions, in_pipelines)
        if stage not in offered:
            yield Gap("zero_stage", name, has_stage, offered)


def _has_flat_units(job: TrainingJob) -> bool:
    """Return whether all of a model that Megatron-FSDP would shard is in transformer layers."""
    is_plain = isinstance(job.model, ModelSpec) and not job.model.prediction_layers
    return is_plain and not job.precision.is_eight_bit


def prediction_gaps(model: ModelSpec) -> Iterator[Gap]:
    """Yield the recomputation of layers that Megatron-Core has not of those that predict further.

    It runs them again where each layer is a checkpoint, and skips them where layers are counted
    from the front (`_checkpointed_forward` of multi_token_prediction.py, core 0.16); and takes one
    of them, not more, beside another microbatch, in a pipeline alone (TransformerConfig).
    """
    if not model.prediction_layers:
        return
    beside = PLAN_FIELDS["expert_overlap"]
    asked = Condition(beside.name, gt, beside.code(None))
    alone = () if model.prediction_layers > 1 else (Condition(Axis.PP, eq, 1),)
    yield Gap(
        beside.name, f"{beside.name} with prediction_layers", (asked, *alone), (None,), model.name
    )
    methods, layers = PLAN_FIELDS["recompute_method"], "recompute_layers"
    uniform = Condition(methods.name, eq, methods.code(RecomputeMethod.UNIFORM))
    counted = Condition(methods.name, ne, methods.code(RecomputeMethod.UNIFORM))
    allowed = ("leave it out",)
    for each in ((Condition(layers, gt, 0), counted), (Condition(layers, gt, 1), uniform)):
        yield Gap(layers, f"{layers} with prediction_layers", each, allowed, model.name)


def _checkpoints_gap() -> Gap:
    """Return the plans whose checkpoints hold several of Megatron-FSDP's units.

    Each unit that runs again there lets go the one before, which backward gathers once more.
    """
    methods = PLAN_FIELDS["recompute_method"]
    uniform = methods.code(RecomputeMethod.UNIFORM)
    conditions = (
        Condition("zero_stage", eq, MAX_ZERO_STAGE),
        Condition(DP_CP, gt, 1),
        Condition(methods.name, eq, uniform),
        Condition("recompute_layers", gt, 1),
    )
    reason = f"recompute_layers > 1 of method {RecomputeMethod.UNIFORM} at zero_stage=3"
    return Gap("recompute_layers", reason, conditions, (1, f"method {RecomputeMethod.BLOCK}"))


def layer_refusal(
    model: ModelSpec, seq_len: int, plan: ResolvedPlan, stack: StackProfile
) -> str | None:
    """Return which fact of its layers *stack* does not offer, or None when it offers all."""
    facts = model.layer_facts(seq_len)
    for fact in facts:
        if fact not in stack.layer_facts:
            name, known = model.name, ", ".join(stacks_with(facts)) or "none"
            return f"{fact} of {name} is not offered by stack {stack.name}; stacks with it: {known}"
    if plan.attention in stack.attention_kernels and plan.attention not in attention_kernels(
        model, stack
    ):
        which = LayerFact.ATTENTION_SINKS
        if model.attention_softcap > 0:
            which = LayerFact.ATTENTION_SOFTCAP
        elif model.latent is not None:
            which = LayerFact.LATENT_ATTENTION
        return f"attention={plan.attention} does not go with {which}; allowed: flash"
    return None


def module_gaps(model: ModelSpec, job: TrainingJob) -> Iterator[Gap]:
    """Yield the plans with tensor parallelism that the tp_plan of transformers cannot train so.

    Accelerate 1.15 trains what transformers 4.57 splits.  There `post_init` drops the plan of the
    head, Accelerate's `_prepare_tp` makes a tied table two, and gradients of norms of heads are
    those of a rank's own heads; a projection is seen as whole heads (modeling_llama.py).
    FSDP without shards is refused (`_validate_accelerator`, accelerate/parallelism_config.py).
    """
    why = _without_module_plan(model, job)
    if why is not None:
        yield Gap(Axis.TP, "tp > 1", (Condition(Axis.TP, gt, 1),), (1,), model.name, why)
        return
    heads = model.num_kv_heads
    cuts = Condition(Axis.TP, lambda ranks, total: total % ranks != 0, heads)
    reason = f"tp that does not divide the {heads} key heads"
    allowed = f"a divisor of the {heads} key heads"
    yield Gap(Axis.TP, reason, (cuts,), (allowed,), model.name)
    alone = Condition(Axis.TP, gt, 1), Condition(SHARDS, eq, 1)
    yield Gap(Axis.DP, "tp > 1 without shards", alone, ("more than 1 rank with tp > 1",))


def _without_module_plan(model: ModelSpec, job: TrainingJob) -> str | None:
    """Return why transformers does not train *model* by a tp_plan, or None where it does."""
    is_llama = (model.spelling, model.norm, model.positions) == ("llama", "rmsnorm", "rotary")
    others = set(model.layer_facts(job.seq_len)) - PLANNED_FACTS
    if not is_llama or model.fused_qkv or not model.gated_mlp or others:
        return "the tp_plan of transformers is offered for layers as Llama's alone"
    if model.tied_embeddings:
        return "Accelerate would make a tied table two"
    if job.precision.is_eight_bit:
        return f"not in {job.precision}"
    return None


def attention_kernels(model: AnyModel, stack: StackProfile) -> tuple[Attention, ...]:
    """Return the kernels of *stack* that attend as *model* does: its own where there is none.

    Scores that lie in memory are not capped here, nor are they of latent attention; a fused kernel
    caps them as it goes.  Sinks beside them are those of Megatron-Core.
    """
    if not isinstance(model, ModelSpec):
        return (stack.attention,)
    has_others = model.attention_sinks and not stack.megatron_layers
    is_fused = model.attention_softcap or has_others or model.latent is not None
    left_out = {Attention.UNFUSED} if is_fused else set()
    return tuple(each for each in stack.attention_kernels if each not in left_out)


def default_attention(device: Device, stack: StackProfile) -> Attention:
    """Return the stack's kernel; unfused where the device lacks its flash kernel."""
    flash, unfused = Attention.FLASH, Attention.UNFUSED
    lacks_kernel = stack.flash_kernel not in device.flash
    if stack.attention is flash and lacks_kernel and unfused in stack.attention_kernels:
        return unfused
    return stack.attention


def parts_refusal(job: TrainingJob, model: ModelSpec, stack: StackProfile) -> str | None:
    """Return why *stack*, which has such parts, does not run *model*, or None when it does."""
    norms_some = model.qk_norm == "unweighted" and model.rotary_layers != "all"
    if stack.is_fully_sharded and stack.transformers_layers and norms_some:
        what = f"{model.name} has norms of heads in those with positions alone"
        return f"stack {stack.name} shards layers of one kind; {what}"
    if model.experts is None and model.latent is None:
        return None
    in_one_kernel = stack.megatron_layers and stack.kernels is Kernels.FUSED
    if job.precision.is_eight_bit and not in_one_kernel:
        return f"precision={job.precision} is not offered for {model.name}; allowed: another one"
    spells_out = stack.transformers_layers or not stack.fused_qkv
    if model.latent is not None and not spells_out and stack.kernels is Kernels.EAGER:
        return f"kernels=eager is not offered for {model.name}; allowed: {Kernels.FUSED}"
    kinds = _kinds(model)
    if stack.is_fully_sharded and _differ(kinds, stack):
        return f"stack {stack.name} shards layers of one kind; {model.name} has {len(kinds)}"
    return None if model.experts is None else _expert_refusal(model.name, model.experts, stack)


def passes_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return why *stack* cannot recompute, or group, what *plan* says, or None when it can."""
    of_layers = modules_refusal(job, plan, stack) or methods_refusal(plan, stack)
    of_layers = of_layers or prediction_refusal(job, plan, stack) or empty_refusal(job, plan, stack)
    beside = group_refusal(plan, stack) or overlap_refusal(job, plan, stack)
    return of_layers or beside


def modules_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return why parts of a layer that *plan* names cannot run again, or None when they can."""
    for each in plan.recompute_modules:
        if each not in stack.recompute_modules:
            known = ", ".join(stack.recompute_modules) or "leave it out"
            return (
                f"recompute_modules={each} is not offered by stack {stack.name}; allowed: {known}"
            )
        lacking = _lacking(job.model, each)
        if lacking is not None:
            return f"recompute_modules={each} does not go with {job.model.name}, which {lacking}"
    given_up = [each for each in GIVEN_UP if each in plan.recompute_modules]
    if given_up and job.precision.is_eight_bit:
        said = f"recompute_modules={given_up[0]}"
        return f"{said} is not offered with precision={job.precision}; allowed: other parts"
    if RecomputeModule.MOE_ACT in given_up and RecomputeModule.MOE in plan.recompute_modules:
        return "recompute_modules=moe_act does not go with moe, of which it is a part; allowed: one"
    if RecomputeModule.MOE_ACT in given_up and stack.kernels is not Kernels.FUSED:
        return (
            f"recompute_modules=moe_act is of grouped products, not of kernels={stack.kernels}; "
            f"allowed: {Kernels.FUSED}"
        )
    return None


def methods_refusal(plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return why the layers that *plan* counts cannot be recomputed, or None when they can.

    Megatron-Core asks a stage for layers that it has not where checkpoints do not divide them.
    """
    number, method = plan.recompute_layers, plan.recompute_method or RecomputeMethod.BLOCK
    if number is None:
        return None
    if method not in stack.recompute_methods:
        known = ", ".join(stack.recompute_methods) or "leave recompute_layers out"
        return f"recompute_method={method} is not offered by stack {stack.name}; allowed: {known}"
    uneven = [count for count in plan.stages if count % number]
    if method is RecomputeMethod.UNIFORM and uneven:
        return (
            f"recompute_layers={number} of method {method} does not divide a stage of {uneven[0]} "
            f"layers; allowed: a divisor of each of {', '.join(map(str, plan.stages))}"
        )
    return None


def group_refusal(plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return why microbatches cannot go in groups of the size of *plan*, or None when they can."""
    size = plan.microbatch_group_size
    if size is None:
        return None
    if stack.pipeline_runtime is not PipelineRuntime.MEGATRON_CORE:
        said = f"microbatch_group_size={size} is not offered by stack {stack.name}"
        return f"{said}; allowed: leave it out"
    if not SCHEDULES[plan.schedule].interleaves:
        said = f"microbatch_group_size={size} does not go with schedule={plan.schedule}"
        return f"{said}; allowed: interleaved"
    return None


def overlap_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return why no exchange can run beside another microbatch, or None when it can.

    As Megatron-Core refuses it (TransformerConfig of core 0.16); of schedules it has 1F1B and, in a
    pipeline, the interleaved one.
    """
    if plan.expert_overlap not in stack.expert_overlaps:  # none is wanted, or none offered
        return None
    refused = {
        "ep=1, where no token goes to another rank; allowed: 2 or more": plan.ep == 1,
        "precision=fp32; allowed: training in 16 or 8 bits": job.precision is Precision.FP32,
        "recompute=full; allowed: none, selective": plan.recompute is Recompute.FULL,
        "recompute_modules=moe; allowed: other parts": RecomputeModule.MOE
        in plan.recompute_modules,
        "zero_stage=3; allowed: 0, 1": plan.zero_stage == MAX_ZERO_STAGE,
        "sync_each_microbatch=True; allowed: False": plan.sync_each_microbatch,
        f"kernels={stack.kernels}; allowed: {Kernels.FUSED}": stack.kernels is not Kernels.FUSED,
        f"schedule={plan.schedule}; allowed: {', '.join(OVERLAPPED)}": plan.schedule
        not in OVERLAPPED,
    }
    why = next((reason for reason, is_so in refused.items() if is_so), None)
    return why and f"expert_overlap={plan.expert_overlap} does not go with {why}"


def _lacking(model: AnyModel, module: RecomputeModule) -> str | None:
    """Return what *model* has not of such a part, or None when it has one."""
    experts = model.experts if isinstance(model, ModelSpec) else None
    if module in {RecomputeModule.MOE, RecomputeModule.MOE_ACT} and experts is None:
        return "has no experts"
    if module is RecomputeModule.SHARED_EXPERTS and not (experts and experts.shared_hidden_size):
        return "has no shared experts"
    # Its checkpoint gives out the last bias, a parameter, as a result of its own, whose gradient
    # then asks for the checkpoint's again, without end (core 0.16 and PyTorch 2.13).
    if module is RecomputeModule.MLP and isinstance(model, ModelSpec) and model.mlp_bias:
        return "has biases in its MLP, which Megatron-Core's checkpoint does not bear"
    is_latent = isinstance(model, ModelSpec) and model.latent is not None
    if module is RecomputeModule.MLA_UP_PROJ and not is_latent:
        return "has no latent attention"
    return None


def _kinds(model: ModelSpec) -> set[BlockKind]:
    """Return kinds of layers whose weights or bytes differ: a window alone changes none."""
    kinds = {run.kind for run in model.layer_runs}
    if model.rotary_layers != "all":
        return kinds
    plain = {WINDOWED_EXPERT_LAYER: EXPERT_LAYER, WINDOWED_LAYER: TRANSFORMER_LAYER}
    return {plain.get(kind, kind) for kind in kinds}


def _beyond_deepseek(experts: Experts) -> str | None:
    """Return what transformers' code for DeepSeek's experts has not, or None when it has all."""
    others = {
        "a gate of shared experts": experts.shared_gate,
        "no shared experts": not experts.shared_hidden_size,
        "biases of experts": experts.bias,
        "casts_shares=true": experts.casts_shares,
        f"activation={experts.activation}": experts.activation != "silu",
    }
    found = next((name for name, holds in others.items() if holds), None)
    return found and f"{found} beside scores={experts.scores}"


def _differ(kinds: set[BlockKind], stack: StackProfile) -> bool:
    """Return whether units of *kinds* differ more than by experts in the place of an MLP.

    In pipelines, where units stay between passes, they must not do so either.
    """
    have = [kind in EXPERT_LAYERS for kind in kinds]
    return len(have) > (1 if stack.pipeline_parallel else len(set(have)))


def _expert_refusal(name: str, experts: Experts, stack: StackProfile) -> str | None:
    """Return why *stack* cannot run these experts, or None when it can."""
    found = None
    is_torchtitans = not (stack.transformers_layers or stack.megatron_layers)
    if experts.shared_gate and is_torchtitans:
        found = "a gate of shared experts"
    elif experts.routing_bias and experts.scores != "sigmoid" and stack.megatron_layers:
        found = f"a routing bias beside scores={experts.scores}"  # TransformerConfig of core 0.16
    elif stack.transformers_layers and experts.routed_in_full:
        found = _beyond_deepseek(experts)
    elif experts.scores == "softmax of chosen" and is_torchtitans:
        found = "a softmax of chosen scores"
    return found and f"{name} has {found}, which stack {stack.name} is not known to run"
