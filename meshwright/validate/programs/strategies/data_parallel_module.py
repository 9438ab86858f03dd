"""The program of torch.nn.DataParallel: one process, a replica on each device, all through one.

On one device its copies are made by hand, between parts that play the devices; on several CUDA
devices it is torch.nn.DataParallel itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from meshwright.simulator import PlanError
from meshwright.simulator.engine import TaskKind
from meshwright.validate.programs.contract import ProgramRequest, token_batch
from meshwright.validate.programs.fused import AutogradFunction, Context
from meshwright.validate.programs.layers import VirtualStage
from meshwright.validate.programs.pytorch import (
    LossOfMicrobatch,
    autocast,
    build_stage,
    clip_gradients,
    local_gradients,
    make_optimizer,
    plain_parts,
    refuse_unsupported,
    tie_embeddings,
    trained_tensors,
)
from meshwright.validate.programs.strategies.copies import Devices
from meshwright.validate.ranks import ByteKind


class GradientsOfPass(Protocol):
    """Adds the gradients of one pass of all replicas to those of the module on device 0."""

    def __call__(self, tokens: Tensor, targets: Tensor) -> None:
        """Run forward and backward on a microbatch of each replica."""


def build_data_parallel_module(request: ProgramRequest) -> "DataParallelModuleProgram":
    """Return the program of one process that drives all replicas.

    Raises:
        PlanError: If PyTorch cannot express the request, or lacks the devices.
    """
    refuse_unsupported(request)
    plan = request.plan
    if request.rank != 0:
        raise PlanError(
            f"rank={request.rank} of stack {request.stack.name} does not exist; allowed: 0, "
            f"whose process drives all {plan.dp} devices"
        )
    available = torch.cuda.device_count() if request.device.type == "cuda" else plan.dp
    if available < plan.dp:
        raise PlanError(
            f"dp={plan.dp} needs as many devices in one process; allowed here: at most {available}"
        )
    return DataParallelModuleProgram(request)


class DataParallelModuleProgram:
    """One process: the module and its optimizer on device 0, replicas for the time of a pass.

    Gradients are zeroed, not freed, as in the PyTorch 1.6 that the stack is dated by.

    Args:
        request: Job, plan and stack to build; its rank is 0.
    """

    settling_steps = 1

    def __init__(self, request: ProgramRequest) -> None:
        self._request = request
        self.devices = Devices(request.plan.dp)
        self.stage = whole_stage(request)
        self._optimizer = make_optimizer(self.stage.parameters())
        self._loss = LossOfMicrobatch(request.num_microbatches)
        self._copied: CopiedReplicas | None = None
        self._pass: GradientsOfPass
        if request.device.type == "cuda" and request.plan.dp > 1:
            self._pass = LibraryReplicas(request, self.stage, self._loss)
        else:
            self._copied = CopiedReplicas(request, self.stage, self.devices, self._loss)
            self._pass = self._copied

    @property
    def groups(self) -> Mapping[tuple[int, ...], str]:
        """Empty: one process is in no process group."""
        return {}

    def run_step(self, step: int) -> list[Tensor]:
        """Run one whole training step and return the mean loss of each pass."""
        request = self._request
        size = request.plan.dp * request.plan.microbatch_size
        with self.devices.work_of(0):
            self._optimizer.zero_grad(set_to_none=False)
        for index in range(request.num_microbatches):
            with self.devices.work_of(0):
                sequences = range(index * size, (index + 1) * size)
                tokens, targets = token_batch(request.job, step, sequences, request.device)
            with set_checkpoint_early_stop(request.stack.recompute_stops_early):
                self._pass(tokens, targets)
        with self.devices.work_of(0):
            clip_gradients(local_gradients(self.stage.parameters()), [], None)
            self._optimizer.step()
        return self._loss.take()

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield weights, gradients and the optimizer's states of all devices."""
        for device in range(self.devices.count):
            yield from self.persistent_tensors_on(device)

    def persistent_tensors_on(self, device: int) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield the tensors of a device in a step: all on device 0, copies of weights on others.

        The library's own replicas live within a pass.
        """
        if device == 0:
            yield from trained_tensors(self.stage.parameters(), self._optimizer)
        elif self._copied is not None:
            for parameter in self._copied.replicas[device].parameters():
                yield parameter, ByteKind.PARAMETERS


class LibraryReplicas:
    """DataParallel itself, on the CUDA devices of this process.

    Args:
        request: Number of devices, and precision.
        stage: The module on device 0.
        loss: Of a pass.
    """

    def __init__(
        self, request: ProgramRequest, stage: VirtualStage, loss: LossOfMicrobatch
    ) -> None:
        self._request, self._loss = request, loss
        is_cuda = request.device.type == "cuda"
        self._module: nn.Module = nn.DataParallel(
            stage, device_ids=list(range(request.plan.dp)) if is_cuda else None
        )

    def __call__(self, tokens: Tensor, targets: Tensor) -> None:
        """Run forward and backward on a microbatch of each replica."""
        with autocast(self._request.job.precision, self._request.device.type):
            loss = self._loss(self._module(tokens), targets)
        loss.backward()


class _Gathered(AutogradFunction):
    """Pass the gradient of gathered logits on, and keep nothing of them."""

    @staticmethod
    def forward(
        ctx: Context, whole: Tensor, _start: Tensor, hand_over: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.hand_over = hand_over
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.hand_over(gradient)
        return None, gradient.new_zeros(()), None


class _Waiting(AutogradFunction):
    """Placeholder for logits whose gradient arrives later; keeps only where it comes from."""

    @staticmethod
    def forward(ctx: Context, logits: Tensor, take: Callable[[], Tensor]) -> Tensor:
        ctx.take = take
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Context, _gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.take(), None


class CopiedReplicas:
    """DataParallel on one device, step by step.

    Gradients are added up as `torch.nn.parallel.comm.reduce_add` does with NCCL: into new tensors,
    straight from where they are, while those of device 0's own replica are alive, and only then
    to what earlier passes left.

    Args:
        request: Number of replicas, and precision.
        stage: The module on device 0, and its replica.
        devices: Devices between which copies are made.
        loss: Of a pass.
    """

    def __init__(
        self, request: ProgramRequest, stage: VirtualStage, devices: Devices, loss: LossOfMicrobatch
    ) -> None:
        self._request, self._devices, self._loss = request, devices, loss
        without_values = replace(request, initialise=False)
        self.replicas = [stage, *(whole_stage(without_values) for _ in devices.others)]

    def __call__(self, tokens: Tensor, targets: Tensor) -> None:
        """Run forward and backward on a microbatch of each replica."""
        ids = self._scattered(tokens)
        weights = list(self.replicas[0].parameters())
        for device in self._devices.others:
            route = (TaskKind.BROADCAST, 0, device)
            self._devices.copy_into(route, weights, self.replicas[device].parameters())
        outputs = self._forward(ids)
        arrived: list[Tensor] = []  # the last device's first
        roots: list[Tensor] = [_Waiting.apply(output, arrived.pop) for output in outputs]
        logits_gradients: list[Tensor] = []
        with self._devices.work_of(0):
            loss = self._loss(self._gathered(outputs, logits_gradients), targets)
            loss.backward()
        # Device 0 runs backward first, and pops the last one.
        arrived.extend(reversed(self._scattered(logits_gradients.pop())))
        self._reduce([self._backward(*each) for each in enumerate(roots)])

    def _scattered(self, whole: Tensor) -> list[Tensor]:
        """Return the part of each device; device 0 keeps a view."""
        with self._devices.work_of(0):
            parts = list(whole.chunk(self._devices.count))
        for device in self._devices.others:
            parts[device] = self._devices.copy((TaskKind.SCATTER, 0, device), parts[device])
        return parts

    def _forward(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits of each replica."""
        outputs: list[Tensor] = []
        precision, device_type = self._request.job.precision, self._request.device.type
        for device, (replica, part) in enumerate(zip(self.replicas, ids, strict=True)):
            # Of a replica's weights, which are no leaves, autocast would keep no casts.
            context = autocast(precision, device_type, caches=False)
            with self._devices.work_of(device), context:
                outputs.append(replica(part))
        return outputs

    def _gathered(self, outputs: list[Tensor], logits_gradients: list[Tensor]) -> Tensor:
        """Return the logits of all on device 0, and drop *outputs*.

        Their gradient will be put into *logits_gradients*.
        """
        rows = [output.shape[0] for output in outputs]
        whole = outputs[0].new_empty((sum(rows), *outputs[0].shape[1:]))
        places = whole.split(rows)
        with torch.no_grad():
            places[0].copy_(outputs[0])
        for device in self._devices.others:
            route = (TaskKind.GATHER, device, 0)
            self._devices.copy_into(route, [outputs[device].detach()], [places[device]])
        outputs.clear()
        # Backward needs a leaf that asks for a gradient: *whole* is a plain buffer.
        start = torch.zeros((), device=whole.device, requires_grad=True)
        gathered: Tensor = _Gathered.apply(whole, start, logits_gradients.append)
        return gathered

    def _backward(self, device: int, root: Tensor) -> Sequence[Tensor]:
        """Return the gradients of a replica's weights."""
        with self._devices.work_of(device):
            return torch.autograd.grad(root, list(self.replicas[device].parameters()))

    @torch.no_grad()
    def _reduce(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Add the gradients of all replicas to those of the module."""
        sums = list(gradients[0])
        for device in self._devices.others:
            self._devices.record((TaskKind.REDUCTION, device, 0), gradients[device])
        with self._devices.work_of(0):
            for index, own in enumerate(gradients[0]):
                for device in self._devices.others:
                    arrived = gradients[device][index]
                    sums[index] = own + arrived if device == 1 else sums[index].add_(arrived)
            for weight, total in zip(self.replicas[0].parameters(), sums, strict=True):
                weight.grad = total if weight.grad is None else weight.grad.add_(total)


def whole_stage(request: ProgramRequest) -> VirtualStage:
    """Return the whole model in fp32."""
    parts = plain_parts(
        request.job.transformer,
        vocab_size=request.vocab_size,
        dropout=request.dropout,
        fuses_qkv=request.fuses_qkv,
    )
    stage = build_stage(request, 0, parts, request.device)
    if request.job.transformer.tied_embeddings:
        tie_embeddings(stage)
    return stage
