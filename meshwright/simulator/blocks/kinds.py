"""What each kind of block runs, takes in and hands on."""

from collections.abc import Callable
from typing import NamedTuple

from meshwright.simulator.blocks.ends import embedding_operators, head_operators
from meshwright.simulator.blocks.layer import layer_operators
from meshwright.simulator.blocks.operators import BlockOperators
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import EMBEDDING, HEAD, TRANSFORMER_LAYER, BlockKind


class KnownBlock(NamedTuple):
    """What is known of a kind of block, but for the memory of its passes.

    Args:
        operators: What one microbatch runs in it.
        input_bytes: A rank's part of the activation that it gets from the block before.
        output_bytes: The same of what it hands on to the block behind.
    """

    operators: Callable[[BlockShape], BlockOperators]
    input_bytes: Callable[[BlockShape], int]
    output_bytes: Callable[[BlockShape], int]


def _residual_bytes(shape: BlockShape) -> int:
    return shape.message_bytes


def _no_bytes(_shape: BlockShape) -> int:
    return 0


KINDS: dict[BlockKind, KnownBlock] = {
    EMBEDDING: KnownBlock(embedding_operators, _no_bytes, _residual_bytes),
    TRANSFORMER_LAYER: KnownBlock(layer_operators, _residual_bytes, _residual_bytes),
    HEAD: KnownBlock(head_operators, _residual_bytes, _no_bytes),
}


def block_operators(shape: BlockShape, kind: BlockKind) -> BlockOperators:
    """Return the operators of one block of *kind* on one rank."""
    return KINDS[kind].operators(shape)


def received_bytes(shape: BlockShape, stage: Stage) -> int:
    """Return a rank's part of a microbatch's message from the stage before *stage*.

    The gradient that goes back there is as large.
    """
    return KINDS[stage.blocks[0].kind].input_bytes(shape)


def sent_bytes(shape: BlockShape, stage: Stage) -> int:
    """Return a rank's part of a microbatch's message from *stage* to the one behind."""
    return KINDS[stage.blocks[-1].kind].output_bytes(shape)
