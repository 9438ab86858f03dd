"""The kernels behind FlashAttention: PyTorch's own on GPUs, plain arithmetic on processors.

All take ``[batch, heads, tokens, width]``; keys and values may have a divisor of the heads. They
are the operators that `scaled_dot_product_attention` calls, called by name: no heuristic chooses
another kernel than the one that a plan means.
"""

from math import ceil, sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

ATEN = torch.ops.aten
ALIGNED_WIDTH = 8  # FlashAttention-2 takes multiples of it; PyTorch pads others likewise
ALIGNED_TOKENS = 32  # of the statistics of the kernel for fp32, in both directions


class SavedAttention(NamedTuple):
    """Inputs and outputs of a forward pass; the log-sum-exp is ``[batch, heads, tokens]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    log_sum_exp: Tensor


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the attention output and the fp32 log-sum-exp of the scores.

    On a processor causal attention may be to a *window* of tokens alone, and a *softcap* may bound
    scores.
    """
    if not query.is_cuda:
        return _plain_forward((query, key, value), causal=causal, window=window, softcap=softcap)
    assert not window
    assert not softcap
    if query.dtype is torch.float32:  # FlashAttention-2 has 16-bit formats alone
        return wide_forward(query, key, value, causal=causal)
    return flash_forward(query, key, value, causal=causal)


def attention_backward(
    gradient: Tensor,
    attended: SavedAttention,
    *,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    if not gradient.is_cuda:
        return _plain_backward(gradient, attended, causal=causal, window=window, softcap=softcap)
    assert not window
    assert not softcap
    if attended.query.dtype is torch.float32:
        return wide_backward(gradient, attended, causal=causal)
    return flash_backward(gradient, attended, causal=causal)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Run FlashAttention-2."""
    width = query.shape[-1]
    padded = (_padded(each) for each in (query, key, value))
    outputs = ATEN._scaled_dot_product_flash_attention(  # noqa: SLF001
        *padded, 0.0, causal, return_debug_mask=False, scale=1 / sqrt(width)
    )
    return outputs[0][..., :width], outputs[1]


def flash_backward(
    gradient: Tensor, attended: SavedAttention, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run FlashAttention-2 backward."""
    width = gradient.shape[-1]
    query, key, value, out = (_padded(each) for each in attended[:4])
    # Seed and offset of dropout, which is off.
    no_dropout = torch.empty(2, dtype=torch.uint64, device=gradient.device)
    outputs = ATEN._scaled_dot_product_flash_attention_backward(  # noqa: SLF001
        _padded(gradient),
        query,
        key,
        value,
        out,
        attended.log_sum_exp,
        None,  # sequences are of one length
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        causal,
        no_dropout,
        no_dropout,
        scale=1 / sqrt(width),
    )
    return outputs[0][..., :width], outputs[1][..., :width], outputs[2][..., :width]


def wide_forward(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Run the memory-efficient kernel, which takes fp32, too."""
    heads, tokens = query.shape[1:3]
    out, log_sum_exp = ATEN._scaled_dot_product_efficient_attention(  # noqa: SLF001
        query,
        _repeated(key, heads),
        _repeated(value, heads),
        None,
        compute_log_sumexp=True,
        dropout_p=0.0,
        is_causal=causal,
    )[:2]
    # The kernel pads its statistics to multiples of `ALIGNED_TOKENS`.
    return out, log_sum_exp[..., :tokens]


def wide_backward(
    gradient: Tensor, attended: SavedAttention, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the memory-efficient kernel backward."""
    heads, tokens = attended.query.shape[1:3]
    groups = attended.key.shape[1]
    missing = ceil(tokens / ALIGNED_TOKENS) * ALIGNED_TOKENS - tokens
    no_dropout = torch.empty((), dtype=torch.long, device=gradient.device)
    query, key, value = ATEN._scaled_dot_product_efficient_attention_backward(  # noqa: SLF001
        gradient,
        attended.query,
        _repeated(attended.key, heads),
        _repeated(attended.value, heads),
        None,
        attended.out,
        F.pad(attended.log_sum_exp, (0, missing), value=float("inf")).contiguous(),
        no_dropout,
        no_dropout,
        0.0,
        [True, True, True, False],
        causal,
    )[:3]
    return query, _summed(key, groups), _summed(value, groups)


def _plain_forward(
    given: tuple[Tensor, Tensor, Tensor], *, causal: bool, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    query, key, value = given
    heads, width = query.shape[1], max(query.shape[-1], value.shape[-1])
    if not (window or softcap):
        # The kernel takes heads of one width alone.
        wide = (F.pad(each, (0, width - each.shape[-1])) for each in given)
        out, log_sum_exp = ATEN._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
            *(_repeated(each, heads) for each in wide),
            is_causal=causal,
            scale=1 / sqrt(query.shape[-1]),
        )[:2]
        return out[..., : value.shape[-1]], log_sum_exp.float()
    wide_key, wide_value = _repeated(key, heads), _repeated(value, heads)
    scores = _scores(query.float(), wide_key.float(), softcap)
    scores = _masked(scores, window) if causal else scores
    log_sum_exp = scores.logsumexp(-1)
    probabilities = torch.exp(scores - log_sum_exp.unsqueeze(-1))
    return (probabilities @ wide_value.float()).to(query.dtype), log_sum_exp


def _scores(query: Tensor, key: Tensor, softcap: float) -> Tensor:
    """Return the attention scores, softcapped where there is a *softcap*."""
    scores = query @ key.transpose(-1, -2) / sqrt(query.shape[-1])
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _masked(scores: Tensor, window: int) -> Tensor:
    """Return scores of causal attention to a sliding *window*, 0 for the whole prefix.

    Where keys outnumber queries, the queries are the last of the tokens.
    """
    mask = torch.full_like(scores[0, 0], float("-inf"))
    start = scores.shape[-1] - scores.shape[-2]
    earlier = mask.tril(start - window) if window else 0
    return scores + mask.triu(start + 1) + earlier


def _plain_backward(
    gradient: Tensor, attended: SavedAttention, *, causal: bool, window: int, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups = attended.query.shape[1], attended.key.shape[1]
    query, key, value, out = (each.float() for each in attended[:4])
    wide_key, wide_value = _repeated(key, heads), _repeated(value, heads)
    incoming = gradient.float()
    scale = 1 / sqrt(query.shape[-1])
    scores = _scores(query, wide_key, softcap)
    # Derivative of softcap * tanh(scores / softcap).
    bend = 1 - (scores / softcap).square() if softcap else 1
    scores = _masked(scores, window) if causal else scores
    probabilities = torch.exp(scores - attended.log_sum_exp.unsqueeze(-1))
    # Softmax backward subtracts the row sums of gradient x output, FlashAttention's D.
    row_totals = (incoming * out).sum(-1, keepdim=True)
    slope = probabilities * (incoming @ wide_value.transpose(-1, -2) - row_totals) * bend * scale
    return (
        slope @ wide_key,
        _summed(slope.transpose(-1, -2) @ query, groups),
        _summed(probabilities.transpose(-1, -2) @ incoming, groups),
    )


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[-1] % ALIGNED_WIDTH
    return F.pad(tensor, (0, missing)) if missing else tensor


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    repeats = heads // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _summed(tensor: Tensor, groups: int) -> Tensor:
    if tensor.shape[1] == groups:
        return tensor
    # Query heads of a group share a key head, whose gradient is their sum.
    return tensor.unflatten(1, (groups, -1)).sum(2)
