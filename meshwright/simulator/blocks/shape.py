"""Shape of a block on a rank: model, batch, parallel degrees and stack."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import ceil
from operator import attrgetter
from typing import NamedTuple

from meshwright.hwprofiles import (
    Attention,
    ContextParallel,
    Dispatcher,
    EightBitRecipe,
    OffloadModule,
    Precision,
    Recompute,
    RecomputeModule,
    StackProfile,
    Strategy,
)
from meshwright.simulator.layout import (
    ResolvedPlan,
    TrainingJob,
    context_parallel_type,
    is_unwrapped,
    reduces_once,
)
from meshwright.simulator.model import (
    ENDS,
    EXPERT_LAYERS,
    LAYERS,
    AnyModel,
    BlockKind,
    ModelSpec,
    ParameterTensor,
    expert_parameters,
    local_shape,
    padded_vocab_size,
    rank_parameters,
    shares_embedding,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightShape:
    """A model and the degrees that shard its weights.

    ``parameters`` are those of a block of each kind on a tensor-parallel rank, with the vocabulary
    padded; ``expert_parameters`` those of routed experts among them under expert parallelism, whose
    data-parallel group is another.  ``whole_ends``: embedding and head are not split over tp.
    """

    trained: AnyModel = field(hash=False)  # shared by all shapes of a table, and slow to hash
    tp: int
    # The model, the ranks and the stack decide them.
    parameters: Mapping[BlockKind, int] = field(compare=False)
    expert_parameters: Mapping[BlockKind, int] = field(compare=False, default_factory=dict)
    ep: int = 1
    etp: int | None = None
    whole_ends: bool = False
    # Hashed once: tables look shapes up again and again.
    cached_hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Cache the hash of the compared fields, without records that a table's shapes share."""
        object.__setattr__(self, "cached_hash", hash(HASHED_FIELDS(self)))

    def __hash__(self) -> int:
        """Return the cached hash."""
        return self.cached_hash

    @property
    def model(self) -> ModelSpec:
        """The transformer; blocks of others do not ask for it."""
        assert isinstance(self.trained, ModelSpec)
        return self.trained

    def local_shape(self, tensor: ParameterTensor) -> tuple[int, ...]:
        """Return the shape of a rank's shard of a parameter."""
        tp = self.ends_tp if tensor.block in ENDS else self.tp
        return local_shape(self.trained, tensor, tp=tp, ep=self.ep, etp=self.etp)

    @property
    def ends_tp(self) -> int:
        """Ranks that split embedding and head."""
        return 1 if self.whole_ends else self.tp

    @property
    def splits_experts_alike(self) -> bool:
        """True where expert tensor parallelism uses the tp ranks."""
        return self.expert_tp == self.tp

    @property
    def expert_tp(self) -> int:
        """Ranks that split the widths of an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def weight_degrees(self) -> tuple[int, int, int]:
        """Degrees that shard the weights: tp, ep and expert tp."""
        return self.tp, self.ep, self.expert_tp

    @property
    def local_kv_width(self) -> int:
        """Width of the keys (or values) of one rank; at least one head."""
        # Fewer key-value heads than ranks are replicated.
        return max(1, self.model.num_kv_heads // self.tp) * self.model.head_dim

    @property
    def has_groups(self) -> bool:
        """True where a rank has several query groups (GQA)."""
        heads = (self.model.num_kv_heads, self.model.num_heads)
        return self.tp < heads[0] < heads[1]

    @property
    def local_width(self) -> int:
        """Width of the queries of one rank."""
        return self.model.query_hidden_size // self.tp

    @property
    def local_ffn_width(self) -> int:
        """FFN hidden size of one rank."""
        return self.model.ffn_hidden_size // self.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape(WeightShape):
    """Fields of job, plan and stack that a block depends on; plans that share them share costs.

    ``defers_norm_all_reduce``: all-reduces of norm gradients over tp, in every microbatch by
    default, wait for the last one.  ``is_unwrapped``: the stack does not run fully_shard.
    ``modules`` are recomputed selectively; those in ``offload_modules`` offload their saved
    tensors.  ``cp`` ranks split a sequence by ``cp_type``, with all-to-all groups of ``cp_inner``
    in a hybrid ring. ``announces_messages``: p2p messages of varying size are preceded by their
    shapes. ``accumulated_bytes`` is the traffic per element of wgrad's accumulation.
    """

    __hash__ = WeightShape.__hash__  # a dataclass would have one of its own
    seq_len: int
    precision: Precision
    microbatch_size: int
    sequence_parallel: bool
    recompute: Recompute
    attention: Attention
    stack: StackProfile = field(hash=False)
    in_pipeline: bool = False
    announces_messages: bool = False
    defers_norm_all_reduce: bool = False
    is_unwrapped: bool = False
    cp: int = 1
    cp_type: ContextParallel | None = None
    cp_inner: int = 1
    modules: tuple[RecomputeModule, ...] = ()
    offload_modules: tuple[OffloadModule, ...] = ()
    accumulated_bytes: int = 0
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL
    imbalance: float = 1.0

    @classmethod
    def of(
        cls,
        job: TrainingJob,
        plan: ResolvedPlan,
        stack: StackProfile,
        parameters: "PlanParameters | None" = None,
    ) -> "BlockShape":
        """Return the shape of *job*'s blocks under *plan*; *parameters* if computed before."""
        every, of_experts = parameters or plan_parameters(job.model, plan, stack)
        return cls(
            trained=job.model,
            seq_len=job.seq_len,
            precision=job.precision,
            microbatch_size=plan.microbatch_size,
            tp=plan.tp,
            sequence_parallel=plan.sequence_parallel and plan.tp > 1,
            recompute=plan.recompute,
            modules=plan.recompute_modules,
            offload_modules=plan.offload_modules,
            attention=plan.attention,
            stack=stack,
            parameters=every,
            whole_ends=stack.tp_plan,
            expert_parameters=of_experts,
            in_pipeline=plan.pp > 1 and stack.keeps_stage_outputs,  # else all share one shape
            announces_messages=plan.prediction_stage is not None,
            defers_norm_all_reduce=stack.sums_norms_each_microbatch
            and (reduces_once(job, plan, stack) or bool(is_unwrapped(stack, plan.dp_cp))),
            is_unwrapped=bool(is_unwrapped(stack, plan.dp_cp)),
            cp=plan.cp,
            cp_type=context_parallel_type(plan, stack),
            cp_inner=_cp_inner(plan),
            ep=plan.ep,
            etp=plan.etp,
            accumulated_bytes=_accumulated_bytes(job, plan, stack),
            dispatcher=_dispatcher(plan, stack),
            imbalance=job.imbalance,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of a microbatch on a context-parallel rank."""
        return self.microbatch_size * self.seq_len // self.cp

    @property
    def num_local_tokens(self) -> int:
        """Tokens on a rank outside of tensor-parallel regions."""
        return self.num_tokens // self.tp if self.sequence_parallel else self.num_tokens

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation's element."""
        return self.precision.num_bytes

    @property
    def keeps_outputs(self) -> bool:
        """True where a stage's output lives until its microbatch's backward."""
        return self.in_pipeline and self.stack.keeps_stage_outputs

    @property
    def casts_weights(self) -> bool:
        """True under autocast: every pass casts fp32 weights; the residual stream is fp32."""
        return self.stack.autocast and self.precision is not Precision.FP32

    @property
    def caches_casts(self) -> bool:
        """True where autocast's weight cache lives through forward: not in DataParallel."""
        return self.casts_weights and self.stack.strategy is not Strategy.DATAPARALLEL

    @property
    def residual_bytes(self) -> int:
        """Bytes of an element of the residual stream."""
        return Precision.FP32.num_bytes if self.casts_weights else self.element_bytes

    @property
    def recipe(self) -> EightBitRecipe | None:
        """Fp8 recipe of linear layers, if any."""
        return self.stack.recipes.get(self.precision)

    @property
    def linear_input_bytes(self) -> int:
        """Bytes of an element of a linear layer's saved input."""
        return self.recipe.saved_input_bytes if self.recipe else self.element_bytes

    @property
    def keeps_narrow_inputs(self) -> bool:
        """True where a linear layer saves an fp8 copy of its input, not the input itself."""
        return self.linear_input_bytes < self.element_bytes

    @property
    def local_vocab_size(self) -> int:
        """Rows of the vocabulary that one rank holds; the last ranks may hold fewer."""
        ranks = self.ends_tp
        return -(-padded_vocab_size(self.model, ranks, self.stack.vocabulary_multiple) // ranks)

    @property
    def num_logits(self) -> int:
        """Logits (or outputs) of a microbatch on one rank."""
        if isinstance(self.trained, ModelSpec):
            return ceil(self.num_tokens * self.model.scored_fraction) * self.local_vocab_size
        return self.microbatch_size * self.trained.num_outputs

    @property
    def tied_embedding_parameters(self) -> int:
        """Parameters of a rank's tied embedding; 0 if embedding and head are not tied."""
        if not shares_embedding(self.trained):
            return 0
        return self.local_vocab_size * self.model.hidden_size

    @property
    def message_bytes(self) -> int:
        """Bytes of the p2p activation between two stages, on one rank."""
        return self.num_local_tokens * self.model.hidden_size * self.residual_bytes


HASHED_FIELDS = attrgetter(
    *(each.name for each in fields(BlockShape) if each.hash is not False and each.compare)
)


def moves_in_pieces(shape: BlockShape, kind: BlockKind, region: Sequence[str]) -> bool:
    """Return True for chunked GEMMs overlapped with tp collectives (tp-comm-overlap) in a *region*.

    Transformer Engine has userbuffers for four linear layers: of attention and of a dense MLP.
    Megatron-Core goes without them where there are others, as in latent attention (`TELinear`), and
    in shared experts (transformer/moe/shared_experts.py).
    """
    # Without sequence parallelism tp all-reduces, which is not overlapped in chunks.
    is_split = shape.stack.tp_in_pieces and shape.sequence_parallel and kind in LAYERS
    is_shared = RecomputeModule.SHARED_EXPERTS in region
    return is_split and shape.model.latent is None and not is_shared


def norm_part(shape: BlockShape, kind: BlockKind, norm: OffloadModule) -> str:
    """Return the part of the layer that a norm belongs to: a dense layer's is in its linear layer.

    So it is in Megatron-Core's Transformer Engine layers (models/gpt/gpt_layer_specs.py, core
    0.16).
    """
    if norm is OffloadModule.ATTN_NORM:
        return OffloadModule.QKV_LINEAR if shape.model.latent is None else norm
    return norm if kind in EXPERT_LAYERS else "norm in product"


def narrows_head(shape: BlockShape) -> bool:
    """Return True if the LM head runs in fp8, as linear layers do."""
    return shape.recipe is not None and shape.recipe.multiplies_head


class PlanParameters(NamedTuple):
    """Parameters of a block of each kind on one rank, and of its expert-parallel experts."""

    every: Mapping[BlockKind, int]
    of_experts: Mapping[BlockKind, int]


def plan_parameters(model: AnyModel, plan: ResolvedPlan, stack: StackProfile) -> PlanParameters:
    """Return the parameters of a block of each kind on a rank of *plan*."""
    ends = 1 if stack.tp_plan else None
    return _rank_parameters(model, plan.tp, (plan.ep, plan.etp), stack.vocabulary_multiple, ends)


@lru_cache  # plans of a search have few different ones
def _rank_parameters(
    model: AnyModel,
    tp: int,
    experts: tuple[int, int | None],
    multiple: int,
    ends_tp: int | None,
) -> PlanParameters:
    """Return the parameters by degrees: tp; ep and expert tp; tp of embedding and head."""
    return PlanParameters(
        rank_parameters(model, tp, multiple, *experts, ends_tp=ends_tp),
        expert_parameters(model, tp, *experts),
    )


def _accumulated_bytes(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> int:
    """Return the bytes per element of an expert's gradient accumulation; others are overlapped."""
    if job.experts is None:
        return 0
    if not stack.fused_gradient_accumulation:
        # Unfused, the GEMM writes the gradient; its accumulation is priced as traffic of its own.
        return job.precision.num_bytes
    # Fused accumulation reads and writes main_grad.
    kept = plan.gradient_precision
    return 2 * (stack.gradient_bytes if kept is None else kept.num_bytes)


def _dispatcher(plan: ResolvedPlan, stack: StackProfile) -> Dispatcher:
    """Return the token dispatcher of expert parallelism."""
    default = next(iter(stack.dispatchers), Dispatcher.ALL_TO_ALL)
    return default if plan.dispatcher is None or plan.ep == 1 else plan.dispatcher


def _cp_inner(plan: ResolvedPlan) -> int:
    """Return the all-to-all (Ulysses) degree of a hybrid ring; 1 without one."""
    inner = plan.cp_inner or 1
    return 1 if inner == plan.cp else inner


def fuses_qkv(shape: BlockShape) -> bool:
    """Return True if queries, keys and values are one GEMM with one weight."""
    return shape.stack.fuses_qkv(in_model=getattr(shape.trained, "fused_qkv", False))
