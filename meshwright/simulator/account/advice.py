"""Warnings about a plan or its prediction."""

from collections.abc import Mapping

from meshwright.hwprofiles import (
    Offload,
    Precision,
    StackProfile,
    changed_facts,
    format_bytes,
    parsed,
    single_line,
)
from meshwright.simulator.account.result import MemoryResult
from meshwright.simulator.costs import ALIGNED_BYTES, ALIGNED_ELEMENTS, CostModel
from meshwright.simulator.engine import StepTimes
from meshwright.simulator.layout import (
    AHEAD,
    DP_CP,
    PLAN_FIELDS,
    Axis,
    Facts,
    Numbers,
    ResolvedPlan,
    TrainingJob,
    is_unwrapped,
    without_defaults,
)
from meshwright.simulator.model import AnyModel, ModelSpec

# Runs this close to the capacity were slower than their neighbours in published sweeps,
# probably for retries of the allocator.
NEARLY_FULL_FRACTION = 0.95
NOTEWORTHY_FRACTION = 0.05
FLAT = "stack.units == 'flat' and zero_stage == 3"
# Facts of stacks that only some plans use: where they have no effect, as a text and a condition.
# Those that are refused there (refused.toml of hwprofiles, and stacks) need no warning.
NO_EFFECT: Mapping[str, Mapping[str, str]] = {
    "mxfp8": {"in other formats than mxfp8": "precision != 'mxfp8'"},
    "mxfp8.fuses_experts": {"without experts": "precision == 'mxfp8' and not model.experts"},
    "fp8": {"in other formats than fp8": "precision != 'fp8'"},
    "fp8.keeps_attention_output": {
        "beside inputs in 16 bits": "precision == 'fp8' and stack.fp8.saved_input_bytes != 1"
    },
    "flash_kernel": {"without attention=flash": "attention != 'flash'"},
    "expert_capacity": {"without experts": "not model.experts"},
    "grouped_experts": {"without experts": "not model.experts"},
    "doubles_unit_buffers": {"without zero_stage=3": "zero_stage != 3"},
    "parameter_remainders": {
        "without moment_precision": "moment_precision == None",
        "in other formats than bf16": "moment_precision != None and precision != 'bf16'",
    },
    "recompute_stops_early": {
        "without recomputation of layers": "recompute == 'none' or recompute == 'selective'",
        "with Megatron's checkpoints": "recompute == 'full' and stack.megatron_layers",
    },
    "tp_in_pieces": {
        "at tp=1": "tp == 1",
        "without sequence_parallel": "tp > 1 and not sequence_parallel",
    },
    "overlap_gradient_reduce": {"at dp=1": "dp_cp == 1", "with Megatron-FSDP": FLAT},
    "overlap_parameter_gather": {
        "at dp=1": "dp_cp == 1",
        "with Megatron-FSDP": FLAT,
        "at zero_stage=0": "dp_cp > 1 and zero_stage == 0",
    },
    "overlap_p2p": {"at pp=1": "pp == 1"},
}


def plan_warnings(
    job: TrainingJob,
    plan: ResolvedPlan,
    memory: MemoryResult,
    costs: CostModel,
    extrapolated_fraction: float,
) -> tuple[str, ...]:
    """Return the warnings about a plan and its prediction, a line each."""
    return (
        *_model_warnings(job.model),
        *_memory_warnings(memory),
        *_alignment_warnings(job, plan),
        *_degree_one_warnings(job, without_defaults(job, costs.stack, plan), costs.stack),
        *_autocast_warnings(job, plan, costs.stack),
        *_expert_warnings(job, without_defaults(job, costs.stack, plan)),
        *_fact_warnings(job, plan, costs.stack),
        *_evidence_warnings(plan, costs, extrapolated_fraction),
    )


def _model_warnings(model: AnyModel) -> list[str]:
    """Return the warning about parts of a model that are not simulated."""
    if not isinstance(model, ModelSpec) or not model.left_out:
        return []
    return [single_line(f"{model.name}: {model.left_out}")]


def _memory_warnings(memory: MemoryResult) -> list[str]:
    """Return the warnings about plans that do not fit, or barely."""
    need, have = format_bytes(memory.device_bytes), format_bytes(memory.usable_bytes)
    warnings = []
    if not memory.fits_device:
        warnings.append(f"does not fit: rank {memory.fullest_rank} needs {need}, usable are {have}")
    if not memory.fits_host:
        need_host = format_bytes(memory.host_bytes)
        have_host = format_bytes(memory.host_capacity_bytes or 0)
        warnings.append(f"does not fit: a host needs {need_host} of memory, it has {have_host}")
    # A plan that does not fit is not warned about being nearly full as well.
    if warnings:
        return warnings
    if memory.device_bytes > NEARLY_FULL_FRACTION * memory.usable_bytes:
        return [
            f"rank {memory.fullest_rank} uses {need} of {have}: runs this full tend to be slower"
        ]
    return []


