"""From logits to a loss: in one fused kernel, in place in fp32, or by PyTorch's own chain."""

from collections.abc import Callable
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp, LossKernel
from meshwright.simulator.graph import Block, Gradient, Size, Tensor, Traffic, Transfer, copy
from meshwright.simulator.layout import Axis

FP32_BYTES = 4
LOGITS = "logits"  # what the loss keeps of them
NUM_STATISTICS = 3  # of a token: maximum, target's logit, sum of exponents


class LossBytes(NamedTuple):
    """Bytes a logit moves in the loss.

    A chain of fp32 kernels moves 38 (cast 2 + 4, maximum 4, subtract 8, exponent 8, sum 4, divide
    8) and 14 (gradient 8 + cast 6), three compiled ones 22 (cast and maximum 6, exponent and sum
    8, divide 8) and one 6, one fused kernel 6 and 10.
    """

    forward: int
    backward: int


CHAIN = LossBytes(38, 14)
COMPILED = LossBytes(22, 6)
ONE_KERNEL = LossBytes(6, 10)


def loss_of(block: Block, logits: Tensor, *others: Tensor) -> Tensor:
    """Return the loss of *logits*, as the block's lowering makes it, and of what is small."""
    loss = _LOSSES[block.lowering.loss](block, logits)
    if not others:
        return loss
    gradients = [Gradient(each, at=each.at) for each in (loss, *others)]
    return block.add([loss, *others], [loss.like("sum of losses")], gradients)


def _fused(block: Block, logits: Tensor) -> Tensor:
    """Return the loss of one kernel, which makes their gradient of the logits or of a copy.

    Transformer Engine writes it over them (cross_entropy_forward, 2.2 to 2.11, in pytorch/triton or
    common/triton), and gathers the three numbers of a token from every rank.  For flash-attn's
    kernel of 2023 the step times of llm-foundry say that it takes as long as the chain.
    """
    is_slow = block.lowering.loss is LossKernel.FLASH_ATTN
    moved = CHAIN if is_slow else ONE_KERNEL
    own = logits.like(LOGITS, base=None if is_slow else logits.storage)
    calls = []
    if Axis.TP in block.mesh:
        size = NUM_STATISTICS * FP32_BYTES * _num_tokens(logits) * block.mesh[Axis.TP]
        calls = [Transfer(CollectiveOp.ALL_GATHER, Axis.TP, size)]
    slope = Gradient(logits, (own,), (Traffic(moved.backward * logits.numel),), overwrites=own)
    forward = Traffic(moved.forward * logits.numel)
    return block.add([logits], [_scalar(logits), own], [slope], forward, *calls)


def _in_place(block: Block, logits: Tensor) -> Tensor:
    """Return Megatron's loss: one fp32 copy, or fp32 logits themselves, become probabilities.

    In fp32 these become the gradient; else it is a 16-bit tensor made of them.
    """
    is_wide = logits.width == FP32_BYTES
    likely = logits.like(LOGITS, width=FP32_BYTES, base=logits.storage if is_wide else None)
    traffic = (Traffic(CHAIN.backward * logits.numel),)
    slope = Gradient(logits, (likely,), traffic, overwrites=likely if is_wide else None)
    forward = Traffic(CHAIN.forward * logits.numel)
    loss = block.add([logits], [_scalar(logits), likely], [slope], forward, *_sums(block, logits))
    block.hold(logits)
    return loss


def _shifted(block: Block, logits: Tensor) -> Tensor:
    """Return Megatron's loss of 2022 to 2024: a second fp32 tensor takes the shifted logits."""
    wide = _widened(block, logits)
    likely = wide.like(LOGITS)
    slope = Gradient(wide, (likely,), (Traffic(CHAIN.backward * logits.numel),), overwrites=likely)
    forward = Traffic(CHAIN.forward * logits.numel)
    outputs = [_scalar(logits), likely]
    loss = block.add([wide], outputs, [slope], forward, *_sums(block, logits))
    block.hold(logits)
    return loss


def _compiled(block: Block, logits: Tensor) -> Tensor:
    """Return Megatron's fused loss: compiled, so that exponents are beside the fp32 logits."""
    likely = logits.like(LOGITS, width=FP32_BYTES)
    slope = Gradient(logits, (likely,), (Traffic(COMPILED.backward * logits.numel),))
    sums: list[Transfer] = []
    if Axis.TP in block.mesh:  # target's logit and sum of exponents go together
        size = FP32_BYTES * _num_tokens(logits)
        sums = [Transfer(CollectiveOp.ALL_REDUCE, Axis.TP, each) for each in (size, 2 * size)]
    scratch = [likely.like("fp32 logits")]
    outputs, forward = [_scalar(logits), likely], Traffic(COMPILED.forward * logits.numel)
    loss = block.add([logits], outputs, [slope], forward, *sums, scratch=(scratch, ()))
    block.hold(logits)
    return loss


def _eager(block: Block, logits: Tensor) -> Tensor:
    """Return the loss as PyTorch computes it; its backward has the losses' gradient and its own.

    Split over ranks, it makes the exponentials, too, for a moment, and keeps its input while it
    shifts it (DTensor's `loss_parallel`).
    """
    wide = _widened(block, logits)
    likely = wide.like(LOGITS)
    forward, backward = (Traffic(each * logits.numel) for each in CHAIN)
    split = Axis.TP in block.mesh
    scratch = [wide.like("exponentials")] if split else []
    slope = Gradient(wide, (likely,), (backward,), at=wide.at)
    block.add([wide], [likely], [slope], forward, scratch=(scratch, scratch))
    of_loss = Gradient(likely, at=likely.at)
    loss = block.add([likely], [_scalar(logits)], [of_loss], *_sums(block, logits))
    block.hold(logits)
    return loss


def _widened(block: Block, logits: Tensor) -> Tensor:
    if logits.width == FP32_BYTES:
        return logits
    return copy(block, logits, "fp32 logits", width=FP32_BYTES)


def _sums(block: Block, logits: Tensor) -> list[Transfer]:
    """Return the three sums of a vocabulary-parallel loss, of one fp32 a token each."""
    if Axis.TP not in block.mesh:
        return []
    size = FP32_BYTES * _num_tokens(logits)
    return [Transfer(CollectiveOp.ALL_REDUCE, Axis.TP, size)] * NUM_STATISTICS


def _num_tokens(logits: Tensor) -> Size:
    return logits.numel // logits.sizes[logits.dims[-1]]


def _scalar(logits: Tensor) -> Tensor:
    return logits.like("loss", dims=(), at={}, width=FP32_BYTES)


_LOSSES: dict[LossKernel, Callable[[Block, Tensor], Tensor]] = {
    LossKernel.FUSED: _fused,
    LossKernel.FLASH_ATTN: _fused,
    LossKernel.IN_PLACE: _in_place,
    LossKernel.SHIFTED: _shifted,
    LossKernel.COMPILED: _compiled,
    LossKernel.EAGER: _eager,
}
