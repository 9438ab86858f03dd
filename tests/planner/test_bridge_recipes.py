"""Recipes of Megatron Bridge: a launch starts from what they set, and nothing of them is guessed.

Expected values are read from v0.6.0 of NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/recipes.
"""

import json
from pathlib import Path

import pytest

from meshwright import main
from meshwright.planner.configuration import load_options
from meshwright.planner.export import bridge_recipe, export_plan, get_framework, load_recipes
from meshwright.planner.reports import json_text, plan_document
from meshwright.simulator import load_model
from meshwright.validate.cli import plan_of_options

OWN_VOCABULARY = "tokenizer.use_tokenizer_vocab_size=false"
LLAMA, QWEN = "llama3_8b_pretrain_config", "qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config"
# By recipe: devices, and what its function says. llama/h100/llama3.py, qwen/h100/qwen2.py,
# qwen/h100/qwen3_moe.py and gpt_oss/h100/gpt_oss.py; batches of the second two are of common.py.
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "llama3_70b_pretrain_config": (
        64,
        {
            "tp": 4,
            "pp": 4,
            "num_virtual_stages": 5,
            "cp": 2,
            "sequence_parallel": True,
            "microbatch_size": 1,
            "global_batch_size": 512,
            "seq_len": 8192,
            "recompute": "none",
            "precision": "bf16",
        },
    ),
    "llama31_405b_pretrain_config": (
        256,
        {
            "tp": 8,
            "pp": 8,
            "num_virtual_stages": 2,
            "cp": 4,
            "stages": [7, *[8] * 14, 7],
            "global_batch_size": 512,
            "seq_len": 131072,
            "microbatch_size": 1,
        },
    ),
    "qwen2_72b_pretrain_config": (
        32,
        {
            "tp": 8,
            "pp": 4,
            "cp": 1,
            "sequence_parallel": False,
            "stages": [20] * 4,
            "microbatch_size": 2,
            "global_batch_size": 32,
            "seq_len": 4096,
        },
    ),
    QWEN: (
        8,
        {
            "tp": 4,
            "pp": 2,
            "ep": 4,
            "etp": 1,
            "sequence_parallel": True,
            "dispatcher": "deepep",
            "recompute": "full",
            "microbatch_size": 2,
            "global_batch_size": 32,
            "seq_len": 4096,
        },
    ),
    "gpt_oss_20b_pretrain_config": (
        16,
        {
            "tp": 2,
            "pp": 4,
            "ep": 4,
            "etp": 1,
            "sequence_parallel": True,
            "dispatcher": "all-to-all",
            "recompute": "none",
            "microbatch_size": 1,
            "global_batch_size": 512,
        },
    ),
}


