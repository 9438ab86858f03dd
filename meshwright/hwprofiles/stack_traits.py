"""What decides, in a stack, which tensors live and which collectives run; see `StackProfile`."""

from collections.abc import Mapping
from typing import Any, Literal

from meshwright.hwprofiles.complaints import ProfileError
from meshwright.hwprofiles.conditions import Ruled
from meshwright.hwprofiles.kinds import (
    Allocator,
    ContextParallel,
    CudaGraphImpl,
    CudaGraphs,
    ExpertOverlap,
    Kernels,
    LayerFact,
    OffloadModule,
    Precision,
    RecomputeMethod,
    Units,
)
from meshwright.hwprofiles.units import (
    Count,
    Flag,
    Fraction,
    Latency,
    Name,
    PositiveRatio,
    Text,
)
from meshwright.records import model_validator, rare

FusedQkv = Literal[True, False, "model"]

# Elements of 16 bits: weight, gradient, and AdamW's moments, which have the weight's format
# (torch/optim/adamw.py: zeros_like).  An update reads all four and writes all but the gradient; a
# gradient is added to another: reads two, writes one.
HALF_BYTES = 2
OF_HALF_WEIGHTS: Mapping[str, object] = {
    "parameter_bytes": HALF_BYTES,
    "sharded_parameter_bytes": HALF_BYTES,
    "gradient_bytes": HALF_BYTES,
    "optimizer_bytes": 2 * HALF_BYTES,
    "optimizer_traffic_bytes": 7 * HALF_BYTES,
}
OF_HALF_REPLICAS: Mapping[str, object] = {
    "autocast": False,
    "gradient_reduce_bytes": HALF_BYTES,
    "accumulation_traffic_bytes": 3 * HALF_BYTES,
}
BUCKETS = "gradient_bucket_parameters", "first_gradient_bucket_parameters"


def half_weight_facts(facts: Mapping[str, Any], precision: object) -> dict[str, object]:
    """Return what of a PyTorch stack's *facts* is otherwise where weights are of 16 bits.

    Of FSDP2 the format of reductions is that of its policy; DistributedDataParallel reduces
    gradients as they are, in buckets of so many bytes.

    >>> ddp = {"autocast": True, "gradient_bucket_parameters": 100, "gradient_precisions": ()}
    >>> changed = half_weight_facts(ddp, "bf16")
    >>> changed["gradient_bucket_parameters"], changed["optimizer_bytes"]
    (200, 4)
    """
    found = dict(OF_HALF_WEIGHTS)
    reduced: tuple[object, ...] = (precision,)
    if facts["autocast"]:
        sizes = {name: facts.get(name) for name in BUCKETS}
        found |= {**OF_HALF_REPLICAS, **{name: 2 * each for name, each in sizes.items() if each}}
    else:
        reduced = tuple(
            dict.fromkeys(wire for _, wire in facts["gradient_precisions"] if wire != "fp16")
        )
    return found | {"gradient_precisions": tuple((precision, wire) for wire in reduced)}


class StackSwitches(Ruled):
    """What a user may switch on, each with its time and its memory.

    Args:
        switches: Facts that are for a user to choose, each with its values behind it; a word in
            capitals stands for a number.
        cuda_graph_modes: What the stack can capture in CUDA graphs; none where it captures nothing.
        cuda_graphs: What it captures.
        cuda_graph_impl: Whose captures of layers these are.
        expert_capacity: Rows that an expert takes of a rank's tokens, filled up or dropped, over
            the mean; None where it takes all that come.
        allocator: How PyTorch's allocator asks for memory.
        allocator_state_fraction: What fixed segments hold beyond what lives from step to step, as a
            part of that; None where it is as of what a step allocates and frees.
    """

    switches: tuple[Text, ...] = rare(())
    cuda_graph_modes: tuple[CudaGraphs, ...] = rare(())
    cuda_graphs: CudaGraphs = rare(CudaGraphs.NONE)
    cuda_graph_impl: CudaGraphImpl = rare(CudaGraphImpl.TRANSFORMER_ENGINE)
    expert_capacity: PositiveRatio | None = rare(None)
    allocator: Allocator = rare(Allocator.FIXED)
    allocator_state_fraction: Fraction | None = rare(None)

    @property
    def captures_layers(self) -> bool:
        """Whether the kernels of layers are in CUDA graphs, but for experts' where rows vary."""
        return self.cuda_graphs != CudaGraphs.NONE

    @property
    def captures_experts(self) -> bool:
        """Whether those of experts are, too: in a whole step, or where a capacity fixes rows."""
        is_whole = self.cuda_graphs == CudaGraphs.WHOLE_STEP
        return is_whole or (self.captures_layers and self.expert_capacity is not None)


