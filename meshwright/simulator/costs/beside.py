"""F/B overlap: expert all-to-alls of one microbatch overlapped with computation of another.

The forward pass of one microbatch runs layer by layer with the backward pass of another: both
compute on one stream, and run dispatch and combine on another (`TransformerLayerSchedulePlan.run`,
megatron/core/models/common/model_chunk_schedule_plan.py of core 0.16).
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from meshwright.simulator.blocks import BlockShape, is_expert_all_to_all
from meshwright.simulator.costs.cost_model import CostModel
from meshwright.simulator.costs.host import issue_ps
from meshwright.simulator.model import BlockKind


class LayerNodes(NamedTuple):
    """Picoseconds of a layer's nodes, forward and backward.

    Args:
        before: Forward before dispatch: attention, router, shared experts.
        dispatch: All-to-all of tokens to their experts.
        experts: Forward of the experts.
        combine: All-to-all of tokens back.
        back: Backward of combine.
        expert_inputs: Dgrad of the experts, with wgrad unless it is delayed.
        expert_weights: Delayed wgrad of the experts.
        returned: Backward of dispatch.
        inputs: Backward of *before*.
        weights: Delayed wgrad of *before*.
        forward_issue: Host time to launch a forward pass.
        backward_issue: Host time to launch a backward pass.
    """

    before: int = 0
    dispatch: int = 0
    experts: int = 0
    combine: int = 0
    back: int = 0
    expert_inputs: int = 0
    expert_weights: int = 0
    returned: int = 0
    inputs: int = 0
    weights: int = 0
    forward_issue: int = 0
    backward_issue: int = 0

    @property
    def forward_ps(self) -> int:
        """Picoseconds of a forward pass without overlap."""
        return self.before + self.experts + self.forward_exchange_ps

    @property
    def backward_ps(self) -> int:
        """Picoseconds of a backward pass without overlap."""
        made = self.expert_inputs + self.expert_weights + self.inputs + self.weights
        return made + self.backward_exchange_ps

    @property
    def forward_exchange_ps(self) -> int:
        """Picoseconds of dispatch and combine, forward."""
        return self.dispatch + self.combine

    @property
    def backward_exchange_ps(self) -> int:
        """Picoseconds of dispatch and combine, backward."""
        return self.back + self.returned


NO_LAYER = LayerNodes()


def layer_nodes(
    costs: CostModel, shape: BlockShape, kind: BlockKind, *, delays: bool
) -> LayerNodes:
    """Return the nodes of a layer, divided by dispatch and combine.

    Recomputation, kernel launches and host time count as before dispatch.

    Args:
        costs: Cost model.
        shape: Shape of the block.
        kind: Kind of layer.
        delays: Whether wgrad is delayed (--delay-wgrad-compute).
    """
    operators, serial = costs.blocks.operators(shape, kind), costs.block_cost(shape, kind)
    sent, returned = expert_all_to_all_times(costs, shape, kind)
    parts = costs.blocks.expert_operators(shape, kind)
    experts, inputs, weights, others = (costs.phase_cost(each, shape).time_ps for each in parts)
    expert_inputs = inputs if delays else inputs + weights
    delayed = others if delays else 0
    return LayerNodes(
        before=serial.forward.time_ps - experts - sum(sent),
        dispatch=sum(sent[:-1]),
        experts=experts,
        combine=sum(sent[-1:]),
        back=sum(returned[:1]),
        expert_inputs=expert_inputs,
        expert_weights=weights if delays else 0,
        returned=sum(returned[1:]),
        inputs=serial.backward.time_ps - inputs - weights - delayed - sum(returned),
        weights=delayed,
        forward_issue=issue_ps(operators.forward, costs.stack, costs.cluster),
        backward_issue=issue_ps(
            (*operators.recompute, *operators.backward), costs.stack, costs.cluster
        ),
    )


def expert_all_to_all_times(
    costs: CostModel, shape: BlockShape, kind: BlockKind
) -> tuple[list[int], list[int]]:
    """Return the picoseconds of each expert all-to-all of a layer, forward and backward."""
    operators = costs.blocks.operators(shape, kind)
    sent, returned = (
        [
            costs.operator_cost(each, shape)[1].time_ps
            for each in phase
            if is_expert_all_to_all(each)
        ]
        for phase in (operators.forward, operators.backward)
    )
    return sent, returned


def overlap_saving_ps(forward: Sequence[LayerNodes], backward: Sequence[LayerNodes]) -> int:
    """Return the picoseconds that overlap saves for a forward and a backward pass.

    Args:
        forward: Layers of the forward pass, first to last.
        backward: Layers of the backward pass, in the same order; it runs them last to first.

    >>> layer = LayerNodes(before=10, dispatch=4, experts=10, combine=4, back=4, expert_inputs=20,
    ...                    returned=4, inputs=20)
    >>> overlap_saving_ps([layer], [layer])
    16
    """
    return max(0, _serial_ps(forward, backward) - overlapped_ps(forward, backward))


def overlap_limit_ps(forward: Sequence[LayerNodes], backward: Sequence[LayerNodes]) -> int:
    """Return the picoseconds by which two passes outlast the host time to launch both."""
    started_ps = sum(each.forward_issue for each in forward)
    started_ps += sum(each.backward_issue for each in backward)
    return max(0, _serial_ps(forward, backward) - started_ps)


def _serial_ps(forward: Sequence[LayerNodes], backward: Sequence[LayerNodes]) -> int:
    return sum(each.forward_ps for each in forward) + sum(each.backward_ps for each in backward)


def overlapped_ps(forward: Sequence[LayerNodes], backward: Sequence[LayerNodes]) -> int:
    """Return the picoseconds of an overlapped forward and backward pass.

    Surplus layers of one pass run alone.  A stream runs its work in launch order; each node waits
    for the node before it of its own pass.
    """
    compute = exchange = f_ready = b_ready = 0
    for f, b in zip_longest(forward, reversed(backward), fillvalue=NO_LAYER):
        # The launch order of TransformerLayerSchedulePlan.run: backward's node first, then
        # forward's.
        exchange = back = max(exchange, b_ready) + b.back
        compute = before = max(compute, f_ready) + f.before
        compute = made = max(compute, back) + b.expert_inputs
        exchange = sent = max(exchange, before) + f.dispatch
        # Nobody waits for wgrad: it only occupies the compute stream.
        compute += b.expert_weights
        exchange = returned = max(exchange, made) + b.returned
        compute = done = max(compute, sent) + f.experts
        exchange = f_ready = max(exchange, done) + f.combine
        compute = b_ready = max(compute, returned) + b.inputs
        compute += b.weights
    return max(compute, exchange)
