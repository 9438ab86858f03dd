"""Pipeline stages: their layers, recomputation checkpoints and activation offloading."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, compress
from typing import NamedTuple

from meshwright.hwprofiles import RecomputeMethod, StackProfile, StageSplit
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.layout.plan import ResolvedPlan
from meshwright.simulator.layout.splits import split_layers
from meshwright.simulator.model import (
    COPY,
    COPY_OF_STREAMS,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    PREDICTIONS,
    AnyModel,
    BlockKind,
    BlockRun,
    KeptLayer,
    LayerGroup,
    ModelSpec,
    OffloadedLayer,
    cut_runs,
    has_mtp_layers,
    join_runs,
    layer_flops,
    mtp_flops,
    shares_embedding,
)


class Checkpoints(NamedTuple):
    """Checkpoints of full recomputation in a virtual stage.

    Args:
        num_recomputed: Layers that are recomputed, from the first on; None is all.
        layers_per_checkpoint: Layers that are recomputed together.
        interval: Only the last of so many layers of a rank is recomputed.
        num_ahead: Layers of the stage's first interval that earlier virtual stages hold.
    """

    num_recomputed: int | None = None
    layers_per_checkpoint: int = 1
    interval: int = 1
    num_ahead: int = 0

    @classmethod
    def of(cls, plan: ResolvedPlan, index: int = 0) -> "Checkpoints":
        """Return the checkpoints of virtual stage *index* of *plan*, in model order.

        Megatron-Core counts layers of each virtual stage as of a TransformerBlock
        (`_checkpointed_forward` of transformer_block.py, core 0.16), torchtitan those of all
        virtual stages of a rank (`_layer_sac_count` of distributed/activation_checkpoint.py,
        0.2.2).
        """
        number = plan.recompute_layers
        match plan.recompute_method:
            case _ if number is None:
                return cls()
            case RecomputeMethod.UNIFORM:
                return cls(layers_per_checkpoint=number)
            case RecomputeMethod.EVERY:
                ahead = sum(plan.stages[index % plan.pp : index : plan.pp])
                return cls(interval=number, num_ahead=ahead % number)
            case _:
                return cls(num_recomputed=number)

    @property
    def keeps_layers(self) -> bool:
        """Whether there may be layers that are not recomputed."""
        # Uniform checkpoints recompute all layers, however many each has.
        return self.num_recomputed is not None or self.interval > 1

    def keeps(self, index: int) -> bool:
        """Return True if layer *index* of the stage is not recomputed."""
        if self.num_recomputed is not None:
            return index >= self.num_recomputed
        return (self.num_ahead + index + 1) % self.interval != 0

    def behind(self, num_layers: int) -> "Checkpoints":
        """Return the checkpoints behind the first *num_layers* of the stage.

        Exact for computation only: a checkpoint may begin in the layers ahead.
        """
        number = None if self.num_recomputed is None else max(0, self.num_recomputed - num_layers)
        ahead = (self.num_ahead + num_layers) % self.interval
        return Checkpoints(number, interval=self.interval, num_ahead=ahead)

    def passes(self, layers: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
        """Return *layers* as the kinds that passes run: kept, or grouped in checkpoints."""
        if not self.keeps_layers and self.layers_per_checkpoint == 1:
            return layers
        kinds = [kind for kind, count in layers for _ in range(count)]
        if self.keeps_layers:
            passes = (
                KeptLayer(kind) if self.keeps(index) else kind for index, kind in enumerate(kinds)
            )
            return join_runs([BlockRun(kind, 1) for kind in passes])
        size = self.layers_per_checkpoint
        groups = (kinds[first : first + size] for first in range(0, len(kinds), size))
        return join_runs([BlockRun(LayerGroup(group), 1) for group in groups])


class LayerOffload(NamedTuple):
    """Activation offloading: first layers whose saved tensors go to the host until backward.

    Args:
        number: Number of offloaded layers.
        depth: Offloaded layers whose tensors are on the device at a time: a layer's are gone when
            the *depth*-th layer behind it begins in forward, and back that far ahead, its own
            pass counted, in backward.
        waits: Whether forward waits for the copies to the host.
    """

    number: int = 0
    depth: int = 1
    waits: bool = True

    @classmethod
    def of(cls, plan: ResolvedPlan, model: AnyModel) -> "LayerOffload":
        """Return the offloading of *plan*, which has no pipeline.

        Transformer Engine spreads the copies of N of L layers so that tensors of L - N are on the
        device at any time (`DefaultOffloadSynchronizer` of pytorch/cpu_offload.py, 2.10 to 2.18).
        Megatron-Core does not offload modules of the last layer, and fetches those of the previous
        layer while a layer runs (`should_bulk_offload` and
        `on_group_start_backward` of pipeline_parallel/fine_grained_activation_offload.py, core
        0.16 to 0.19).
        """
        if plan.offload_layers is not None:
            return cls(plan.offload_layers, model.num_layers - plan.offload_layers)
        if plan.offload_modules:
            return cls(model.num_layers - (not has_mtp_layers(model)), AHEAD, waits=False)
        return cls()

    def present(self, place: int) -> range:
        """Return the offloaded layers whose tensors are on the device while layer *place* runs.

        >>> [[*LayerOffload(number=3, depth=2).present(place)] for place in range(5)]
        [[0], [0, 1], [1, 2], [2], []]
        """
        return range(max(0, place - self.depth + 1), min(place + 1, self.number))

    def passes(self, layers: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
        """Return *layers* with the offloaded ones as kinds of their own."""
        if not self.number:
            return layers
        offloaded = (
            BlockRun(OffloadedLayer(kind), num) for kind, num in cut_runs(layers, 0, self.number)
        )
        num_layers = sum(count for _, count in layers)
        return (*offloaded, *cut_runs(layers, self.number, num_layers))

    def behind(self, num_layers: int) -> "LayerOffload":
        """Return the offloading behind the first *num_layers* of the stage."""
        return self._replace(number=max(0, self.number - num_layers)) if self.number else self


AHEAD = 2  # the layer that runs, and the previous one, which is fetched meanwhile
DEFAULT_CHECKPOINTS, NO_OFFLOAD = Checkpoints(), LayerOffload()
ONE_EMBEDDING = (BlockRun(EMBEDDING, 1),)
BEHIND_LAYERS = tuple(BlockRun(kind, 1) for kind in (FINAL_NORM, PREDICTIONS, HEAD))


class Stage(NamedTuple):
    """Layers of one virtual stage by kind, and the embedding, norm, MTP layers and head it holds.

    ``has_norm``: it holds the final norm apart from the head; ``has_predictions``: the MTP layers.
    A stage without layers and norm ``copies`` its input, as this kind of block: Megatron-Core
    returns another tensor (`TransformerBlock.forward` of
    transformer_block.py, core 0.16).
    """

    layers: tuple[BlockRun, ...]
    has_embedding: bool
    has_head: bool
    checkpoints: Checkpoints = DEFAULT_CHECKPOINTS
    copies: BlockKind | None = None
    has_norm: bool = False
    has_predictions: bool = False
    offload: LayerOffload = NO_OFFLOAD

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return sum(count for _, count in self.layers)

    @property
    def blocks(self) -> tuple[BlockRun, ...]:
        """Embedding, layers and head in model order."""
        return self._between_ends(self.layers)

    @property
    def contents(self) -> tuple[BlockRun, ...]:
        """The blocks, or the copy of a stage without any."""
        return self.blocks or self.passes

    @property
    def passes(self) -> tuple[BlockRun, ...]:
        """The contents as a pass runs them: kept, recomputed, grouped or offloaded."""
        copy = () if self.copies is None else (BlockRun(self.copies, 1),)
        return copy + self._between_ends(self.offload.passes(self.checkpoints.passes(self.layers)))

    def _between_ends(self, layers: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
        first = ONE_EMBEDDING if self.has_embedding else ()
        if not (self.has_head or self.has_norm or self.has_predictions):
            return first + layers
        present = self.has_norm, self.has_predictions, self.has_head
        return first + layers + tuple(compress(BEHIND_LAYERS, present))

    def num_kept(self, first: int = 0) -> int:
        """Return the number of layers from *first* on that are kept while others are recomputed."""
        if not self.checkpoints.keeps_layers:
            return 0
        return sum(map(self.checkpoints.keeps, range(first, self.num_layers)))

    @property
    def num_blocks(self) -> int:
        """Number of layers, embedding and head."""
        ends = self.has_embedding + self.has_norm + self.has_predictions + self.has_head
        return self.num_layers + ends

    def part(self, first: int, end: int) -> "Stage":
        """Return the stage of the blocks from index *first* up to, but without, *end*."""
        offset = int(self.has_embedding)
        behind = offset + self.num_layers
        mtp = behind + self.has_norm
        return Stage(
            cut_runs(self.layers, max(0, first - offset), end - offset),
            has_embedding=self.has_embedding and first == 0,
            has_head=self.has_head and first < end == self.num_blocks,
            checkpoints=self.checkpoints.behind(max(0, first - offset)),
            copies=self.copies if first == 0 else None,
            has_norm=self.has_norm and first <= behind < end,
            has_predictions=self.has_predictions and first <= mtp < end,
            offload=self.offload.behind(max(0, first - offset)),
        )


def whole_model(model: AnyModel) -> Stage:
    """Return all of *model* as one stage."""
    has_mtp = has_mtp_layers(model)
    return Stage(
        model.layer_runs,
        has_embedding=True,
        has_head=True,
        has_norm=has_mtp,
        has_predictions=has_mtp,
    )


def recomputed_layers(model: AnyModel, plan: ResolvedPlan) -> tuple[BlockRun, ...]:
    """Return the layers of *model* to which the plan's recomputation applies."""
    if not Checkpoints.of(plan).keeps_layers:
        return model.layer_runs
    runs = [
        run
        for stage in plan_stages(model, plan)
        for run in stage.checkpoints.passes(stage.layers)
        if not isinstance(run.kind, KeptLayer)
    ]
    return join_runs(runs)


