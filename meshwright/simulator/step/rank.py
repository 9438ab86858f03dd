"""What each rank of a step computes, sends and reduces, from the costs of its parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp, Source
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.costs import Cost, CostModel, PhaseCost
from meshwright.simulator.engine import (
    CopyPoint,
    Message,
    PassSegment,
    RankWork,
    UnitWork,
    VirtualStageWork,
)
from meshwright.simulator.layout import Axis, Stage
from meshwright.simulator.ledger import (
    LedgerEntry,
    Moment,
    StepSetting,
    message_collectives,
    price,
    rank_ledger,
)
from meshwright.simulator.memory import BlockBytes, LateGradients, stage_messages
from meshwright.simulator.model import BlockKind
from meshwright.simulator.replication import (
    StagePart,
    buffer_copies,
    filled_parameters,
    held_parameters,
    updated_cast_bytes,
)
from meshwright.simulator.step.activations import backward_points, copied_bytes, forward_points
from meshwright.simulator.step.beside import hidden_exchanges
from meshwright.simulator.step.offload import HostSide, copy_back_ps, part_copies, rank_update_cost


@dataclass(frozen=True, slots=True)
class VirtualStageCost:
    """Cost of one forward and one backward pass through a virtual stage."""

    forward: PhaseCost
    backward: PhaseCost


NO_MESSAGE = Message()


class Hops(NamedTuple):
    """Whether messages of a rank to the next one, and to the previous one, cross nodes."""

    forward: bool
    backward: bool


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every part of one plan's step is built from."""

    setting: StepSetting
    costs: CostModel
    blocks: Mapping[BlockKind, BlockBytes[int]]
    host: HostSide
    late: LateGradients | None = None
    _passes: dict[Stage, "VirtualStageCost"] = field(default_factory=dict)
    _messages: dict[tuple[int, bool], Message] = field(default_factory=dict)

    def pass_cost(self, stage: Stage) -> "VirtualStageCost":
        """Return the cost of a pass through *stage*, found once."""
        if stage not in self._passes:
            self._passes[stage] = virtual_stage_cost(self.costs, self.setting.shape, stage)
        return self._passes[stage]

    def message(self, size_bytes: int, *, crosses_nodes: bool) -> Message:
        """Return a message of *size_bytes*; none where there is nothing to send."""
        if size_bytes == 0:
            return NO_MESSAGE
        key = size_bytes, crosses_nodes
        if key not in self._messages:
            self._messages[key] = message_between(
                self.costs, self.setting.shape, size_bytes, crosses_nodes=crosses_nodes
            )
        return self._messages[key]


class PricedRank(NamedTuple):
    """A rank's work, the price of its update, and of what closes its step by when it comes.

    ``replicas`` is what the times of its gradients' reductions rest on.
    """

    work: RankWork
    update: PhaseCost
    closing: Mapping[Moment, Cost]
    replicas: Source


def virtual_stage_cost(costs: CostModel, shape: BlockShape, stage: Stage) -> VirtualStageCost:
    """Return the cost of a pass through *stage*."""
    forward = backward = PhaseCost()
    for kind, count in stage.passes:
        block = costs.block_cost(shape, kind)
        forward, backward = forward + block.forward * count, backward + block.backward * count
    return VirtualStageCost(forward, backward)


def message_between(
    costs: CostModel, shape: BlockShape, size_bytes: int, *, crosses_nodes: bool
) -> Message:
    """Return the message of one microbatch between two stages, gathered by the receivers.

    Its sizes, where they go ahead, have arrived when it is sent; what a host does meanwhile is not
    modelled.
    """
    span = costs.spans.of_block(Axis.TP, shape)
    calls = message_collectives(shape, size_bytes, span, crosses_nodes=crosses_nodes)
    gathers = [each for each in calls if each.op is not CollectiveOp.P2P]
    sent, *announced = (
        costs.message(each.size_bytes, crosses_nodes=crosses_nodes)
        for each in calls
        if each.op is CollectiveOp.P2P
    )
    ahead_ps = sum(each.transfer.time_ps + each.latency.time_ps for each in announced)
    delay_ps = sent.latency.time_ps + price(costs, gathers).time_ps + ahead_ps
    return Message(sent.transfer.time_ps, delay_ps)


