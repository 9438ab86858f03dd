"""Layouts of stages as Megatron-Core itself reads them."""

from random import Random

import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from meshwright.simulator import PlanError
from meshwright.simulator.layout import check_mtp_layers, layout_mtp_stage, read_layout

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


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("Et*4|(t*4|)*14tmL", None),
        ("Et*3|(tt|)*29m|L", 30),
        ("Et*4|(t*4|)*12t*9m||L", 13),
        (f"Et*61m{'|' * 15}L", 0),
    ],
)
def test_layers_that_predict_further_tokens_stand_where_megatron_core_has_them(
    text: str, place: int | None
) -> None:
    """Elsewhere than with the loss it calls them standalone."""
    layout = PipelineParallelLayerLayout(text, 16)
    assert layout.validate_layer_layout(61, 1) is (place is not None)
    stages = theirs(text)
    assert read_layout(text) == tuple(stage.count(LayerType.decoder) for stage in stages)
    predicting = [index for index, stage in enumerate(stages) if LayerType.mtp in stage]
    assert predicting == [len(stages) - 1 if place is None else place]
    assert layout_mtp_stage(text) == place
    check_mtp_layers(text, 1)


@pytest.mark.parametrize("number", [0, 2])
def test_a_layout_has_as_many_of_them_as_the_model(number: int) -> None:
    text = "Et*4|(t*4|)*14tmL"
    with pytest.raises(AssertionError):
        PipelineParallelLayerLayout(text, 16).validate_layer_layout(61, number)
    with pytest.raises(PlanError, match=f"has 1 layer m; allowed: prediction_layers={number}"):
        check_mtp_layers(text, number)


@pytest.mark.parametrize("text", ["tE|L", "Et|t", "LtE", "Et|tLt", "Et|EtL", "Etm|t|L", "Et|tm|mL"])
def test_what_its_validation_refuses_is_refused(text: str) -> None:
    layout = PipelineParallelLayerLayout(text, text.count("|") + 1)
    with pytest.raises(AssertionError):
        layout.validate_layer_layout(text.count("t"), text.count("m"))
    with pytest.raises(PlanError):
        read_layout(text)