def launch(words: str, gpus: int, folder: Path, *told: str) -> int:
    """Return the status of an import of a launch of run_recipe.py, into ``plan.json``."""
    nodes, ranks = max(1, gpus // 8), min(8, gpus)
    file = folder / "launch.sh"
    ranks_of_all = f"--nnodes={nodes} --nproc_per_node={ranks}"
    start = f"uv run --no-sync python -m torch.distributed.run {ranks_of_all} run_recipe.py"
    file.write_text(f"{start} \\\n  {words}\n")
    out = ["--out", str(folder / "plan.json")]
    return main(["import", str(file), "--cluster", "dgx-h100", *told, *out])


def plan_of(folder: Path) -> dict[str, object]:
    """Return the fields of ``plan.json``, with those of its job."""
    document = json.loads((folder / "plan.json").read_text())
    return {**document["plan"], **document["job"]}


@pytest.mark.parametrize("recipe", LAYOUTS)
def test_a_launch_without_overrides_is_the_layout_of_its_recipe(
    recipe: str, tmp_path: Path
) -> None:
    gpus, expected = LAYOUTS[recipe]
    assert launch(f"--recipe {recipe} {OWN_VOCABULARY}", gpus, tmp_path) == 0
    found = plan_of(tmp_path)
    assert {name: found[name] for name in expected} == expected


def test_an_option_goes_above_the_recipe_and_an_override_above_the_option(tmp_path: Path) -> None:
    words = f"--recipe {LLAMA} model.context_parallel_size=1 -cp 4 -tp 4 -gb 128 {OWN_VOCABULARY}"
    assert launch(words, 8, tmp_path) == 0
    found = plan_of(tmp_path)
    assert [found[each] for each in ("tp", "cp", "dp", "global_batch_size")] == [4, 1, 2, 128]


def test_a_recipe_trains_the_vocabulary_of_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DEFAULT_NULL_TOKENIZER_VOCAB_SIZE of utils/tokenizer_utils.py is 32000."""
    assert (
        launch(f"--model {LLAMA.removesuffix('_pretrain_config')} --mode pretrain", 2, tmp_path)
        == 0
    )
    assert launch(f"--recipe {LLAMA}", 2, tmp_path, "--model", "llama3-8b") == 2
    assert "vocab_size 32000, not 128256" in capsys.readouterr().err


@pytest.mark.parametrize("told", ["qwen3-8b", "deepseek-v3"])
def test_a_model_given_beside_a_recipe_is_compared_with_its_own(
    told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3 4B has 36 layers of width 2560, 32 heads, 8 key heads; moonlight has 27 layers."""
    recipe = {"qwen3-8b": "qwen3_4b", "deepseek-v3": "moonlight_16b"}[told]
    words = f"--model {recipe} --mode pretrain"
    assert launch(words, 8, tmp_path, "--model", told) == 2
    said = {"qwen3-8b": "hidden_size 2560, not 4096", "deepseek-v3": "num_layers 61, not 27"}[told]
    assert said in capsys.readouterr().err


REFUSED = [
    ("--recipe llama3_8b_pretrain_confg", LLAMA),
    ("--recipe llama3_8b_sft_config", "it fine-tunes"),
    ("--recipe qwen3_vl_8b_pretrain_mock_config", "its model sees images"),
    ("--recipe nemotronh_8b_pretrain_config", "Mamba"),
    ("--recipe kimi_k2_pretrain_config", "Muon"),
    ("--recipe qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config", "the benchmark of that name"),
    ("--recipe qwen3_30b_a3b_pretrain_config", "cuda_graph_scope=moe_preprocess,moe_router"),
    ("model.tensor_model_parallel_size=2", "--recipe is missing"),
    (f"--recipe {LLAMA} --mode lora", "mode=lora"),
    (f"--recipe {LLAMA} --deterministic", "deterministic"),
    (f"--recipe {LLAMA} --tensor_model_parallel_sise 2", "tensor-model-parallel-size"),
    (f"--recipe {LLAMA} model.tensor_model_parallel_sise=2", "model.tensor_model_parallel_size"),
    (f"--recipe {LLAMA} model.num_layers=4", "allowed: the recipe's"),
    (f"--recipe {LLAMA} optimizer.optimizer=dist_muon", "allowed: adam"),
    (f"--recipe {LLAMA} comm_overlap.tp_comm_overlap=true", "comm_overlap is no section"),
    (f"--recipe {LLAMA} mixed_precision.grad_reduce_in_fp32=false", "mixed_precision is no sec"),
    (f"--recipe {LLAMA} ~model.recompute_granularity=full", "is no override"),
    (f"--recipe {LLAMA} tensor_model_parallel_size=2", "is no override"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_no_plan_says_is_refused_by_name(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(f"{words} {OWN_VOCABULARY}", 8, tmp_path) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "plan.json").exists()


def test_comm_overlap_of_a_recipe_overwrites_what_ddp_says(tmp_path: Path) -> None:
    """_get_optimizer_overlap_cfgs of training/comm_overlap.py; llama3_70b has such a section."""
    told = {}
    for gpus, words in [
        (32, ""),
        (64, "ddp.overlap_grad_reduce=false"),
        (64, "comm_overlap.overlap_grad_reduce=false"),
    ]:
        recipe = f"--recipe llama3_70b_pretrain_config {OWN_VOCABULARY}"
        assert launch(f"{recipe} {words}", gpus, tmp_path) == 0
        told[gpus, words] = (tmp_path / "plan.json").read_text()
    assert all('"gradient_bucket_parameters": 134217728' in each for each in told.values())
    off = '"overlap_gradient_reduce": false'
    assert [off in each for each in told.values()] == [True, False, True]


EXPORTED = [
    "llama2-7b --tp 2 --sequence-parallel",
    "llama3-8b --tp 2 --sequence-parallel --cp 2",
    "llama3-70b --tp 8 --pp 2 --vpp 2 --sequence-parallel",
    "llama3-70b --tp 8 --pp 2 --zero 0",
    "llama3-405b --tp 8 --pp 9 --sequence-parallel --moment-precision bf16",
    "qwen2-72b --tp 8 --pp 4",
    "qwen3-8b --cp 2",
    "qwen3-32b --tp 8 --sequence-parallel --recompute selective",
    "qwen3-30b-a3b --ep 8",
    "qwen3-235b-a22b --pp 2 --ep 8 --dispatcher hybridep",
]


@pytest.mark.parametrize("words", EXPORTED)
def test_an_exported_plan_overrides_all_that_its_recipe_sets(words: str, tmp_path: Path) -> None:
    gpus, batch = ("288", "1152") if "--pp 9" in words else ("256", "1024")
    job = f"{words} --gpus {gpus} --global-batch {batch} --seq-len 4096"
    saved = plan_of_options(job, "dgx-h100")
    file = tmp_path / "run.sh"
    (text,) = export_plan(saved, get_framework("megatron-bridge")).files.values()
    file.write_text(text)
    told = ["--cluster", "dgx-h100", "--gpus", gpus, "--model", words.split(maxsplit=1)[0]]
    out = tmp_path / "again.json"
    assert main(["import", str(file), *told, "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == json.loads(json_text(plan_document(saved)))


def test_every_key_of_a_recipe_is_one_of_its_options() -> None:
    options = load_options("megatron-bridge-0.6")
    recipes = load_recipes("megatron-bridge-0.6")
    assert {key for each in recipes.known.values() for key in each.keys} <= {*options}
    models = {each.model for each in recipes.known.values()} - {""}
    assert all(load_model(each) for each in models)
    assert bridge_recipe("llama3_8b_pretrain_2gpu_h100_bf16_config") is bridge_recipe(LLAMA)
