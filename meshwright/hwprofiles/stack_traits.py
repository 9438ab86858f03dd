"""Stack facts that decide which tensors live and which collectives run; see `StackProfile`."""

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
# Without autocast nothing casts fp32 masters, and DDP sends gradients in the weights' format.
OF_HALF_REPLICAS: Mapping[str, object] = {
    "autocast": False,
    "gradient_reduce_bytes": HALF_BYTES,
    "accumulation_traffic_bytes": 3 * HALF_BYTES,
}
BUCKETS = "gradient_bucket_parameters", "first_gradient_bucket_parameters"


def half_weight_facts(facts: Mapping[str, Any], precision: object) -> dict[str, object]:
    """Return the facts of a PyTorch stack that change with parameters in 16 bits.

    FSDP2 reduces in the format of its MixedPrecisionPolicy; DistributedDataParallel reduces
    gradients as they are, in buckets of a size in bytes.

    >>> ddp = {"autocast": True, "gradient_bucket_parameters": 100, "gradient_precisions": ()}
    >>> changed = half_weight_facts(ddp, "bf16")
    >>> changed["gradient_bucket_parameters"], changed["optimizer_bytes"]
    (200, 4)
    """
    changed = dict(OF_HALF_WEIGHTS)
    reduced: tuple[object, ...] = (precision,)
    if facts["autocast"]:
        sizes = {name: facts.get(name) for name in BUCKETS}
        # The limit is in bytes (`bucket_cap_mb`), so that half as wide gradients fill it twice.
        changed |= {**OF_HALF_REPLICAS, **{name: 2 * size for name, size in sizes.items() if size}}
    else:
        reduced = tuple(
            dict.fromkeys(wire for _, wire in facts["gradient_precisions"] if wire != "fp16")
        )
    return changed | {"gradient_precisions": tuple((precision, wire) for wire in reduced)}


class StackSwitches(Ruled):
    """Options of a stack that a user may change, each with its time and memory.

    Args:
        switches: Facts that a user may set, each followed by its values; a word in capitals
            stands for a number.
        cuda_graph_modes: Supported scopes of CUDA graph capture; empty where there is none.
        cuda_graphs: Scope of capture.
        cuda_graph_impl: Implementation of graphs of layers.
        expert_capacity: Capacity factor of experts, whose rows are padded or dropped to it; None
            is dropless.
        allocator: Segments of PyTorch's caching allocator.
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
        """Whether layers are in CUDA graphs, but for experts where their rows vary."""
        return self.cuda_graphs != CudaGraphs.NONE

    @property
    def captures_experts(self) -> bool:
        """Whether experts are in CUDA graphs: in a whole-step graph, or at a fixed capacity."""
        is_whole = self.cuda_graphs == CudaGraphs.WHOLE_STEP
        return is_whole or (self.captures_layers and self.expert_capacity is not None)


class LayerTraits(StackSwitches):
    """Implementation of layers: kernels, fused modules, casts and recomputation.

    Args:
        kernels: Kernels of element-wise work in layers.
        transformers_layers: Eager layers are those of Hugging Face's transformers, which write
            RMS norm and GELU in PyTorch's operators; else those of torchtitan, or with
            megatron_layers of Megatron-Core's local spec.
        megatron_layers: Layers are Megatron-LM's, tokens first: bias, dropout and addition are one
            kernel, a gated MLP's two inputs one GEMM, and collectives part of the linear layers
            next to them; else of PyTorch's own modules.
        fused_qkv: Queries, keys and values are one GEMM; "model" follows each model's own code in
            transformers.
        sums_norms_each_microbatch: Norm gradients of sequence parallelism are all-reduced one by
            one in every microbatch, where others all-reduce them together in the last.
        scatters_positions: The embedding's output is reduce-scattered also where a learned
            position is added.
        recompute_methods: Methods of choosing the layers of full recomputation; empty where all are
            recomputed, one by one.
        recompute_stops_early: Recomputation stops once the last saved tensor is recomputed.
        autocast: 16-bit training casts fp32 weights in every pass and keeps the residual stream
            in fp32.
        casts_shards_alone: Only the gather of shards casts weights, so that with one data-parallel
            rank layers compute in fp32.
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
        """Return True if queries, keys and values are one GEMM; *in_model*: in the model's code."""
        return in_model if self.fused_qkv == "model" else self.fused_qkv


