"""Cross-entropy over logits whose vocabulary is split over the tensor-parallel ranks."""

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.hwprofiles import MEBI, LossKernel
from meshwright.validate.programs.fused import AutogradFunction, Context
from meshwright.validate.programs.megatron.tensor_parallel import TensorParallelGroup

NUM_STATISTICS = 3
PART_BYTES = 64 * MEBI


class _WideLoss(AutogradFunction):
    """Mean loss as Megatron-LM computes it in fp32; keeps probabilities, which become the gradient.

    Three numbers a token are reduced over the ranks: maximum, target's logit, sum of exponents.
    """

    @staticmethod
    def forward(
        ctx: Context,
        logits: Tensor,
        targets: Tensor,
        tp: TensorParallelGroup,
        in_place: bool,  # noqa: FBT001 - autograd functions take no keywords
        num_scored: int | None,
    ) -> Tensor:
        wide = logits.float()
        maximum = tp.maximum(wide.max(dim=-1).values).unsqueeze(-1)
        # The maximum over all ranks, so that no exponent overflows and the sums agree.
        shifted = wide.sub_(maximum) if in_place else wide - maximum
        local, outside = _local_targets(targets, shifted.shape[-1], tp)
        target_logit = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        tp.sum(target_logit.masked_fill_(outside, 0.0))
        exponents = shifted.exp_()
        total = tp.sum(exponents.sum(dim=-1))
        exponents.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exponents, local, outside)
        ctx.num_scored = num_scored
        return (total.log() - target_logit)[:num_scored].mean()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, outside = ctx.saved_tensors
        _subtract_targets(probabilities, local, outside)
        return _scaled_gradient(probabilities, gradient, ctx.num_scored), None, None, None, None


class _CompiledLoss(AutogradFunction):
    """Mean loss as Megatron-LM's fused form computes it, with two sums over the ranks.

    What it compiles writes nothing in place, and makes the gradient in 16 bits at once.
    """

    @staticmethod
    def forward(
        ctx: Context,
        logits: Tensor,
        targets: Tensor,
        tp: TensorParallelGroup,
        num_scored: int | None,
    ) -> Tensor:
        wide = logits.to(torch.float32, copy=True)
        maximum = tp.maximum(wide.max(dim=-1).values).unsqueeze(-1)
        exponents = wide - maximum
        local, outside = _local_targets(targets, wide.shape[-1], tp)
        target = exponents.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(outside, 0.0)
        exponents.exp_()
        both = tp.sum(torch.cat((target, exponents.sum(dim=-1))))
        target, total = both.chunk(2)
        exponents.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exponents, local, outside)
        ctx.format, ctx.num_scored = logits.dtype, num_scored
        return (total.log() - target)[:num_scored].mean()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, local, outside = ctx.saved_tensors
        _subtract_targets(probabilities, local, outside)
        logits_gradient = _scaled_gradient(probabilities, gradient, ctx.num_scored)
        return logits_gradient.to(ctx.format), None, None, None


def _scaled_gradient(values: Tensor, gradient: Tensor, num_scored: int | None) -> Tensor:
    """Return the gradient of logits, in place of that of each token's loss over them."""
    values.mul_(gradient / values[:num_scored, ..., 0].numel())
    if num_scored is not None:
        values[num_scored:].zero_()
    return values


def _local_targets(
    targets: Tensor, num_rows: int, tp: TensorParallelGroup
) -> tuple[Tensor, Tensor]:
    """Return the targets counted from this rank's first row, and which lie outside its rows."""
    local = targets - tp.rank * num_rows
    outside = (local < 0) | (local >= num_rows)
    return local.masked_fill_(outside, 0), outside


def _subtract_targets(probabilities: Tensor, local: Tensor, outside: Tensor) -> None:
    ones = (~outside).to(probabilities.dtype).unsqueeze(-1)
    # The gradient of cross-entropy: probabilities, less 1 at the target.
    probabilities.scatter_add_(-1, local.unsqueeze(-1), -ones)


