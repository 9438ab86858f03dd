"""The fullest moments of pipeline ranks."""

import numpy as np
import pytest

from meshwright.hwprofiles import PipelineRuntime
from meshwright.planner.space import MessageColumns, fullest_moments
from meshwright.planner.space.moments import PERIODS, PERIODS_OF_MESSAGES
from meshwright.planner.space.pipelines import Pipeline, block_kinds
from meshwright.simulator import load_model
from meshwright.simulator.layout import model_stages
from meshwright.simulator.schedules import get_schedule

GPT2 = load_model("gpt2")  # 12 layers


@pytest.mark.parametrize(("pp", "layers"), [(2, 2), (2, 1), (3, 1), (6, 1)])
@pytest.mark.parametrize("holds", [False, True])
def test_a_few_groups_show_the_moments_of_any_number(pp: int, layers: int, *, holds: bool) -> None:
    kinds = block_kinds(GPT2)
    columns = {kind: number for number, kind in enumerate(kinds)}
    messages = MessageColumns(columns, columns) if holds else None
    for size in (None, pp + 1, 2 * pp):
        schedule = get_schedule("interleaved", PipelineRuntime.MEGATRON_CORE, group_size=size)
        stages = model_stages(GPT2, (layers,) * (12 // layers))
        pipeline = Pipeline(pp, schedule, stages, kinds)
        few = PERIODS_OF_MESSAGES if holds else PERIODS
        numbers = (size or pp) * np.array([few, few + 1, few + 3])
        for role in pipeline.roles:
            moments = fullest_moments(pipeline, role, numbers, messages)
            known = [{*map(tuple, each.tolist())} for each in moments]
            assert known[0] == known[1] == known[2]