def price_ranks(context: StepContext) -> tuple[PricedRank, ...]:
    """Return the work of each pipeline rank; equal ranks share one record."""
    known: dict[tuple[tuple[Stage, ...], Hops], PricedRank] = {}
    ranks = []
    for pp_rank in range(context.setting.plan.pp):
        hops = Hops(_crosses(context, pp_rank, 1), _crosses(context, pp_rank, -1))
        key = (context.setting.rank_stages(pp_rank), hops)
        if key not in known:
            known[key] = _priced_rank(context, pp_rank, hops)
        ranks.append(known[key])
    return tuple(ranks)


def _priced_rank(context: StepContext, pp_rank: int, hops: Hops) -> PricedRank:
    costs, setting = context.costs, context.setting
    stages, ledger = setting.rank_stages(pp_rank), rank_ledger(setting, pp_rank)
    closing = {entry.moment: price(costs, entry.collectives) for entry in ledger.closing}
    reductions = [entry for entry in ledger.entries if entry.moment is Moment.REDUCE]
    first = reductions[0] if reductions else ledger.at(Moment.PASSES_DONE)
    virtual_stages = {
        stage: _virtual_stage_work(context, stage, entries, hops)
        for stage, entries in dict(zip(stages, ledger.virtual_stages, strict=True)).items()
    }
    held = held_parameters(setting.shape, stages)
    cast_bytes = updated_cast_bytes(setting.shape, stages, setting.replication)
    wire, replication = setting.wire, setting.replication
    updated = filled_parameters(setting.shape, stages, replication)
    update = rank_update_cost(costs, updated, wire, replication, cast_bytes)
    work = RankWork(
        virtual_stages=tuple(virtual_stages[stage] for stage in stages),
        reduce_ps=closing[Moment.PASSES_DONE].time_ps,
        sums_ps=closing[Moment.SUMS].time_ps,
        shared_embedding_ps=closing[Moment.TIED_TABLE].time_ps,
        optimizer_ps=update.time_ps,
        gather_ps=copy_back_ps(context.host, sum(held)) + closing[Moment.UPDATED].time_ps,
        hidden=hidden_exchanges(setting, costs, stages),
    )
    return PricedRank(work, update, closing, price(costs, first.collectives).source)


def _virtual_stage_work(
    context: StepContext,
    stage: Stage,
    entries: tuple[LedgerEntry, ...],
    hops: Hops,
) -> VirtualStageWork:
    replication, pass_cost = context.setting.replication, context.pass_cost(stage)
    messages = stage_messages(context.blocks, stage)
    gathers, ahead, reductions, sums = (
        [entry for entry in entries if entry.moment is moment]
        for moment in (Moment.GATHER, Moment.AHEAD, Moment.REDUCE, Moment.REPLICAS)
    )
    units: tuple[tuple[UnitWork, ...], ...] = (), ()
    if replication.in_units:
        ahead_ps = sum(_entry_ps(context, entry) for entry in ahead)
        sums_ps = [_entry_ps(context, entry) for entry in sums] or [0] * len(reductions)
        units = _units(context, gathers, [*zip(reductions, sums_ps, strict=True)], ahead_ps)
    copies = _copies(context, stage)
    if replication.gathers_units:
        gathers = []
    if replication.in_units:
        reductions = []
    return VirtualStageWork(
        forward_ps=pass_cost.forward.time_ps,
        backward_ps=pass_cost.backward.time_ps,
        forward_message=context.message(messages.output, crosses_nodes=hops.forward),
        backward_message=context.message(messages.gradient, crosses_nodes=hops.backward),
        gathers=tuple(
            PassSegment(
                context.pass_cost(entry.part.stage).forward.time_ps, _entry_ps(context, entry)
            )
            for entry in gathers
        ),
        # Last layers first.
        reductions=tuple(
            PassSegment(
                context.pass_cost(entry.part.stage).backward.time_ps, _entry_ps(context, entry)
            )
            for entry in reversed(reductions)
        ),
        forward_units=units[0],
        backward_units=units[1],
        forward_copies=copies[0],
        backward_copies=copies[1],
        reduces_each_pass=replication.reduces_each_microbatch,
    )


