"""Permutation of tokens into the order of their experts, one kernel each way.

Transformer Engine sorts by a map of ``2 E + 1`` numbers a token: its rows, their experts, how many
they are (transformer_engine/common/triton/permutation.py, 2.x).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.validate.programs.fused import AutogradFunction, Context


@torch.library.custom_op("meshwright::row_map", mutates_args=())
def row_map(expert_indices: Tensor, num_experts: int) -> Tensor:
    """Return ``[tokens, 2 E + 1]`` numbers of the ``[tokens, k]`` experts of tokens."""
    num_tokens, chosen = expert_indices.shape
    order = expert_indices.flatten().argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    made = expert_indices.new_zeros((num_tokens, 2 * num_experts + 1), dtype=torch.int32)
    made[:, :chosen] = rows.view_as(expert_indices)
    made[:, num_experts : num_experts + chosen] = expert_indices
    made[:, -1] = chosen
    return made


@row_map.register_fake
def _(expert_indices: Tensor, num_experts: int) -> Tensor:
    return expert_indices.new_empty(
        (expert_indices.shape[0], 2 * num_experts + 1), dtype=torch.int32
    )


@torch.library.custom_op("meshwright::sort_rows", mutates_args=())
def sort_rows(tokens: Tensor, numbers: Tensor, chosen: int) -> Tensor:
    """Return ``[tokens x k, width]``: each of *tokens* once for each of its experts."""
    made = tokens.new_empty((tokens.shape[0] * chosen, tokens.shape[1]))
    made[numbers[:, :chosen].flatten().long()] = tokens.repeat_interleave(chosen, dim=0)
    return made


@sort_rows.register_fake
def _(tokens: Tensor, _numbers: Tensor, chosen: int) -> Tensor:
    return tokens.new_empty((tokens.shape[0] * chosen, tokens.shape[1]))


@torch.library.custom_op("meshwright::put_rows_back", mutates_args=())
def put_rows_back(rows: Tensor, numbers: Tensor, chosen: int) -> Tensor:
    """Return ``[tokens, width]``: the sum of a token's *rows*."""
    return rows[numbers[:, :chosen].long()].sum(dim=1)


@put_rows_back.register_fake
def _(rows: Tensor, numbers: Tensor, _chosen: int) -> Tensor:
    return rows.new_empty((numbers.shape[0], rows.shape[1]))


@torch.library.custom_op("meshwright::sort_weights", mutates_args=())
def sort_weights(shares: Tensor, numbers: Tensor, chosen: int) -> Tensor:
    """Return the weight of each row, of ``[tokens, E]`` *shares*."""
    num_experts = shares.shape[1]
    own = shares.gather(1, numbers[:, num_experts : num_experts + chosen].long())
    made = shares.new_empty(own.numel())
    made[numbers[:, :chosen].flatten().long()] = own.flatten()
    return made


@sort_weights.register_fake
def _(shares: Tensor, _numbers: Tensor, chosen: int) -> Tensor:
    return shares.new_empty(shares.shape[0] * chosen)


@torch.library.custom_op("meshwright::put_weights_back", mutates_args=())
def put_weights_back(weights: Tensor, numbers: Tensor, chosen: int) -> Tensor:
    """Return ``[tokens, E]`` shares, of which most are 0, of the *weights* of rows."""
    num_experts = numbers.shape[1] // 2
    own = weights[numbers[:, :chosen].long()]
    made = weights.new_zeros((numbers.shape[0], num_experts))
    return made.scatter_(1, numbers[:, num_experts : num_experts + chosen].long(), own)


