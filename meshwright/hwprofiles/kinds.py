"""Enumerations of profiles and plans: precisions, collectives, recomputation, kernels."""

from enum import StrEnum


class Precision(StrEnum):
    """Number format of the matrix multiplications.

    `FP8` is mixed training: the four linear layers of a transformer layer multiply in 8 bits, all
    other GEMMs, and all tensors saved or passed between kernels, stay in bf16.  `MXFP8` is
    the same with a scale for every 32 elements along the inner dim of a GEMM (OCP Microscaling
    Formats 1.0) instead of one for a tensor.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"

    @property
    def is_eight_bit(self) -> bool:
        """Whether linear layers multiply in 8 bits.

        >>> Precision.MXFP8.is_eight_bit, Precision.BF16.is_eight_bit
        (True, False)
        """
        return self in EIGHT_BITS

    @property
    def storage(self) -> "Precision":
        """Return the format of tensors between kernels, and of GEMMs outside linear layers.

        >>> Precision.FP8.storage, Precision.FP16.storage
        (<Precision.BF16: 'bf16'>, <Precision.FP16: 'fp16'>)
        """
        return Precision.BF16 if self.is_eight_bit else self

    @property
    def num_bytes(self) -> int:
        """Return the bytes of one element between kernels.

        >>> Precision.FP32.num_bytes, Precision.BF16.num_bytes, Precision.FP8.num_bytes
        (4, 2, 2)
        """
        return 4 if self is Precision.FP32 else 2


EIGHT_BITS = (Precision.FP8, Precision.MXFP8)


class Source(StrEnum):
    """Evidence for a number, from the strongest kind to the weakest."""

    MEASURED = "measured"
    FITTED = "fitted"
    DATASHEET = "datasheet"
    EXTRAPOLATED = "extrapolated"


class CollectiveOp(StrEnum):
    """Communication operations."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"
    P2P = "p2p"


class Allocator(StrEnum):
    """Segments of a caching allocator: of one size each, or expandable."""

    FIXED = "fixed"
    EXPANDABLE = "expandable"


class Attention(StrEnum):
    """Attention kernel: unfused, or flash attention, which never stores the scores."""

    UNFUSED = "unfused"
    FLASH = "flash"


class ContextParallel(StrEnum):
    """Context parallelism: how ranks with parts of a sequence attend to all of its tokens.

    Keys and values go around a ring while ranks compute (ring attention, arXiv 2310.01889), all
    ranks all-gather them, or an all-to-all exchanges tokens for heads (Ulysses, arXiv 2309.14509).
    The hybrid does both: Ulysses among neighbours, ring attention between these
    groups (USP, arXiv 2405.07719; LongVILA, arXiv 2408.10188).
    """

    RING = "ring"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    HYBRID_RING = "ring+all-to-all"


class Dispatcher(StrEnum):
    """Token dispatcher of expert parallelism: dispatch to the ranks of experts, and combine.

    All-to-all sends a copy for each expert of a token.  DeepEP and HybridEP send a token once to
    each node that has any of its experts, and there once to each rank.
    """

    ALL_TO_ALL = "all-to-all"
    DEEPEP = "deepep"
    HYBRIDEP = "hybridep"

    @property
    def sends_once(self) -> bool:
        """Whether a token is sent at most once to a rank, and to a node."""
        return self is not Dispatcher.ALL_TO_ALL


class CudaGraphs(StrEnum):
    """Scope of CUDA graph capture, within which no host time is left between kernels."""

    NONE = "none"
    LAYERS = "layers"
    WHOLE_STEP = "whole-step"


class CudaGraphImpl(StrEnum):
    """Implementation of CUDA graphs of layers, as Megatron-Core names them."""

    TRANSFORMER_ENGINE = "transformer_engine"
    LOCAL = "local"


class ExpertOverlap(StrEnum):
    """Overlap of expert-parallel all-to-alls with the computation of another microbatch.

    `MICROBATCHES` runs the forward pass of one microbatch layer by layer with the backward pass of
    another, so that the all-to-all of either is hidden while the other computes
    (``overlap_moe_expert_parallel_comm`` of Megatron-Core); `DELAYED_WEIGHTS` also delays gradients
    of weights behind those of inputs, so that there is more to overlap with
    (``delay_wgrad_compute``).
    """

    MICROBATCHES = "microbatches"
    DELAYED_WEIGHTS = "delayed-weights"


class Recompute(StrEnum):
    """Activation recomputation: none, the attention core, or whole layers.

    `SELECTIVE_OP` is torchtitan's selective activation checkpointing per operator: whole layers
    but for attention, every other matrix product and reduce-scatter outputs.
    """

    NONE = "none"
    SELECTIVE = "selective"
    SELECTIVE_OP = "selective-op"
    FULL = "full"


class RecomputeModule(StrEnum):
    """Modules of a layer that selective recomputation may recompute, as Megatron-Core names them.

    Of the attention core, the MLP, a layer of routed experts, and shared experts only the input is
    kept.  Of norms, the experts' activation, and the projections that make queries, keys and values
    of latents, the output is discarded as soon as the next matrix product is done.
    """

    CORE_ATTN = "core_attn"
    MLP = "mlp"
    MOE = "moe"
    MOE_ACT = "moe_act"
    MLA_UP_PROJ = "mla_up_proj"
    LAYERNORM = "layernorm"
    SHARED_EXPERTS = "shared_experts"


