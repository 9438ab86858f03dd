"""A worker that computes gradients, and a server that keeps parameters and updates them."""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.validate.programs.contract import CLIP_NORM, ProgramRequest, token_batch
from meshwright.validate.programs.layers import Ends, LayerOptions, VirtualStage
from meshwright.validate.programs.megatron import (
    DTYPES,
    MegatronParts,
    TensorParallelGroup,
    check_megatron,
    default_dtype,
    fill_weights,
    vocabulary_loss,
)
from meshwright.validate.programs.pytorch import make_optimizer, sum_of_squares
from meshwright.validate.ranks import ByteKind

ALONE = TensorParallelGroup(None, 0, 1, sequence_parallel=False)


class _ReturnedGradient:
    """Accumulator that leaves weight gradients to autograd."""

    def add_product(self, weight: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor:  # noqa: ARG002
        """Return the gradient of *weight*."""
        return gradient.t().mm(inputs)


def whole_model(request: ProgramRequest) -> VirtualStage:
    """Return the whole model in the precision of the job.

    Raises:
        PlanError: If Megatron's layers cannot express it.
    """
    check_megatron(request)
    model, plan = request.job.transformer, request.plan
    dropout = request.dropout if model.dropout else 0.0
    options = LayerOptions(attention=plan.attention, recompute=plan.recompute, dropout=dropout)
    parts = MegatronParts(
        ALONE, _ReturnedGradient(), vocab_size=request.vocab_size, dropout=dropout
    )
    layers = range(model.num_layers)
    with default_dtype(DTYPES[request.job.precision]), request.device:
        stage = VirtualStage(model, layers, options, parts, Ends(embedding=True, head=True))
    if request.initialise:
        fill_weights(stage, model, ALONE, request.vocab_size)
    return stage


@torch.no_grad()
def flattened(stage: VirtualStage) -> Tensor:
    """Return all weights of *stage* as one tensor."""
    return torch.cat([parameter.flatten() for parameter in stage.parameters()])


class Worker:
    """A whole model whose weights, and whose gradients, are one buffer each.

    Args:
        request: Job, plan, stack and rank to build.
        worker: Index of this worker.
        slowdown: Factor by which its computation is slowed.
    """

    def __init__(self, request: ProgramRequest, worker: int, slowdown: float) -> None:
        self._request, self._worker = request, worker
        self._slowdown = slowdown
        self._stage = whole_model(request)
        self.weights = flattened(self._stage)
        self.gradients = torch.zeros_like(self.weights)
        start = 0
        for parameter in self._stage.parameters():
            end = start + parameter.numel()
            # Views, so that one message has all weights, or all gradients.
            parameter.data = self.weights[start:end].view(parameter.shape)
            parameter.grad = self.gradients[start:end].view(parameter.shape)
            start = end

    def compute(self, step: int) -> list[Tensor]:
        """Fill the gradients with those of this worker's batch; return its losses."""
        started_s = time.perf_counter()
        request = self._request
        self.gradients.zero_()
        size = request.plan.microbatch_size
        share = request.job.global_batch_size // request.plan.dp
        losses = []
        for index in range(request.num_microbatches):
            first = self._worker * share + index * size
            sequences = range(first, first + size)
            tokens, targets = token_batch(request.job, step, sequences, request.device)
            losses.append(self._pass(tokens, targets.t().contiguous()))
        if request.initialise and self._slowdown > 1:
            time.sleep((self._slowdown - 1) * (time.perf_counter() - started_s))
        return losses

    def clip(self) -> None:
        """Clip this worker's own gradients."""
        clip_to(self.gradients, sum_of_squares([self.gradients]))

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield weights and gradients."""
        yield self.weights, ByteKind.PARAMETERS
        yield self.gradients, ByteKind.GRADIENTS

    def _pass(self, tokens: Tensor, targets: Tensor) -> Tensor:
        kernel = self._request.stack.loss
        loss = vocabulary_loss(self._stage(tokens), targets, ALONE, kernel=kernel)
        (loss / self._request.num_microbatches).backward()
        return loss.detach()


class Server:
    """A shard of the parameters with the optimizer's states.

    Args:
        weights: The shard's initial values, in the precision of the job.
        sums_gradients: Keep a sum of gradients between updates.
    """

    def __init__(self, weights: Tensor, *, sums_gradients: bool) -> None:
        self.weights = weights
        is_master = weights.dtype is torch.float32
        self._master = torch.nn.Parameter(weights if is_master else weights.float())
        self.sums = torch.zeros_like(weights) if sums_gradients else None
        self._adam = make_optimizer([self._master])

    def add(self, gradient: Tensor) -> None:
        """Add a gradient to the sum."""
        assert self.sums is not None
        self.sums.add_(gradient)

    @torch.no_grad()
    def update_by_mean(self, num_workers: int, group: dist.ProcessGroup | None) -> None:
        """Update by the mean of the summed gradients, clipped by its norm over all servers."""
        assert self.sums is not None
        mean = self.sums.div_(num_workers)
        squares = sum_of_squares([mean])
        if group is not None:
            dist.all_reduce(squares, group=group)
        clip_to(mean, squares)
        self.update(mean)
        mean.zero_()

    def update(self, gradient: Tensor) -> None:
        """Update the shard by one gradient."""
        self._master.grad = gradient.to(self._master.dtype)
        self._adam.step()
        self._master.grad = None
        if self.weights.dtype is not self._master.dtype:
            self.weights.copy_(self._master.detach())

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield the shard, its sum of gradients and the optimizer's states."""
        if self.weights.dtype is not self._master.dtype:
            yield self._master, ByteKind.OPTIMIZER
        yield self.weights, ByteKind.PARAMETERS
        if self.sums is not None:
            yield self.sums, ByteKind.GRADIENTS
        for state in self._adam.state.get(self._master, {}).values():
            yield state, ByteKind.OPTIMIZER


@torch.no_grad()
def clip_to(gradient: Tensor, squares: Tensor) -> None:
    """Scale *gradient* so that a norm of so many *squares* is at most `CLIP_NORM`."""
    gradient.mul_((CLIP_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0))