@put_weights_back.register_fake
def _(weights: Tensor, numbers: Tensor, _chosen: int) -> Tensor:
    return weights.new_empty((numbers.shape[0], numbers.shape[1] // 2))


@torch.library.custom_op("meshwright::reorder_rows", mutates_args=())
def reorder_rows(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return stretches of *rows* of some *sizes* in another *order*."""
    parts = rows.split(list(sizes))
    return torch.cat([parts[index] for index in order])


@reorder_rows.register_fake
def _(rows: Tensor, _sizes: Sequence[int], _order: Sequence[int]) -> Tensor:
    return torch.empty_like(rows)


class SortedRows(AutogradFunction):
    """Permutation of tokens by expert; keeps the map."""

    @staticmethod
    def forward(ctx: Context, tokens: Tensor, numbers: Tensor, chosen: int) -> Tensor:
        """Return `sort_rows`."""
        ctx.save_for_backward(numbers)
        ctx.chosen = chosen
        return sort_rows(tokens, numbers, chosen)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the sum of the gradients of a token's rows."""
        (numbers,) = ctx.saved_tensors
        return put_rows_back(gradient, numbers, ctx.chosen), None, None


class SortedWeights(AutogradFunction):
    """Routing weights in the order of permuted rows; keeps the map."""

    @staticmethod
    def forward(ctx: Context, shares: Tensor, numbers: Tensor, chosen: int) -> Tensor:
        """Return `sort_weights`."""
        ctx.save_for_backward(numbers)
        ctx.chosen = chosen
        return sort_weights(shares, numbers, chosen)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of all shares."""
        (numbers,) = ctx.saved_tensors
        return put_weights_back(gradient, numbers, ctx.chosen), None, None


class UnpermutedRows(AutogradFunction):
    """Sum of each token's rows, which undoes the permutation; keeps the map."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, numbers: Tensor, chosen: int) -> Tensor:
        """Return `put_rows_back`."""
        ctx.save_for_backward(numbers)
        ctx.chosen = chosen
        return put_rows_back(rows, numbers, chosen)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of each row."""
        (numbers,) = ctx.saved_tensors
        return sort_rows(gradient, numbers, ctx.chosen), None, None


class Reordered(AutogradFunction):
    """Stretches of rows in another order."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
        """Return `reorder_rows`."""
        ctx.sizes = [sizes[index] for index in order]
        ctx.order = sorted(range(len(order)), key=order.__getitem__)
        return reorder_rows(rows, sizes, order)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient in the order that rows came in."""
        return reorder_rows(gradient, ctx.sizes, ctx.order), None, None


@torch.library.custom_op("meshwright::sorted_slots", mutates_args=())
def sorted_slots(expert_indices: Tensor) -> Tensor:
    """Return the numbers of ``[tokens, k]`` *expert_indices* in the order of experts."""
    return expert_indices.flatten().argsort(stable=True)


@sorted_slots.register_fake
def _(expert_indices: Tensor) -> Tensor:
    return expert_indices.new_empty(expert_indices.numel())


@torch.library.custom_op("meshwright::take_rows", mutates_args=())
def take_rows(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return *rows* by number."""
    return rows[numbers.long()]


@take_rows.register_fake
def _(rows: Tensor, numbers: Tensor) -> Tensor:
    return rows.new_empty((numbers.shape[0], *rows.shape[1:]))


@torch.library.custom_op("meshwright::put_rows", mutates_args=())
def put_rows(rows: Tensor, numbers: Tensor, num_rows: int) -> Tensor:
    """Return so many rows, each the sum of those of *rows* with its number."""
    return rows.new_zeros((num_rows, *rows.shape[1:])).index_add_(0, numbers.long(), rows)


@put_rows.register_fake
def _(rows: Tensor, _numbers: Tensor, num_rows: int) -> Tensor:
    return rows.new_empty((num_rows, *rows.shape[1:]))


class TakenRows(AutogradFunction):
    """Rows by number; keeps the numbers."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, numbers: Tensor) -> Tensor:
        """Return `take_rows`."""
        ctx.save_for_backward(numbers)
        ctx.num_rows = rows.shape[0]
        return take_rows(rows, numbers)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of all rows."""
        (numbers,) = ctx.saved_tensors
        return put_rows(gradient, numbers, ctx.num_rows), None


class PutRows(AutogradFunction):
    """Rows at the indices of their numbers; keeps these."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, numbers: Tensor, num_rows: int) -> Tensor:
        """Return `put_rows`."""
        ctx.save_for_backward(numbers)
        return put_rows(rows, numbers, num_rows)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of each row."""
        (numbers,) = ctx.saved_tensors
        return take_rows(gradient, numbers), None, None


@torch.library.custom_op("meshwright::weighed_sum", mutates_args=())
def weighed_sum(shares: Tensor, rows: Tensor) -> Tensor:
    """Return the sum of each token's ``[tokens, k, width]`` *rows* times its *shares*."""
    return (shares.unsqueeze(-1) * rows).sum(dim=1)


@weighed_sum.register_fake
def _(shares: Tensor, rows: Tensor) -> Tensor:
    return rows.new_empty((shares.shape[0], rows.shape[2]))


@torch.library.custom_op("meshwright::weighed_sum_backward", mutates_args=())
def weighed_sum_backward(gradient: Tensor, shares: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of shares and rows."""
    wide = gradient.unsqueeze(1)
    return (rows * wide).sum(dim=-1), shares.unsqueeze(-1) * wide


@weighed_sum_backward.register_fake
def _(_gradient: Tensor, shares: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(shares), torch.empty_like(rows)


class WeighedSum(AutogradFunction):
    """A token's rows by its shares; keeps both.

    A product of so few rows is no work beside its traffic, and is not counted as one.
    """

    @staticmethod
    def forward(ctx: Context, shares: Tensor, rows: Tensor) -> Tensor:
        """Return `weighed_sum`."""
        ctx.save_for_backward(shares, rows)
        return weighed_sum(shares, rows)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        return weighed_sum_backward(gradient, *ctx.saved_tensors)
