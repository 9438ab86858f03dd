"""The sizes that decide what one rank computes and keeps in a block."""

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
    context_way,
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
    shares_table,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightShape:
    """A model and the ranks that share its weights.

    ``parameters`` are a tensor-parallel rank's, its vocabulary padded, of a block of each kind;
    ``expert_parameters`` those of routed experts among them where experts are divided among ranks:
    other ranks than those of a replica hold them.  ``whole_ends`` says that tensor-parallel ranks
    split layers alone.
    """

    trained: AnyModel = field(hash=False)  # a table's shapes share it; so many facts hash slowly
    tp: int
    # The model, the ranks and the stack decide them.
    parameters: Mapping[BlockKind, int] = field(compare=False)
    expert_parameters: Mapping[BlockKind, int] = field(compare=False, default_factory=dict)
    ep: int = 1
    etp: int | None = None
    whole_ends: bool = False
    # Found once: tables look shapes up again and again.
    known_hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Find the hash of what is compared, but for records that a table's shapes share."""
        object.__setattr__(self, "known_hash", hash(HASHED(self)))

    def __hash__(self) -> int:
        """Return one number for all that are equal."""
        return self.known_hash

    @property
    def model(self) -> ModelSpec:
        """The transformer; blocks of others do not ask for it."""
        assert isinstance(self.trained, ModelSpec)
        return self.trained

    def local_shape(self, tensor: ParameterTensor) -> tuple[int, ...]:
        """Return the shape of a rank's part of a tensor."""
        tp = self.ends_tp if tensor.block in ENDS else self.tp
        return local_shape(self.trained, tensor, tp=tp, ep=self.ep, etp=self.etp)

    @property
    def ends_tp(self) -> int:
        """Ranks that split embedding and head."""
        return 1 if self.whole_ends else self.tp

    @property
    def splits_experts_alike(self) -> bool:
        """Whether an expert is split over as many ranks as other layers, which are the same."""
        return self.expert_tp == self.tp

    @property
    def expert_tp(self) -> int:
        """Ranks that split the widths of an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def weight_degrees(self) -> tuple[int, int, int]:
        """The degrees that divide a rank's weights."""
        return self.tp, self.ep, self.expert_tp

    @property
    def local_kv_width(self) -> int:
        """Width of the keys, and of the values, of one rank; at least one head."""
        return max(1, self.model.num_kv_heads // self.tp) * self.model.head_dim

    @property
    def has_groups(self) -> bool:
        """Whether a rank has several groups of heads, each of which shares a key head."""
        heads = (self.model.num_kv_heads, self.model.num_heads)
        return self.tp < heads[0] < heads[1]

    @property
    def local_width(self) -> int:
        """Width of the queries of one rank."""
        return self.model.query_hidden_size // self.tp

    @property
    def local_ffn_width(self) -> int:
        """Width of the MLP of one rank."""
        return self.model.ffn_hidden_size // self.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape(WeightShape):
    """Model, batch and tensor-parallel choices; plans that share them share operator times.

    ``defers_sums`` says that gradients which the stack sums over tensor-parallel ranks in every
    microbatch stay unsummed until the last one, as those that are whole until then do.
    ``is_unwrapped`` says that the stack does not run fully_shard. ``modules`` of a layer run again
    in selective recomputation; those in ``offload_modules`` leave saved tensors on the host. ``cp``
    ranks share a sequence by ``cp_type``; of a ring of swaps, groups of ``cp_inner`` swap.
    ``announces_messages`` says that sizes go ahead of messages between stages, which differ.
    ``accumulated_bytes`` are those that a product moves to add a gradient to what is kept of it.
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
    defers_sums: bool = False
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
        """Return the shape of *job*'s blocks by *plan*; *parameters* where they are known."""
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
            defers_sums=stack.sums_norms_each_microbatch
            and (reduces_once(job, plan, stack) or bool(is_unwrapped(stack, plan.dp_cp))),
            is_unwrapped=bool(is_unwrapped(stack, plan.dp_cp)),
            cp=plan.cp,
            cp_type=context_way(plan, stack),
            cp_inner=_cp_inner(plan),
            ep=plan.ep,
            etp=plan.etp,
            accumulated_bytes=_accumulated_bytes(job, plan, stack),
            dispatcher=_dispatcher(plan, stack),
            imbalance=job.imbalance,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of a microbatch that a context-parallel rank has."""
        return self.microbatch_size * self.seq_len // self.cp

    @property
    def num_local_tokens(self) -> int:
        """Tokens a rank keeps outside tensor-parallel regions."""
        return self.num_tokens // self.tp if self.sequence_parallel else self.num_tokens

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return self.precision.num_bytes

    @property
    def keeps_outputs(self) -> bool:
        """Whether a stage's output lives until the backward pass of its microbatch."""
        return self.in_pipeline and self.stack.keeps_stage_outputs

    @property
    def casts_weights(self) -> bool:
        """Whether every pass casts fp32 weights to 16 bit, beside a residual stream in fp32."""
        return self.stack.autocast and self.precision is not Precision.FP32

    @property
    def caches_casts(self) -> bool:
        """Whether these copies live as long as the forward pass: not those of copied weights."""
        return self.casts_weights and self.stack.strategy is not Strategy.DATAPARALLEL

    @property
    def residual_bytes(self) -> int:
        """Bytes of an activation of the residual stream."""
        return Precision.FP32.num_bytes if self.casts_weights else self.element_bytes

    @property
    def recipe(self) -> EightBitRecipe | None:
        """How linear layers multiply in 8 bits, if they do."""
        return self.stack.recipes.get(self.precision)

    @property
    def linear_input_bytes(self) -> int:
        """Bytes of an element that a linear layer keeps of its input for backward."""
        return self.recipe.saved_input_bytes if self.recipe else self.element_bytes

    @property
    def keeps_narrow_inputs(self) -> bool:
        """Whether a linear layer keeps a copy of 8 bits of its input, not the input itself."""
        return self.linear_input_bytes < self.element_bytes

    @property
    def local_vocab_size(self) -> int:
        """Rows of the vocabulary that one rank holds; the last ranks may hold fewer."""
        ranks = self.ends_tp
        return -(-padded_vocab_size(self.model, ranks, self.stack.vocabulary_multiple) // ranks)

    @property
    def num_logits(self) -> int:
        """Numbers that a microbatch's loss is made of on one rank."""
        if isinstance(self.trained, ModelSpec):
            return ceil(self.num_tokens * self.model.scored_fraction) * self.local_vocab_size
        return self.microbatch_size * self.trained.num_outputs

    @property
    def copied_parameters(self) -> int:
        """Parameters of a rank's table where the head has use of it, too; else 0."""
        if not shares_table(self.trained):
            return 0
        return self.local_vocab_size * self.model.hidden_size

    @property
    def message_bytes(self) -> int:
        """Bytes of the activation between two stages that one rank holds."""
        return self.num_local_tokens * self.model.hidden_size * self.residual_bytes


HASHED = attrgetter(
    *(each.name for each in fields(BlockShape) if each.hash is not False and each.compare)
)


def moves_in_pieces(shape: BlockShape, kind: BlockKind, region: Sequence[str]) -> bool:
    """Return whether tokens of a layer move piece by piece beside products of a *region* of it.

    Transformer Engine has buffers for four: of attention and of a dense MLP. Megatron-Core does
    without them where there are others, as latent attention has (`TELinear`), and in shared
    experts (transformer/moe/shared_experts.py).
    """
    is_split = shape.stack.tp_in_pieces and shape.sequence_parallel and kind in LAYERS
    is_shared = RecomputeModule.SHARED_EXPERTS in region
    return is_split and shape.model.latent is None and not is_shared


def norm_part(shape: BlockShape, kind: BlockKind, norm: OffloadModule) -> str:
    """Return of which part a norm is: that of a dense layer is in the product behind it.

    So are Megatron-Core's layers of Transformer Engine (models/gpt/gpt_layer_specs.py, core 0.16).
    """
    if norm is OffloadModule.ATTN_NORM:
        return OffloadModule.QKV_LINEAR if shape.model.latent is None else norm
    return norm if kind in EXPERT_LAYERS else "norm in product"


def narrows_head(shape: BlockShape) -> bool:
    """Return whether the output matrix multiplies in 8 bits, as linear layers do."""
    return shape.recipe is not None and shape.recipe.multiplies_head


class PlanParameters(NamedTuple):
    """What a rank of a plan holds of a block of each kind, and of that its divided experts."""

    every: Mapping[BlockKind, int]
    of_experts: Mapping[BlockKind, int]


def plan_parameters(model: AnyModel, plan: ResolvedPlan, stack: StackProfile) -> PlanParameters:
    """Return the parameters that a rank of *plan* holds of a block of each kind."""
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
    """Return these by the degrees of parallelism: tensor; expert and expert tensor; of the ends."""
    return PlanParameters(
        rank_parameters(model, tp, multiple, *experts, ends_tp=ends_tp),
        expert_parameters(model, tp, *experts),
    )


def _accumulated_bytes(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> int:
    """Return what is read and written of an expert's gradient; other layers' are hidden."""
    if job.experts is None:
        return 0
    if not stack.fused_gradient_accumulation:
        return job.precision.num_bytes
    kept = plan.gradient_precision
    return 2 * (stack.gradient_bytes if kept is None else kept.num_bytes)


def _dispatcher(plan: ResolvedPlan, stack: StackProfile) -> Dispatcher:
    """Return how tokens go to experts on other ranks."""
    habit = next(iter(stack.dispatchers), Dispatcher.ALL_TO_ALL)
    return habit if plan.dispatcher is None or plan.ep == 1 else plan.dispatcher


def _cp_inner(plan: ResolvedPlan) -> int:
    """Return the ranks that swap tokens for heads in a ring of swaps; 1 where that is no such."""
    inner = plan.cp_inner or 1
    return 1 if inner == plan.cp else inner


def fuses_qkv(shape: BlockShape) -> bool:
    """Return whether queries, keys and values are one product of one weight."""
    return shape.stack.fuses_qkv(in_model=getattr(shape.trained, "fused_qkv", False))
