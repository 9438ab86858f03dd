"""Cross-entropy losses: one fused kernel, Megatron's in-place fp32, or PyTorch's own kernels."""

from collections.abc import Callable
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp, LossKernel
from meshwright.simulator.graph import Block, Gradient, Size, Tensor, Traffic, Transfer, copy
from meshwright.simulator.layout import Axis

FP32_BYTES = 4
LOGITS = "logits"  # name of the tensor the loss saves
NUM_STATISTICS = 3  # per token: maximum, target's logit, sum of exponentials


class LossBytes(NamedTuple):
    """Bytes per logit that the loss moves.

    A chain of fp32 kernels moves 38 (cast 2 + 4, max 4, subtract 8, exp 8, sum 4, divide 8) and
    14 (gradient 8 + cast 6), compiled 22 (cast and max 6, exp and sum 8, divide 8) and 6, one
    fused kernel 6 and 10.
    """

    forward: int
    backward: int


CHAIN = LossBytes(38, 14)
COMPILED = LossBytes(22, 6)
ONE_KERNEL = LossBytes(6, 10)


def loss_of(block: Block, logits: Tensor, *others: Tensor) -> Tensor:
    """Return the loss of *logits* by the block's lowering, plus the small *others*."""
    loss = _LOSSES[block.lowering.loss](block, logits)
    if not others:
        return loss
    gradients = [Gradient(each, at=each.at) for each in (loss, *others)]
    return block.add([loss, *others], [loss.like("sum of losses")], gradients)


def _fused(block: Block, logits: Tensor) -> Tensor:
    """Return the loss of one kernel, which saves the logits' gradient.

    Transformer Engine overwrites the logits with it (cross_entropy_forward, 2.2 to 2.11, in
    pytorch/triton or common/triton), and gathers three numbers a token from every rank.  For
    flash-attn's kernel of 2023 the step times of llm-foundry say that it takes as long as the
    chain.
    """
    is_slow = block.lowering.loss is LossKernel.FLASH_ATTN
    moved = CHAIN if is_slow else ONE_KERNEL
    # flash-attn's kernel saves a copy; Transformer Engine's works in place.
    saved_logits = logits.like(LOGITS, base=None if is_slow else logits.storage)
    calls = []
    if Axis.TP in block.mesh:
        # The output of the all-gather has three numbers a token of every rank.
        size = NUM_STATISTICS * FP32_BYTES * _num_tokens(logits) * block.mesh[Axis.TP]
        calls = [Transfer(CollectiveOp.ALL_GATHER, Axis.TP, size)]
    slope = Gradient(
        logits, (saved_logits,), (Traffic(moved.backward * logits.numel),), overwrites=saved_logits
    )
    forward = Traffic(moved.forward * logits.numel)
    return block.add([logits], [_scalar(logits), saved_logits], [slope], forward, *calls)


def _in_place(block: Block, logits: Tensor) -> Tensor:
    """Return Megatron's loss: one fp32 copy, or fp32 logits in place, become probabilities.

    In fp32 these are overwritten by the gradient; else it is a 16-bit tensor.
    """
    is_wide = logits.width == FP32_BYTES
    probabilities = logits.like(LOGITS, width=FP32_BYTES, base=logits.storage if is_wide else None)
    traffic = (Traffic(CHAIN.backward * logits.numel),)
    slope = Gradient(
        logits, (probabilities,), traffic, overwrites=probabilities if is_wide else None
    )
    forward = Traffic(CHAIN.forward * logits.numel)
    loss = block.add(
        [logits],
        [_scalar(logits), probabilities],
        [slope],
        forward,
        *_vocab_parallel_all_reduces(block, logits),
    )
    block.hold(logits)
    return loss


def _shifted_copy(block: Block, logits: Tensor) -> Tensor:
    """Return Megatron's loss of 2022 to 2024: ``logits - max`` is a second fp32 tensor."""
    wide = _in_fp32(block, logits)
    probabilities = wide.like(LOGITS)
    slope = Gradient(
        wide, (probabilities,), (Traffic(CHAIN.backward * logits.numel),), overwrites=probabilities
    )
    forward = Traffic(CHAIN.forward * logits.numel)
    outputs = [_scalar(logits), probabilities]
    loss = block.add([wide], outputs, [slope], forward, *_vocab_parallel_all_reduces(block, logits))
    block.hold(logits)
    return loss


def _compiled(block: Block, logits: Tensor) -> Tensor:
    """Return Megatron's fused loss (compiled): exponentials are made beside the fp32 logits."""
    probabilities = logits.like(LOGITS, width=FP32_BYTES)
    slope = Gradient(logits, (probabilities,), (Traffic(COMPILED.backward * logits.numel),))
    sums: list[Transfer] = []
    if Axis.TP in block.mesh:  # target's logit and sum of exponentials share an all-reduce
        size = FP32_BYTES * _num_tokens(logits)
        sums = [Transfer(CollectiveOp.ALL_REDUCE, Axis.TP, each) for each in (size, 2 * size)]
    scratch = [probabilities.like("fp32 logits")]
    outputs, forward = [_scalar(logits), probabilities], Traffic(COMPILED.forward * logits.numel)
    loss = block.add([logits], outputs, [slope], forward, *sums, scratch=(scratch, ()))
    block.hold(logits)
    return loss


def _eager(block: Block, logits: Tensor) -> Tensor:
    """Return the loss as PyTorch computes it (log_softmax, nll_loss), with two gradients.

    Vocabulary-parallel, the exponentials are a temporary, and the input lives while it is shifted
    (DTensor's `loss_parallel`).
    """
    wide = _in_fp32(block, logits)
    probabilities = wide.like(LOGITS)
    forward, backward = (Traffic(each * logits.numel) for each in CHAIN)
    split = Axis.TP in block.mesh
    scratch = [wide.like("exponentials")] if split else []
    slope = Gradient(wide, (probabilities,), (backward,), at=wide.at)
    # log_softmax and nll_loss are two nodes, so both have a gradient.
    block.add([wide], [probabilities], [slope], forward, scratch=(scratch, scratch))
    of_loss = Gradient(probabilities, at=probabilities.at)
    loss = block.add(
        [probabilities], [_scalar(logits)], [of_loss], *_vocab_parallel_all_reduces(block, logits)
    )
    block.hold(logits)
    return loss


def _in_fp32(block: Block, logits: Tensor) -> Tensor:
    if logits.width == FP32_BYTES:
        return logits
    return copy(block, logits, "fp32 logits", width=FP32_BYTES)


def _vocab_parallel_all_reduces(block: Block, logits: Tensor) -> list[Transfer]:
    """Return the three all-reduces of a vocabulary-parallel loss, of one fp32 a token each."""
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
    LossKernel.SHIFTED: _shifted_copy,
    LossKernel.COMPILED: _compiled,
    LossKernel.EAGER: _eager,
}
