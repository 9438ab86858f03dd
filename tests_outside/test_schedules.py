"""The passes that PyTorch's pipeline runtime runs, in its order, against those of `schedules`."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from meshwright.simulator.schedules import get_schedule
from meshwright.simulator.schedules.actions import Action, Phase
from meshwright.validate.counting import fake_cluster

RUNTIMES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}
SIZES = [
    ("gpipe", 2, 3, 1),
    ("gpipe", 4, 8, 1),
    ("1f1b", 2, 2, 1),
    ("1f1b", 4, 4, 1),
    ("1f1b", 4, 9, 1),
    ("interleaved", 2, 4, 2),
    ("interleaved", 4, 8, 2),
    ("interleaved", 4, 12, 3),
]


@contextmanager
def passes_noted(pp: int) -> Iterator[list[Action]]:
    """Note each pass that a stage runs."""
    noted: list[Action] = []
    forward, backward = PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk

    def run_forward(stage: PipelineStage, chunk: int, *args: object, **kwargs: object) -> object:
        noted.append(Action(Phase.FORWARD, stage.stage_index // pp, chunk))
        return forward(stage, chunk, *args, **kwargs)

    def run_backward(stage: PipelineStage, chunk: int, *args: object, **kwargs: object) -> object:
        noted.append(Action(Phase.BACKWARD, stage.stage_index // pp, chunk))
        return backward(stage, chunk, *args, **kwargs)

    with (
        patch.object(PipelineStage, "forward_one_chunk", run_forward),
        patch.object(PipelineStage, "backward_one_chunk", run_backward),
    ):
        yield noted


def passes_of_pytorch(name: str, rank: int, pp: int, microbatches: int, vpp: int) -> list[Action]:
    """Return the passes of a rank in one step of PyTorch's runtime."""

    def example() -> Tensor:
        return torch.empty((1, 4), device="meta", requires_grad=True)

    with fake_cluster(rank, pp), passes_noted(pp) as noted:
        stages = [
            PipelineStage(
                nn.Linear(4, 4),
                index * pp + rank,
                pp * vpp,
                torch.device("cpu"),
                input_args=(example(),),
                output_args=(example(),),
            )
            for index in range(vpp)
        ]
        schedule = RUNTIMES[name](
            stages if vpp > 1 else stages[0], microbatches, loss_fn=lambda found, _: found.sum()
        )
        batch = torch.ones((microbatches, 4))
        schedule.step(*((batch,) if rank == 0 else ()), target=batch if rank == pp - 1 else None)
    return noted


@pytest.mark.parametrize(("name", "pp", "microbatches", "vpp"), SIZES)
def test_passes_are_run_in_the_order_of_ours(
    name: str, pp: int, microbatches: int, vpp: int
) -> None:
    schedule = get_schedule(name)
    for rank in range(pp):
        ours = schedule.rank_actions(rank, pp, microbatches, vpp)
        assert passes_of_pytorch(name, rank, pp, microbatches, vpp) == ours