class LayerTraits(StackSwitches):
    """How a stack's programs write layers, cast what they read, and run them again.

    Args:
        kernels: How element-wise work of layers runs.
        transformers_layers: Eager layers are those of Hugging Face's transformers, which write
            RMS norm and GELU in PyTorch's operators; else those of torchtitan, or with
            megatron_layers of Megatron-Core's local spec.
        megatron_layers: Layers are Megatron-LM's, tokens first: bias, dropout and addition are one
            kernel, a gated MLP's two inputs one product, and collectives part of the products
            beside them; else of PyTorch's own modules.
        fused_qkv: Queries, keys and values are one product; "model" says that each model has them
            as its own code in transformers does.
        sums_norms_each_microbatch: It then sums the gradients of norms over the tensor-parallel
            ranks one by one in every microbatch, where others sum all at once in the last.
        scatters_positions: It scatters the sum of looked-up tokens also where a learned position
            is added.
        recompute_methods: How full recomputation may choose layers of a stage; none where it runs
            all of them again, one by one.
        recompute_stops_early: Recomputation ends when the last kept tensor is there.
        autocast: 16-bit training casts fp32 weights in every pass and keeps the residual stream
            in fp32.
        casts_shards_alone: Weights are cast when shards are gathered, so that one data-parallel
            rank beside others on other axes computes in fp32.
    """

    kernels: Kernels = Kernels.FUSED
    transformers_layers: Flag = False
    megatron_layers: Flag = True
    fused_qkv: FusedQkv = True
    sums_norms_each_microbatch: Flag = False
    scatters_positions: Flag = False
    recompute_methods: tuple[RecomputeMethod, ...] = rare(())
    recompute_stops_early: Flag = False
    autocast: Flag = False
    casts_shards_alone: Flag = False

    def fuses_qkv(self, *, in_model: bool) -> bool:
        """Return whether queries, keys and values are one product, if they are *in_model*."""
        return in_model if self.fused_qkv == "model" else self.fused_qkv