def join_stages(stages: Sequence[Stage]) -> Stage:
    """Return consecutive *stages* as one; without any, an empty stage."""
    return Stage(
        join_runs([run for stage in stages for run in stage.layers]),
        has_embedding=any(stage.has_embedding for stage in stages),
        has_head=any(stage.has_head for stage in stages),
        has_norm=any(stage.has_norm for stage in stages),
        has_predictions=any(stage.has_predictions for stage in stages),
    )


def model_stages(
    model: AnyModel, layers: Sequence[int], prediction_stage: int | None = None
) -> tuple[Stage, ...]:
    """Return *model* split into virtual stages of *layers* layers each, in model order.

    MTP layers are on *prediction_stage*, or with the head.

    >>> from meshwright.simulator.model import load_model
    >>> model_stages(load_model("gpt2"), (5, 7))[0].blocks
    (BlockRun(kind='embedding', num_blocks=1), BlockRun(kind='layer', num_blocks=5))
    """
    last = len(layers) - 1
    last_with_layers = max((index for index, count in enumerate(layers) if count), default=last)
    has_mtp = has_mtp_layers(model)
    mtp_stage = last if prediction_stage is None else prediction_stage
    return tuple(
        Stage(
            cut_runs(model.layer_runs, end - count, end),
            has_embedding=index == 0,
            has_head=index == last,
            copies=(COPY if index <= mtp_stage else COPY_OF_STREAMS)
            if count == 0 and 0 < index < last + has_mtp
            else None,
            has_norm=has_mtp and index == last_with_layers,
            has_predictions=has_mtp and index == mtp_stage,
        )
        for index, (count, end) in enumerate(zip(layers, accumulate(layers), strict=True))
    )