class StackTraits(LayerTraits):
    """Behaviour of a stack outside of layers: FSDP units, buckets, optimizer, pipeline, offload.

    Args:
        keeps_stage_outputs: A pipeline stage holds its output until the backward pass of the
            microbatch, and a buffer for each message of a step.
        holds_messages: p2p buffers are kept alive by variables of the schedule, as in
            Megatron-Core's.
        units: FSDP units of sharded embedding and head.
        keeps_last_layer: Without a pipeline the last layer stays gathered from its forward pass to
            its backward, which follows soon.
        reshards_in_pipelines: Sharded units are freed after a forward pass also in a pipeline.
        doubles_unit_buffers: Flat units share two buffers that are never freed
            (``fsdp_double_buffer`` of Megatron-FSDP).
        ends_gather_ahead: Embedding, final norm and head gather flat units ahead (Megatron-FSDP up
            to core 0.17.1); from 0.18 on layers alone do.
        unit_gather_parameters: Size of gathers of flat units and reductions of their gradients;
            0 is twice a mean unit, 1e9 at least (its ``suggested_communication_unit_size``).
        copies_units: Shards are those of each parameter, so that a unit is copied out of the
            buffer it is gathered into, and its gradients into that of their reduction (FSDP2).
        splits_experts: Where more ranks share experts that are a unit of their own than there are
            experts, each is cut along its widths; else ranks share whole ones.
        norm_by_axis: The gradient norm is summed axis by axis, a number for each weight that a rank
            holds a part of (DTensor's), then as one over a pipeline; else one over all ranks.
        joint_gradient_norm: Optimizers of experts and of all else sum one norm where they have the
            same ranks, else each its own (ChainedOptimizer of Megatron-Core).
        sums_tokens: A step begins with an all-reduce of token counts over data-parallel ranks.
        gathers_tokens: It begins with an all-gather of them (transformers' Trainer).
        broadcasts_buffers: The first rank's buffers, which are no weights, go to all before the
            passes after which gradients are reduced (DistributedDataParallel).
        gradient_as_bucket_view: Gradients lie in the buckets that are reduced; else they are beside
            them, copied in and out, and a step's first backward pass makes them, as
            `Optimizer.zero_grad` frees them (DistributedDataParallel).
        whole_table_gradient: Each tensor-parallel rank has a gradient of the whole embedding.
        vocabulary_multiple: The vocabulary is padded so that a tensor-parallel rank's rows are a
            multiple of this; 1 pads nothing.
        transformer_engine: Attention and linear layers are Transformer Engine's: keys and values
            that do not lie as it knows are copied, and its products have a workspace of their own.
        optimizer_instances: The optimizer's states of stage 1 may be sharded over a part of the
            data-parallel ranks and replicated over the rest.
        parameter_precisions: Formats of less than 32 bits that weights, gradients and Adam's
            moments may all have, without a master copy.
        parameter_precision: That of them that they have; None is fp32, or that of masters.
        keeps_stand_ins: With fused weight-gradient accumulation a dummy ``.grad`` of each shape of
            a linear layer's weight, which autograd needs, is never freed.
        moment_precisions: Formats of Adam's moments in a precision-aware optimizer.
        offloads_layers: Layers may leave their saved tensors on the host from forward to backward.
        offload_modules: Parts of layers that may, whichever layers have them.
        parameter_remainders: Of the fp32 copy of a bf16 weight it then keeps the 16 bits that the
            weight has not.
        main_precision: Format of the copies of weights in such an optimizer (main_params_dtype).
        expert_overlaps: Modes of overlapping expert-parallel all-to-alls with another microbatch.
        ep_overlap_fraction: The part of them that is hidden, of what could be.
        host_issue_pass_s: Host time to launch a pass through a layer with experts, a lower bound
            of its device time.
        host_issue_expert_s: Added for each expert of the rank.
        host_issue_cast_s: Added for each kernel that casts rows of experts.
        tp_plan: Tensor parallelism is the tp_plan of transformers, a module at a time: ends stay
            whole on each rank, and every product whose outputs are split sums the gradient of its
            input over the ranks by itself.
        tp_in_pieces: With sequence parallelism all-gathers and reduce-scatters around linear layers
            overlap with their GEMMs in chunks; ``tp_overlap_fraction`` of them is hidden.
        latent_context_parallel: Those of ``context_parallel`` that support keys wider than values.
        layer_facts: Features of layers, embedding and head beyond those of GPT and Llama.
        pads_rows: torchtitan's experts fill rows up to whole lines of a grouped product, behind a
            router in the layers' format (0.2); else rows are as many as there are, and the router
            is in fp32 (0.3).
        nests_experts: Experts of which other ranks hold others are a unit of fully_shard within
            that of their layer; else parameters of it on a mesh of their own, which are gathered
            and reduced beside its others (PyTorch 2.14).
        splits_sequences: Sequence parallelism is the default with tensor parallelism.
        launched_by: Frameworks that train its plans: a search is over the options of the first
            of them that trains the job.
        buckets_first_stage_only: All but the model's first stage reduce gradients as one bucket.
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
        """Return the hash of some facts, since dicts among the fields have none."""
        return hash((self.kernels, self.units, self.layer_facts, self.latent_context_parallel))

    @model_validator(mode="after")
    def _check_parameters(self) -> None:
        kept, offered = self.parameter_precision, self.parameter_precisions
        if kept is not None and kept not in offered:
            raise ProfileError(
                f"parameter_precision: {kept} is not offered by stack {getattr(self, 'name', '')}; "
                f"allowed: {', '.join(offered) or 'leave it out'}"
            )

    @property
    def is_fully_sharded(self) -> bool:
        """Whether states are sharded in FSDP units, whose memory is modelled one by one."""
        return self.units in {Units.ROOT, Units.ENDS}


def check_switches(stack: StackTraits) -> None:
    """Raise ProfileError for options that only another kind of stack has."""
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
