"""MLP and shared experts with their gate."""

from collections.abc import Callable
from typing import NamedTuple

from meshwright.simulator.graph import (
    Activation,
    Block,
    Dim,
    Gradient,
    Linear,
    Placement,
    Reads,
    Tensor,
    activation,
    biased,
    columns,
    pointwise,
    product,
    row,
)

Write = Callable[[Block, Tensor], Tensor]


class Widths(NamedTuple):
    """Dims of an MLP: gate and up projection, input and output of down projection; activation."""

    parts: tuple[Dim, ...]
    inner: Dim
    hidden: Dim
    activation: Activation = Activation.USUAL


def feed_forward(
    block: Block,
    x: Tensor,
    widths: Widths,
    outside: Placement,
    bias: Linear,
    name: str = "mlp out",
) -> Tensor:
    """Return an MLP of *widths*, with its output in the placement *outside*."""
    with block.module(x):
        adds_bias_apart = block.lowering.is_local  # the bias is added by a kernel of its own
        linear = Linear() if adds_bias_apart else bias
        inner = columns(block, x, *widths.parts, linear=linear, packed=True)
        if adds_bias_apart and bias.bias:
            inner = [biased(block, each, "mlp in") for each in inner]
        hidden = activation(
            block, *inner, parts=widths.parts, last=widths.inner, kind=widths.activation
        )
        y = row(block, hidden, widths.hidden, name, outside, bias)
        block.hold(hidden)
        return y


class Shared(NamedTuple):
    """Shared experts of a layer.

    Args:
        write: Function that adds them to a block and returns their output.
        has_gate: Their output is weighted by a sigmoid gate (Qwen2-MoE).
    """

    write: Write
    has_gate: bool = False


def gated(block: Block, x: Tensor, out: Tensor) -> Tensor:
    """Return *out*, the shared experts' output of tokens *x*, times a sigmoid gate of *x*.

    The gate's weight is replicated, and each rank multiplies its own tokens, in 16 bits even in fp8
    layers (`SharedExpertMLP` of megatron/core/transformer/moe/shared_experts.py,
    core 0.16; `Qwen2MoeSparseMoeBlock` of transformers 5.23).  The gradient of the gate is as large
    as *out* until it is summed over a token's width.
    """
    one = Dim("gate of shared experts", 1)
    weight = block.weight("shared_gate.weight", one, x.dims[-1])
    logit = product(block, "shared gate", (x, weight), *x.dims[:-1], one)
    share = pointwise(block, "share of shared experts", logit, reads=Reads.OUTPUT)
    if block.lowering.fuses_redistribute:  # a local variable of Megatron-Core
        block.argument(logit)
    weighted, gate_gradient = out.like("weighed shared out"), out.like("gradient of a gate")
    traffic, read = block.traffic(out, weighted), (share, out)
    gradients = [
        Gradient(out, read, (traffic, traffic)),
        Gradient(share, read, at=share.at),
    ]
    return block.add([out, share], [weighted], gradients, traffic, scratch=((), (gate_gradient,)))