def copy_warnings(plan: ResolvedPlan, times: StepTimes) -> tuple[str, ...]:
    """Return the warnings about activations that are offloaded slower than they are made.

    PyTorch's allocator reuses their memory only after the copy (`record_stream`).
    """
    behind = max(rank.pending_offloads for rank in times.ranks)
    if not plan.offload_modules or behind <= AHEAD:
        return ()
    said = f"copies of offload_modules={','.join(plan.offload_modules)} fall {behind} layers behind"
    return (f"{said}: the device needs more than is counted",)


def _alignment_warnings(job: TrainingJob, plan: ResolvedPlan) -> list[str]:
    """Return the warnings about GEMM sizes that tensor cores run slowly."""
    if job.precision is Precision.FP32:
        return []
    of_linear = ALIGNED_BYTES if job.precision.is_eight_bit else ALIGNED_ELEMENTS
    return [
        f"{each.name} = {each.size} is not a multiple of {aligned}: its matrix products run slowly"
        for each in job.model.product_sizes(plan.tp)
        if each.size % (aligned := of_linear if each.is_linear else ALIGNED_ELEMENTS)
    ]


def _degree_one_warnings(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> list[str]:
    """Return the warnings about options whose axis has degree 1."""
    warnings = _alone_warnings(plan, stack) if _shards_alone(job, plan, stack) else []
    for axis in Axis:
        if axis is Axis.DP and _shards_alone(job, plan, stack):
            continue
        for field in PLAN_FIELDS.values():
            value = getattr(plan, field.name)
            acts_on = field.declaration.acts_on
            is_meant = acts_on == axis or (acts_on == DP_CP and axis is Axis.DP)
            is_idle = is_meant and plan.number(str(acts_on)) == 1
            # States that are offloaded are sharded, too, over one rank.
            is_used = field.name == "zero_stage" and plan.offload is not Offload.NONE
            if is_idle and value != field.default and not is_used:
                is_flag = field.kind is bool and not field.is_optional
                said = field.name if is_flag else f"{field.name}={value}"
                warnings.append(f"{said} has no effect at {axis}=1")
    return warnings


def _shards_alone(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> bool:
    """Return True if fully_shard runs on one rank.

    It shards nothing there, but still copies units, in the format of products, out of the shards
    and their gradients into the format of reductions (FSDPParamGroup.wait_for_unshard and
    foreach_reduce of PyTorch 2.13).
    """
    is_plain = job.precision is Precision.FP32 and bool(is_unwrapped(stack, plan.dp_cp))
    return stack.is_fully_sharded and plan.dp_cp == 1 and not is_plain


def _alone_warnings(plan: ResolvedPlan, stack: StackProfile) -> list[str]:
    """Return the warning about a ZeRO stage that a stack of fully_shard lacks."""
    if plan.zero_stage in stack.zero_stages:
        return []
    said = f"zero_stage={plan.zero_stage} is predicted as --zero {stack.zero_stage}"
    return [f"{said}: {stack.name} runs fully_shard on one rank, too"]


def _autocast_warnings(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> list[str]:
    """Return the warning about one device that the stack runs without fully_shard.

    torchtitan up to 0.2 runs it under autocast (`maybe_enable_amp` of distributed/utils.py, 0.2.2).
    """
    is_cast = job.precision is not Precision.FP32 and stack.parameter_precision is None
    if not (is_cast and is_unwrapped(stack, plan.dp_cp)) or plan.world_size > 1:
        return []
    said = f"{stack.name} runs {job.precision} on one device under autocast, with weights in fp32"
    return [f"{said}; predicted is fully_shard on one rank"]


def _expert_warnings(job: TrainingJob, plan: ResolvedPlan) -> list[str]:
    """Return the warnings about options of experts without expert parallelism."""
    if plan.ep > 1:
        return []
    options = {"imbalance": f"{job.imbalance:g}" if job.imbalance != 1 else None}
    options |= {"dispatcher": plan.dispatcher}
    return [f"{name}={value} has no effect at ep=1" for name, value in options.items() if value]


def _fact_warnings(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> list[str]:
    """Return the warnings about facts of the stack that a user changed without effect."""
    numbers = Numbers(plan.number, Facts(job, stack))
    return [
        f"{each.key}={_lowercase(each.value)} has no effect {where}"
        for each in changed_facts(stack)
        # A fact of a table is listed by its own name or by the table's.
        for key in dict.fromkeys((each.key, each.key.partition(".")[0]))
        for where, condition in NO_EFFECT.get(key, {}).items()
        if parsed(condition).holds(numbers)
    ]


def _lowercase(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _evidence_warnings(
    plan: ResolvedPlan, costs: CostModel, extrapolated_fraction: float
) -> list[str]:
    """Return the warnings about tensor parallelism across nodes, and extrapolated times."""
    warnings = []
    if costs.spans.in_step(Axis.TP, plan.tp, 1).crosses_nodes:
        node_size = costs.cluster.devices_per_node
        warnings.append(f"tp={plan.tp} crosses nodes of {node_size} devices")
    if extrapolated_fraction > NOTEWORTHY_FRACTION:
        warnings.append(f"{extrapolated_fraction:.0%} of the busy time rests on extrapolation")
    return warnings
