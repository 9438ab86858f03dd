"""Contiguous weights and gradients of a virtual stage, cut into buckets, as Megatron-Core has them.

Weights lie in the buffers in reverse order of the model, so that backward fills them from the
front; a bucket is closed once it holds the stack's bucket size (`param_and_grad_buffer.py` of
Megatron-Core 0.8, 2024).
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.hwprofiles import StackProfile
from meshwright.simulator.replication import bucket_limit
from meshwright.validate.programs.context import all_gather, reduce_scatter
from meshwright.validate.programs.fused import accumulate_weight_gradient
from meshwright.validate.programs.megatron.tensor_parallel import TensorParallelGroup


@dataclass(frozen=True, slots=True)
class DataParallelGroup:
    """The ranks that hold the same weights; ``group`` is None where there is only one.

    Args:
        group: These ranks, or those of them that share one set of the optimizer's states.
        rank: Index of this one among all that hold the same weights.
        size: Ranks of the group.
        num_batches: Parts of a batch over which gradients are averaged: an expert sees tokens of
            ranks with other experts, too.
        replicas: The ranks with the same shard of the states; None where there is only one.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    num_batches: int
    replicas: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BucketEntry:
    """Weight, its range in a bucket, and whether other tensor-parallel ranks hold it, too."""

    parameter: nn.Parameter
    start: int
    end: int
    is_duplicate: bool


@dataclass(kw_only=True, slots=True, eq=False)
class ParameterBucket:
    """Bucket of a virtual stage: weights, gradients, and the weights still without one."""

    weights: Tensor
    gradients: Tensor
    entries: tuple[BucketEntry, ...]
    waiting: set[nn.Parameter] = field(default_factory=set)

    def shard(self, dp: DataParallelGroup) -> slice:
        """Return the part of the bucket that this rank updates."""
        size = self.weights.numel() // dp.size
        shard = dp.rank % dp.size
        return slice(shard * size, (shard + 1) * size)


class BucketRule(NamedTuple):
    """Ends of buckets: once they hold *limit* weights, and around the weight *alone*."""

    limit: int
    alone: nn.Parameter | None

    @classmethod
    def of(
        cls, stack: StackProfile, dp: int, *, is_first: bool, far_embedding: nn.Parameter | None
    ) -> "BucketRule":
        """Return the rule of a virtual stage.

        Args:
            stack: Software stack.
            dp: Data-parallel ranks.
            is_first: Whether it is the model's first.
            far_embedding: A sharded embedding whose other copy is on another stage. It has a bucket
                of its own, so that the same data-parallel rank owns the same part of both.
        """
        # Without overlap nothing is gained by more than one bucket.
        if not stack.overlap_gradient_reduce:
            return cls(sys.maxsize, None)
        in_one = stack.buckets_first_stage_only and not is_first
        return cls(sys.maxsize if in_one else bucket_limit(stack, dp), far_embedding)


