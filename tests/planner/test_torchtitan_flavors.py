"""Flavors of torchtitan: what their names mean, and what is said of those that no plan has.

Numbers of parameters are those of torchtitan 0.2.2's own classes on the meta device, with the
model_args of the flavor; buffers, such as the numbers that balance routing, are none.
"""

import json
from pathlib import Path

import pytest

from meshwright.__main__ import main
from meshwright.hwprofiles import load_framework
from meshwright.planner.export.flavors import flavor_model, load_flavors
from meshwright.planner.importing.plans import built_in_name
from meshwright.simulator.model.parameters import count_trained_parameters

PARAMETERS = {
    ("llama3", "debugmodel"): 6163712,
    ("llama3", "8B"): 8030261248,
    ("llama4", "debugmodel"): 15017216,
    ("llama4", "17bx16e"): 107769861120,
    ("llama4", "17bx128e_irope"): 400711848960,
    ("qwen3", "debugmodel"): 31987968,
    ("qwen3", "0.6B"): 596049920,
    ("qwen3", "1.7B"): 1720574976,
    ("qwen3", "4B"): 4022468096,
    ("qwen3", "14B"): 14768307200,
    ("qwen3", "debugmodel_moe"): 315758848,
    ("deepseek_v3", "debugmodel"): 33014016,
    ("deepseek_v3", "16B"): 15706484224,
    ("deepseek_v3", "236B"): 235741434880,
    ("deepseek_v3", "671B"): 671026404352,
}
READ = [
    ('name = "llama3"\n[training]', "", "llama3-debugmodel"),  # the default of JobConfig
    ('flavor = "70B"', "", "llama3-70b"),
    ('name = "qwen3"\nflavor = "0.6B"', "", "qwen3-0.6B"),
    ('name = "llama3"\nflavor = "8B_flex"', "--attention flash", "llama3-8b"),
]
REFUSED = [
    ('name = "llama3"\nflavor = "8B_flex"', "", "has FlexAttention, masked by documents"),
    ('name = "qwen3"\nflavor = "0.7B"', "", "allowed: debugmodel, 0.6B,"),
    # In 0.1.0 update_from_config of TransformerModelArgs took the tokenizer's n_words.
    (
        'flavor = "debugmodel"\ntokenizer_path = "tests/assets/test_tiktoken.model"',
        "",
        "says the vocabulary of such a flavor up to 0.1",
    ),
    ('name = "gpt_oss"\nflavor = "20b"', "", "weights of its layers are bf16"),
    ('name = "llama4"\nflavor = "17bx16e"', "", "is not offered by stack torchtitan"),
    ('name = "deepseek_v3"\nflavor = "debugmodel"', "", "stack torchtitan@0.2 is not known to run"),
    (
        'name = "qwen3"\nflavor = "14B"\n[parallelism]\npipeline_parallel_degree = 2',
        "",
        "allowed: 1 with qwen3",
    ),
]


def imported(model: str, told: str, folder: Path) -> int:
    (folder / "a.toml").write_text(f"[model]\n{model}\n", encoding="utf-8")
    words = ["import", str(folder / "a.toml"), "--cluster", "dgx-h100", "--gpus", "8"]
    return main([*words, *told.split(), "--out", str(folder / "plan.json")])


def test_flavors_have_as_many_parameters_as_in_torchtitan() -> None:
    found = {each: count_trained_parameters(flavor_model(*each, 2048)) for each in PARAMETERS}
    assert found == PARAMETERS


def test_what_is_written_is_read_as_the_same_model() -> None:
    values = load_framework("torchtitan").tables["0.2"].fields["model"].values
    for name, told in values.items():
        assert isinstance(told, dict)
        flavor = str(told["model.name"]), str(told["model.flavor"])
        assert built_in_name(flavor_model(*flavor, 2048)) == name


def test_every_flavor_is_a_model() -> None:
    for name, models in load_flavors().models.items():
        for flavor in models.flavors:
            assert flavor_model(name, flavor, 2048).positions == "rotary"


@pytest.mark.parametrize(("model", "told", "meant"), READ)
def test_a_flavor_is_the_model_of_the_plan(
    model: str, told: str, meant: str, tmp_path: Path
) -> None:
    assert imported(model, told, tmp_path) == 0
    model_of = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["model"]
    assert (model_of if isinstance(model_of, str) else model_of["name"]) == meant


@pytest.mark.parametrize(("model", "told", "said"), REFUSED)
def test_a_flavor_that_no_plan_has_is_refused_with_the_reason(
    model: str, told: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported(model, told, tmp_path) == 2
    assert said in capsys.readouterr().err


def test_a_configuration_of_the_command_is_its_flavor(tmp_path: Path) -> None:
    script = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3"
    options = "--config llama3_debugmodel --training.disable-cuda-graphs"
    (tmp_path / "a.sh").write_text(f"{script} {options}\n", encoding="utf-8")
    words = ["import", str(tmp_path / "a.sh"), "--cluster", "dgx-h100"]
    assert main([*words, "--out", str(tmp_path / "plan.json")]) == 0
    saved = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert saved["model"]["name"] == "llama3-debugmodel"
    assert saved["job"]["global_batch_size"] == 64
