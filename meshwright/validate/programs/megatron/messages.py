"""Messages between the stages of a pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.simulator import ResolvedPlan
from meshwright.simulator.schedules import Phase
from meshwright.validate.programs.megatron.tensor_parallel import TensorParallelGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """The ranks of a pipeline, and a group for each kind of message.

    On NCCL the messages between two ranks go one after the other, in the order in which both ask
    for them. With groups of their own for activations and gradients, and for those that return
    from one end of the pipeline to the other, that is the order in which they are needed. (Of two
    ranks with virtual stages each sends activations to the other: in one group both would wait.)

    Args:
        ranks: All of them, in the order of stages.
        index: Index of this rank.
        groups: By direction (1 for activations) and whether the message returns; empty for one.
    """

    ranks: tuple[int, ...]
    index: int
    groups: Mapping[tuple[int, bool], dist.ProcessGroup]

    def peer(self, distance: int) -> int:
        """Return the rank *distance* places on."""
        return self.ranks[(self.index + distance) % len(self.ranks)]

    def returns(self, distance: int) -> bool:
        """Return True if the rank *distance* places on is at the other end."""
        return not 0 <= self.index + distance < len(self.ranks)


class PipelineMessages:
    """Messages of one rank; a sent tensor is kept until it has left."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.neighbours = neighbours
        self._leaving: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, distance: int) -> None:
        """Send *tensor* to the rank next to it: *distance* is 1 or -1."""
        neighbours = self.neighbours
        group = neighbours.groups[distance, neighbours.returns(distance)]
        work = dist.isend(tensor, dst=neighbours.peer(distance), group=group)
        assert work is not None
        # Tensors whose messages have left may be freed.
        self._leaving = [item for item in self._leaving if not item[0].is_completed()]
        if not work.is_completed():
            self._leaving.append((work, tensor))

    def receive(self, buffer: Tensor, distance: int) -> Tensor:
        """Return *buffer*, filled by the rank *distance* places on."""
        neighbours = self.neighbours
        group = neighbours.groups[-distance, neighbours.returns(distance)]
        work = dist.irecv(buffer, src=neighbours.peer(distance), group=group)
        assert work is not None
        work.wait()
        return buffer

    def flush(self) -> None:
        """Wait until every message has left."""
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()


class Streams(NamedTuple):
    """Token streams in a virtual stage's inputs and outputs."""

    received: int
    sent: int


def stage_streams(plan: ResolvedPlan, index: int, number: int) -> list[Streams] | None:
    """Return the token streams that each virtual stage receives and sends; None if always one.

    There are *number* behind the MTP layers, where these are not with the head.
    """
    place = plan.prediction_stage
    if place is None:
        return None
    return [
        Streams(number if stage > place else 1, number if stage >= place else 1)
        for stage in range(index, plan.num_stages, plan.pp)
    ]


class ActivationMessages:
    """Activations and gradients, whole or in parts.

    Args:
        messages: Sends and receives of this rank.
        shape: Of one stream of an activation that one rank holds.
        streams: Of each virtual stage; sizes go ahead of messages where they are not all alike.
        like: A tensor with the messages' precision and device.
        tp: Who shares the activation, where each rank sends a part of it and the receivers
            gather it (Narayanan et al. 2021, section 4.1); None to send it whole.
    """

    def __init__(
        self,
        messages: PipelineMessages,
        shape: tuple[int, ...],
        streams: Sequence[Streams] | None,
        like: Tensor,
        tp: TensorParallelGroup | None,
    ) -> None:
        self.messages, self.shape, self.streams, self.tp = messages, shape, streams, tp
        self.dtype, self.device = like.dtype, like.device

    def send(self, value: Tensor, distance: int) -> None:
        """Send *value* to the rank *distance* places on."""
        if self.tp is not None:
            value = self.tp.own_tokens(value)
        if self.streams is not None:
            # As `_communicate_shapes` of Megatron-Core's p2p_communication.py.
            self.messages.send(torch.tensor(value.shape, device=self.device), distance)
        self.messages.send(value.contiguous(), distance)

    def buffer(self, phase: Phase, virtual_stage: int) -> Tensor:
        """Return the buffer for the message of a pass through a virtual stage."""
        parts = 1 if self.tp is None else self.tp.size
        streams = Streams(1, 1) if self.streams is None else self.streams[virtual_stage]
        number = streams.received if phase is Phase.FORWARD else streams.sent
        shape = (number * self.shape[0] // parts, *self.shape[1:])
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def receive(self, distance: int, buffer: Tensor) -> Tensor:
        """Return the next message of the rank *distance* places on, in *buffer*."""
        if self.streams is not None:
            sizes = torch.empty(buffer.dim(), dtype=torch.long, device=self.device)
            self.messages.receive(sizes, distance)
        value = self.messages.receive(buffer, distance)
        return value if self.tp is None else self.tp.gather_tokens(value)
