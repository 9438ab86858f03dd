"""Schema of a training software stack: its options, defaults and fitted constants."""

from typing import Annotated

from meshwright.hwprofiles.complaints import ProfileError, check_distinct, check_member, listed
from meshwright.hwprofiles.kinds import (
    Attention,
    ContextParallel,
    Dispatcher,
    LossKernel,
    Offload,
    ParameterGather,
    PipelineRuntime,
    Precision,
    Recompute,
    RecomputeModule,
    StageSplit,
    Strategy,
    Units,
    WeightCast,
)
from meshwright.hwprofiles.stack_traits import StackTraits, check_switches
from meshwright.hwprofiles.units import (
    ByteCount,
    Count,
    Flag,
    Fraction,
    Latency,
    Name,
    OptionalName,
    OptionalStackName,
    PositiveFraction,
    Profile,
    Size,
    StackName,
    Text,
    Title,
)
from meshwright.records import Field, model_validator, rare

ZeroStage = Annotated[int, Field(strict=True, ge=0, le=3)]
SavedBytes = Annotated[int, Field(strict=True, ge=1, le=2)]

# Lists of supported values, checked to hold each value once.
LISTS = (
    *("precisions", "schedules", "attention_kernels", "zero_stages", "recompute_modes"),
    *("recompute_modules", "recompute_methods", "context_parallel", "latent_context_parallel"),
    *("offload_modes", "offload_modules", "cuda_graph_modes", "dispatchers", "expert_overlaps"),
    *("moment_precisions", "parameter_precisions"),
)


class EightBitRecipe(Profile):
    """FP8 recipe: linear layers in 8 bits.

    ``saved_input_bytes`` is what an element of a linear layer's input takes from forward to
    backward: 1 where the fp8 copy is kept, 2 where the bf16 tensor is; ``weight_copy_bytes`` what
    fp8 copies of a linear layer's weight take an element; ``holds_parameters`` whether these are
    the parameters, with no bf16 weight beside them; ``tp_gathers_fp8`` whether inputs and
    gradients of linear layers are cast before tensor-parallel all-gathers; ``scaled_elements`` how
    many elements share a scale of one byte, 0 where a tensor has one; ``pads_expert_rows`` whether
    the rows of each expert are copied to fill up what a product takes, and what it makes is copied
    back; ``expert_cast_kernels`` how many kernels cast the rows of an expert, 0 where one casts
    those of all; ``fuses_experts`` whether the kernel of a grouped product opens what it makes, and
    casts it for the product that reads it; ``multiplies_head`` whether the head is one of these;
    ``keeps_attention_output`` whether the product behind attention keeps what attention keeps, too,
    and no copy of 8 bits; ``gathers_parameters`` whether fully_shard gathers weights cast,
    ``precomputes_scales`` whether one all-reduce of a step gives the scales of these casts.
    """

    saved_input_bytes: SavedBytes
    weight_copy_bytes: Size
    weight_casts: WeightCast
    holds_parameters: Flag = False
    tp_gathers_fp8: Flag = False
    scaled_elements: Size = 0
    pads_expert_rows: Flag = rare(usual=False)
    expert_cast_kernels: Size = rare(0)
    fuses_experts: Flag = rare(usual=False)
    multiplies_head: Flag = rare(usual=False)
    keeps_attention_output: Flag = rare(usual=False)
    gathers_parameters: Flag = rare(usual=False)
    precomputes_scales: Flag = rare(usual=False)
    source: Text

    @property
    def casts_of_expert(self) -> int:
        """Cast kernels of one expert's rows; none where the grouped GEMM casts them itself."""
        return 0 if self.fuses_experts else self.expert_cast_kernels

    @property
    def fills_expert_rows(self) -> bool:
        """Whether rows of each expert are padded, by a copy, to the multiple that a GEMM takes."""
        return self.pads_expert_rows and not self.fuses_experts

    @model_validator(mode="after")
    def _check_parameters(self) -> None:
        # fp8 copies that are the parameters must exist, and outlive a pass.
        is_kept = self.weight_copy_bytes > 0 and self.weight_casts is WeightCast.STEP
        if self.holds_parameters and not is_kept:
            raise ProfileError(
                "holds_parameters: does not go with weight_copy_bytes "
                f"{self.weight_copy_bytes} and weight_casts {self.weight_casts}; "
                f"allowed: with copies of at least 1 byte, cast once a {WeightCast.STEP}"
            )


