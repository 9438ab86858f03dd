"""Forward passes beside backward passes, in the order in which Megatron-Core starts their parts."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import pytest
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.pipeline_parallel.combined_1f1b import (
    combined_1f1b_schedule_for_no_pipelining,
)

from meshwright.hwprofiles import PipelineRuntime
from meshwright.simulator.costs import LayerNodes, overlap_saving_ps
from meshwright.simulator.schedules import Action, Phase, get_schedule

COMPUTE, EXCHANGE = "compute", "exchange"


@dataclass
class Streams:
    """Two streams, each of which runs what it is given in order, when what that waits for is done.

    As ScheduleNode has it: a part waits for the one before it of its own pass.
    """

    free: dict[str, int] = field(default_factory=lambda: {COMPUTE: 0, EXCHANGE: 0})
    done: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})

    def part(self, stream: str, whose: str, time_ps: int, *, waits: bool = True) -> None:
        """Start a part; those that nothing waits for leave the pass where it is."""
        ready = self.done[whose] if waits else 0
        self.free[stream] = max(self.free[stream], ready) + time_ps
        if waits:
            self.done[whose] = self.free[stream]


def layer_of(streams: Streams, nodes: LayerNodes) -> SimpleNamespace:
    """Return a layer whose parts take their time on *streams*."""

    def node(stream: str, forward: int, backward: int, later: int = 0) -> SimpleNamespace:
        def runs(whose: str, time_ps: int) -> Callable[[object], object]:
            def run(given: object) -> object:
                if time_ps:
                    streams.part(stream, whose, time_ps)
                return given

            return run

        return SimpleNamespace(
            forward=runs("forward", forward),
            backward=runs("backward", backward),
            backward_dw=lambda: streams.part(stream, "backward", later, waits=False),
        )

    return SimpleNamespace(
        attn=node(COMPUTE, nodes.before, nodes.inputs, nodes.weights),
        moe_dispatch=node(EXCHANGE, nodes.dispatch, nodes.returned),
        mlp=node(COMPUTE, nodes.experts, nodes.expert_inputs, nodes.expert_weights),
        moe_combine=node(EXCHANGE, nodes.combine, nodes.back),
        mtp_post_process=node(COMPUTE, 0, 0),
        config=SimpleNamespace(ep_overlap_early_attn_memory_release=False),
        get_fp8_context=nullcontext,
    )


def layers(random: Random) -> list[LayerNodes]:
    return [
        LayerNodes(*(random.randint(1, 50) for _ in LayerNodes._fields))
        for _ in range(random.randint(1, 4))
    ]


@pytest.mark.parametrize("seed", range(100))
def test_parts_of_a_pair_start_as_megatron_core_starts_them(seed: int) -> None:
    random = Random(seed)
    forward, backward = layers(random), layers(random)
    streams = Streams()
    ahead = [layer_of(streams, each) for each in forward]
    back = [layer_of(streams, each) for each in reversed(backward)]
    count = min(len(ahead), len(back))
    for f, b in zip(ahead, back, strict=False):
        TransformerLayerSchedulePlan.run(f, b, "x", "dy")
    for b in back[count:]:
        TransformerLayerSchedulePlan.run(None, b, b_grad="dy")
    for f in ahead[count:]:
        TransformerLayerSchedulePlan.run(f, None, f_input="x")
    alone = sum(each.forward_ps for each in forward)
    alone += sum(each.backward_ps for each in backward)
    assert overlap_saving_ps(forward, backward) == alone - max(streams.free.values())


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_without_a_pipeline_one_forward_pass_runs_ahead(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "megatron.core.pipeline_parallel.combined_1f1b"
    turns: list[list[Action]] = []

    def step(
        *given: object, current_microbatch: int | None = None, **_: object
    ) -> tuple[None, int, None]:
        forward, backward = given[2], given[6]
        turn = [Action(Phase.FORWARD, 0, int(current_microbatch or 0))] * (forward is not None)
        done = sum(action.phase is Phase.BACKWARD for each in turns for action in each)
        turns.append(turn + [Action(Phase.BACKWARD, 0, done)] * (backward is not None))
        return None, 1, None

    monkeypatch.setattr(f"{module}.combined_forward_backward_step", step)
    monkeypatch.setattr(f"{module}.set_streams", lambda **_: None, raising=False)
    model = object()
    combined_1f1b_schedule_for_no_pipelining(
        *(None, None, model, count, None, None, [], SimpleNamespace(), False, None, False),
        nullcontext,
        0,
        lambda _: False,
    )
    schedule = get_schedule("1f1b", PipelineRuntime.MEGATRON_CORE, beside=True)
    actions, pairs = schedule.rank_actions(0, 1, count, 1), schedule.pairs(0, 1, count, 1)
    assert [action for turn in turns for action in turn] == actions
    starts = [sum(map(len, turns[:place])) for place, turn in enumerate(turns) if len(turn) > 1]
    assert starts == list(pairs)
