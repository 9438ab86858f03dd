"""Layouts of stages as Megatron-Core itself reads them."""

from random import Random

import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from meshwright.simulator import PlanError
from meshwright.simulator.layout import read_layout

# The first ones are of its own comments and of NVIDIA's recipes.
LAYOUTS = [
    "Ettt|(tt|)*29,L",
    "E|(t|)*4L",
    "Et*3|t*4|L",
    "Et|(tt|)*30L",
    "E|(tt|)*47L",
    "(Et|)*1(tt|ttt|)*3,t*2L",
    "EL",
    "Et*14,L",
    "Et*2|,t*12|t*0t*3|L",
]


def theirs(text: str) -> list[list[LayerType]]:
    stages: list[list[LayerType]] = PipelineParallelLayerLayout.parse_str_to_list(text)
    return stages


def made_up(random: Random) -> str:
    """Return a text of groups, repetitions and commas."""
    parts = []
    for _ in range(random.randrange(1, 6)):
        inside = "".join(random.choice(["t", "|", "t*2", "t*3", ","]) for _ in range(4))
        count = random.randrange(1, 5)
        parts.append(random.choice([inside, f"({inside})*{count}", f"({inside}|)*{count}"]))
    return f"E{''.join(parts)}L"


@pytest.mark.parametrize("text", [*LAYOUTS, *(made_up(Random(seed)) for seed in range(200))])
def test_a_layout_is_read_as_megatron_core_does(text: str) -> None:
    stages = theirs(text)
    assert read_layout(text) == tuple(stage.count(LayerType.decoder) for stage in stages)
    assert (stages[0][0], stages[-1][-1]) == (LayerType.embedding, LayerType.loss)


@pytest.mark.parametrize("text", ["Et*3|(tt|)*29m|L", "Et*4|(t*4|)*14tmL"])
def test_multi_token_prediction_is_refused_by_name(text: str) -> None:
    assert any(LayerType.mtp in stage for stage in theirs(text))
    with pytest.raises(PlanError, match="multi-token prediction"):
        read_layout(text)


@pytest.mark.parametrize("text", ["tE|L", "Et|t", "LtE", "Et|tLt", "Et|EtL"])
def test_what_its_validation_refuses_is_refused(text: str) -> None:
    layout = PipelineParallelLayerLayout(text, 1)
    with pytest.raises(AssertionError):
        layout.validate_layer_layout(text.count("t"), 0)
    with pytest.raises(PlanError):
        read_layout(text)
