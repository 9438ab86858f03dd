"""Action lists against those of the runtimes that run them, made by their own code."""

from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the extra [validate] is not installed")
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import UNSHARD, _add_unshard_reshard

from meshwright.hwprofiles import PipelineRuntime
from meshwright.simulator.schedules import RUNTIMES, count_refetches

OURS = RUNTIMES[PipelineRuntime.PYTORCH]
SIZES = [(pp, count) for pp in (2, 3, 4, 8) for count in range(1, 26)]


def stages(pp: int, vpp: int) -> list[SimpleNamespace]:
    """Return what PyTorch's schedules read of the stages of rank 0."""
    return [
        SimpleNamespace(
            stage_index=index * pp,
            num_stages=pp * vpp,
            group_size=pp,
            group_rank=0,
            is_last=False,
            has_backward=True,
        )
        for index in range(vpp)
    ]


@pytest.mark.parametrize("vpp", [2, 3, 4])
@pytest.mark.parametrize(("pp", "num_microbatches"), SIZES)
def test_interleaved_lists_are_those_that_pytorch_makes(
    pp: int, num_microbatches: int, vpp: int
) -> None:
    schedule = OURS["interleaved"]
    if schedule.refusal(pp, num_microbatches, vpp) is not None:
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            ScheduleInterleaved1F1B(stages(pp, vpp), num_microbatches)  # type: ignore[arg-type]
        return
    made = ScheduleInterleaved1F1B(stages(pp, vpp), num_microbatches)  # type: ignore[arg-type]
    for pp_rank in range(pp):
        theirs = [
            (each.computation_type.value, each.stage_index, each.microbatch_index)
            for each in made.pipeline_order[pp_rank]
            if each is not None
        ]
        assert theirs == [
            (str(phase), virtual_stage * pp + pp_rank, microbatch)
            for phase, virtual_stage, microbatch in schedule.rank_actions(
                pp_rank, pp, num_microbatches, vpp
            )
        ]


@pytest.mark.parametrize(("name", "runtime"), [("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)])
@pytest.mark.parametrize(("pp", "num_microbatches"), SIZES)
def test_single_stage_schedules_take_the_numbers_of_microbatches_that_pytorch_takes(
    name: str, runtime: type, pp: int, num_microbatches: int
) -> None:
    if OURS[name].refusal(pp, num_microbatches, 1) is None:
        runtime(stages(pp, 1)[0], num_microbatches)
    else:
        with pytest.raises(ValueError, match="equal to the number of stages"):
            runtime(stages(pp, 1)[0], num_microbatches)


@pytest.mark.parametrize("vpp", [2, 3, 4, 5, 7])
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 2), (2, 8), (4, 8), (3, 9)])
def test_virtual_stages_are_gathered_as_often_as_pytorch_makes_its_lists_say(
    pp: int, num_microbatches: int, vpp: int
) -> None:
    made = ScheduleInterleaved1F1B(stages(pp, vpp), num_microbatches)  # type: ignore[arg-type]
    for pp_rank in range(pp):
        listed = _add_unshard_reshard(made.pipeline_order[pp_rank])
        theirs = Counter(each.stage_index for each in listed if each.computation_type is UNSHARD)
        actions = OURS["interleaved"].rank_actions(pp_rank, pp, num_microbatches, vpp)
        again = [sum(each) for each in count_refetches(actions, vpp)]
        assert [theirs[pp_rank + pp * index] - 1 for index in range(vpp)] == again
        assert any(again) == (vpp > 3)
