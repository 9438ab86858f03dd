"""What brings activations to the next stage of a pipeline, and their gradients back."""

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Axis, GroupSpan, pair_span
from meshwright.simulator.ledger.collectives import StepCollective


def message_collectives(
    shape: BlockShape, size_bytes: int, tp_span: GroupSpan, *, crosses_nodes: bool
) -> tuple[StepCollective, ...]:
    """Return what a rank sends of a message of *size_bytes*, then what the receivers gather.

    With scatter/gather each rank of a tensor-parallel group sends its part, which the
    receiving group gathers inside the node (Narayanan et al. 2021, section 4.1).
    """
    in_parts = shape.stack.scatter_gather_p2p and shape.tp > 1 and not shape.sequence_parallel
    sent_bytes = -(-size_bytes // shape.tp) if in_parts else size_bytes
    sent = StepCollective(
        Axis.PP, CollectiveOp.P2P, sent_bytes, pair_span(crosses_nodes=crosses_nodes)
    )
    gather = StepCollective(Axis.TP, CollectiveOp.ALL_GATHER, size_bytes, tp_span)
    return (sent, gather) if in_parts else (sent,)