def reads_embedding(model: AnyModel, stage: Stage) -> bool:
    """Return True if the head or MTP layers of *stage* read the shared embedding weight.

    On another stage than the embedding's they read a copy.
    """
    if not (stage.has_head or stage.has_predictions):
        return False
    reads = stage.has_predictions if has_mtp_layers(model) else stage.has_head
    return reads and shares_embedding(model)


def tied_embedding_rank(plan: ResolvedPlan) -> int:
    """Return the pipeline rank with the second copy of a shared embedding: of the head, or of MTP.

    It is 0 where no other rank reads it.
    """
    return plan.pp - 1 if plan.prediction_stage is None else plan.prediction_stage % plan.pp


def receives_mtp_states(model: AnyModel, stage: Stage) -> bool:
    """Return True if *stage* receives the hidden states of MTP layers from an earlier stage."""
    has_losses = has_mtp_layers(model) and stage.has_head and not stage.has_predictions
    return has_losses or stage.copies == COPY_OF_STREAMS


def copies_embedding(model: AnyModel, stage: Stage) -> bool:
    """Return True if *stage* has a copy of the embedding weight."""
    return reads_embedding(model, stage) and not stage.has_embedding


def plan_stages(model: AnyModel, plan: ResolvedPlan) -> tuple[Stage, ...]:
    """Return the virtual stages of *plan* in model order, with recomputation and offloading."""
    stages = model_stages(model, plan.stages, plan.prediction_stage)
    offload = LayerOffload.of(plan, model)
    if offload.number:
        return tuple(stage._replace(offload=offload) for stage in stages)
    if plan.recompute_layers is None:
        return stages
    return tuple(
        stage._replace(checkpoints=Checkpoints.of(plan, index))
        for index, stage in enumerate(stages)
    )


