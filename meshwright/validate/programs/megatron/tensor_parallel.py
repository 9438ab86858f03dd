"""Column- and row-parallel linear layers of Megatron-Core, with sequence parallelism.

Shoeybi et al. 2019 (arXiv 1909.08053) and Korthikanti et al. 2022 (arXiv 2205.05198): a column
layer keeps only its own tokens of the input and gathers the rest again in backward.
Activations are ``[tokens, batch, width]``.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows it by
from torch import Tensor, nn

from meshwright.validate.programs.context import all_gather, reduce_scatter
from meshwright.validate.programs.fused import AutogradFunction, Context, GradientSink


class DeferredSink:
    """Accumulator whose target is set after the layers that use it are built."""

    def __init__(self) -> None:
        self.target: GradientSink | None = None

    def add_product(self, weight: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor | None:
        """Pass a product on."""
        assert self.target is not None
        return self.target.add_product(weight, inputs, gradient)


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """The tensor-parallel ranks of a rank; ``group`` is None where there is only one."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    sequence_parallel: bool

    @property
    def splits_tokens(self) -> bool:
        """Whether activations outside the parallel region are split along tokens."""
        return self.sequence_parallel and self.size > 1

    def sum(self, values: Tensor) -> Tensor:
        """Return *values* summed over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def maximum(self, values: Tensor) -> Tensor:
        """Return the maximum of *values* over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def gather_tokens(self, local: Tensor) -> Tensor:
        """Return the tokens of all ranks, along dim 0."""
        if self.size == 1:
            return local
        whole = local.new_empty((local.shape[0] * self.size, *local.shape[1:]))
        all_gather(whole, local.contiguous(), self.group)
        return whole

    def scatter_sum(self, partial: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of *partial* over the ranks."""
        local = partial.new_empty((partial.shape[0] // self.size, *partial.shape[1:]))
        reduce_scatter(local, partial, self.group)
        return local

    def own_tokens(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's tokens; a view would keep the others alive."""
        return whole.chunk(self.size)[self.rank].clone()


@dataclass(frozen=True, slots=True)
class BufferedGroup(TensorParallelGroup):
    """Ranks that gather tokens into one buffer, which stays.

    So Megatron-Core does ahead of its output matrix (`get_global_memory_buffer` in
    tensor_parallel/layers.py, core 0.16).
    """

    buffers: list[Tensor] = field(default_factory=list)

    def gather_tokens(self, local: Tensor) -> Tensor:
        """Return the tokens of all ranks, until the next are gathered."""
        if not self.buffers:
            shape = local.shape[0] * self.size, *local.shape[1:]
            self.buffers.append(local.new_empty(shape))
        all_gather(self.buffers[0], local.contiguous(), self.group)
        return self.buffers[0]


ALONE = TensorParallelGroup(None, 0, 1, sequence_parallel=False)


class _ColumnProduct(AutogradFunction):
    """``x W^T + b`` whose outputs are split over the ranks."""

    @staticmethod
    def forward(
        ctx: Context,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tp: TensorParallelGroup,
        sink: GradientSink,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        # Not saved: what recomputation hands back is no longer the parameter that a sink knows.
        ctx.weight, ctx.has_bias = weight, bias is not None
        ctx.tp, ctx.sink = tp, sink
        whole = tp.gather_tokens(inputs) if tp.splits_tokens else inputs
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        weight, tp = ctx.weight, ctx.tp
        whole = tp.gather_tokens(inputs) if tp.splits_tokens else inputs
        input_gradient = gradient.matmul(weight)
        if tp.splits_tokens:
            input_gradient = tp.scatter_sum(input_gradient)
        else:
            tp.sum(input_gradient)
        rows = gradient.flatten(0, 1)
        weight_gradient = ctx.sink.add_product(weight, whole.flatten(0, 1), rows)
        bias_gradient = rows.sum(0) if ctx.has_bias else None
        return input_gradient, weight_gradient, bias_gradient, None, None


class _RowProduct(AutogradFunction):
    """``x W^T`` whose inputs are split over the ranks; the parts are summed."""

    @staticmethod
    def forward(
        ctx: Context,
        inputs: Tensor,
        weight: Tensor,
        tp: TensorParallelGroup,
        sink: GradientSink,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.tp, ctx.sink = weight, tp, sink
        # The bias is added after the sum, or it would count once a rank.
        partial = F.linear(inputs, weight)
        return tp.scatter_sum(partial) if tp.splits_tokens else tp.sum(partial)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        weight, tp = ctx.weight, ctx.tp
        whole = tp.gather_tokens(gradient) if tp.splits_tokens else gradient
        input_gradient = whole.matmul(weight)
        weight_gradient = ctx.sink.add_product(weight, inputs.flatten(0, 1), whole.flatten(0, 1))
        return input_gradient, weight_gradient, None, None


class _ScatterTokens(AutogradFunction):
    """Keep this rank's tokens; backward gathers the gradient of all."""

    @staticmethod
    def forward(ctx: Context, whole: Tensor, tp: TensorParallelGroup) -> Tensor:
        ctx.tp = tp
        return tp.own_tokens(whole)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.gather_tokens(gradient), None


class _GatherTokens(AutogradFunction):
    """The tokens of all ranks; backward sums what they make of this rank's."""

    @staticmethod
    def forward(ctx: Context, local: Tensor, tp: TensorParallelGroup) -> Tensor:
        ctx.tp = tp
        return tp.gather_tokens(local)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.scatter_sum(gradient.contiguous()), None


class _GatherColumns(AutogradFunction):
    """All columns of this rank's tokens; backward gathers tokens and keeps this rank's columns."""

    @staticmethod
    def forward(ctx: Context, values: Tensor, tp: TensorParallelGroup) -> Tensor:
        ctx.tp = tp
        by_rank = tp.gather_tokens(values)
        whole = torch.cat(by_rank.chunk(tp.size), dim=-1)
        del by_rank
        return whole.chunk(tp.size)[tp.rank] if tp.splits_tokens else whole

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        tp = ctx.tp
        whole = tp.gather_tokens(gradient) if tp.splits_tokens else gradient
        return whole.chunk(tp.size, dim=-1)[tp.rank].contiguous(), None


class _SumRanks(AutogradFunction):
    """Sum over the ranks, in place as in Megatron-LM; each part's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Context, partial: Tensor, tp: TensorParallelGroup) -> Tensor:
        # Autograd must know that its input has been overwritten.
        ctx.mark_dirty(partial)
        return tp.sum(partial)

    @staticmethod
    def backward(_ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _ScatterSum(AutogradFunction):
    """This rank's tokens of the sum over the ranks; backward gathers."""

    @staticmethod
    def forward(ctx: Context, partial: Tensor, tp: TensorParallelGroup) -> Tensor:
        ctx.tp = tp
        return tp.scatter_sum(partial)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.gather_tokens(gradient), None


class ColumnLinear(nn.Module):
    """A linear layer with this rank's part of the outputs."""

    def __init__(
        self,
        inputs: int,
        local_outputs: int,
        tp: TensorParallelGroup,
        sink: GradientSink,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(local_outputs, inputs))
        self.bias = nn.Parameter(torch.empty(local_outputs)) if bias else None
        self.tp, self.sink = tp, sink

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``[all tokens, batch, local outputs]``."""
        return column_product(inputs, self.weight, self.bias, self.tp, self.sink)


class RowLinear(nn.Module):
    """A linear layer with this rank's part of the inputs; whoever adds the result adds the bias."""

    def __init__(
        self,
        local_inputs: int,
        outputs: int,
        tp: TensorParallelGroup,
        sink: GradientSink,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, local_inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.tp, self.sink = tp, sink

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sum over the ranks, without the bias."""
        out: Tensor = _RowProduct.apply(inputs, self.weight, self.tp, self.sink)
        return out


def column_product(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallelGroup, sink: GradientSink
) -> Tensor:
    """Return ``inputs weight^T + bias`` for this rank's rows of *weight*."""
    out: Tensor = _ColumnProduct.apply(inputs, weight, bias, tp, sink)
    return out


def gather_columns(values: Tensor, tp: TensorParallelGroup) -> Tensor:
    """Return the columns of all ranks side by side, of this rank's tokens."""
    out: Tensor = _GatherColumns.apply(values, tp) if tp.size > 1 else values
    return out


def gather_tokens(local: Tensor, tp: TensorParallelGroup) -> Tensor:
    """Return the tokens of all ranks, of which each uses all."""
    out: Tensor = _GatherTokens.apply(local, tp) if tp.splits_tokens else local
    return out


def sum_ranks(partial: Tensor, tp: TensorParallelGroup) -> Tensor:
    """Return the sum of *partial* over the ranks."""
    out: Tensor = _SumRanks.apply(partial, tp) if tp.size > 1 else partial
    return out


def scatter_sum(partial: Tensor, tp: TensorParallelGroup) -> Tensor:
    """Return this rank's tokens of the sum of *partial* over the ranks."""
    out: Tensor = _ScatterSum.apply(partial, tp)
    return out


def scatter_tokens(whole: Tensor, tp: TensorParallelGroup) -> Tensor:
    """Return this rank's tokens of what every rank has."""
    out: Tensor = _ScatterTokens.apply(whole, tp)
    return out