class StageBuffers:
    """Weights of one virtual stage in buckets; accumulates the gradients of their GEMMs.

    Args:
        weights: Weights in the order of the model; they become views of the buffers.
        stack: Bucket size, gradient width, fusion and overlap.
        dp: Over whom gradients are reduced.
        shards: Whether each rank keeps a part alone (the distributed optimizer).
        is_duplicate: True of weights that another rank counts in the gradient norm.
        rule: Ends of its buckets.
    """

    def __init__(
        self,
        weights: Iterable[nn.Parameter],
        stack: StackProfile,
        dp: DataParallelGroup,
        *,
        shards: bool,
        is_duplicate: Callable[[nn.Parameter], bool],
        rule: BucketRule,
    ) -> None:
        self.stack, self.dp, self.shards = stack, dp, shards
        self.last_pass = False
        parameters = list(dict.fromkeys(reversed(list(weights))))
        groups = _bucketed(parameters, rule)
        self.buckets = [self._bucket(group, is_duplicate) for group in groups]
        self._places = {
            entry.parameter: (bucket, entry) for bucket in self.buckets for entry in bucket.entries
        }
        self.shared: set[nn.Parameter] = set()
        self.num_products: dict[nn.Parameter, int] = {}  # in a pass, where they are several
        self._num_added: Counter[nn.Parameter] = Counter()
        # Dummy `.grad` of fused weight-gradient accumulation, shared by all virtual stages.
        self.dummy_gradients: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return True if *parameter* is one of this virtual stage."""
        return parameter in self._places

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient of *parameter*, a view of its bucket."""
        bucket, entry = self._places[parameter]
        return bucket.gradients[entry.start : entry.end].view(parameter.shape)

    def add_product(self, weight: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor | None:
        """Add ``gradient^T inputs`` to the gradient of *weight*, or return it if not fused."""
        if not self.stack.fused_gradient_accumulation:
            return gradient.t().mm(inputs)
        assert isinstance(weight, nn.Parameter)
        accumulate_weight_gradient(self.gradient_of(weight), inputs, gradient)
        if self.stack.keeps_stand_ins:
            key = (weight.shape, weight.dtype)
            if key not in self.dummy_gradients:
                self.dummy_gradients[key] = torch.empty_like(weight)
        self._num_added[weight] += 1
        # A weight of several GEMMs (logits of MTP) is ready after the last of them.
        is_last = self._num_added[weight] % self.num_products.get(weight, 1) == 0
        if is_last and weight not in self.shared:
            self._is_ready(weight)
        return None

    def start_step(self) -> None:
        """Forget the gradients of the step before."""
        for bucket in self.buckets:
            bucket.gradients.zero_()
            bucket.waiting = {entry.parameter for entry in bucket.entries}

    def finish(self) -> None:
        """Reduce the buckets that were not reduced under the last backward pass."""
        if not self.stack.overlap_gradient_reduce:
            for bucket in self.buckets:
                self._reduce(bucket)

    def gather(self) -> None:
        """All-gather the weights, of which each rank has updated its shard."""
        if not self.shards or self.dp.size == 1:
            return
        for bucket in self.buckets:
            own = bucket.weights[bucket.shard(self.dp)]
            all_gather(bucket.weights, own, self.dp.group)

    def _bucket(
        self, parameters: Sequence[nn.Parameter], is_duplicate: Callable[[nn.Parameter], bool]
    ) -> ParameterBucket:
        entries, start = [], 0
        for parameter in parameters:
            end = start + parameter.numel()
            entries.append(
                BucketEntry(
                    parameter=parameter, start=start, end=end, is_duplicate=is_duplicate(parameter)
                )
            )
            start = end
        parts = self.dp.size if self.shards else 1
        # Padded, so that all ranks have equal shards.
        size = -(-start // parts) * parts
        first = parameters[0]
        fp32 = first.dtype is torch.float32
        dtype = torch.float32 if fp32 else _float_of(self.stack.gradient_bytes, first.dtype)
        weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        for each in entries:
            # Parameters become views, so that one collective serves the whole bucket.
            view = weights[each.start : each.end].view(each.parameter.shape)
            view.copy_(each.parameter.data)
            each.parameter.data = view
        return ParameterBucket(
            weights=weights,
            gradients=torch.zeros(size, dtype=dtype, device=first.device),
            entries=tuple(entries),
        )

    def _accumulated(self, parameter: Tensor) -> None:
        """Add a gradient that autograd has made to its bucket, and free it."""
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:
            return
        self.gradient_of(parameter).add_(parameter.grad)
        parameter.grad = None
        self._is_ready(parameter)

    def _is_ready(self, parameter: nn.Parameter) -> None:
        # Gradients of earlier microbatches are summed locally: the last pass alone reduces.
        if not (self.last_pass and self.stack.overlap_gradient_reduce):
            return
        bucket, _ = self._places[parameter]
        bucket.waiting.discard(parameter)
        if not bucket.waiting:
            self._reduce(bucket)

    def _reduce(self, bucket: ParameterBucket) -> None:
        """Average a bucket over data-parallel ranks; with shards, this rank's shard alone."""
        if self.dp.num_batches == 1:
            return
        own = gradients = bucket.gradients.mul_(1 / self.dp.num_batches)
        if self.shards:
            own = gradients[bucket.shard(self.dp)]
            reduce_scatter(own, gradients, self.dp.group)
        elif self.dp.size > 1:
            dist.all_reduce(gradients, group=self.dp.group)
        if self.dp.replicas is not None:
            dist.all_reduce(own, group=self.dp.replicas)


def _float_of(num_bytes: int, narrow: torch.dtype) -> torch.dtype:
    return torch.float32 if num_bytes == 4 else narrow


def _bucketed(parameters: Sequence[nn.Parameter], rule: BucketRule) -> list[list[nn.Parameter]]:
    """Return *parameters* in buckets, cut as *rule* says."""
    buckets: list[list[nn.Parameter]] = []
    is_open = False
    for parameter in parameters:
        if not is_open or parameter is rule.alone:
            buckets.append([])
        buckets[-1].append(parameter)
        is_full = sum(each.numel() for each in buckets[-1]) >= rule.limit
        is_open = not is_full and parameter is not rule.alone
    return buckets


def all_reduce_unsplit_gradients(
    buffers: Sequence[StageBuffers], unsplit: Sequence[nn.Parameter], tp: TensorParallelGroup
) -> None:
    """All-reduce, as one, the gradients of weights that saw only a rank's own tokens or heads.

    With sequence parallelism norms and the biases of row layers are such weights: each tensor
    rank holds them whole.  Without it norms of each head of queries and keys are.
    """
    if tp.size == 1 or not unsplit:
        return
    views = [gradient_view(buffers, parameter) for parameter in unsplit]
    flat = torch.cat([view.flatten() for view in views])
    tp.sum(flat)
    for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
        view.copy_(part.view(view.shape))


def all_reduce_tied_embedding(
    buffers: Sequence[StageBuffers], table: nn.Parameter, ends: dist.ProcessGroup
) -> None:
    """All-reduce the gradients of an embedding that first and last stage both hold."""
    dist.all_reduce(gradient_view(buffers, table), group=ends)


def gradient_view(buffers: Sequence[StageBuffers], parameter: nn.Parameter) -> Tensor:
    """Return the gradient of *parameter* in the buffers that have it."""
    return next(each.gradient_of(parameter) for each in buffers if each.holds(parameter))
