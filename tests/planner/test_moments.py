"""The fullest moments of pipeline ranks."""

import numpy as np
import pytest

from meshwright.hwprofiles import PipelineRuntime
from meshwright.planner.footprint.pass_table import RolePasses, pass_table
from meshwright.simulator.memory import RankOrder
from meshwright.simulator.schedules import get_schedule


@pytest.mark.parametrize(
    ("pp", "kinds"), [(2, (0, 1, 2)), (2, (0,) * 6), (3, (0, 1, 1, 2)), (6, (0, 1))]
)
@pytest.mark.parametrize("holds", ["nothing", "messages", "units"])
def test_a_few_groups_show_the_moments_of_any_number(
    pp: int, kinds: tuple[int, ...], holds: str
) -> None:
    runtime = PipelineRuntime.PYTORCH if holds == "units" else PipelineRuntime.MEGATRON_CORE
    for size in (None,) if holds == "units" else (None, pp + 1, 2 * pp):
        schedule = get_schedule("interleaved", runtime, group_size=size)
        units = holds == "units"
        order = RankOrder(kinds, moves_states=units, keeps_units=units)
        passes = RolePasses(schedule, pp, order, holds == "messages")
        few = passes.few_microbatches(0, 100 * (size or pp))
        for rank in range(pp):
            orders = [few + more * (size or pp) for more in (0, 1, 3)]
            tables = [pass_table(passes, rank, number) for number in orders]
            columns = np.unique(np.concatenate([table.columns for table in tables]))
            sizes = np.random.default_rng(rank).integers(0, 1000, (40, 1 + columns.max()))
            most = [
                table.most_dynamic(sizes[:, table.columns], np.full(40, orders[-1])).tolist()
                for table in tables
            ]
            assert most[0] == most[1] == most[2]
