"""The passes that frameworks' own pipeline runtimes run, in their order, against `schedules`."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from witnesses.boundary import gpu_answers

from meshwright.hwprofiles import PipelineRuntime
from meshwright.simulator.schedules import core_group, get_schedule
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


# Ranks, microbatches, virtual stages, and microbatches in a row; None as few as it takes.
GROUPS = [
    (2, 4, 2, None),
    (2, 5, 2, None),
    (2, 8, 2, 3),
    (2, 8, 2, 8),
    (4, 10, 3, None),
    (4, 10, 3, 6),
    (4, 12, 2, 4),
    (4, 12, 2, 8),
    (4, 12, 2, 12),
    (4, 21, 4, 17),
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


def passes_of_megatron(
    rank: int, pp: int, count: int, vpp: int, group: int, *, beside: bool = False
) -> list[Action]:
    """Return the passes of a rank by Megatron-Core's table and its number of warm-up passes."""
    ranks = SimpleNamespace(size=lambda: pp, rank=lambda: rank)
    messages = SimpleNamespace(pp_group=ranks, virtual_pipeline_model_parallel_size=vpp)
    table = schedules.get_schedule_table(count, vpp, group)
    _, _, warmup, rest = schedules.get_pp_rank_microbatches(
        count,
        vpp,
        group,
        overlap_moe_expert_parallel_comm=beside,
        p2p_communicator=messages,
    )
    forward = [Action(Phase.FORWARD, stage, microbatch) for microbatch, stage in table]
    backward = [Action(Phase.BACKWARD, vpp - 1 - stage, at) for at, stage in table]
    steady = zip(forward[warmup:], backward, strict=False)
    return [*forward[:warmup], *chain(*steady), *backward[rest:]]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("pp", "microbatches", "vpp", "group"), GROUPS)
def test_passes_go_in_the_groups_of_megatron_core(
    pp: int, microbatches: int, vpp: int, group: int | None, *, beside: bool
) -> None:
    runtime = PipelineRuntime.MEGATRON_CORE
    schedule = get_schedule("interleaved", runtime, group, beside=beside)
    size = group or core_group(pp, microbatches)
    assert size is not None
    for rank in range(pp):
        ours = schedule.rank_actions(rank, pp, microbatches, vpp)
        assert passes_of_megatron(rank, pp, microbatches, vpp, size, beside=beside) == ours


def is_taken(pp: int, microbatches: int, group: int) -> bool:
    """Return whether Megatron-Core begins a step in groups of such a size."""
    ranks = SimpleNamespace(size=lambda: pp, rank=lambda: 0)
    config = ModelParallelConfig(
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.bfloat16,
        microbatch_group_size_per_vp_stage=group,
    )
    config.hidden_size = 4
    messages = SimpleNamespace(pp_group=ranks, config=config)
    names = ("tp", "cp", "embd", "pos_embd", "pp", "dp_cp")
    with (
        gpu_answers(),
        patch.object(torch.cuda, "Event"),
        patch.object(schedules, "get_model_config", lambda _: config),
        patch.object(schedules, "get_model_type", lambda _: None),
        patch.object(schedules, "get_pp_rank_microbatches", side_effect=StopIteration),
    ):
        try:
            schedules.forward_backward_pipelining_with_interleaving(
                forward_step_func=None,
                data_iterator=[None] * 2,
                model=[nn.Identity()] * 2,
                num_microbatches=microbatches,
                seq_length=4,
                micro_batch_size=1,
                p2p_communicator=messages,
                pg_collection=SimpleNamespace(**dict.fromkeys(names, ranks)),
            )
        except StopIteration:
            return True
        except (ValueError, RuntimeError) as refused:
            said = str(refused)
    return "micro-batches" not in said


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("microbatches", range(2, 14))
def test_megatron_core_takes_the_groups_that_are_not_refused(pp: int, microbatches: int) -> None:
    for group in range(1, 16):
        schedule = get_schedule("interleaved", PipelineRuntime.MEGATRON_CORE, group)
        is_allowed = schedule.refusal(pp, microbatches, 2) is None
        assert is_taken(pp, microbatches, group) == is_allowed