class StackProfile(StackTraits):
    """Dated facts of one software stack.

    Bytes are per parameter in 16-bit training. In a file the fitted constants stand in a table
    ``[fitted]`` with a ``source`` of their own that says what they were fitted on, or chosen from.

    ZeRO stages 2 and 3: ``reduces_each_microbatch`` says whether gradients are reduced (and kept as
    shards) after every microbatch, ``prefetches_units`` whether a layer's parameters are gathered
    while the layer before it computes, ``pipeline_zero_stages`` what goes with pipeline
    parallelism, ``sharded_parameter_bytes`` what a rank keeps of a parameter between its uses
    (``parameter_bytes`` where parameters are whole), ``hybrid_sharding`` whether states may be
    sharded over a part of the data-parallel ranks and replicated over the rest,
    ``parameter_gather`` whether the owner of a layer broadcasts it to the others, who reduce its
    gradient to the owner.

    ``context_parallel`` lists the types of context parallelism,
    the default first; none where it does not divide sequences.  ``recompute_modules`` lists
    the modules that selective recomputation may recompute; if empty, only the attention core.

    ``dispatchers`` lists the token dispatchers of expert parallelism, the default first;
    ``grouped_experts`` says that one grouped GEMM runs all experts of a rank.

    ``pipeline_runtime`` decides which numbers of microbatches a schedule takes.

    ``release`` is the built-in stack that it is based on, if that is another one;
    ``alike`` are releases of the framework that count as it does.

    ``strategy`` says what the plan's ranks are; ``host_per_launch_s`` is the time of a kernel
    launch in the one interpreter of `Strategy.DATAPARALLEL`.

    ``host_per_expert_pass_s`` is the host time of a pass through a layer with experts, beyond
    that of other layers, ``host_per_own_expert_s`` what each expert of the rank adds to it;
    ``expert_launch_s`` is the least time between products of two experts, each started by itself.

    ``context_bytes`` are the CUDA context's, with the kernels loaded into it, and
    ``allocator_fraction`` what fixed segments hold beyond what a step allocates and frees.
    A gradient bucket holds ``gradient_bucket_parameters``, or where more,
    ``gradient_bucket_parameters_per_replica`` times the data-parallel degree.

    ``offload_modes`` lists what may live on the host, ``offload_accumulates`` says whether that
    goes with more than one microbatch, ``host_bandwidth_fraction`` what the update there reaches
    of the host's memory bandwidth.
    """

    name: StackName
    release: OptionalStackName = rare("")
    alike: tuple[Text, ...] = rare(())
    title: Title
    date: str = Field(pattern=r"^[0-9]{4}-(0[1-9]|1[0-2])$")
    source: Text
    strategy: Strategy = Strategy.MESH

    precisions: tuple[Precision, ...] = Field(min_length=1)
    schedules: tuple[Name, ...] = Field(min_length=1)
    attention_kernels: tuple[Attention, ...] = Field(min_length=1)
    zero_stages: tuple[ZeroStage, ...] = Field(min_length=1)
    recompute_modes: tuple[Recompute, ...] = Field(min_length=1)
    recompute_modules: tuple[RecomputeModule, ...] = rare(())
    sequence_parallel: Flag
    offload_modes: tuple[Offload, ...] = (Offload.NONE,)
    offload_accumulates: Flag = True
    tensor_parallel: Flag = True
    pipeline_parallel: Flag = True
    context_parallel: tuple[ContextParallel, ...] = rare(())
    expert_parallel: Flag = rare(usual=False)
    dispatchers: tuple[Dispatcher, ...] = rare(())
    grouped_experts: Flag = rare(usual=True)

    attention: Attention
    zero_stage: ZeroStage
    stage_split: StageSplit
    flash_kernel: OptionalName = ""

    overlap_gradient_reduce: Flag
    overlap_parameter_gather: Flag
    overlap_p2p: Flag
    tp_overlap_fraction: Fraction
    scatter_gather_p2p: Flag
    fused_gradient_accumulation: Flag
    loss: LossKernel
    gradient_bucket_parameters: Count
    first_gradient_bucket_parameters: Count | None = None
    gradient_bucket_parameters_per_replica: Size = 0
    reduces_each_microbatch: Flag = False
    optional_microbatch_sync: Flag = False
    finds_unused: Flag = False
    hybrid_sharding: Flag = False
    prefetches_units: Flag = True
    parameter_gather: ParameterGather = ParameterGather.ALL_GATHER
    pipeline_zero_stages: tuple[ZeroStage, ...] = (0, 1)
    pipeline_runtime: PipelineRuntime = PipelineRuntime.PUBLISHED

    gradient_bytes: Size
    gradient_reduce_bytes: Size
    gradient_precisions: tuple[tuple[Precision, Precision], ...] = ()
    optimizer_bytes: Size
    parameter_bytes: Size = 2
    sharded_parameter_bytes: Size = 2
    optimizer_temporary_bytes: Size
    optimizer_traffic_bytes: Size
    accumulation_traffic_bytes: Size

    kernel_gap_s: Latency = Field(alias="fitted.kernel_gap")
    forward_kernels_per_layer: Size = Field(alias="fitted.forward_kernels_per_layer")
    backward_kernels_per_layer: Size = Field(alias="fitted.backward_kernels_per_layer")
    host_per_layer_pass_s: Latency = Field(alias="fitted.host_per_layer_pass")
    host_per_launch_s: Latency = Field(default=0.0, alias="fitted.host_per_launch")
    host_per_expert_pass_s: Latency = Field(default=0.0, alias="fitted.host_per_expert_pass")
    host_per_own_expert_s: Latency = Field(default=0.0, alias="fitted.host_per_own_expert")
    expert_launch_s: Latency = Field(default=0.0, alias="fitted.expert_launch")
    p2p_bandwidth_fraction: PositiveFraction = Field(alias="fitted.p2p_bandwidth_fraction")
    dp_bandwidth_fraction: PositiveFraction = Field(alias="fitted.dp_bandwidth_fraction")
    step_overhead_fraction: Fraction = Field(alias="fitted.step_overhead_fraction")
    host_bandwidth_fraction: Fraction = Field(default=0.0, alias="fitted.host_bandwidth_fraction")
    fitted_source: Text = Field(alias="fitted.source")

    context_bytes: ByteCount = Field(alias="context")
    allocator_fraction: Fraction
    memory_source: Text

    fp8: EightBitRecipe | None = None
    mxfp8: EightBitRecipe | None = rare(None)

    @property
    def recipes(self) -> dict[Precision, EightBitRecipe | None]:
        """Recipe by 8-bit format, None where the stack does not support it."""
        return {Precision.FP8: self.fp8, Precision.MXFP8: self.mxfp8}

    @model_validator(mode="after")
    def _check_defaults(self) -> None:
        for field in LISTS:
            check_distinct(field, getattr(self, field))
        _check_context(self)
        _check_recompute(self)
        _check_gradients(self)
        check_switches(self)
        check_member("attention", self.attention, "attention_kernels", self.attention_kernels)
        check_member("zero_stage", self.zero_stage, "zero_stages", self.zero_stages)
        if (Attention.FLASH in self.attention_kernels) != bool(self.flash_kernel):
            raise ProfileError(
                f"flash_kernel: {self.flash_kernel!r} does not go with attention_kernels; "
                "allowed: a name exactly where attention_kernels lists flash"
            )
        _check_recipes(self)
        _check_gather(self)
        _check_tp_plan(self)
        _check_experts(self)
        _check_strategy(self)
        _check_offload(self)


