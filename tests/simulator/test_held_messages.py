"""What Megatron-Core's schedules hold of messages, against what its own program held."""

import pytest

from meshwright.hwprofiles import PipelineRuntime
from meshwright.simulator.memory import (
    PipelinePosition,
    RankMemory,
    SentBytes,
    VirtualStageMemory,
    memory_timeline,
)
from meshwright.simulator.memory.held_messages import live_message_counts, max_live_messages
from meshwright.simulator.schedules import get_schedule


def test_interleaved_passes_find_the_messages_that_megatron_core_holds() -> None:
    """Counted pass by pass in core 0.16.1: "megatron interleaved" of the outside plans, rank 2."""
    schedule = get_schedule("interleaved", PipelineRuntime.MEGATRON_CORE)
    sizes = [1, 1, 0, 1]  # output and gradient of each virtual stage
    actions = schedule.rank_actions(1, 2, 4, 2)
    held = zip(
        actions, live_message_counts(actions, PipelinePosition(1, 2), 2) @ sizes, strict=True
    )
    assert " ".join(f"{action}={number}" for action, number in held) == (
        "F0.0=2 F0.1=2 F1.0=0 B1.0=1 F1.1=2 B1.1=3 F0.2=5 B0.0=6 "
        "F0.3=6 B0.1=7 F1.2=3 B1.2=4 F1.3=3 B1.3=3 B0.2=4 B0.3=6"
    )


def test_a_module_holds_its_last_input_and_the_gradient_of_it_over_the_steps_end() -> None:
    """The second of three ranks runs F0 F1 B0 F2 B1 B2; an input is as large as its gradient."""
    actions = get_schedule("1f1b").rank_actions(1, 3, 3, 1)
    virtual_stage = VirtualStageMemory(
        saved_bytes=0,
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
        sent=SentBytes(output=10, gradient=1),
    )
    memory = RankMemory(
        parameters_bytes=0,
        gradients_bytes=0,
        optimizer_states_bytes=0,
        update_temporary_bytes=0,
        virtual_stages=(virtual_stage,),
        p2p_position=PipelinePosition(1, 3),
    )
    events = memory_timeline(memory, [(action, 0, 0) for action in actions], 0)
    assert [each.activations_bytes for each in events] == [0] * 5 + [12, 12] + [1] * 4 + [2, 2]


@pytest.mark.parametrize("group_size", [None, 3, 5, 8])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (3, 4), (4, 2), (6, 3)])
def test_no_rank_holds_more_messages_than_its_modules_and_groups_let_it(
    pp: int, vpp: int, group_size: int | None
) -> None:
    schedule = get_schedule("interleaved", PipelineRuntime.MEGATRON_CORE, group_size=group_size)
    spare = []
    for count in (each for each in range(pp, 5 * pp) if not schedule.refusal(pp, each, vpp)):
        most = max_live_messages(vpp, schedule.group(pp, count) - pp)
        for rank in range(pp):
            actions = schedule.rank_actions(rank, pp, count, vpp)
            held = live_message_counts(actions, PipelinePosition(rank, pp), vpp).sum(axis=1)
            spare.append(most - held.max())
    least = min(spare, default=0)
    assert least == 0 if group_size is None else least >= 0
