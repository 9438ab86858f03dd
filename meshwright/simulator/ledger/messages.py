"""P2p messages of a pipeline: activations to the next stage, gradients to the one before."""

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Axis, GroupSpan, pair_span
from meshwright.simulator.ledger.collectives import StepCollective

SIZES_BYTES = 24  # of a tensor's three sizes, int64


def message_collectives(
    shape: BlockShape, size_bytes: int, tp_span: GroupSpan, *, crosses_nodes: bool
) -> tuple[StepCollective, ...]:
    """Return the p2p send of *size_bytes* of a rank, then the receivers' all-gather.

    With scatter/gather each rank of a tensor-parallel group sends its part, which the receiving
    group gathers inside the node (Narayanan et al. 2021, section 4.1). With variable sequence
    lengths the shape is sent ahead of each message (`_communicate_shapes` of
    megatron/core/pipeline_parallel/p2p_communication.py, core 0.16).
    """
    # With sequence parallelism each rank has its own tokens: nothing is sent twice.
    in_parts = shape.stack.scatter_gather_p2p and shape.tp > 1 and not shape.sequence_parallel
    sent_bytes = -(-size_bytes // shape.tp) if in_parts else size_bytes
    span = pair_span(crosses_nodes=crosses_nodes)
    sent = StepCollective(Axis.PP, CollectiveOp.P2P, sent_bytes, span)
    if in_parts:
        return sent, StepCollective(Axis.TP, CollectiveOp.ALL_GATHER, size_bytes, tp_span)
    if shape.announces_messages:
        return sent, StepCollective(Axis.PP, CollectiveOp.P2P, SIZES_BYTES, span)
    return (sent,)