def _parts(logits: Tensor) -> Iterator[slice]:
    """Yield slices of tokens whose fp32 copies are small: the fused kernel makes none at all."""
    token_bytes = logits[0].numel() * torch.float32.itemsize
    step = max(1, PART_BYTES // token_bytes)
    yield from (slice(start, start + step) for start in range(0, logits.shape[0], step))


@torch.library.custom_op("meshwright::softmax_statistics", mutates_args=())
def softmax_statistics(logits: Tensor, local: Tensor, outside: Tensor) -> Tensor:
    """Return ``[3, tokens, batch]`` fp32: maximum, sum of exponents, target's logit."""
    maximum = logits.amax(dim=-1).float()
    total = torch.empty_like(maximum)
    for part in _parts(logits):
        exponents = (logits[part].float() - maximum[part].unsqueeze(-1)).exp_()
        torch.sum(exponents, dim=-1, out=total[part])
    target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).float()
    return torch.stack([maximum, total, target.masked_fill_(outside, 0.0)])


@softmax_statistics.register_fake
def _(logits: Tensor, local: Tensor, outside: Tensor) -> Tensor:  # noqa: ARG001
    return logits.new_empty((NUM_STATISTICS, *local.shape), dtype=torch.float32)


@torch.library.custom_op("meshwright::logits_to_gradient", mutates_args={"logits"})
def logits_to_gradient(
    logits: Tensor, statistics: Tensor, local: Tensor, outside: Tensor
) -> Tensor:
    """Write the gradient of each token's loss over its logits; return the losses.

    Args:
        logits: ``[tokens, batch, rows]``, changed in place.
        statistics: ``[ranks, 3, tokens, batch]`` of all ranks.
        local: Targets counted from this rank's first row.
        outside: Mask of targets that other ranks hold.
    """
    maximum = statistics[:, 0].max(dim=0).values
    total = (statistics[:, 1] * (statistics[:, 0] - maximum).exp()).sum(dim=0)
    target = statistics[:, 2].sum(dim=0)
    for part in _parts(logits):
        probabilities = (logits[part].float() - maximum[part].unsqueeze(-1)).exp_()
        probabilities.div_(total[part].unsqueeze(-1))
        _subtract_targets(probabilities, local[part], outside[part])
        logits[part] = probabilities
    return total.log() + maximum - target


@logits_to_gradient.register_fake
def _(
    logits: Tensor,  # noqa: ARG001
    statistics: Tensor,
    local: Tensor,
    outside: Tensor,  # noqa: ARG001
) -> Tensor:
    return statistics.new_empty(local.shape)


class _FusedLoss(AutogradFunction):
    """Mean loss as Transformer Engine computes it: the gradient takes the place of the logits.

    One gather of three numbers a token from every rank.
    """

    @staticmethod
    def forward(
        ctx: Context,
        logits: Tensor,
        targets: Tensor,
        tp: TensorParallelGroup,
        num_scored: int | None,
    ) -> Tensor:
        own = logits.detach()
        local, outside = _local_targets(targets, own.shape[-1], tp)
        statistics = softmax_statistics(own, local, outside)
        everyone = tp.gather_tokens(statistics).unflatten(0, (tp.size, NUM_STATISTICS))
        losses = logits_to_gradient(own, everyone, local, outside)
        ctx.save_for_backward(own)
        ctx.num_scored = num_scored
        return losses[:num_scored].mean()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return _scaled_gradient(own, gradient, ctx.num_scored), None, None, None


def vocabulary_loss(
    logits: Tensor,
    targets: Tensor,
    tp: TensorParallelGroup,
    *,
    kernel: LossKernel,
    num_scored: int | None = None,
) -> Tensor:
    """Return the mean loss of ``[tokens, batch, local rows]`` logits.

    Args:
        logits: This rank's part, in the precision of the products.
        targets: ``[tokens, batch]`` ids of the whole vocabulary.
        tp: Ranks that hold the other rows.
        kernel: As Transformer Engine computes it (fused) or as Megatron-LM does, in fp32.
        num_scored: Tokens of each sequence, from the first on, whose mean it is; None: all.
    """
    if kernel is LossKernel.FUSED:
        loss: Tensor = _FusedLoss.apply(logits, targets, tp, num_scored)
    elif kernel is LossKernel.COMPILED:
        loss = _CompiledLoss.apply(logits, targets, tp, num_scored)
    else:
        loss = _WideLoss.apply(logits, targets, tp, kernel is LossKernel.IN_PLACE, num_scored)
    return loss