def _copies(
    context: StepContext, stage: Stage
) -> tuple[tuple[CopyPoint, ...], tuple[CopyPoint, ...]]:
    """Return where passes through *stage* copy activations to the host, and have them back."""
    if not stage.offload.number:
        return (), ()
    blocks = [context.pass_cost(stage.part(at, at + 1)) for at in range(stage.num_blocks)]
    forward = [*accumulate((each.forward.time_ps for each in blocks), initial=0)]
    behind = [*accumulate((each.backward.time_ps for each in reversed(blocks)), initial=0)]
    first, copied = int(stage.has_embedding), copied_bytes(context.blocks, stage)
    done = stage.num_blocks - 1 - first  # blocks whose backward comes before that of layer 0
    backward = [behind[done - layer] for layer in range(stage.num_layers)]
    given = context.costs, stage, copied
    return (
        tuple(forward_points(*given, forward[first:])),
        tuple(backward_points(*given, backward)),
    )


def _units(
    context: StepContext,
    gathers: Sequence[LedgerEntry],
    reductions: Sequence[tuple[LedgerEntry, int]],
    ahead_ps: int,
) -> tuple[tuple[UnitWork, ...], tuple[UnitWork, ...]]:
    """Return the units of each forward pass in model order, and of each backward pass reversed.

    Where parameters are not sharded, a forward pass has none.  What is gathered ahead and unused
    comes before what a backward pass gathers first: that of the last layer.  Beside each reduction
    stands the time of the sum over replicas that follows the last one.
    """
    setting = context.setting
    replication = setting.replication
    # Only then a pass finds sums of earlier ones, which have the format of the wire already.
    adds_up = not replication.reduces_each_microbatch and setting.num_microbatches > 1
    gathered = [_entry_ps(context, entry) for entry in gathers]
    if not replication.gathers_units:
        gathered = [0] * len(reductions)
    forward, backward = [], []
    for gather_ps, (entry, last_ps) in zip(gathered, reductions, strict=True):
        part, pass_cost = entry.part, context.pass_cost(entry.part.stage)
        copies = part_copies(context.host, part)
        copied = buffer_copies(context.costs, part, setting.wire, replication, adds_up=adds_up)
        unit = UnitWork(
            pass_cost.forward.time_ps,
            gather_ps + copies.in_ps,
            unpack_ps=copied.unpack_ps,
            stays=part.stays or not replication.reshards,
            is_once=part.is_once,
        )
        forward.append(unit)
        backward.append(
            replace(
                unit,
                compute_ps=pass_cost.backward.time_ps,
                reduce_ps=_entry_ps(context, entry) + copies.out_ps,
                again_ps=copies.again_ps,
                last_ps=last_ps,
                unpack_ps=copied.unpack_ps + _transposes_ps(context, part),
                pack_ps=copied.pack_ps,
            )
        )
    if ahead_ps:
        last = max(place for place, unit in enumerate(backward) if not unit.stays)
        backward[last] = replace(backward[last], gather_ps=backward[last].gather_ps + ahead_ps)
    return tuple(forward) if replication.gathers_units else (), tuple(reversed(backward))


def _transposes_ps(context: StepContext, part: StagePart) -> int:
    """Return the time in which backward writes transposes of a part's weights, each read once."""
    return context.costs.memory_traffic(2 * part.transposed).time_ps if part.transposed else 0


def _entry_ps(context: StepContext, entry: LedgerEntry) -> int:
    return price(context.costs, entry.collectives).time_ps


def _crosses(context: StepContext, pp_rank: int, step: int) -> bool:
    """Return whether the next rank (*step* 1), or the previous one (-1), is on another node."""
    # Round the ranks, as the virtual stages go: the last rank sends to the first one's next stage.
    target = (pp_rank + step) % context.setting.plan.pp
    return context.setting.mesh.crosses_nodes(min(pp_rank, target), max(pp_rank, target))