def _check_recipes(stack: StackProfile) -> None:
    for name, recipe in stack.recipes.items():
        if (name in stack.precisions) != (recipe is not None):
            raise ProfileError(
                f"{name}: does not go with precisions {listed(stack.precisions)}; "
                f"allowed: a table [{name}] exactly where precisions lists {name}"
            )


def _check_context(stack: StackProfile) -> None:
    for kind in stack.latent_context_parallel:
        offered = stack.context_parallel
        check_member("latent_context_parallel", kind, "context_parallel", offered)


def _check_recompute(stack: StackProfile) -> None:
    """Raise ProfileError if recomputation by operator goes with layers not PyTorch's own."""
    is_other = stack.strategy is not Strategy.MESH or stack.megatron_layers or stack.autocast
    has_unfused = Attention.UNFUSED in stack.attention_kernels
    if Recompute.SELECTIVE_OP in stack.recompute_modes and (is_other or has_unfused):
        raise ProfileError(
            f"recompute_modes: {Recompute.SELECTIVE_OP} is of PyTorch's own layers; allowed: "
            "with strategy mesh and attention_kernels flash, without megatron_layers "
            "and autocast"
        )


def _check_gradients(stack: StackProfile) -> None:
    """Raise ProfileError for unsupported gradient formats or buckets."""
    pairs = tuple("/".join(pair) for pair in stack.gradient_precisions)
    check_distinct("gradient_precisions", pairs)
    is_whole = stack.zero_stages == (0,) and not (stack.tensor_parallel or stack.pipeline_parallel)
    if not stack.gradient_as_bucket_view and (stack.strategy is not Strategy.MESH or not is_whole):
        raise ProfileError(
            "gradient_as_bucket_view: false is of replicas of a whole model; allowed: with "
            "strategy mesh and zero_stages 0, without tensor_parallel and pipeline_parallel"
        )
    in_buckets = max(stack.zero_stages) <= 1 or stack.units is Units.FLAT
    if stack.gradient_bucket_parameters_per_replica and not in_buckets:
        raise ProfileError(
            "gradient_bucket_parameters_per_replica: does not go with zero_stages "
            f"{listed(stack.zero_stages)}; allowed: with 0 and 1, or units {Units.FLAT}"
        )
    stored = {each.storage for each in Precision}
    for pair in stack.gradient_precisions:
        for each in pair:
            if each not in stored:
                raise ProfileError(
                    f"gradient_precisions: {each} is not a format of gradients; "
                    f"allowed: {listed(tuple(sorted(stored)))}"
                )


