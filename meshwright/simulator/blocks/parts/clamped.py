"""Clamped SwiGLU of gpt-oss, with ``g sigmoid(1.702 g)``."""

from meshwright.simulator.graph import (
    Block,
    Dim,
    Gradient,
    Reads,
    Tensor,
    Traffic,
    activation,
    cut,
    pass_through,
    pointwise,
)


def clamped(
    block: Block, inner: Tensor, parts: tuple[Dim, Dim], last: Dim, *, by_slices: bool
) -> Tensor:
    """Return ``(up + 1) glu`` of clamped gate and up, with ``glu = gate sigmoid(1.702 gate)``.

    Eager, local variables keep the clamped tensors and all factors until it returns
    (`_apply_gate` of transformers' modeling_gpt_oss.py, 5.23; `glu` of megatron/core's
    transformer/mlp.py, core 0.16).

    Args:
        block: Block to add the operators to.
        inner: Output of the fused gate and up projection.
        parts: Dims of gate and up.
        last: Last dim of the output.
        by_slices: Gate and up are interleaved (``[..., ::2]``), so each is a slice of its own.
    """
    if not block.lowering.is_eager:
        return activation(block, inner, parts=parts, last=last)
    gate, up = bounded(block, inner, parts, by_slices=by_slices)
    scaled = pointwise(block, "scaled gate", gate, reads=Reads.NOTHING)
    opened = pointwise(block, "opened gate", scaled, reads=Reads.OUTPUT)
    glu = pointwise(block, "glu", gate, opened)
    shifted = pass_through(block, [up], up.like("value and one"), block.traffic(up, up))
    factors = (shifted, glu) if by_slices else (glu, shifted)
    out = pointwise(block, "activation", *factors, last=last)
    block.hold(gate, up, glu)
    return out


def bounded(
    block: Block, inner: Tensor, parts: tuple[Dim, Dim], *, by_slices: bool
) -> tuple[Tensor, Tensor]:
    """Return gate, clamped from above, and up, clamped on both sides."""
    gate, up = cut(block, inner, *parts, by_slices=by_slices)
    return _bounded(block, gate, num_bounds=1), _bounded(block, up, num_bounds=2)


def _bounded(block: Block, x: Tensor, *, num_bounds: int) -> Tensor:
    """Return *x* clamped; backward makes a mask of one byte an element for each bound."""
    masks = tuple(x.like(f"{x.name} inside", width=1) for _ in range(num_bounds))
    # The input is a slice of the projection's output, its gradient one of that output's.
    traffic = block.traffic(x, x)._replace(strided=x.numel)
    compared = Traffic(block.traffic(x).nbytes + x.numel, x.numel)
    slope = Gradient(x, (x,), (*(compared for _ in masks), traffic))
    return block.add([x], [x.like(f"bounded {x.name}")], [slope], traffic, scratch=((), masks))
