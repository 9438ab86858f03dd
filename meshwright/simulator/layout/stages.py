"""Which layers each pipeline stage holds."""

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
    join_runs,
    layer_flops,
    prediction_flops,
    predicts_further,
    shares_table,
)


class Checkpoints(NamedTuple):
    """Which layers of a virtual stage full recomputation runs again.

    Args:
        num_again: How many, from its first one on; None is all of them.
        num_together: Layers of a checkpoint.
        interval: Of so many layers of a rank the last one alone.
        num_ahead: Layers of the interval in which the stage begins that are ahead of it.
    """

    num_again: int | None = None
    num_together: int = 1
    interval: int = 1
    num_ahead: int = 0

    @classmethod
    def of(cls, plan: ResolvedPlan, index: int = 0) -> "Checkpoints":
        """Return those of the virtual stage number *index* of *plan*, in model order.

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
                return cls(num_together=number)
            case RecomputeMethod.EVERY:
                ahead = sum(plan.stages[index % plan.pp : index : plan.pp])
                return cls(interval=number, num_ahead=ahead % number)
            case _:
                return cls(num_again=number)

    @property
    def keeps_layers(self) -> bool:
        """Whether there may be layers that are not recomputed."""
        return self.num_again is not None or self.interval > 1

    def keeps(self, place: int) -> bool:
        """Return True if the layer at a *place* of the stage, from 0 on, is not recomputed."""
        if self.num_again is not None:
            return place >= self.num_again
        return (self.num_ahead + place + 1) % self.interval != 0

    def behind(self, num_layers: int) -> "Checkpoints":
        """Return those of what follows the first *num_layers*, if it is less than a stage.

        What it computes; its checkpoints may begin in what is ahead of it.
        """
        again = None if self.num_again is None else max(0, self.num_again - num_layers)
        ahead = (self.num_ahead + num_layers) % self.interval
        return Checkpoints(again, interval=self.interval, num_ahead=ahead)

    def passes(self, layers: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
        """Return *layers* by what becomes of them: kept, or together in a checkpoint."""
        if not self.keeps_layers and self.num_together == 1:
            return layers
        kinds = [kind for kind, count in layers for _ in range(count)]
        if self.keeps_layers:
            found = (
                KeptLayer(kind) if self.keeps(place) else kind for place, kind in enumerate(kinds)
            )
            return join_runs([BlockRun(kind, 1) for kind in found])
        size = self.num_together
        groups = (kinds[first : first + size] for first in range(0, len(kinds), size))
        return join_runs([BlockRun(LayerGroup(group), 1) for group in groups])


class LayerOffload(NamedTuple):
    """First layers whose saved tensors wait on the host from forward to backward.

    Args:
        number: How many.
        depth: Tensors of so many layers in a row, and no more, are on the device beside those of
            layers that keep theirs: a layer's have left when so many more begin in forward, and
            come back so many ahead, its own counted, in backward.
        waits: Forward waits for them to have left.
    """

    number: int = 0
    depth: int = 1
    waits: bool = True

    @classmethod
    def of(cls, plan: ResolvedPlan, model: AnyModel) -> "LayerOffload":
        """Return those of *plan*, which has no pipeline.

        Transformer Engine spreads the copies of N of L layers so that those of L - N are there at
        any time (`DefaultOffloadSynchronizer` of pytorch/cpu_offload.py, 2.10 to 2.18).
        Megatron-Core leaves parts of the last layer that has them where they are, and has those of
        the layer before come back while a layer runs (`should_bulk_offload` and
        `on_group_start_backward` of pipeline_parallel/fine_grained_activation_offload.py, core
        0.16 to 0.19).
        """
        if plan.offload_layers is not None:
            return cls(plan.offload_layers, model.num_layers - plan.offload_layers)
        if plan.offload_modules:
            return cls(model.num_layers - (not predicts_further(model)), AHEAD, waits=False)
        return cls()

    def present(self, place: int) -> range:
        """Return the layers whose tensors are on the device while that at a *place* runs.

        >>> [[*LayerOffload(number=3, depth=2).present(place)] for place in range(5)]
        [[0], [0, 1], [1, 2], [2], []]
        """
        return range(max(0, place - self.depth + 1), min(place + 1, self.number))

    def passes(self, layers: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
        """Return *layers* with those whose tensors leave by themselves."""
        if not self.number:
            return layers
        gone = (
            BlockRun(OffloadedLayer(kind), num) for kind, num in cut_runs(layers, 0, self.number)
        )
        num_layers = sum(count for _, count in layers)
        return (*gone, *cut_runs(layers, self.number, num_layers))

    def behind(self, num_layers: int) -> "LayerOffload":
        """Return those of what follows the first *num_layers*."""
        return self._replace(number=max(0, self.number - num_layers)) if self.number else self


AHEAD = 2  # a layer, and the one before it that comes back
ALL_ALONE, NO_OFFLOAD = Checkpoints(), LayerOffload()
ONE_EMBEDDING = (BlockRun(EMBEDDING, 1),)
BEHIND_LAYERS = tuple(BlockRun(kind, 1) for kind in (FINAL_NORM, PREDICTIONS, HEAD))


class Stage(NamedTuple):
    """Layers of one virtual stage by kind, and whether it holds an end of the model.

    ``has_norm`` is whether it holds the final norm apart from the head, ``has_predictions`` whether
    it holds the layers that predict further tokens.
    One without layers and a norm ``copies`` what it has received, of which that is the kind of
    block: Megatron-Core's block gives another tensor (`TransformerBlock.forward` of
    transformer_block.py, core 0.16).
    """

    layers: tuple[BlockRun, ...]
    has_embedding: bool
    has_head: bool
    checkpoints: Checkpoints = ALL_ALONE
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
        """Layers and ends in model order."""
        return self._between_ends(self.layers)

    @property
    def contents(self) -> tuple[BlockRun, ...]:
        """The same, or the copy of a stage without any."""
        return self.blocks or self.passes

    @property
    def passes(self) -> tuple[BlockRun, ...]:
        """The same as a pass goes through them: by what backward computes again."""
        copy = () if self.copies is None else (BlockRun(self.copies, 1),)
        return copy + self._between_ends(self.offload.passes(self.checkpoints.passes(self.layers)))

    def _between_ends(self, layers: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
        first = ONE_EMBEDDING if self.has_embedding else ()
        if not (self.has_head or self.has_norm or self.has_predictions):
            return first + layers
        held = self.has_norm, self.has_predictions, self.has_head
        return first + layers + tuple(compress(BEHIND_LAYERS, held))

    def num_kept(self, first: int = 0) -> int:
        """Return the layers from the place *first* on that are not recomputed where others are."""
        if not self.checkpoints.keeps_layers:
            return 0
        return sum(map(self.checkpoints.keeps, range(first, self.num_layers)))

    @property
    def num_blocks(self) -> int:
        """Layers and ends."""
        ends = self.has_embedding + self.has_norm + self.has_predictions + self.has_head
        return self.num_layers + ends

    def part(self, first: int, end: int) -> "Stage":
        """Return the blocks from the place *first* up to *end*, both counted from 0."""
        offset = int(self.has_embedding)
        behind = offset + self.num_layers
        further = behind + self.has_norm
        return Stage(
            cut_runs(self.layers, max(0, first - offset), end - offset),
            has_embedding=self.has_embedding and first == 0,
            has_head=self.has_head and first < end == self.num_blocks,
            checkpoints=self.checkpoints.behind(max(0, first - offset)),
            copies=self.copies if first == 0 else None,
            has_norm=self.has_norm and first <= behind < end,
            has_predictions=self.has_predictions and first <= further < end,
            offload=self.offload.behind(max(0, first - offset)),
        )


def whole_model(model: AnyModel) -> Stage:
    """Return all of *model* as one stage."""
    apart = predicts_further(model)
    return Stage(
        model.layer_runs,
        has_embedding=True,
        has_head=True,
        has_norm=apart,
        has_predictions=apart,
    )


def repeated_layers(model: AnyModel, plan: ResolvedPlan) -> tuple[BlockRun, ...]:
    """Return the layers of *model* of which backward computes again what the plan recomputes."""
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
    """Return *stages*, which follow each other, as one; of none, a stage that holds nothing."""
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
    """Return *model* cut into stages with so many *layers* each, in model order.

    Layers that predict further tokens are on the stage of that number, or with the head.

    >>> from meshwright.simulator.model import load_model
    >>> model_stages(load_model("gpt2"), (5, 7))[0].blocks
    (BlockRun(kind='embedding', num_blocks=1), BlockRun(kind='layer', num_blocks=5))
    """
    last = len(layers) - 1
    with_layers = max((index for index, count in enumerate(layers) if count), default=last)
    apart = predicts_further(model)
    predicting = last if prediction_stage is None else prediction_stage
    return tuple(
        Stage(
            cut_runs(model.layer_runs, end - count, end),
            has_embedding=index == 0,
            has_head=index == last,
            copies=(COPY if index <= predicting else COPY_OF_STREAMS)
            if count == 0 and 0 < index < last + apart
            else None,
            has_norm=apart and index == with_layers,
            has_predictions=apart and index == predicting,
        )
        for index, (count, end) in enumerate(zip(layers, accumulate(layers), strict=True))
    )


def reads_table(model: AnyModel, stage: Stage) -> bool:
    """Return True if *stage* has use of the table of tokens beside that of the embedding.

    On another stage than the embedding's that is a copy.
    """
    if not (stage.has_head or stage.has_predictions):
        return False
    reads = stage.has_predictions if predicts_further(model) else stage.has_head
    return reads and shares_table(model)


def table_rank(plan: ResolvedPlan) -> int:
    """Return which pipeline rank has the other copy of a shared table: the head's, if no other.

    That is 0 where the first rank has all use of it.
    """
    return plan.pp - 1 if plan.prediction_stage is None else plan.prediction_stage % plan.pp


def receives_streams(model: AnyModel, stage: Stage) -> bool:
    """Return True if *stage* is behind the one that predicts further tokens."""
    has_losses = predicts_further(model) and stage.has_head and not stage.has_predictions
    return has_losses or stage.copies == COPY_OF_STREAMS


def copies_table(model: AnyModel, stage: Stage) -> bool:
    """Return True if *stage* has a copy of the table of tokens."""
    return reads_table(model, stage) and not stage.has_embedding


def plan_stages(model: AnyModel, plan: ResolvedPlan) -> tuple[Stage, ...]:
    """Return the virtual stages of *plan*, in model order, and what their layers keep."""
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
    """Return the virtual stages of pipeline rank ``r``: number ``r, p + r, 2 p + r, ...``.

    >>> from meshwright.simulator.model import load_model
    >>> plan = ResolvedPlan(pp=2, num_virtual_stages=2, stages=(1, 2, 3, 6))
    >>> rank_stages(load_model("gpt2"), plan, 0)[1].blocks
    (BlockRun(kind='layer', num_blocks=3),)
    """
    return plan_stages(model, plan)[pp_rank :: plan.pp]


@lru_cache
def head_cost_layers(model: ModelSpec, seq_len: int) -> float:
    """Return the forward FLOPs of the head, in units of one layer's forward FLOPs.

    Per token a layer costs ``2 h (2 q + 2 g) + 4 q s + 2 h f k`` (QKV and projection, attention
    over s keys, MLP with k = 2 or 3 matrices), in the mean of all layers, and the head ``2 h V``,
    beside those of layers that predict further tokens.
    """
    runs = model.layer_runs
    layers = sum(count * layer_flops(model, kind, seq_len) for kind, count in runs)
    head = 2 * model.hidden_size * model.vocab_size + prediction_flops(model, seq_len)
    return head * model.num_layers / layers


def resolve_stages(
    model: AnyModel, seq_len: int, num_stages: int, wanted: StageSplit | Sequence[int]
) -> tuple[int, ...]:
    """Return layer counts for a rule or pass explicit counts through."""
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
