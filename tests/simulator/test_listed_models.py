"""Models that list their layers: images and chains, by name and by file."""

from pathlib import Path

import pytest
from torch import nn

from meshwright.hwprofiles import Precision
from meshwright.simulator import PlanError, TrainingJob, count_parameters, load_model
from meshwright.simulator.blocks import model_flops
from meshwright.simulator.model import (
    Bottleneck,
    ChainModel,
    ImageModel,
    list_models,
    parse_any_model,
)

TEXTBOOK: dict[str, object] = {
    "name": "textbook",
    "kind": "chain",
    "linear": [{"inputs": 5, "outputs": 8}, {"inputs": 8, "outputs": 3}],
}
TINY: dict[str, object] = {
    "name": "tiny",
    "kind": "images",
    "image_size": 32,
    "stem_channels": 16,
    "num_classes": 10,
    "blocks": [
        {"count": 2, "inner_channels": 8, "out_channels": 32},
        {"count": 1, "inner_channels": 16, "out_channels": 64, "stride": 2},
    ],
}


def resnet50() -> ImageModel:
    model = load_model("resnet50")
    assert isinstance(model, ImageModel)
    return model


def changed(data: dict[str, object], **fields: object) -> dict[str, object]:
    return {key: value for key, value in {**data, **fields}.items() if value is not None}


def test_resnet50_has_the_published_parameters_and_operations() -> None:
    job = TrainingJob(model=resnet50(), global_batch_size=1, seq_len=1)
    assert count_parameters(resnet50()) == 25_557_032
    assert model_flops(job) == 3 * 2 * 4_089_184_256  # multiply-adds forward, twice that backward


def test_resnet50_has_its_stride_in_the_middle_of_the_first_block_of_a_run() -> None:
    assert resnet50().layers[2:4] == (
        Bottleneck(side=56, in_channels=256, inner_channels=64, out_channels=256, stride=1),
        Bottleneck(side=56, in_channels=256, inner_channels=128, out_channels=512, stride=2),
    )
    assert resnet50().layers[4].side == 28


def test_blocks_that_are_equal_are_one_run() -> None:
    runs = resnet50().layer_runs
    assert [count for _, count in runs] == [1, 2, 1, 3, 1, 5, 1, 2]
    assert resnet50().layer(runs[1].kind) == resnet50().layers[1]


def test_a_chain_has_the_parameters_of_its_matrices() -> None:
    chain = parse_any_model(TEXTBOOK, origin="a.toml")
    modules = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Linear(8, 3, bias=False))
    assert count_parameters(chain) == sum(each.numel() for each in modules.parameters())


def test_a_chain_splits_columns_then_rows_and_leaves_the_last_of_three_whole() -> None:
    run = {"inputs": 4, "outputs": 4, "count": 3, "bias": True, "activation": True}
    chain = parse_any_model(changed(TEXTBOOK, linear=[run]), origin="a.toml")
    assert isinstance(chain, ChainModel)
    assert [each.split for each in chain.layers] == ["columns", "rows", "none"]
    assert chain.split_refusal(2) is None
    assert chain.split_refusal(3) == "layer 0 has 4 outputs, which tp=3 does not divide"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (changed(TINY, image_size=None), "image_size is missing"),
        (changed(TINY, image_sise=7), "unknown key 'image_sise'; nearest: image_size"),
        (changed(TINY, blocks=[]), "blocks=[]: tuple should have at least 1 item"),
        (changed(TINY, blocks=[{"count": 1}]), "blocks.0.inner_channels is missing"),
        (
            changed(TINY, blocks=[{"cuont": 1, "inner_channels": 8, "out_channels": 8}]),
            "unknown key 'blocks.0.cuont'; nearest: count",
        ),
        (changed(TINY, kind="image"), "kind='image'; allowed: transformer, images, chain"),
        (changed(TINY, kind=["images"]), "kind=['images']; allowed: transformer, images, chain"),
        (changed(TINY, name="a\nb"), "name='a\\nb' must be printable, on one line"),
        (
            changed(TEXTBOOK, linear=[{"inputs": 5, "outputs": 8}, {"inputs": 7, "outputs": 3}]),
            "linear.1.inputs=7 does not follow the outputs of the layer before; allowed: 8",
        ),
        (
            changed(TEXTBOOK, linear=[{"inputs": 5, "outputs": 8, "count": 2}]),
            "linear.0.count=2 repeats 5 x 8; allowed: 1, or outputs that equal inputs",
        ),
        (
            changed(TEXTBOOK, linear=[{"inputs": 0, "outputs": 8}]),
            "linear.0.inputs=0: input should be greater than or equal to 1",
        ),
    ],
)
def test_each_mistake_gets_one_line(data: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_any_model(data, origin="a.toml")
    assert str(caught.value).startswith(f"a.toml: {said}")
    assert "\n" not in str(caught.value)


def test_a_file_says_what_kind_of_model_it_describes(tmp_path: Path) -> None:
    path = tmp_path / "chain.toml"
    path.write_text(
        'name = "textbook"\nkind = "chain"\n'
        "[[linear]]\ninputs = 5\noutputs = 8\n[[linear]]\ninputs = 8\noutputs = 3\n"
    )
    assert load_model(str(path)) == parse_any_model(TEXTBOOK, origin="a.toml")


def test_a_transformer_may_say_that_it_is_one() -> None:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "vocab_size": 16, "seq_len": 4}
    plain = parse_any_model({"name": "a", **sizes}, origin="a.toml")
    assert parse_any_model({"name": "a", "kind": "transformer", **sizes}, origin="a.toml") == plain


def test_an_image_is_a_sequence_of_length_1() -> None:
    with pytest.raises(PlanError, match=r"seq_len=2 does not go with resnet50, whose batch counts"):
        TrainingJob(model=resnet50(), global_batch_size=8, seq_len=2, precision=Precision.FP32)


def test_built_in_models_of_all_kinds_are_listed() -> None:
    assert {"resnet50", "gpt2"} <= set(list_models())
