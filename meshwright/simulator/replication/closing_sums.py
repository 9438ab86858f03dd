"""Gradients that a step sums last, beside those of replicas: over tensor ranks, and over both ends.

With sequence parallelism the gradients of norms' weights, and of biases that are added to a rank's
own tokens, are of these tokens alone.  Megatron-LM flattens and sums all of a rank in one call: in
`finalize_model_grads` of megatron/core/distributed/finalize_model_grads.py (core r0.8) after the
reductions over replicas, in `reduce_model_grads` of Megatron-LM 3.0 (megatron/optimizer, 2022)
before them.  DTensor sums each where it is reduced, at once or after the last microbatch.
A tied table on both ends of a pipeline is summed after that.
"""

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp, StackProfile
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.costs import Cost, CostModel
from meshwright.simulator.layout import Axis, Stage
from meshwright.simulator.memory import StateBytes
from meshwright.simulator.model import BlockKind, parameter_tensors
from meshwright.simulator.replication.data_parallel import WireBytes


class ClosingSum(NamedTuple):
    """All-reduces of one size."""

    size_bytes: int
    num_calls: int


def sums_first(stack: StackProfile) -> bool:
    """Return whether sums over tensor ranks come before the reductions over replicas end."""
    return stack.sums_norms_each_microbatch or not stack.overlap_gradient_reduce


def leaves_sums(shape: BlockShape) -> bool:
    """Return whether gradients are left to be summed over tensor ranks at the end of a step."""
    each = shape.stack.sums_norms_each_microbatch and not shape.defers_sums
    return shape.sequence_parallel and not each


def tensor_sums(
    shape: BlockShape, stages: tuple[Stage, ...], wire: WireBytes
) -> Iterator[ClosingSum]:
    """Yield the sums over tensor ranks after the last backward pass of a rank with *stages*."""
    if not leaves_sums(shape):
        return
    if not shape.stack.sums_norms_each_microbatch:
        replicated = _replicated_parameters(shape, stages)
        if replicated:
            yield ClosingSum(replicated * wire.reduce_bytes, 1)
    else:
        model = shape.model
        size_bytes = model.hidden_size * wire.reduce_bytes
        norms = sum(2 * stage.num_layers + stage.has_head for stage in stages)
        yield ClosingSum(size_bytes, norms * (2 if model.norm == "layernorm" else 1))
        # Scattered before a position is added, a rank sees its own tokens of the table, too.
        has_positions = stages[0].has_embedding and model.positions == "learned"
        if has_positions and shape.stack.scatters_positions:
            yield ClosingSum(model.max_positions * size_bytes, 1)


def tensor_sums_cost(
    costs: CostModel, shape: BlockShape, stages: tuple[Stage, ...], wire: WireBytes
) -> Cost:
    """Return the time of `tensor_sums`, one call after the other."""
    span = costs.tp_span(shape.tp)
    priced = [
        (costs.collective(CollectiveOp.ALL_REDUCE, each.size_bytes, span, Axis.TP), each.num_calls)
        for each in tensor_sums(shape, stages, wire)
    ]
    source = priced[0][0].source if priced else costs.cluster.inter_node.kind
    return Cost(sum(cost.time_ps * count for cost, count in priced), source)


def tied_table_bytes(shape: BlockShape, wire: WireBytes, num_shards: int) -> int:
    """Return what first and last stage sum of the gradient of a table that both hold.

    Units of fully_shard are reduced first: each rank has its shard of the sum, in the format of
    the shards.
    """
    rows, width_bytes = shape.local_vocab_size, wire.reduce_bytes
    if shape.stack.root_unit:
        rows = -(-rows // num_shards)  # equal shards on both ends, so that each meets its own
        width_bytes = StateBytes.of(shape.stack, shape.precision).sharded_parameter
    return rows * shape.model.hidden_size * width_bytes


def _replicated_parameters(shape: BlockShape, stages: tuple[Stage, ...]) -> int:
    """Return the parameters of norms, and of biases added to a rank's own tokens."""
    counts: Counter[BlockKind] = Counter()
    for tensor in parameter_tensors(shape.model):
        # Megatron adds positions before tokens are scattered: that table's gradient is of all.
        if tensor.tp_dim is None and tensor.name != "position_embedding.weight":
            counts[tensor.block] += prod(tensor.shape)
    return sum(count * counts[kind] for stage in stages for kind, count in stage.blocks)