class StackTraits(LayerTraits):
    """Habits of a stack's programs beside those of layers.

    Args:
        keeps_stage_outputs: A pipeline stage holds its output until the backward pass of the
            microbatch, and a buffer for each message of a step.
        holds_messages: The schedules' variables hold messages beside those of passes in flight, as
            Megatron-Core's do.
        units: What sharded embedding and head are gathered with.
        keeps_last_layer: Without a pipeline the last layer stays gathered from its forward pass to
            its backward, which follows soon.
        reshards_in_pipelines: Sharded units are freed after a forward pass also in a pipeline.
        doubles_unit_buffers: Flat units share two buffers that are never freed
            (``fsdp_double_buffer`` of Megatron-FSDP).
        ends_gather_ahead: Embedding, final norm and head gather flat units ahead (Megatron-FSDP up
            to core 0.17.1); from 0.18 on layers alone do.
        unit_gather_parameters: What gathers of flat units and reductions of their gradients work
            in; 0 is twice a mean unit, 1e9 at least (its ``suggested_communication_unit_size``).
        copies_units: Shards are those of each parameter, so that a unit is copied out of the
            buffer it is gathered into, and its gradients into that of their reduction (FSDP2).
        splits_experts: Where more ranks share experts that are a unit of their own than there are
            experts, each is cut along its widths; else ranks share whole ones.
        norm_by_axis: The gradient norm is summed axis by axis, a number for each weight that a rank
            holds a part of (DTensor's), then as one over a pipeline; else one over all ranks.
        joint_gradient_norm: Optimizers of experts and of all else sum one norm where they have the
            same ranks, else each its own (ChainedOptimizer of Megatron-Core).
        sums_tokens: A step first sums the tokens of its batch over the data-parallel ranks.
        gathers_tokens: It first gathers a number of each rank's tokens (transformers' Trainer).
        broadcasts_buffers: The first rank's buffers, which are no weights, go to all before the
            passes after which gradients are reduced (DistributedDataParallel).
        gradient_as_bucket_view: Gradients lie in the buckets that are reduced; else they are beside
            them, copied in and out, and a step's first backward pass makes them, as
            `Optimizer.zero_grad` frees them (DistributedDataParallel).
        whole_table_gradient: Every tensor-parallel rank makes the gradient of the whole table.
        vocabulary_multiple: The vocabulary is padded so that a tensor-parallel rank's rows are a
            multiple of this; 1 pads nothing.
        transformer_engine: Attention and linear layers are Transformer Engine's: keys and values
            that do not lie as it knows are copied, and its products have a workspace of their own.
        optimizer_instances: The optimizer's states of stage 1 may be sharded over a part of the
            data-parallel ranks and replicated over the rest.
        parameter_precisions: Formats of less than 32 bits that weights, gradients and Adam's
            moments may all have, without a master copy.
        parameter_precision: That of them that they have; None is fp32, or that of masters.
        keeps_stand_ins: Where products add gradients to their sums, a tensor of each shape of a
            linear layer's weight, which autograd is given for them, lives throughout.
        moment_precisions: Formats that Adam's moments may have, in an optimizer that is told so.
        offloads_layers: Layers may leave their saved tensors on the host from forward to backward.
        offload_modules: Parts of layers that may, whichever layers have them.
        parameter_remainders: Of the fp32 copy of a bf16 weight it then keeps the 16 bits that the
            weight has not.
        main_precision: Format of the copies of weights in such an optimizer (main_params_dtype).
        expert_overlaps: How exchanges with ranks of experts may run beside another microbatch.
        ep_overlap_fraction: The part that hides of what then could.
        host_issue_pass_s: Time in which the host starts a pass through a layer with experts; the
            device takes as long for it at least.
        host_issue_expert_s: What each expert of the rank adds to that.
        host_issue_cast_s: And each kernel that casts rows of experts.
        tp_plan: Tensor parallelism is the tp_plan of transformers, a module at a time: ends stay
            whole on each rank, and every product whose outputs are split sums the gradient of its
            input over the ranks by itself.
        tp_in_pieces: With sequence parallelism gathers and scattered sums around linear layers go
            piece by piece beside their products, of which ``tp_overlap_fraction`` hides.
        latent_context_parallel: How ranks that share sequences may attend to each other's tokens
            where keys are wider than values, of all ways in ``context_parallel``.
        layer_facts: What its layers and ends may have beyond those of GPT and Llama.
        pads_rows: torchtitan's experts fill rows up to whole lines of a grouped product, behind a
            router in the layers' format (0.2); else rows are as many as there are, and the router
            is in fp32 (0.3).
        nests_experts: Experts of which other ranks hold others are a unit of fully_shard within
            that of their layer; else parameters of it on a mesh of their own, which are gathered
            and reduced beside its others (PyTorch 2.14).
        splits_sequences: Sequence parallelism goes with tensor parallelism unless told otherwise.
        launched_by: Frameworks whose files start its plans: a search is over what the first of them
            that trains the job can be told.
        buckets_first_stage_only: All but the model's first stage reduce their gradients as one.
    """

    keeps_stage_outputs: Flag = False
    holds_messages: Flag = False
    units: Units = Units.LAYERS
    keeps_last_layer: Flag = False
    reshards_in_pipelines: Flag = True
    copies_units: Flag = False
    splits_experts: Flag = rare(usual=False)
    norm_by_axis: Flag = False
    joint_gradient_norm: Flag = rare(usual=False)
    sums_tokens: Flag = False
    gathers_tokens: Flag = False
    broadcasts_buffers: Flag = False
    gradient_as_bucket_view: Flag = True
    whole_table_gradient: Flag = False
    vocabulary_multiple: Count = 1
    transformer_engine: Flag = False
    buckets_first_stage_only: Flag = False
    optimizer_instances: Flag = rare(usual=False)
    parameter_precisions: tuple[Precision, ...] = rare(())
    parameter_precision: Precision | None = rare(None)
    keeps_stand_ins: Flag = rare(usual=False)
    moment_precisions: tuple[Precision, ...] = rare(())
    offloads_layers: Flag = rare(usual=False)
    offload_modules: tuple[OffloadModule, ...] = rare(())
    parameter_remainders: Flag = rare(usual=False)
    main_precision: Literal[Precision.FP32, Precision.FP16] = rare(Precision.FP32)
    expert_overlaps: tuple[ExpertOverlap, ...] = rare(())
    ep_overlap_fraction: Fraction = rare(0.0, alias="fitted.ep_overlap_fraction")
    host_issue_pass_s: Latency = rare(0.0, alias="fitted.host_issue_pass")
    host_issue_expert_s: Latency = rare(0.0, alias="fitted.host_issue_expert")
    host_issue_cast_s: Latency = rare(0.0, alias="fitted.host_issue_cast")
    doubles_unit_buffers: Flag = rare(usual=False)
    ends_gather_ahead: Flag = rare(usual=True)
    unit_gather_parameters: int = rare(0, strict=True, ge=0, le=10**12)
    tp_plan: Flag = rare(usual=False)
    tp_in_pieces: Flag = rare(usual=False)
    latent_context_parallel: tuple[ContextParallel, ...] = rare(())
    pads_rows: Flag = rare(usual=True)
    nests_experts: Flag = rare(usual=True)
    splits_sequences: Flag = rare(usual=False)
    launched_by: tuple[Name, ...] = rare(())
    layer_facts: tuple[LayerFact, ...] = rare(())

    def __hash__(self) -> int:
        """Return a number of some facts: tables have none."""
        return hash((self.kernels, self.units, self.layer_facts, self.latent_context_parallel))

    @model_validator(mode="after")
    def _check_parameters(self) -> None:
        said, offered = self.parameter_precision, self.parameter_precisions
        if said is not None and said not in offered:
            raise ProfileError(
                f"parameter_precision: {said} is not offered by stack {getattr(self, 'name', '')}; "
                f"allowed: {', '.join(offered) or 'leave it out'}"
            )

    @property
    def is_fully_sharded(self) -> bool:
        """Whether states are sharded as FSDP does, in units whose memory is followed one by one."""
        return self.units in {Units.ROOT, Units.ENDS}


