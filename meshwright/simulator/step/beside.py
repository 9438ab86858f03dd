"""Expert all-to-alls that overlapped passes of two microbatches hide from the critical path."""

from collections.abc import Mapping, Sequence
from itertools import product

from meshwright.hwprofiles import ExpertOverlap, Source
from meshwright.simulator.blocks import is_expert_all_to_all
from meshwright.simulator.costs import (
    CostModel,
    LayerNodes,
    layer_nodes,
    overlap_limit_ps,
    overlap_saving_ps,
)
from meshwright.simulator.engine import OverlapSavings
from meshwright.simulator.layout import Stage
from meshwright.simulator.ledger import StepSetting
from meshwright.simulator.model import BlockRun


def overlapped_all_to_alls(
    setting: StepSetting, costs: CostModel, stages: Sequence[Stage]
) -> Mapping[tuple[int, int], OverlapSavings]:
    """Return the all-to-all time that overlapped passes of a rank's virtual *stages* hide.

    The stack's fraction of the possible overlap, as all-to-all and computation take resources from
    each other; it is split over both passes by their all-to-all times.

    Returns:
        Overlapped times by the virtual stages of the forward and of the backward pass.
    """
    overlap = setting.plan.expert_overlap
    if overlap is None:
        return {}
    delays = overlap is ExpertOverlap.DELAYED_WEIGHTS
    layers = [_layers(setting, costs, stage, delays=delays) for stage in stages]
    numbers = range(len(stages))
    by_stages: dict[tuple[Stage, Stage], OverlapSavings] = {}
    for pair in product(numbers, numbers):
        key = stages[pair[0]], stages[pair[1]]
        if key not in by_stages:
            by_stages[key] = _overlap(
                layers[pair[0]], layers[pair[1]], costs.stack.ep_overlap_fraction
            )
    return {(f, b): by_stages[stages[f], stages[b]] for f, b in product(numbers, numbers)}


def exchange_source(costs: CostModel, setting: StepSetting) -> Source:
    """Return the source of the all-to-all times that another microbatch may overlap."""
    if setting.plan.expert_overlap is None:
        return Source.DATASHEET  # of no time, so no share of any evidence
    kinds = dict.fromkeys(kind for stage in setting.parts for kind, _ in stage.layers)
    sources = (
        costs.operator_cost(each, setting.shape)[1].source
        for kind in kinds
        for each in costs.blocks.operators(setting.shape, kind).forward
        if is_expert_all_to_all(each)
    )
    return next(sources)


def _layers(
    setting: StepSetting, costs: CostModel, stage: Stage, *, delays: bool
) -> list[LayerNodes]:
    """Return the layers of a virtual stage, with those of MTP.

    Megatron-Core overlaps these, too (`TransformerModelChunkSchedulePlan` of
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


def _overlap(
    forward: Sequence[LayerNodes], backward: Sequence[LayerNodes], fraction: float
) -> OverlapSavings:
    """Return the overlapped time of two passes, split by their all-to-all times."""
    forward_ps = sum(each.forward_exchange_ps for each in forward)
    backward_ps = sum(each.backward_exchange_ps for each in backward)
    if not forward_ps + backward_ps:
        return OverlapSavings()
    overlapped_ps = int(fraction * overlap_saving_ps(forward, backward))
    # No more than each pass has computation to overlap with.
    overlapped_ps = min(overlapped_ps, overlap_limit_ps(forward, backward))
    of_forward_ps = overlapped_ps * forward_ps // (forward_ps + backward_ps)
    return OverlapSavings(of_forward_ps, overlapped_ps - of_forward_ps)
