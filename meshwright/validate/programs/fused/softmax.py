"""Scale, mask and softmax of attention scores in one kernel."""

import torch
from torch import Tensor

from meshwright.validate.programs.fused.autograd_function import AutogradFunction, Context


@torch.library.custom_op("meshwright::causal_softmax", mutates_args=())
def causal_softmax(scores: Tensor, scale: float, *, causal: bool, window: int = 0) -> Tensor:
    """Return the probabilities of ``scale * scores``, ``[batch * heads, tokens, tokens]``.

    With a *window* a token sees itself and ``window - 1`` before it, if it sees no later ones.
    """
    scaled = scores * scale
    if causal:
        square = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
        scaled.masked_fill_(square.triu(1), float("-inf"))
        if window:
            scaled.masked_fill_(square.tril(-window), float("-inf"))
    # By its public name autocast on GPUs would give fp32.
    probabilities: Tensor = torch.ops.aten._softmax(  # noqa: SLF001
        scaled, -1, half_to_float=False
    )
    return probabilities


@causal_softmax.register_fake
def _(scores: Tensor, _scale: float, **_: int) -> Tensor:
    return torch.empty_like(scores)


@torch.library.custom_op("meshwright::softmax_backward", mutates_args=())
def softmax_backward(gradient: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    """Return the gradient of the scores."""
    score_gradient: Tensor = torch.ops.aten._softmax_backward_data(  # noqa: SLF001
        gradient, probabilities, -1, probabilities.dtype
    )
    return score_gradient.mul_(scale)


@softmax_backward.register_fake
def _(gradient: Tensor, _probabilities: Tensor, _scale: float) -> Tensor:
    return torch.empty_like(gradient)


class CausalSoftmax(AutogradFunction):
    """Scale, mask and softmax in one kernel; keeps the probabilities alone."""

    @staticmethod
    def forward(
        ctx: Context,
        scores: Tensor,
        scale: float,
        causal: bool,  # noqa: FBT001
        window: int = 0,
    ) -> Tensor:
        """Return the probabilities."""
        probabilities = causal_softmax(scores, scale, causal=causal, window=window)
        ctx.save_for_backward(probabilities)
        ctx.scale = scale
        return probabilities

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the scores."""
        (probabilities,) = ctx.saved_tensors
        return softmax_backward(gradient, probabilities, ctx.scale), None, None, None
