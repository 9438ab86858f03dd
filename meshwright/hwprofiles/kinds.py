"""The closed choices that profiles are made of."""

from enum import StrEnum


class Precision(StrEnum):
    """Number format of the matrix multiplications.

    `FP8` is mixed training: the four linear layers of a transformer layer multiply in 8 bits, all
    other products, and everything that is kept or sent between kernels, stay in bf16.  `MXFP8` is
    the same with a scale for every 32 elements along the inner dim of a product (OCP Microscaling
    Formats 1.0) in the place of one for a tensor.
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
        """Return the format of tensors between kernels, and of products that are not linear layers.

        >>> Precision.FP8.storage, Precision.FP16.storage
        (<Precision.BF16: 'bf16'>, <Precision.FP16: 'fp16'>)
        """
        return Precision.BF16 if self.is_eight_bit else self

    @property
    def num_bytes(self) -> int:
        """Return the bytes one element takes between kernels.

        >>> Precision.FP32.num_bytes, Precision.BF16.num_bytes, Precision.FP8.num_bytes
        (4, 2, 2)
        """
        return 4 if self is Precision.FP32 else 2


EIGHT_BITS = (Precision.FP8, Precision.MXFP8)


class Source(StrEnum):
    """Where a number comes from, from the best kind of evidence to the weakest."""

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
    """How the attention core runs: separate kernels, or one that never stores the scores."""

    UNFUSED = "unfused"
    FLASH = "flash"


class ContextParallel(StrEnum):
    """How ranks that each hold a part of the tokens attend to those of all.

    Keys and values go around a ring while the ranks compute (Ring Attention, arXiv 2310.01889), all
    ranks gather them, or tokens are swapped for heads before and after (Ulysses, arXiv 2309.14509).
    A ring of swaps does both: neighbours swap, and what they have then goes around a ring of such
    groups (USP, arXiv 2405.07719; LongVILA, arXiv 2408.10188).
    """

    RING = "ring"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    RING_OF_SWAPS = "ring+all-to-all"


class Dispatcher(StrEnum):
    """How tokens go to the ranks of their experts and back.

    All-to-all sends a row for each expert of a token.  DeepEP and HybridEP send a token once to
    each node that has any of its experts, and there once to each rank.
    """

    ALL_TO_ALL = "all-to-all"
    DEEPEP = "deepep"
    HYBRIDEP = "hybridep"

    @property
    def sends_once(self) -> bool:
        """Whether a token goes to a rank, and to a node, once at most."""
        return self is not Dispatcher.ALL_TO_ALL


class CudaGraphs(StrEnum):
    """What of a step is captured in CUDA graphs, so that no host time is left between kernels."""

    NONE = "none"
    LAYERS = "layers"
    WHOLE_STEP = "whole-step"


class CudaGraphImpl(StrEnum):
    """Whose captures of layers they are."""

    TRANSFORMER_ENGINE = "transformer_engine"
    LOCAL = "local"


class ExpertOverlap(StrEnum):
    """How exchanges of tokens with ranks of experts run beside what another microbatch computes.

    `MICROBATCHES` runs the forward pass of one microbatch layer by layer with the backward pass of
    another, so that the exchange of either goes on while the other computes
    (``overlap_moe_expert_parallel_comm`` of Megatron-Core); `DELAYED_WEIGHTS` also puts gradients
    of weights behind those of inputs, for exchanges to have more beside them
    (``delay_wgrad_compute``).
    """

    MICROBATCHES = "microbatches"
    DELAYED_WEIGHTS = "delayed-weights"


class Recompute(StrEnum):
    """What the backward pass computes again: nothing, the attention core, or whole layers.

    `SELECTIVE_OP` is torchtitan's selective activation checkpointing per operator: whole layers
    but for attention, every other matrix product and what is reduce-scattered.
    """

    NONE = "none"
    SELECTIVE = "selective"
    SELECTIVE_OP = "selective-op"
    FULL = "full"


class RecomputeModule(StrEnum):
    """Parts of a layer that selective recomputation may run again, as Megatron-Core names them.

    Of the attention core, the MLP, a layer of routed experts, and shared experts only the input is
    kept.  Of norms, the experts' activation, and the projections that make queries, keys and values
    of latents, the output is given up as soon as the next product is done.
    """

    CORE_ATTN = "core_attn"
    MLP = "mlp"
    MOE = "moe"
    MOE_ACT = "moe_act"
    MLA_UP_PROJ = "mla_up_proj"
    LAYERNORM = "layernorm"
    SHARED_EXPERTS = "shared_experts"


class RecomputeMethod(StrEnum):
    """Which layers full recomputation runs again, as Megatron-LM and torchtitan have it.

    `BLOCK` checkpoints so many of a virtual stage's first layers, each by itself, and keeps all of
    the others; `UNIFORM` checkpoints all, so many at a time (Megatron-LM's names). `EVERY`
    checkpoints the last of so many layers of a rank, counted through its virtual stages
    (torchtitan's ``selective_ac_option``, a number).
    """

    BLOCK = "block"
    UNIFORM = "uniform"
    EVERY = "every"


class Kernels(StrEnum):
    """How element-wise work runs: operator by operator, compiled around products, or by hand.

    `EAGER` keeps what each of PyTorch's operators keeps and holds what each makes, `COMPILED` keeps
    what the partitioner of torch.compile chooses, `FUSED` what kernels of a library keep.
    """

    EAGER = "eager"
    COMPILED = "compiled"
    FUSED = "fused"


class LossKernel(StrEnum):
    """How logits become a loss.

    `FUSED` is Transformer Engine's one kernel, which writes the gradient over the logits,
    `FLASH_ATTN` that of flash-attn (csrc/xentropy, 2023) on a 16-bit copy; `IN_PLACE` is
    Megatron's own, which turns one fp32 copy into exponents, probabilities and the gradient
    (`vocab_parallel_cross_entropy` until September 2022 and again from June 2024); `SHIFTED` is
    what it was between: the maximum was subtracted into a second fp32 tensor.  `COMPILED` is its
    fused form (`fused_vocab_parallel_cross_entropy`, from 2024), compiled in parts: it sums once
    less over the ranks, into a second fp32 tensor, too.  `EAGER` is PyTorch's own chain, or
    DTensor's where the vocabulary is split.
    """

    FUSED = "fused"
    FLASH_ATTN = "flash-attn"
    IN_PLACE = "in-place"
    SHIFTED = "shifted"
    COMPILED = "compiled"
    EAGER = "eager"


class Offload(StrEnum):
    """What is kept and updated on the host: nothing, optimizer states, or parameters, too."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"


class OffloadModule(StrEnum):
    """Parts of layers whose saved tensors may wait on the host, as Megatron-Core names them."""

    ATTN_NORM = "attn_norm"
    QKV_LINEAR = "qkv_linear"
    CORE_ATTN = "core_attn"
    ATTN_PROJ = "attn_proj"
    MLP_NORM = "mlp_norm"
    EXPERT_FC1 = "expert_fc1"
    MOE_ACT = "moe_act"


class StageSplit(StrEnum):
    """Rule that gives layers to pipeline stages; `ENDS` counts embedding and head as one each."""

    EVEN = "even"
    ENDS = "ends"
    BALANCED = "balanced"
    GREEDY = "greedy"


class ParameterGather(StrEnum):
    """How ranks get parameters that are sharded: all shards at once, or each from its owner."""

    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"


class PipelineRuntime(StrEnum):
    """Whose code runs a pipeline: how many microbatches it takes, and in which groups.

    `PUBLISHED` runs groups of as many as there are pipeline ranks, as Narayanan et al. 2021.
    """

    PUBLISHED = "published"
    MEGATRON_CORE = "megatron-core"
    PYTORCH = "pytorch"


class Units(StrEnum):
    """What sharded weights are gathered with; each layer is a unit in any case.

    `LAYERS` has embedding and head in the units of the outer layers.  `ROOT` has both in one that
    stays gathered from forward to backward.  `ENDS` has the table in one of its own, final norm and
    head in one that stays; with them a tied table, and what else there is stays, too.  `FLAT` has
    both, and the final norm, in flat buckets that are gathered once a step (Megatron-FSDP).
    """

    LAYERS = "layers"
    ROOT = "root"
    ENDS = "ends"
    FLAT = "flat"


class WeightCast(StrEnum):
    """How often a stack casts the weights of its fp8 linear layers.

    Once a step (the copies are kept), in each forward pass, or in each forward and backward pass.
    """

    STEP = "step"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward-and-backward"


class Strategy(StrEnum):
    """How a stack trains: ranks of a device mesh, replicas of one process, or servers."""

    MESH = "mesh"
    DATAPARALLEL = "dataparallel"
    PARAMETER_SERVER = "parameter-server"


class LayerFact(StrEnum):
    """What layers and ends of a transformer may have beyond those of GPT and Llama.

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
