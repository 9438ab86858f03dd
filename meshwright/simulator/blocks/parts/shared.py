"""Shared experts beside routed ones, and the gate that weighs what they make (Qwen2-MoE)."""

from collections.abc import Callable
from typing import NamedTuple

from meshwright.simulator.graph import (
    Block,
    Dim,
    Gradient,
    Reads,
    Tensor,
    pointwise,
    product,
)

Write = Callable[[Block, Tensor], Tensor]


class Shared(NamedTuple):
    """Shared experts of a layer.

    Args:
        write: Writes what they make of tokens.
        has_gate: A product with one output, a sigmoid, weighs it.
    """

    write: Write
    has_gate: bool = False


def gated(block: Block, x: Tensor, out: Tensor) -> Tensor:
    """Return *out*, what shared experts made of tokens *x*, times the sigmoid of a product of *x*.

    Every rank has the gate's weight whole and multiplies its own tokens, in full width whatever the
    layer's other products do (`SharedExpertMLP` of megatron/core/transformer/moe/shared_experts.py,
    core 0.16; `Qwen2MoeSparseMoeBlock` of transformers 5.23).  The gradient of the gate is as large
    as *out* until it is summed over a token's width.
    """
    one = Dim("gate of shared experts", 1)
    weight = block.weight("shared_gate.weight", one, x.dims[-1])
    logit = product(block, "shared gate", (x, weight), *x.dims[:-1], one)
    share = pointwise(block, "share of shared experts", logit, reads=Reads.OUTPUT)
    if block.lowering.fuses_places:  # it has a name there
        block.argument(logit)
    made, twice = out.like("weighed shared out"), out.like("gradient of a gate")
    traffic, read = block.traffic(out, made), (share, out)
    gradients = [
        Gradient(out, read, (traffic, traffic)),
        Gradient(share, read, at=share.at),
    ]
    return block.add([out, share], [made], gradients, traffic, scratch=((), (twice,)))
