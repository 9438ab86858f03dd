"""What decides, in a stack, which tensors live and which collectives run; see `StackProfile`."""

import operator
from typing import Literal

from pydantic import Field

from meshwright.hwprofiles.base import Count, Flag, Fraction, Latency, Name
from meshwright.hwprofiles.conditions import Ruled
from meshwright.hwprofiles.kinds import (
    ContextParallel,
    ExpertOverlap,
    Kernels,
    LayerFact,
    Precision,
    RecomputeMethod,
    Units,
)

FusedQkv = Literal[True, False, "model"]


class StackTraits(Ruled):
    """Habits of a stack's programs.

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
        keeps_stage_outputs: A pipeline stage holds its output until the backward pass of the
            microbatch, and a buffer for each message of a step.
        holds_messages: The schedules' variables hold messages beside those of passes in flight, as
            Megatron-Core's do.
        units: What sharded embedding and head are gathered with.
        keeps_last_layer: Without a pipeline the last layer stays gathered from its forward pass to
            its backward, which follows soon.
        reshards_in_pipelines: Sharded units are freed after a forward pass also in a pipeline.
        copies_units: Shards are those of each parameter, so that a unit is copied out of the
            buffer it is gathered into, and its gradients into that of their reduction (FSDP2).
        norm_by_axis: The gradient norm is summed axis by axis, a number for each weight that a rank
            holds a part of (DTensor's), then as one over a pipeline; else one over all ranks.
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
        keeps_stand_ins: Where products add gradients to their sums, a tensor of each shape of a
            linear layer's weight, which autograd is given for them, lives throughout.
        moment_precisions: Formats that Adam's moments may have, in an optimizer that is told so.
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
        splits_sequences: Sequence parallelism goes with tensor parallelism unless told otherwise.
        launched_by: Frameworks whose files start its plans: a search is over what the first of them
            that trains the job can be told.
        buckets_first_stage_only: All but the model's first stage reduce their gradients as one.
    """

    kernels: Kernels = Kernels.FUSED
    transformers_layers: Flag = False
    megatron_layers: Flag = True
    fused_qkv: FusedQkv = True
    sums_norms_each_microbatch: Flag = False
    scatters_positions: Flag = False
    recompute_methods: tuple[RecomputeMethod, ...] = Field(default=(), exclude_if=operator.not_)
    recompute_stops_early: Flag = False
    autocast: Flag = False
    casts_shards_alone: Flag = False
    keeps_stage_outputs: Flag = False
    holds_messages: Flag = False
    units: Units = Units.LAYERS
    keeps_last_layer: Flag = False
    reshards_in_pipelines: Flag = True
    copies_units: Flag = False
    norm_by_axis: Flag = False
    sums_tokens: Flag = False
    gathers_tokens: Flag = False
    broadcasts_buffers: Flag = False
    gradient_as_bucket_view: Flag = True
    whole_table_gradient: Flag = False
    vocabulary_multiple: Count = 1
    transformer_engine: Flag = False
    buckets_first_stage_only: Flag = False
    keeps_stand_ins: Flag = Field(default=False, exclude_if=operator.not_)
    moment_precisions: tuple[Precision, ...] = Field(default=(), exclude_if=operator.not_)
    expert_overlaps: tuple[ExpertOverlap, ...] = Field(default=(), exclude_if=operator.not_)
    ep_overlap_fraction: Fraction = Field(
        default=0.0, alias="fitted.ep_overlap_fraction", exclude_if=operator.not_
    )
    host_issue_pass_s: Latency = Field(
        default=0.0, alias="fitted.host_issue_pass", exclude_if=operator.not_
    )
    host_issue_expert_s: Latency = Field(
        default=0.0, alias="fitted.host_issue_expert", exclude_if=operator.not_
    )
    host_issue_cast_s: Latency = Field(
        default=0.0, alias="fitted.host_issue_cast", exclude_if=operator.not_
    )
    tp_plan: Flag = Field(default=False, exclude_if=operator.not_)
    tp_in_pieces: Flag = Field(default=False, exclude_if=operator.not_)
    latent_context_parallel: tuple[ContextParallel, ...] = Field((), exclude_if=operator.not_)
    splits_sequences: Flag = Field(default=False, exclude_if=operator.not_)
    launched_by: tuple[Name, ...] = Field(default=(), exclude_if=operator.not_)
    layer_facts: tuple[LayerFact, ...] = Field(default=(), exclude_if=operator.not_)

    def __hash__(self) -> int:
        """Return a number of some facts: tables have none."""
        return hash((self.kernels, self.units, self.layer_facts, self.latent_context_parallel))

    def fuses_qkv(self, *, in_model: bool) -> bool:
        """Return whether queries, keys and values are one product, if they are *in_model*."""
        return in_model if self.fused_qkv == "model" else self.fused_qkv

    @property
    def is_fully_sharded(self) -> bool:
        """Whether states are sharded as FSDP does, in units whose memory is followed one by one."""
        return self.units in {Units.ROOT, Units.ENDS}