def _check_experts(stack: StackProfile) -> None:
    """Raise ProfileError for expert parallelism with layers or optimizers not modelled."""
    is_flat = stack.units is Units.FLAT
    in_buckets = stack.megatron_layers and (max(stack.zero_stages) <= 1 or is_flat)
    if stack.expert_parallel and not (in_buckets or stack.is_fully_sharded):
        raise ProfileError(
            "expert_parallel: true is of Megatron-Core's layers and optimizer, or of fully_shard's "
            "units; allowed: with megatron_layers and zero_stages 0 and 1, or units flat; or "
            "units root or ends"
        )
    if stack.expert_parallel != bool(stack.dispatchers):
        raise ProfileError(
            f"dispatchers: {listed(stack.dispatchers) or 'none'} do not go with expert_parallel "
            f"{str(stack.expert_parallel).lower()}; allowed: some exactly where it is true"
        )
    if stack.expert_overlaps and not (stack.megatron_layers and stack.expert_parallel):
        raise ProfileError(
            f"expert_overlaps: {listed(stack.expert_overlaps)} is of Megatron-Core's schedule; "
            "allowed: with megatron_layers and expert_parallel"
        )
    if bool(stack.expert_overlaps) != (stack.ep_overlap_fraction > 0):
        raise ProfileError(
            f"fitted.ep_overlap_fraction: {stack.ep_overlap_fraction:g} does not go with "
            "expert_overlaps; allowed: more than 0 exactly where expert_overlaps lists some"
        )


def _check_gather(stack: StackProfile) -> None:
    """Raise ProfileError for a broadcast gather of anything but ZeRO-3 parameters."""
    if stack.parameter_gather is ParameterGather.ALL_GATHER:
        return
    partly = {1, 2} & {*stack.zero_stages} or stack.hybrid_sharding or len(stack.offload_modes) > 1
    if 3 not in stack.zero_stages or partly:
        raise ProfileError(
            f"parameter_gather: {stack.parameter_gather} is for sharded parameters alone; "
            "allowed: with zero_stages of 3 or of 0 and 3, without hybrid_sharding or offloading"
        )


def _check_tp_plan(stack: StackProfile) -> None:
    """Raise ProfileError where `tp_plan` of transformers is mixed with other tensor parallelism."""
    is_theirs = stack.transformers_layers and stack.tensor_parallel and stack.is_fully_sharded
    if stack.tp_plan and (not is_theirs or stack.sequence_parallel or stack.pipeline_parallel):
        raise ProfileError(
            "tp_plan: true is of transformers under FSDP2; allowed: with transformers_layers, "
            "tensor_parallel and units, without sequence_parallel and pipeline_parallel"
        )


def _check_strategy(stack: StackProfile) -> None:
    """Raise ProfileError for a key that the strategy ignores."""
    one_process = stack.strategy is Strategy.DATAPARALLEL
    if stack.host_per_launch_s and not one_process:
        raise ProfileError(
            f"fitted.host_per_launch: has no meaning with strategy {stack.strategy}; "
            f"allowed: with {Strategy.DATAPARALLEL}"
        )
    if stack.strategy is Strategy.MESH:
        return
    if stack.tensor_parallel or stack.pipeline_parallel:
        raise ProfileError(
            f"strategy: {stack.strategy} needs tensor_parallel and pipeline_parallel to be false"
        )
    if stack.gradient_precisions or stack.optional_microbatch_sync or stack.finds_unused:
        raise ProfileError(
            f"strategy: {stack.strategy} has neither gradient_precisions nor "
            "optional_microbatch_sync nor finds_unused; allowed: with mesh"
        )
    if stack.zero_stages != (0,):
        raise ProfileError(
            f"zero_stages: {listed(stack.zero_stages)} does not go with strategy "
            f"{stack.strategy}; allowed: 0"
        )


def _check_offload(stack: StackProfile) -> None:
    """Raise ProfileError unless offloading comes with the host's update bandwidth."""
    check_member("offload_modes", Offload.NONE, "offload_modes", stack.offload_modes)
    if (len(stack.offload_modes) > 1) != (stack.host_bandwidth_fraction > 0):
        raise ProfileError(
            f"fitted.host_bandwidth_fraction: {stack.host_bandwidth_fraction:g} does not go with "
            "offload_modes; allowed: more than 0 exactly where offload_modes lists more than none"
        )