def check_switches(stack: StackTraits) -> None:
    """Raise ProfileError for captures, or a capacity, that no code here has."""
    offered = (CudaGraphs.NONE, *stack.cuda_graph_modes)
    known = ", ".join(offered)
    if stack.cuda_graphs not in offered:
        raise ProfileError(
            f"cuda_graphs: {stack.cuda_graphs} is not in cuda_graph_modes; allowed: {known}"
        )
    switched = {
        f"cuda_graph_modes: {known} is of captures": bool(stack.cuda_graph_modes),
        f"expert_capacity: {stack.expert_capacity} is of experts": bool(stack.expert_capacity),
    }
    for said, is_on in switched.items():
        if is_on and not stack.megatron_layers:
            raise ProfileError(f"{said} of Megatron-Core; allowed: with megatron_layers")
    if stack.doubles_unit_buffers and stack.units is not Units.FLAT:
        raise ProfileError(
            "doubles_unit_buffers: true is of Megatron-FSDP; allowed: with units flat"
        )
    if stack.main_precision is not Precision.FP32 and not stack.moment_precisions:
        raise ProfileError(
            f"main_precision: {stack.main_precision} is of a precision-aware optimizer; "
            "allowed: with moment_precisions"
        )
    if stack.cuda_graph_impl == CudaGraphImpl.LOCAL and stack.cuda_graphs != CudaGraphs.LAYERS:
        raise ProfileError(
            "cuda_graph_impl: local says how layers are captured; allowed: with cuda_graphs layers"
        )
