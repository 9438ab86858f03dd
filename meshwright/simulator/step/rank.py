"""Work of each rank of a step: compute, messages and reductions, from the costs of its parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.costs import BlockCost, CostModel, PhaseCost
from meshwright.simulator.engine import (
    CopyPoint,
    Message,
    PassSegment,
    PassWork,
    RankWork,
)
from meshwright.simulator.layout import Axis, Stage
from meshwright.simulator.ledger import StepPoint, StepSetting, message_collectives, price
from meshwright.simulator.memory import BlockMemory, ReallocatedGradients, stage_messages
from meshwright.simulator.model import BlockKind
from meshwright.simulator.schedules import Phase
from meshwright.simulator.step.activations import backward_points, copied_bytes, forward_points
from meshwright.simulator.step.beside import overlapped_all_to_alls
from meshwright.simulator.step.exchanges import RankExchanges, StageExchanges, rank_exchanges
from meshwright.simulator.step.offload import HostSide

NO_MESSAGE = Message()


class Hops(NamedTuple):
    """Whether p2p messages of a rank to the next one, and to the previous one, cross nodes."""

    forward: bool
    backward: bool


@dataclass(frozen=True, slots=True)
class StepContext:
    """Setting, costs and memory from which all parts of one plan's step are built."""

    setting: StepSetting
    costs: CostModel
    blocks: Mapping[BlockKind, BlockMemory[int]]
    host: HostSide
    late: ReallocatedGradients | None = None
    exchanges: dict[Stage, StageExchanges] = field(default_factory=dict)
    _passes: dict[Stage, Mapping[Phase, PhaseCost]] = field(default_factory=dict)
    _messages: dict[tuple[int, bool], Message] = field(default_factory=dict)

    def pass_costs(self, stage: Stage) -> Mapping[Phase, PhaseCost]:
        """Return the cost of a pass through *stage* by phase, computed once."""
        if stage not in self._passes:
            cost = virtual_stage_cost(self.costs, self.setting.shape, stage)
            self._passes[stage] = phase_costs(cost)
        return self._passes[stage]

    def message(self, size_bytes: int, *, crosses_nodes: bool) -> Message:
        """Return a p2p message of *size_bytes*, an empty one for 0 bytes."""
        if size_bytes == 0:
            return NO_MESSAGE
        key = size_bytes, crosses_nodes
        if key not in self._messages:
            self._messages[key] = message_between(
                self.costs, self.setting.shape, size_bytes, crosses_nodes=crosses_nodes
            )
        return self._messages[key]


class PricedRank(NamedTuple):
    """Work of a rank, and its data-parallel communication."""

    work: RankWork
    exchanges: RankExchanges


def phase_costs(cost: BlockCost) -> dict[Phase, PhaseCost]:
    """Return the *cost* of blocks by the phase of passes through them."""
    return {Phase.FORWARD: cost.forward, Phase.BACKWARD: cost.backward}


def virtual_stage_cost(costs: CostModel, shape: BlockShape, stage: Stage) -> BlockCost:
    """Return the cost of a pass through *stage*."""
    blocks = [costs.block_cost(shape, kind) * count for kind, count in stage.passes]
    return BlockCost.total(blocks)