class RecomputeMethod(StrEnum):
    """Layers that full recomputation checkpoints, as in Megatron-LM and torchtitan.

    `BLOCK` checkpoints so many of a virtual stage's first layers, each by itself, and keeps all of
    the others; `UNIFORM` checkpoints all, so many at a time (Megatron-LM's names). `EVERY`
    checkpoints the last of so many layers of a rank, counted through its virtual stages
    (torchtitan's ``selective_ac_option``, a number).
    """

    BLOCK = "block"
    UNIFORM = "uniform"
    EVERY = "every"


class Kernels(StrEnum):
    """Kernels of element-wise work: eager, compiled around GEMMs, or a library's fused ones.

    For backward `EAGER` saves what each of PyTorch's operators does, and holds outputs; `COMPILED`
    saves what the partitioner of torch.compile chooses, `FUSED` what kernels of a library do.
    """

    EAGER = "eager"
    COMPILED = "compiled"
    FUSED = "fused"


class LossKernel(StrEnum):
    """Cross-entropy kernel, from logits to the loss.

    `FUSED` is Transformer Engine's kernel, which overwrites the logits with their gradient,
    `FLASH_ATTN` that of flash-attn (csrc/xentropy, 2023) on a 16-bit copy; `IN_PLACE` is
    Megatron's own, which overwrites one fp32 copy with exponents, probabilities and the gradient
    (`vocab_parallel_cross_entropy` until September 2022 and again from June 2024); `SHIFTED` is
    its form between these: the maximum was subtracted into a second fp32 tensor.  `COMPILED` is its
    fused form (`fused_vocab_parallel_cross_entropy`, from 2024), compiled in parts: it has one
    all-reduce less, and a second fp32 tensor, too.  `EAGER` is PyTorch's own chain, or
    DTensor's where the vocabulary is split.
    """

    FUSED = "fused"
    FLASH_ATTN = "flash-attn"
    IN_PLACE = "in-place"
    SHIFTED = "shifted"
    COMPILED = "compiled"
    EAGER = "eager"


class Offload(StrEnum):
    """CPU offloading: none, optimizer states, or also parameters, updated on the host."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"


class OffloadModule(StrEnum):
    """Modules whose saved activations may be offloaded, as Megatron-Core names them."""

    ATTN_NORM = "attn_norm"
    QKV_LINEAR = "qkv_linear"
    CORE_ATTN = "core_attn"
    ATTN_PROJ = "attn_proj"
    MLP_NORM = "mlp_norm"
    EXPERT_FC1 = "expert_fc1"
    MOE_ACT = "moe_act"


class StageSplit(StrEnum):
    """Rule of splitting layers over stages; `ENDS` counts embedding and head as one each."""

    EVEN = "even"
    ENDS = "ends"
    BALANCED = "balanced"
    GREEDY = "greedy"


class ParameterGather(StrEnum):
    """Collective that gathers sharded parameters: all-gather, or broadcasts by the owners."""

    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"


class PipelineRuntime(StrEnum):
    """Runtime of a pipeline, which decides the microbatch counts it takes, and their groups.

    `PUBLISHED` runs groups of as many as there are pipeline ranks, as Narayanan et al. 2021.
    """

    PUBLISHED = "published"
    MEGATRON_CORE = "megatron-core"
    PYTORCH = "pytorch"


class Units(StrEnum):
    """FSDP units of embedding, norm and head; each layer is a unit in any case.

    `LAYERS` has embedding and head in the units of the outer layers.  `ROOT` has both in one that
    stays gathered from forward to backward.  `ENDS` has the embedding in its own, final norm and
    head in one that stays gathered, as do a tied embedding and other parameters.  `FLAT` has
    both, and the final norm, in flat buckets that are gathered once a step (Megatron-FSDP).
    """

    LAYERS = "layers"
    ROOT = "root"
    ENDS = "ends"
    FLAT = "flat"


class WeightCast(StrEnum):
    """Frequency of casting the weights of fp8 linear layers.

    Once a step (the copies are kept), in each forward pass, or in each forward and backward pass.
    """

    STEP = "step"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward-and-backward"


class Strategy(StrEnum):
    """Training strategy: a device mesh, `DataParallel` in one process, or parameter servers."""

    MESH = "mesh"
    DATAPARALLEL = "dataparallel"
    PARAMETER_SERVER = "parameter-server"


class LayerFact(StrEnum):
    """Features of transformer layers, embedding and head beyond those of GPT and Llama.

    Each is a field of a model, with a value where it has several.
    """

    ROUTED_EXPERTS = "experts"
    LATENT_ATTENTION = "latent"
    HEAD_DIM = "head_dim"
    HEAD_NORM = "qk_norm=head"
    WIDTH_NORM = "qk_norm=width"
    UNWEIGHTED_NORM = "qk_norm=unweighted"
    NORM_PLACES = "norm_places"
    PARALLEL_MLP = "parallel_mlp"
    ACTIVATION = "activation"
    ROTARY_FRACTION = "rotary_fraction"
    ATTENTION_SOFTCAP = "attention_softcap"
    LOGIT_SOFTCAP = "logit_softcap"
    SCALED_EMBEDDINGS = "scaled_embeddings"
    WINDOW = "window"
    CHUNKED_WINDOW = "chunked_window"
    ROTARY_LAYERS = "rotary_layers"
    ATTENTION_SINKS = "attention_sinks"
    PREDICTION_LAYERS = "prediction_layers"
    EXPERT_BIAS = "experts.bias"
    EXPERT_ACTIVATION = "experts.activation"
    EXPERT_GELU = "experts.activation=gelu"
    EXPERT_SQUARED_RELU = "experts.activation=squared relu"
    WEIGHED_INPUTS = "experts.weighs_inputs"
