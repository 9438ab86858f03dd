"""Kernels that training stacks fuse, as operators: each allocates what the fused kernel does.

PyTorch's eager operators would keep or allocate more than the kernels that stand behind these
in Megatron-Core, Transformer Engine, FlashAttention or code from torch.compile.  The
implementations here are written for correctness; memory and FLOPs are those of the kernel.
"""

from math import sqrt

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_NAME = "meshwright"


def _to_heads_first(tensor: Tensor, seq_dim: int) -> Tensor:
    """Return ``[batch, heads, tokens, width]`` of a tensor whose tokens are dim 0 or 1."""
    return tensor.permute(1, 2, 0, 3) if seq_dim == 0 else tensor.transpose(1, 2)


def _from_heads_first(tensor: Tensor, seq_dim: int) -> Tensor:
    permuted = tensor.permute(2, 0, 1, 3) if seq_dim == 0 else tensor.transpose(1, 2)
    return permuted.contiguous()


def _log_sum_exp_like(query: Tensor, seq_dim: int) -> Tensor:
    batch, heads, tokens = query.shape[1 - seq_dim], query.shape[2], query.shape[seq_dim]
    return query.new_empty((batch, heads, tokens), dtype=torch.float32)


def _sum_heads(tensor: Tensor, groups: int) -> Tensor:
    return tensor.unflatten(1, (groups, -1)).sum(2)


def _repeat_heads(tensor: Tensor, num_heads: int) -> Tensor:
    return tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


@torch.library.custom_op(f"{_NAME}::flash_attention", mutates_args=())
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, seq_dim: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the attention output, laid out as *query*, and the log-sum-exp of the scores.

    Args:
        query: ``[tokens, batch, heads, width]``, or batch first; any strides.
        key: As *query*, with as many heads or a divisor of them.
        value: As *key*.
        seq_dim: Which dim counts tokens, 0 or 1.
        causal: Whether tokens see only those before them.
    """
    heads = query.shape[2]
    q = _to_heads_first(query, seq_dim)
    k, v = (_repeat_heads(_to_heads_first(each, seq_dim), heads) for each in (key, value))
    if query.is_cuda:
        out, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False
        )[:2]
    else:
        out, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal
        )
    return _from_heads_first(out, seq_dim), log_sum_exp.float().contiguous()


@flash_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, seq_dim: int, causal: bool
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), _log_sum_exp_like(query, seq_dim)


@torch.library.custom_op(f"{_NAME}::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    gradient: Tensor,
    saved: list[Tensor],
    seq_dim: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        gradient: Of the output.
        saved: Query, key, value, output and log-sum-exp of the forward pass.
        seq_dim: As in `flash_attention`.
        causal: As in `flash_attention`.
    """
    heads, groups = saved[0].shape[2], saved[1].shape[2]
    query, key, value, out = (_to_heads_first(each, seq_dim).float() for each in saved[:4])
    wide_key, wide_value = _repeat_heads(key, heads), _repeat_heads(value, heads)
    incoming = _to_heads_first(gradient, seq_dim).float()
    scale = 1 / sqrt(query.shape[-1])
    scores = query @ wide_key.transpose(-1, -2) * scale
    if causal:
        scores = scores + torch.full_like(scores[0, 0], float("-inf")).triu(1)
    probabilities = torch.exp(scores - saved[4].unsqueeze(-1))
    row_totals = (incoming * out).sum(-1, keepdim=True)
    slope = probabilities * (incoming @ wide_value.transpose(-1, -2) - row_totals) * scale
    gradients = (
        slope @ wide_key,
        _sum_heads(slope.transpose(-1, -2) @ query, groups),
        _sum_heads(probabilities.transpose(-1, -2) @ incoming, groups),
    )
    first, second, third = (
        _from_heads_first(each, seq_dim).to(gradient.dtype) for each in gradients
    )
    return first, second, third


