"""Which layers each pipeline stage holds."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

from meshwright.hwprofiles import RecomputeMethod, StackProfile, StageSplit, shown
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.layout.plan import ParallelPlan
from meshwright.simulator.model import (
    EMBEDDING,
    HEAD,
    AnyModel,
    BlockRun,
    KeptLayer,
    LayerGroup,
    ModelSpec,
    cut_runs,
    join_runs,
    layer_flops,
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
    def of(cls, plan: ParallelPlan, index: int = 0) -> "Checkpoints":
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
        """Return whether the layer at a *place* of the stage, from 0 on, is not recomputed."""
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


ALL_ALONE = Checkpoints()


class Stage(NamedTuple):
    """Layers of one virtual stage by kind, and whether it holds an end of the model."""

    layers: tuple[BlockRun, ...]
    has_embedding: bool
    has_head: bool
    checkpoints: Checkpoints = ALL_ALONE

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return sum(count for _, count in self.layers)

    @property
    def blocks(self) -> tuple[BlockRun, ...]:
        """Layers and ends in model order."""
        return self._between_ends(self.layers)

    @property
    def passes(self) -> tuple[BlockRun, ...]:
        """The same as a pass goes through them: by what backward computes again."""
        return self._between_ends(self.checkpoints.passes(self.layers))

    def _between_ends(self, layers: tuple[BlockRun, ...]) -> tuple[BlockRun, ...]:
        first = (BlockRun(EMBEDDING, 1),) if self.has_embedding else ()
        last = (BlockRun(HEAD, 1),) if self.has_head else ()
        return (*first, *layers, *last)

    def num_kept(self, first: int = 0) -> int:
        """Return the layers from the place *first* on that are not recomputed where others are."""
        if not self.checkpoints.keeps_layers:
            return 0
        return sum(map(self.checkpoints.keeps, range(first, self.num_layers)))

    @property
    def num_blocks(self) -> int:
        """Layers and ends."""
        return self.num_layers + self.has_embedding + self.has_head

    def part(self, first: int, end: int) -> "Stage":
        """Return the blocks from the place *first* up to *end*, both counted from 0."""
        offset = int(self.has_embedding)
        return Stage(
            cut_runs(self.layers, max(0, first - offset), end - offset),
            has_embedding=self.has_embedding and first == 0,
            has_head=self.has_head and first < end == self.num_blocks,
            checkpoints=self.checkpoints.behind(max(0, first - offset)),
        )


def whole_model(model: AnyModel) -> Stage:
    """Return all of *model* as one stage."""
    return Stage(model.layer_runs, has_embedding=True, has_head=True)


def repeated_layers(model: AnyModel, plan: ParallelPlan) -> tuple[BlockRun, ...]:
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
    )


def model_stages(model: AnyModel, layers: Sequence[int]) -> tuple[Stage, ...]:
    """Return *model* cut into stages with so many *layers* each, in model order.

    >>> from meshwright.simulator.model import load_model
    >>> model_stages(load_model("gpt2"), (5, 7))[0].blocks
    (BlockRun(kind='embedding', num_blocks=1), BlockRun(kind='layer', num_blocks=5))
    """
    last = len(layers) - 1
    return tuple(
        Stage(cut_runs(model.layer_runs, end - count, end), index == 0, index == last)
        for index, (count, end) in enumerate(zip(layers, accumulate(layers), strict=True))
    )


def plan_stages(model: AnyModel, plan: ParallelPlan) -> tuple[Stage, ...]:
    """Return the virtual stages of *plan*, in model order, with what it recomputes of each."""
    return tuple(
        stage._replace(checkpoints=Checkpoints.of(plan, index))
        for index, stage in enumerate(model_stages(model, plan.stages))
    )


def rank_stages(model: AnyModel, plan: ParallelPlan, pp_rank: int) -> tuple[Stage, ...]:
    """Return the virtual stages of pipeline rank ``r``: number ``r, p + r, 2 p + r, ...``.

    >>> from meshwright.simulator.model import load_model
    >>> plan = ParallelPlan(pp=2, num_virtual_stages=2, stages=(1, 2, 3, 6))
    >>> rank_stages(load_model("gpt2"), plan, 0)[1].blocks
    (BlockRun(kind='layer', num_blocks=3),)
    """
    return plan_stages(model, plan)[pp_rank :: plan.pp]


@lru_cache
def head_cost_layers(model: ModelSpec, seq_len: int) -> float:
    """Return the forward FLOPs of the output matrix, in units of one layer's forward FLOPs.

    Per token a layer costs ``2 h (2 q + 2 g) + 4 q s + 2 h f k`` (QKV and projection, attention
    over s keys, MLP with k = 2 or 3 matrices), in the mean of all layers, and the head ``2 h V``.
    """
    runs = model.layer_runs
    layers = sum(count * layer_flops(model, kind, seq_len) for kind, count in runs)
    return 2 * model.hidden_size * model.vocab_size * model.num_layers / layers


@cache
def split_layers(
    num_layers: int, num_stages: int, rule: StageSplit, *, head_cost: float = 0.0
) -> tuple[int, ...]:
    """Return the layers of each stage in model order.

    ``even`` gives every stage the same number and places a remainder where the stage stays
    cheapest; ``balanced`` minimises the costliest stage with the head counted as *head_cost*
    layers on the last one; ``ends`` shares out layers, embedding and head, a remainder from the
    front (`generate_llm_fqn_per_model_part`, torchtitan/distributed/pipeline_parallel.py of
    0.2.2); ``greedy`` fills stages with ``ceil(L / n)`` layers from the front
    (DeepSpeed's split: 78 layers on 12 stages are 11 stages of 7 and one of 1).

    Raises:
        PlanError: If there are more stages than layers.

    >>> split_layers(7, 3, StageSplit.EVEN)
    (2, 2, 3)
    >>> split_layers(32, 4, StageSplit.ENDS)
    (8, 9, 8, 7)
    >>> split_layers(78, 12, StageSplit.GREEDY)
    (7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 1)
    """
    if num_stages > num_layers:
        raise PlanError(f"{num_stages} stages are more than the model's {num_layers} layers")
    match rule:
        case StageSplit.GREEDY:
            return _fill_from_front(num_layers, num_stages)
        case StageSplit.ENDS:
            return _with_ends(num_layers, num_stages)
        case StageSplit.EVEN:
            floor = num_layers // num_stages
        case StageSplit.BALANCED:
            floor = 1
    return _level(num_layers, [floor] * num_stages, head_cost)


def _fill_from_front(num_layers: int, num_stages: int) -> tuple[int, ...]:
    most = -(-num_layers // num_stages)
    counts: list[int] = []
    left = num_layers
    for stage in range(num_stages):
        later = num_stages - stage - 1
        counts.append(min(most, left - later))
        left -= counts[-1]
    return tuple(counts)


def _with_ends(num_layers: int, num_stages: int) -> tuple[int, ...]:
    if num_stages == 1:
        return (num_layers,)
    share, rest = divmod(num_layers + 2, num_stages)
    counts = [share + (stage < rest) for stage in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def _level(num_layers: int, counts: list[int], head_cost: float) -> tuple[int, ...]:
    """Add the layers that are left one by one to the cheapest stage.

    Among equals the later stage wins: it keeps fewer microbatches in flight, so the layer
    costs less memory there.
    """
    costs = [float(count) for count in counts]
    costs[-1] += head_cost
    for _ in range(num_layers - sum(counts)):
        stage = min(range(len(counts)), key=lambda index: (costs[index], -index))
        counts[stage] += 1
        costs[stage] += 1.0
    return tuple(counts)


def parse_stages(text: str) -> StageSplit | tuple[int, ...]:
    """Read the value of ``--stages``: a rule's name, layer counts such as ``3,2,2,1``, or a layout.

    Raises:
        PlanError: If it is none of them.

    >>> parse_stages("3,2,1"), parse_stages("Et*3|(tt|)*2,L")
    ((3, 2, 1), (3, 2, 2, 0))
    """
    if text in list(StageSplit):
        return StageSplit(text)
    if LAYOUT_TEXT.fullmatch(text):
        return read_layout(text)
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        rules = ", ".join(StageSplit)
        raise PlanError(
            f"stages={shown(text)} is neither a rule ({rules}), nor layer counts such as 3,2,2,1, "
            "nor a layout such as Et*2|(t*3|)*2L"
        ) from None


# What a text begins with, and consists of, that is neither a rule nor numbers.
LAYOUT_TEXT = re.compile(r"[E(][EtmL|()*,0-9]*")
REPEATED = re.compile(r"\(([^()]+)\)\*([0-9]{1,6})"), re.compile(r"([EtmL|])\*([0-9]{1,6})")
MAX_LAYOUT = 100_000  # letters: more than any model has layers and stages


def read_layout(text: str) -> tuple[int, ...]:
    """Return the layers of each virtual stage of a layout, in model order.

    It has a letter for the embedding (E), each layer (t) and the loss (L) with stages between
    borders (|), and repeats letters and groups, as ``t*4`` and ``(t|)*4``; commas say nothing
    (`PipelineParallelLayerLayout` of megatron/core/transformer, core 0.16).

    Raises:
        PlanError: If it is no such text, or has layers of multi-token prediction (m).

    >>> read_layout("E|(t|)*2,t*3L")
    (0, 1, 1, 3)
    """
    plain = text.replace(",", "")
    for pattern in REPEATED:
        size = len(plain) + sum(len(each[1]) * int(each[2]) for each in pattern.finditer(plain))
        if size > MAX_LAYOUT:
            raise PlanError(f"stages={shown(text)} has more than {MAX_LAYOUT:,} letters")
        plain = pattern.sub(lambda match: match[1] * int(match[2]), plain)
    if "m" in plain:
        raise PlanError(
            f"stages={shown(text)} has multi-token prediction (m), which is not modelled; "
            "allowed: E, t, L"
        )
    if not re.fullmatch(r"Et*(\|t*)*L", plain):
        raise PlanError(
            f"stages={shown(text)} is no layout; allowed: E, layers t and stages | between them, L"
        )
    return tuple(part.count("t") for part in plain.split("|"))


def resolve_stages(
    model: AnyModel, seq_len: int, num_stages: int, wanted: StageSplit | Sequence[int]
) -> tuple[int, ...]:
    """Return layer counts for a rule or pass explicit counts through."""
    if isinstance(wanted, StageSplit):
        cost = head_cost_layers(model, seq_len) if isinstance(model, ModelSpec) else 0.0
        return split_layers(model.num_layers, num_stages, wanted, head_cost=cost)
    return tuple(wanted)


def with_stages(job: TrainingJob, plan: ParallelPlan, stack: StackProfile) -> ParallelPlan:
    """Return *plan* with the stages of the stack's rule where it lists none.

    Raises:
        PlanError: If there are more stages than layers.
    """
    if plan.stages:
        return plan
    stages = resolve_stages(job.model, job.seq_len, plan.num_stages, stack.stage_split)
    return replace(plan, stages=stages)


def stages_rule(job: TrainingJob, plan: ParallelPlan, stack: StackProfile) -> StageSplit | None:
    """Return the rule that gives the stages of *plan*; None if it is the stack's, or none does."""
    if not plan.stages:
        return None
    own = stack.stage_split
    rules = (
        rule
        for rule in (own, *StageSplit)
        if resolve_stages(job.model, job.seq_len, plan.num_stages, rule) == plan.stages
    )
    rule = next(rules, own)
    return None if rule is own else rule