def message_between(
    costs: CostModel, shape: BlockShape, size_bytes: int, *, crosses_nodes: bool
) -> Message:
    """Return the p2p message of one microbatch between two stages, gathered by the receivers.

    Its shape, where sent ahead, has arrived when it is sent; host time in between is not modelled.
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
    by_stages: dict[tuple[tuple[Stage, ...], Hops], PricedRank] = {}
    ranks = []
    for pp_rank in range(context.setting.plan.pp):
        hops = Hops(_crosses(context, pp_rank, 1), _crosses(context, pp_rank, -1))
        # Equal stages with equal links cost the same.
        key = (context.setting.rank_stages(pp_rank), hops)
        if key not in by_stages:
            by_stages[key] = _priced_rank(context, pp_rank, hops)
        ranks.append(by_stages[key])
    return tuple(ranks)


def _priced_rank(context: StepContext, pp_rank: int, hops: Hops) -> PricedRank:
    """Return the work of a pipeline rank with its data-parallel communication."""
    setting, stages = context.setting, context.setting.rank_stages(pp_rank)
    exchanges = rank_exchanges(setting, context.host, stages, context.exchanges)
    closing = exchanges.closing
    virtual_stages = {
        stage: _virtual_stage_work(context, stage, each, hops)
        for stage, each in dict(zip(stages, exchanges.virtual_stages, strict=True)).items()
    }
    work = RankWork(
        virtual_stages=tuple(virtual_stages[stage] for stage in stages),
        reduce_ps=closing[StepPoint.PASSES_DONE].time_ps,
        norm_all_reduce_ps=closing[StepPoint.SUMS].time_ps,
        shared_embedding_ps=closing[StepPoint.TIED_TABLE].time_ps,
        optimizer_ps=exchanges.update.time_ps,
        gather_ps=exchanges.updated_ps,
        hidden=overlapped_all_to_alls(setting, context.costs, stages),
    )
    return PricedRank(work, exchanges)


def _virtual_stage_work(
    context: StepContext, stage: Stage, exchanges: StageExchanges, hops: Hops
) -> dict[Phase, PassWork]:
    """Return the work of forward and backward passes through *stage*."""

    def time_ps(phase: Phase, part: Stage = stage) -> int:
        return context.pass_costs(part)[phase].time_ps

    forward, backward = Phase.FORWARD, Phase.BACKWARD
    replication, messages = context.setting.replication, stage_messages(context.blocks, stage)
    forward_copies, backward_copies = _copies(context, stage)
    return {
        forward: PassWork(
            time_ps(forward),
            context.message(messages.output, crosses_nodes=hops.forward),
            gathers=tuple(
                PassSegment(time_ps(forward, each.part.stage), each.forward.gather_ps)
                for each in exchanges.gathers
            ),
            # Where parameters are not sharded, forward passes have none.
            units=tuple(
                each.forward._replace(compute_ps=time_ps(forward, each.part.stage))
                for each in (exchanges.units if replication.gathers_units else ())
            ),
            copies=forward_copies,
        ),
        # Backward runs the last layers first.
        backward: PassWork(
            time_ps(backward),
            context.message(messages.gradient, crosses_nodes=hops.backward),
            reductions=tuple(
                PassSegment(time_ps(backward, each.part.stage), each.backward.reduce_ps)
                for each in reversed(exchanges.reductions)
            ),
            units=tuple(
                each.backward._replace(compute_ps=time_ps(backward, each.part.stage))
                for each in reversed(exchanges.units)
            ),
            copies=backward_copies,
            reduces_every_microbatch=replication.reduces_each_microbatch,
        ),
    }


def _copies(
    context: StepContext, stage: Stage
) -> tuple[tuple[CopyPoint, ...], tuple[CopyPoint, ...]]:
    """Return the offload and reload points of passes through *stage*."""
    if not stage.offload.number:
        return (), ()
    blocks = [context.pass_costs(stage.part(at, at + 1)) for at in range(stage.num_blocks)]
    forward, behind = (
        [*accumulate((each[phase].time_ps for each in passes), initial=0)]
        for phase, passes in ((Phase.FORWARD, blocks), (Phase.BACKWARD, blocks[::-1]))
    )
    first, copied = int(stage.has_embedding), copied_bytes(context.blocks, stage)
    done = stage.num_blocks - 1 - first  # blocks whose backward comes before that of layer 0
    backward = [behind[done - layer] for layer in range(stage.num_layers)]
    common = context.costs, stage, copied
    return (
        tuple(forward_points(*common, forward[first:])),
        tuple(backward_points(*common, backward)),
    )


def _crosses(context: StepContext, pp_rank: int, step: int) -> bool:
    """Return True if the next rank (*step* 1), or the previous one (-1), is on another node."""
    # Modulo pp: with virtual stages the last rank sends to the first one's next stage.
    neighbour = (pp_rank + step) % context.setting.plan.pp
    return context.setting.mesh.crosses_nodes(min(pp_rank, neighbour), max(pp_rank, neighbour))
