"""Two microbatches in one rank: what of exchanges with experts another's computation hides.

The forward pass of one goes layer by layer with the backward pass of another.  A layer computes
before its tokens go to the ranks of experts, there, and exchanges in between: computation of both
passes is on one stream, their exchanges on another (`TransformerLayerSchedulePlan.run`,
megatron/core/models/common/model_chunk_schedule_plan.py of core 0.16).
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from meshwright.simulator.blocks import BlockShape, is_exchange
from meshwright.simulator.costs.cost_model import CostModel
from meshwright.simulator.costs.host import issue_ps
from meshwright.simulator.model import BlockKind


class LayerNodes(NamedTuple):
    """Picoseconds of the parts of a layer, in a forward and in a backward pass.

    Args:
        before: Forward, until tokens are sent: attention, router, shared experts.
        dispatch: Tokens to the ranks of their experts.
        experts: What these compute.
        combine: And back.
        back: Gradients to the ranks of experts.
        expert_inputs: What experts make of them.
        expert_weights: Gradients of their weights, by themselves where they are delayed.
        returned: Gradients of what was sent, back to where it came from.
        inputs: Backward of what was before.
        weights: Gradients of weights there, where they are delayed.
        forward_issue: What the host takes to start a forward pass.
        backward_issue: And a backward pass.
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
        """A forward pass by itself."""
        return self.before + self.experts + self.forward_exchange_ps

    @property
    def backward_ps(self) -> int:
        """A backward pass by itself."""
        made = self.expert_inputs + self.expert_weights + self.inputs + self.weights
        return made + self.backward_exchange_ps

    @property
    def forward_exchange_ps(self) -> int:
        """Exchanges of a forward pass."""
        return self.dispatch + self.combine

    @property
    def backward_exchange_ps(self) -> int:
        """Exchanges of a backward pass."""
        return self.back + self.returned


NO_LAYER = LayerNodes()


def layer_nodes(
    costs: CostModel, shape: BlockShape, kind: BlockKind, *, delays: bool
) -> LayerNodes:
    """Return a layer in parts between its exchanges with ranks of experts.

    What runs again, kernels' starts and host time count as what comes before experts.

    Args:
        costs: Times of its operators.
        shape: Its sizes.
        kind: Which layer.
        delays: Whether gradients of weights come after those of inputs.
    """
    operators, alone = costs.blocks.operators(shape, kind), costs.block_cost(shape, kind)
    sent, returned = (
        [costs.operator_cost(each, shape)[1].time_ps for each in phase if is_exchange(each)]
        for phase in (operators.forward, operators.backward)
    )
    parts = costs.blocks.expert_operators(shape, kind)
    experts, inputs, weights, others = (costs.phase_cost(each, shape).time_ps for each in parts)
    expert_inputs = inputs if delays else inputs + weights
    later = others if delays else 0
    return LayerNodes(
        before=alone.forward.time_ps - experts - sum(sent),
        dispatch=sum(sent[:-1]),
        experts=experts,
        combine=sum(sent[-1:]),
        back=sum(returned[:1]),
        expert_inputs=expert_inputs,
        expert_weights=weights if delays else 0,
        returned=sum(returned[1:]),
        inputs=alone.backward.time_ps - inputs - weights - later - sum(returned),
        weights=later,
        forward_issue=issue_ps(operators.forward, costs.stack, costs.cluster),
        backward_issue=issue_ps(
            (*operators.recompute, *operators.backward), costs.stack, costs.cluster
        ),
    )


def hidden_exchange_ps(forward: Sequence[LayerNodes], backward: Sequence[LayerNodes]) -> int:
    """Return the picoseconds that two passes beside each other take less than by themselves.

    Args:
        forward: Layers of the forward pass, first to last.
        backward: Those of the backward pass, which goes through them last to first.

    >>> layer = LayerNodes(before=10, dispatch=4, experts=10, combine=4, back=4, expert_inputs=20,
    ...                    returned=4, inputs=20)
    >>> hidden_exchange_ps([layer], [layer])
    16
    """
    return max(0, _alone_ps(forward, backward) - paired_ps(forward, backward))


def hideable_ps(forward: Sequence[LayerNodes], backward: Sequence[LayerNodes]) -> int:
    """Return the picoseconds by which two passes last longer than the host takes to start both."""
    started_ps = sum(each.forward_issue for each in forward)
    started_ps += sum(each.backward_issue for each in backward)
    return max(0, _alone_ps(forward, backward) - started_ps)


def _alone_ps(forward: Sequence[LayerNodes], backward: Sequence[LayerNodes]) -> int:
    return sum(each.forward_ps for each in forward) + sum(each.backward_ps for each in backward)


def paired_ps(forward: Sequence[LayerNodes], backward: Sequence[LayerNodes]) -> int:
    """Return the picoseconds from the first to the last layer of two passes beside each other.

    Where one of them has more layers, these run alone.  Work of a stream runs in the order in which
    it is started; each part waits for the part before it of its own pass.
    """
    compute = exchange = f_ready = b_ready = 0
    for f, b in zip_longest(forward, reversed(backward), fillvalue=NO_LAYER):
        exchange = back = max(exchange, b_ready) + b.back
        compute = before = max(compute, f_ready) + f.before
        compute = made = max(compute, back) + b.expert_inputs
        exchange = sent = max(exchange, before) + f.dispatch
        compute += b.expert_weights
        exchange = returned = max(exchange, made) + b.returned
        compute = done = max(compute, sent) + f.experts
        exchange = f_ready = max(exchange, done) + f.combine
        compute = b_ready = max(compute, returned) + b.inputs
        compute += b.weights
    return max(compute, exchange)