@flash_attention_backward.register_fake
def _(
    gradient: Tensor, saved: list[Tensor], seq_dim: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (each.new_empty(each.shape) for each in saved[:3])
    return query, key, value


@register_flop_formula(torch.ops.meshwright.flash_attention)
def _flash_flops(
    query: tuple[int, ...],
    key: tuple[int, ...],
    _value: tuple[int, ...],
    seq_dim: int,
    *_: object,
    **__: object,
) -> int:
    """Two products over the full square, as PyTorch counts attention."""
    batch, heads, width = query[1 - seq_dim], query[2], query[3]
    return 4 * batch * heads * query[seq_dim] * key[seq_dim] * width


@register_flop_formula(torch.ops.meshwright.flash_attention_backward)
def _flash_backward_flops(
    _gradient: tuple[int, ...],
    saved: list[tuple[int, ...]],
    seq_dim: int,
    *_: object,
    **__: object,
) -> int:
    """Five products: the scores again, and four gradients."""
    return _flash_flops(saved[0], saved[1], saved[2], seq_dim) * 5 // 2


class FlashAttention(torch.autograd.Function):
    """Attention that keeps its inputs, its output and one number a row of scores."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seq_dim: int,
        causal: bool,
    ) -> Tensor:
        """Return the output, laid out as *query*."""
        out, log_sum_exp = flash_attention(query, key, value, seq_dim, causal)
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        ctx.seq_dim, ctx.causal = seq_dim, causal
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value."""
        saved = list(ctx.saved_tensors)
        gradients = flash_attention_backward(gradient.contiguous(), saved, ctx.seq_dim, ctx.causal)
        return (*gradients, None, None)


@torch.library.custom_op(f"{_NAME}::causal_softmax", mutates_args=())
def causal_softmax(scores: Tensor, scale: float, causal: bool) -> Tensor:
    """Return the probabilities of ``scale * scores``, ``[batch * heads, tokens, tokens]``."""
    scaled = scores.float() * scale
    if causal:
        scaled = scaled + torch.full_like(scaled[0], float("-inf")).triu(1)
    return torch.softmax(scaled, -1).to(scores.dtype)


@causal_softmax.register_fake
def _(scores: Tensor, scale: float, causal: bool) -> Tensor:
    return torch.empty_like(scores)


@torch.library.custom_op(f"{_NAME}::softmax_backward", mutates_args=())
def softmax_backward(gradient: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    """Return the gradient of the scores."""
    product = gradient.float() * probabilities.float()
    total = product.sum(-1, keepdim=True)
    return (scale * (product - probabilities.float() * total)).to(gradient.dtype)


@softmax_backward.register_fake
def _(gradient: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    return torch.empty_like(gradient)


class CausalSoftmax(torch.autograd.Function):
    """Scale, mask and softmax in one kernel; keeps the probabilities alone."""

    @staticmethod
    def forward(ctx, scores: Tensor, scale: float, causal: bool) -> Tensor:
        """Return the probabilities."""
        probabilities = causal_softmax(scores, scale, causal)
        ctx.save_for_backward(probabilities)
        ctx.scale = scale
        return probabilities

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the scores."""
        (probabilities,) = ctx.saved_tensors
        return softmax_backward(gradient, probabilities, ctx.scale), None, None


@torch.library.custom_op(f"{_NAME}::rms_norm", mutates_args=())
def rms_norm(values: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the normalised values and the fp32 inverse root mean square of each token."""
    wide = values.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * inverse * weight.float()).to(values.dtype), inverse


@rms_norm.register_fake
def _(values: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    inverse = values.new_empty((*values.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(values), inverse


@torch.library.custom_op(f"{_NAME}::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of values and weight."""
    normal = values.float() * inverse
    scaled = gradient.float() * weight.float()
    values_gradient = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    weight_gradient = (gradient.float() * normal).flatten(0, -2).sum(0)
    return values_gradient.to(values.dtype), weight_gradient.to(weight.dtype)


@rms_norm_backward.register_fake
def _(gradient: Tensor, values: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(values), torch.empty_like(weight)


class RmsNorm(torch.autograd.Function):
    """Root-mean-square norm that keeps its input and one number a token."""

    @staticmethod
    def forward(ctx, values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return the normalised values."""
        normal, inverse = rms_norm(values, weight, epsilon)
        ctx.save_for_backward(values, weight, inverse)
        return normal

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of values and weight."""
        return *rms_norm_backward(gradient, *ctx.saved_tensors), None


@torch.library.custom_op(f"{_NAME}::rotate", mutates_args=())
def rotate(values: Tensor, seq_dim: int, base: float, inverse: bool) -> Tensor:
    """Return ``[.., .., heads, width]`` turned by angles that grow along dim *seq_dim*."""
    tokens, half = values.shape[seq_dim], values.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=values.device, dtype=torch.float32) / half)
    angle = torch.arange(tokens, device=values.device, dtype=torch.float32)[:, None] * frequency
    shape = (tokens, 1, 1, half) if seq_dim == 0 else (1, tokens, 1, half)
    cosine, sine = angle.cos().view(shape), angle.sin().view(shape)
    first, second = values.float().chunk(2, dim=-1)
    sine = -sine if inverse else sine
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(values.dtype)


@rotate.register_fake
def _(values: Tensor, seq_dim: int, base: float, inverse: bool) -> Tensor:
    return values.new_empty(values.shape)


class Rotary(torch.autograd.Function):
    """Rotary position embedding in one kernel; keeps nothing."""

    @staticmethod
    def forward(ctx, values: Tensor, seq_dim: int, base: float) -> Tensor:
        """Return the turned values."""
        ctx.seq_dim, ctx.base = seq_dim, base
        return rotate(values, seq_dim, base, False)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient, turned back."""
        return rotate(gradient.contiguous(), ctx.seq_dim, ctx.base, True), None, None


@torch.library.custom_op(f"{_NAME}::swiglu", mutates_args=())
def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """Return ``silu(gate) * value``."""
    return (torch.nn.functional.silu(gate.float()) * value.float()).to(gate.dtype)


@swiglu.register_fake
def _(gate: Tensor, value: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _swiglu_gradients(gradient: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    wide = gate.float()
    sigmoid = torch.sigmoid(wide)
    slope = sigmoid * (1 + wide * (1 - sigmoid))
    gate_gradient = (gradient.float() * value.float() * slope).to(gate.dtype)
    return gate_gradient, (gradient.float() * wide * sigmoid).to(value.dtype)


@torch.library.custom_op(f"{_NAME}::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and value."""
    return _swiglu_gradients(gradient, gate, value)


@swiglu_backward.register_fake
def _(gradient: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), value.new_empty(value.shape)


@torch.library.custom_op(f"{_NAME}::packed_swiglu_backward", mutates_args=())
def packed_swiglu_backward(gradient: Tensor, packed: Tensor) -> Tensor:
    """Return the gradient of gate and value in one tensor, packed as they are."""
    return torch.cat(_swiglu_gradients(gradient, *packed.chunk(2, dim=-1)), dim=-1)


@packed_swiglu_backward.register_fake
def _(gradient: Tensor, packed: Tensor) -> Tensor:
    return packed.new_empty(packed.shape)


class Swiglu(torch.autograd.Function):
    """Gated activation of two tensors; keeps both, not the activated gate."""

    @staticmethod
    def forward(ctx, gate: Tensor, value: Tensor) -> Tensor:
        """Return ``silu(gate) * value``."""
        ctx.save_for_backward(gate, value)
        return swiglu(gate, value)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and value."""
        return swiglu_backward(gradient, *ctx.saved_tensors)


class PackedSwiglu(torch.autograd.Function):
    """Gated activation of the two halves of one tensor; keeps that tensor."""

    @staticmethod
    def forward(ctx, packed: Tensor) -> Tensor:
        """Return ``silu(gate) * value`` of ``[gate, value]``."""
        ctx.save_for_backward(packed)
        return swiglu(*packed.chunk(2, dim=-1))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        """Return the gradient, packed as the input."""
        return packed_swiglu_backward(gradient, *ctx.saved_tensors)


@torch.library.custom_op(f"{_NAME}::accumulate_weight_gradient", mutates_args={"buffer"})
def accumulate_weight_gradient(buffer: Tensor, inputs: Tensor, gradient: Tensor) -> None:
    """Add ``gradient^T inputs`` to *buffer* in its own precision.

    Args:
        buffer: ``[outputs, inputs]``, changed in place.
        inputs: ``[tokens, inputs]``.
        gradient: ``[tokens, outputs]``.
    """
    buffer += gradient.to(buffer.dtype).t() @ inputs.to(buffer.dtype)


@accumulate_weight_gradient.register_fake
def _(buffer: Tensor, inputs: Tensor, gradient: Tensor) -> None:
    return None


@register_flop_formula(torch.ops.meshwright.accumulate_weight_gradient)
def _accumulate_flops(
    buffer: tuple[int, ...], inputs: tuple[int, ...], *_: object, **__: object
) -> int:
    """One product of the weight's shape over all tokens."""
    return 2 * buffer[0] * buffer[1] * inputs[0]