def rank_stages(model: AnyModel, plan: ResolvedPlan, pp_rank: int) -> tuple[Stage, ...]:
    """Return the virtual stages of pipeline rank ``r`` of p: ``r, p + r, 2 p + r, ...``.

    >>> from meshwright.simulator.model import load_model
    >>> plan = ResolvedPlan(pp=2, num_virtual_stages=2, stages=(1, 2, 3, 6))
    >>> rank_stages(load_model("gpt2"), plan, 0)[1].blocks
    (BlockRun(kind='layer', num_blocks=3),)
    """
    return plan_stages(model, plan)[pp_rank :: plan.pp]


@lru_cache
def head_cost_layers(model: ModelSpec, seq_len: int) -> float:
    """Return the forward FLOPs of head and MTP layers, in units of a layer's forward FLOPs.

    Per token a layer costs ``2 h (2 q + 2 g) + 4 q s + 2 h f k`` (QKV and projection, attention
    over s keys, MLP with k = 2 or 3 matrices), in the mean of all layers, and the head ``2 h V``.
    """
    runs = model.layer_runs
    layers = sum(count * layer_flops(model, kind, seq_len) for kind, count in runs)
    head = 2 * model.hidden_size * model.vocab_size + mtp_flops(model, seq_len)
    return head * model.num_layers / layers


def resolve_stages(
    model: AnyModel, seq_len: int, num_stages: int, wanted: StageSplit | Sequence[int]
) -> tuple[int, ...]:
    """Return the layer counts of a rule, or explicit counts unchanged."""
    if isinstance(wanted, StageSplit):
        cost = head_cost_layers(model, seq_len) if isinstance(model, ModelSpec) else 0.0
        return split_layers(model.num_layers, num_stages, wanted, head_cost=cost)
    return tuple(wanted)


def with_stages(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> ResolvedPlan:
    """Return *plan* with the stages of the stack's rule where it lists none.

    Raises:
        PlanError: If there are more stages than layers.
    """
    if plan.stages:
        return plan
    stages = resolve_stages(job.model, job.seq_len, plan.num_stages, stack.stage_split)
    return replace(plan, stages=stages)
