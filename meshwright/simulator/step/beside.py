"""What passes of two microbatches beside each other hide of exchanges with ranks of experts."""

from collections.abc import Mapping, Sequence
from itertools import product

from meshwright.hwprofiles import ExpertOverlap, Source
from meshwright.simulator.blocks import is_exchange
from meshwright.simulator.costs import (
    CostModel,
    LayerNodes,
    hidden_exchange_ps,
    hideable_ps,
    layer_nodes,
)
from meshwright.simulator.engine import Hidden
from meshwright.simulator.layout import Stage
from meshwright.simulator.ledger import StepSetting
from meshwright.simulator.model import BlockRun


def hidden_exchanges(
    setting: StepSetting, costs: CostModel, stages: Sequence[Stage]
) -> Mapping[tuple[int, int], Hidden]:
    """Return what passes through the virtual *stages* of a rank hide of each other's exchanges.

    Of what could be hidden that is the stack's share, as the exchange takes some of what
    computation needs, and the other way round; each pass has it by what it exchanges.

    Returns:
        By the virtual stage of a forward pass and that of the backward pass beside it.
    """
    overlap = setting.plan.expert_overlap
    if overlap is None:
        return {}
    delays = overlap is ExpertOverlap.DELAYED_WEIGHTS
    layers = [_layers(setting, costs, stage, delays=delays) for stage in stages]
    numbers = range(len(stages))
    known: dict[tuple[Stage, Stage], Hidden] = {}
    for pair in product(numbers, numbers):
        key = stages[pair[0]], stages[pair[1]]
        if key not in known:
            known[key] = _shared(layers[pair[0]], layers[pair[1]], costs.stack.ep_overlap_fraction)
    return {(f, b): known[stages[f], stages[b]] for f, b in product(numbers, numbers)}


def exchange_source(costs: CostModel, setting: StepSetting) -> Source:
    """Return what the times of exchanges rest on that another microbatch may hide."""
    if setting.plan.expert_overlap is None:
        return Source.DATASHEET  # of no time, so no share of any evidence
    kinds = dict.fromkeys(kind for stage in setting.parts for kind, _ in stage.layers)
    sources = (
        costs.operator_cost(each, setting.shape)[1].source
        for kind in kinds
        for each in costs.blocks.operators(setting.shape, kind).forward
        if is_exchange(each)
    )
    return next(sources)


def _layers(
    setting: StepSetting, costs: CostModel, stage: Stage, *, delays: bool
) -> list[LayerNodes]:
    """Return the layers of a virtual stage, those that predict further tokens, too.

    So Megatron-Core takes these beside others (`TransformerModelChunkSchedulePlan` of
    megatron/core/models/common/model_chunk_schedule_plan.py, core 0.16).
    """
    runs, model = [*stage.layers], setting.shape.model
    if stage.has_predictions:
        runs.append(BlockRun(model.layer_runs[-1].kind, model.prediction_layers))
    return [
        nodes
        for kind, count in runs
        for nodes in [layer_nodes(costs, setting.shape, kind, delays=delays)] * count
    ]


def _shared(
    forward: Sequence[LayerNodes], backward: Sequence[LayerNodes], fraction: float
) -> Hidden:
    """Return what two passes hide, shared by what each exchanges."""
    sent = sum(each.forward_exchange_ps for each in forward)
    returned = sum(each.backward_exchange_ps for each in backward)
    if not sent + returned:
        return Hidden()
    hidden_ps = int(fraction * hidden_exchange_ps(forward, backward))
    hidden_ps = min(hidden_ps, hideable_ps(forward, backward))
    of_forward = hidden_ps * sent // (sent + returned)
    return Hidden(of_forward, hidden_ps - of_forward)
