"""Plans as configurations of frameworks: there and back, and what is refused."""

import ast
import json
import os
import shlex
import tomllib
from itertools import product
from pathlib import Path

import pytest

from meshwright import main
from meshwright.planner.export import FRAMEWORKS, export_plan
from meshwright.planner.export.registry import facts_of, keys_of
from meshwright.planner.importing import read_keys, table_of
from meshwright.planner.reports import json_text, plan_document
from meshwright.planner.tables import Facts
from meshwright.simulator import PlanError
from meshwright.validate.cli import plan_of_options

GOLDEN = Path(__file__).parents[1] / "golden" / "imports"
WHERE = ["--cluster", "dgx-b200"]
LLAMA = ["llama3-8b", "--global-batch", "64", "--seq-len", "4096"]
TITAN = [*LLAMA, "--stack", "torchtitan@0.2"]
EVERY_SECOND = ["--recompute-layers", "2", "--recompute-method", "every"]
NARROW = ["--set", "fp8.gathers_parameters=true", "--set", "fp8.precomputes_scales=true"]
QWEN = ["qwen3-30b-a3b", "--global-batch", "64", "--seq-len", "4096", "--stack", "torchtitan@0.2"]
SHARING = ["--sequence-parallel"]
GROUPED = ["--microbatch-group-size", "12"]
ROUTED = ["qwen3-30b-a3b", "--global-batch", "64", "--seq-len", "4096"]
MIXTRAL = ["mixtral-8x7b", "--global-batch", "64", "--seq-len", "4096"]
SPLIT = ["--tp", "2", "--sequence-parallel", "--ep", "4", "--etp", "1"]
BESIDE = ["--expert-overlap", "delayed-weights", "--recompute-modules", "moe_act,layernorm"]
QWEN_CORE, MIXED = ["--model", "qwen3-30b-a3b"], ["--model", "mixtral-8x7b"]
# Plans by framework: options of simulate, and what an import has to be told.
CORE = ["--model", "llama3-8b"]
GPT_CORE = ["--model", "gpt2"]
GPT = ["gpt2", "--global-batch", "64"]
SPEED = ["gpt2", "--stack", "deepspeed", "--global-batch", "64", "--gpus", "8"]
SMALL_CORE = [*GPT, "--gpus", "16"]
FSDP = [*LLAMA, "--stack", "fsdp", "--gpus", "16"]
DDP = [*GPT, "--stack", "ddp"]
# What Accelerate makes of stages 1 and 2.
ONE_BY_ONE = ["--set", "overlap_gradient_reduce=false"]
ONCE = ["--recompute", "none"]
SINGLE = ["--micro-batch", "1"]
AT_LAST = ["--no-sync-each-microbatch"]
UNFUSED = [
    "--attention",
    "unfused",
]  # of FSDP on Blackwell, for which FlashAttention 2 has no times
EACH = ["--sync-each-microbatch", *SINGLE, *UNFUSED]
SPED = ["--model", "gpt2", "--seq-len", "1024", "--global-batch", "64"]
FLASH = ["--attention", "flash"]
SHARDED = [*CORE, "--seq-len", "4096", "--global-batch", "64"]
NARROW_MASTERS = ["--set", "main_precision=fp16"]
WHOLE_MASTERS = ["--set", "parameter_remainders=false"]
NESTED = ["--cp-type", "ring+all-to-all", "--cp-inner", "4"]
PREDICTING = ["--stages", "Et*9|(t*9|)*2t*5mL", "--prediction-layers", "1"]
IN_GRAPHS = ["--set", "cuda_graphs=layers", "--set", "allocator=expandable"]
CAPTURED = ["--set", "cuda_graphs=layers", "--set", "expert_capacity=1.25"]
AT_ONCE = ["--set", "cuda_graphs=whole-step", "--set", "allocator=expandable"]
BLACKWELL = ["--stack", "megatron-core-blackwell"]  # whose segments are expandable
BY_ITSELF = ["--set", "cuda_graphs=layers", "--set", "cuda_graph_impl=local"]
NEWER = ["--stack", "megatron-core@0.16"]
OFFLOADED = ["--offload-modules", "core_attn,attn_proj"]
PLANS: dict[str, list[tuple[list[str], list[str]]]] = {
    "megatron-lm": [
        ([*LLAMA, "--gpus", "64", "--tp", "4", "--pp", "4"], CORE),
        *(
            ([*plan, "--gpus", "64", *switches], told)
            for plan, told in ((LLAMA, CORE), ([*ROUTED, "--ep", "8"], QWEN_CORE))
            for switches in (IN_GRAPHS, AT_ONCE)
        ),
        ([*LLAMA, "--gpus", "64", *BY_ITSELF], CORE),
        ([*LLAMA, "--gpus", "64", *BLACKWELL, "--set", "allocator=fixed"], [*CORE, *BLACKWELL]),
        ([*ROUTED, "--ep", "8", "--gpus", "64", *CAPTURED], QWEN_CORE),
        ([*LLAMA, "--gpus", "64", "--tp", "8", "--sequence-parallel", "--recompute", "full"], CORE),
        ([*LLAMA, "--gpus", "32", "--pp", "4", "--vpp", "2", "--recompute", "selective"], CORE),
        ([*LLAMA, "--gpus", "16", "--pp", "2", "--vpp", "2", "--stages", "7,9,8,8"], CORE),
        ([*LLAMA, "--gpus", "16", "--pp", "2", "--recompute-layers", "3"], CORE),
        ([*LLAMA, "--gpus", "8", "--pp", "2", "--stages", "E|t*16|t*16|L"], CORE),
        ([*LLAMA, "--gpus", "8", "--pp", "4", "--vpp", "2", *GROUPED], CORE),
        ([*LLAMA, "--gpus", "8", "--pp", "4", *PREDICTING], CORE),
        ([*MIXTRAL, "--gpus", "64", "--ep", "8", "--prediction-layers", "2"], MIXED),
        ([*LLAMA, "--gpus", "16", "--zero", "0", "--gradient-precision", "bf16"], CORE),
        ([*LLAMA, "--gpus", "16", "--zero", "3", "--tp", "2", "--cp", "2"], CORE),
        ([*LLAMA, "--gpus", "32", "--tp", "2", "--cp", "2", "--dp-shard", "4"], CORE),
        (
            [*LLAMA, "--gpus", "16", "--gradient-precision", "bf16", "--moment-precision", "bf16"],
            CORE,
        ),
        ([*LLAMA, "--gpus", "16", "--moment-precision", "fp8"], CORE),
        ([*LLAMA, "--gpus", "16", "--moment-precision", "fp8", *NARROW_MASTERS], CORE),
        ([*MIXTRAL, "--gpus", "64", "--pp", "4", "--ep", "8"], MIXED),
        ([*MIXTRAL, "--gpus", "16", *SPLIT, "--dispatcher", "deepep"], MIXED),
        ([*ROUTED, "--gpus", "16", "--ep", "8", "--dispatcher", "hybridep", *BESIDE], QWEN_CORE),
        ([*LLAMA, "--gpus", "16", "--cp", "2"], CORE),
        ([*LLAMA, "--gpus", "16", "--cp", "4", "--cp-type", "all-to-all"], CORE),
        ([*LLAMA, "--gpus", "64", "--cp", "16", *NESTED], CORE),
        ([*LLAMA, "--gpus", "8", "--precision", "fp8", "--micro-batch", "2"], CORE),
        ([*LLAMA, "--gpus", "8", "--precision", "mxfp8"], CORE),
        ([*LLAMA, "--gpus", "16", *NEWER, "--offload-layers", "4"], CORE),
        ([*LLAMA, "--gpus", "16", *NEWER, *OFFLOADED], CORE),
        ([*GPT, "--gpus", "16", "--attention", "unfused", "--set", "loss=in-place"], GPT_CORE),
        ([*GPT, "--gpus", "8", "--precision", "fp16", "--pp", "2"], GPT_CORE),
    ],
    "megatron-bridge": [
        ([*ROUTED, "--ep", "8", "--gpus", "64", *IN_GRAPHS], []),
        ([*ROUTED, "--ep", "8", "--gpus", "64", *CAPTURED], []),
        ([*LLAMA, "--gpus", "64", *AT_ONCE], []),
        ([*LLAMA, "--gpus", "64", "--tp", "4", "--pp", "4"], ["--gpus", "64"]),
        ([*LLAMA, "--gpus", "64", "--tp", "8", "--sequence-parallel"], ["--gpus", "64"]),
        ([*LLAMA, "--gpus", "32", "--pp", "4", "--vpp", "2"], ["--gpus", "32"]),
        ([*LLAMA, "--gpus", "16", "--pp", "2", "--stages", "15,17"], ["--gpus", "16"]),
        ([*LLAMA, "--gpus", "16", "--pp", "4", *PREDICTING], ["--gpus", "16"]),
        ([*LLAMA, "--gpus", "16", "--recompute", "full", "--micro-batch", "2"], ["--gpus", "16"]),
        (
            [*LLAMA, "--gpus", "8", "--recompute-layers", "4", "--recompute-method", "uniform"],
            ["--gpus", "8"],
        ),
        ([*LLAMA, "--gpus", "8", "--precision", "fp8", "--zero", "0"], ["--gpus", "8"]),
        ([*LLAMA, "--gpus", "8", "--zero", "3", "--recompute", "full"], ["--gpus", "8"]),
        ([*LLAMA, "--gpus", "8", *NEWER, "--offload-layers", "4"], ["--gpus", "8"]),
        ([*LLAMA, "--gpus", "8", *NEWER, *OFFLOADED], ["--gpus", "8"]),
        ([*LLAMA, "--gpus", "16", "--cp", "2", "--cp-type", "all-gather"], ["--gpus", "16"]),
        ([*LLAMA, "--gpus", "16", "--cp", "8", *NESTED], ["--gpus", "16"]),
        ([*ROUTED, "--gpus", "16", *SPLIT, "--dispatcher", "hybridep"], ["--gpus", "16"]),
        ([*LLAMA, "--gpus", "32", "--tp", "2", "--dp-shard", "4"], ["--gpus", "32"]),
        ([*LLAMA, "--gpus", "8", "--moment-precision", "bf16", *NARROW_MASTERS], ["--gpus", "8"]),
        ([*LLAMA, "--gpus", "8", "--moment-precision", "bf16", *WHOLE_MASTERS], ["--gpus", "8"]),
    ],
    "deepspeed": [
        ([*SPEED, "--zero", "0", "--precision", "fp16"], [*SPED, *ONCE]),
        ([*SPEED, "--zero", "1", "--micro-batch", "4"], [*SPED, *ONCE]),
        ([*SPEED, "--zero", "2", "--recompute", "full"], [*SPED, "--recompute", "full"]),
        ([*SPEED, "--zero", "3"], [*SPED, *ONCE]),
        ([*SPEED, "--zero", "2", "--offload", "optimizer"], [*SPED, *ONCE]),
        ([*SPEED, "--zero", "1", "--tp", "2"], [*SPED, *ONCE]),
        (
            [*SPEED, "--zero", "1", "--precision", "bf16", "--reduce-precision", "fp32"],
            [*SPED, *ONCE],
        ),
        ([*SPEED, "--zero", "1", "--set", "gradient_bucket_parameters=1000000"], [*SPED, *ONCE]),
        ([*SPEED, *ONE_BY_ONE, "--zero", "3"], [*SPED, *ONCE]),
    ],
    "accelerate": [
        ([*DDP, "--gpus", "8"], [*SPED, *ONCE, *AT_LAST, *SINGLE, *FLASH]),
        (
            [*DDP, "--gpus", "16", "--find-unused"],
            [*SPED, *ONCE, *AT_LAST, *SINGLE, *FLASH, "--find-unused"],
        ),
        (
            [*DDP, "--gpus", "8", "--micro-batch", "4", "--recompute", "full"],
            [*SPED, *AT_LAST, *FLASH, "--micro-batch", "4", "--recompute", "full"],
        ),
        ([*FSDP, "--recompute", "full"], [*SHARDED, *EACH]),
        ([*FSDP, "--no-reshard-after-forward", "--precision", "fp16"], [*SHARDED, *EACH]),
        ([*FSDP, *AT_LAST], [*SHARDED, *AT_LAST, *SINGLE, *UNFUSED]),
        (
            [*FSDP, "--micro-batch", "4", "--offload", "parameters"],
            [*SHARDED, *UNFUSED, "--micro-batch", "4"],
        ),
        ([*FSDP, "--dp-shard", "8"], [*SHARDED, *EACH]),
        ([*FSDP, "--tp", "2"], [*SHARDED, *EACH]),
        ([*FSDP, "--tp", "4", "--dp-shard", "2", "--recompute", "full"], [*SHARDED, *EACH]),
        ([*SPEED, *ONE_BY_ONE, "--zero", "2", "--offload", "optimizer"], [*SPED, *ONCE]),
        ([*SPEED, "--zero", "3", "--precision", "fp16"], [*SPED, *ONCE]),
    ],
    "torchtitan": [
        ([*TITAN, "--gpus", "8"], []),
        ([*TITAN, "--gpus", "16", "--dp-shard", "8", "--recompute", "full"], []),
        ([*TITAN, "--gpus", "16", "--tp", "8", "--sequence-parallel", "--micro-batch", "4"], []),
        ([*TITAN, "--gpus", "16", "--recompute", "selective-op", "--precision", "fp32"], []),
        ([*TITAN, "--gpus", "8", *EVERY_SECOND], []),
        ([*TITAN, "--gpus", "64", "--tp", "2", "--pp", "4", "--sequence-parallel"], []),
        ([*TITAN, "--gpus", "16", "--pp", "2", "--vpp", "2", "--stages", "7,9,8,8"], []),
        ([*TITAN, "--gpus", "8", "--pp", "4", "--schedule", "gpipe", "--micro-batch", "2"], []),
        ([*TITAN, "--gpus", "8", "--offload", "parameters", "--no-reshard-after-forward"], []),
        ([*TITAN, "--gpus", "8", "--precision", "fp8", "--set", "kernels=eager"], []),
        ([*TITAN, "--gpus", "8", "--set", "parameter_precision=bf16"], []),
        ([*TITAN, "--gpus", "8", "--precision", "fp8", *NARROW], []),
        ([*TITAN, "--gpus", "16", "--tp", "2", "--set", "tp_in_pieces=true"], []),
        ([*QWEN, "--gpus", "64", "--ep", "8"], []),
        ([*QWEN, "--gpus", "64", "--ep", "8", "--cp", "2"], []),
        ([*TITAN, "--gpus", "64", "--cp", "4", "--tp", "2", *SHARING, "--dp-shard", "4"], []),
    ],
}
ROUNDS = [
    pytest.param(name, words, told, id=f"{name}-{number}")
    for name, plans in PLANS.items()
    for number, (words, told) in enumerate(plans)
]


def plan_file(words: list[str], folder: Path, cluster: str = "dgx-b200") -> Path:
    """Return a plan file of options of simulate."""
    saved = plan_of_options(" ".join(words), cluster)
    path = folder / "plan.json"
    path.write_text(json_text(plan_document(saved)))
    return path


def stack_of(version: str | None, word: str) -> str:
    """Return a word of a plan with the stack of a framework's version, where that has its own."""
    return "torchtitan@0.3" if (version, word) == ("0.3", "torchtitan@0.2") else word


def is_offered(words: list[str], version: str | None) -> bool:
    """Return whether a version can express a plan that others can."""
    lacking = {
        "0.3": ("fp8", "--ep", "--cp", "--recompute-layers", "tp_in_pieces=true"),
        "fsdp1": ("--dp-shard", "--tp"),
    }
    return not {*words}.intersection(lacking.get(version or "", ()))


@pytest.mark.parametrize(("name", "words", "told"), ROUNDS)
def test_a_plan_comes_back_from_a_framework_as_it_was(
    name: str, words: list[str], told: list[str], tmp_path: Path
) -> None:
    out, again = tmp_path / "out", tmp_path / "again.json"
    for version in FRAMEWORKS[name].versions or (None,):
        plan = plan_file([stack_of(version, word) for word in words], tmp_path)
        chosen = [] if version is None else ["--framework-version", version]
        status = main(["export", str(plan), "--to", name, *chosen, "--out", str(out)])
        assert status == (0 if is_offered(words, version) else 2)
        if status == 0:
            source = ["--from", name, *WHERE, *told]
            assert main(["import", str(out), *source, "--out", str(again)]) == 0
            assert json.loads(again.read_text()) == json.loads(plan.read_text())


@pytest.mark.parametrize(
    ("name", "words", "told"),
    [
        ("torchtitan", [*TITAN, "--gpus", "8"], []),
        ("torchtitan", [*TITAN, "--gpus", "8", "--set", "allocator=fixed"], []),
        (
            "accelerate",
            [*FSDP, "--set", "allocator=expandable"],
            [*SHARDED, *EACH, "--define", "SCRIPT=own.py"],
        ),
        (
            "deepspeed",
            [*SPEED, "--set", "allocator=expandable"],
            ["--from", "deepspeed", *SPED, *ONCE, "--define", "SCRIPT=own.py"],
        ),
    ],
)
def test_segments_of_the_allocator_come_back_from_the_script_that_starts_a_plan(
    name: str, words: list[str], told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out, again = plan_file(words, tmp_path), tmp_path / "out", tmp_path / "p"
    assert main(["export", str(plan), "--to", name, "--slurm", "--out", str(out)]) == 0
    source = ["--define", "hosts=a", *WHERE, *told, "--out", str(again)]
    assert main(["import", str(out / "run.sbatch"), *source]) == 0
    assert json.loads(again.read_text()) == json.loads(plan.read_text())
    capsys.readouterr()
    assert main(["export", str(plan), "--to", name, "--out", str(tmp_path / "file")]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "your launch: " in line]
    assert said == [
        f"note: your launch: {line}"
        for line in (out / "run.sbatch").read_text().splitlines()
        if "ALLOC" in line
    ]


def test_of_another_stack_a_plan_is_told_whose_its_numbers_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stack, is_told in (("torchtitan@0.2", False), ("torchtitan-2024-12", True)):
        plan, out = plan_file([*LLAMA, "--stack", stack, "--gpus", "8"], tmp_path), tmp_path / "out"
        assert main(["export", str(plan), "--to", "torchtitan", "--out", str(out)]) == 0
        note = f"memory and times of this plan are of stack {stack}; of torchtitan@0.2: "
        assert (note in out.read_text() + capsys.readouterr().err) == is_told


def test_how_ranks_attend_is_not_read_where_there_is_one(tmp_path: Path) -> None:
    plan, out, again = plan_file(SMALL_CORE, tmp_path), tmp_path / "out", tmp_path / "again.json"
    assert main(["export", str(plan), "--to", "megatron-lm", "--out", str(out)]) == 0
    text = out.read_text()
    out.write_text(text.replace("--bf16", "--cp-comm-type a2a+p2p --bf16"))
    assert out.read_text() != text
    source = ["--from", "megatron-lm", *WHERE, *GPT_CORE]
    assert main(["import", str(out), *source, "--out", str(again)]) == 0
    assert json.loads(again.read_text()) == json.loads(plan.read_text())


def test_every_framework_is_tried_with_six_plans() -> None:
    assert {name: len(plans) >= 6 for name, plans in PLANS.items()} == {
        name: True for name, framework in FRAMEWORKS.items() if framework.is_read
    }


REFUSED = [
    ("megatron-lm", [*LLAMA, "--gpus", "8", "--pp", "2", "--schedule", "gpipe"], "schedule=gpipe"),
    ("megatron-lm", [*TITAN, "--gpus", "8"], "stack.loss=eager"),
    ("torchtitan", [*LLAMA, "--gpus", "8"], "zero_stage=1"),
    ("torchtitan", [*GPT, "--stack", "torchtitan@0.2", "--gpus", "8"], "model=gpt2"),
    ("torchtitan", [*TITAN, "--gpus", "8", "--recompute", "selective"], "recompute=selective"),
    ("torchtitan", [*QWEN, "--gpus", "64", "--pp", "2"], "pp=2"),
    ("torchtitan", [*TITAN, "--gpus", "8", "--cp", "2", "--cp-type", "ring"], "cp_type=ring"),
    ("torchtitan 0.3", [*TITAN, "--gpus", "8", "--cp", "2"], "cp=2"),
    ("torchtitan", [*FSDP, "--attention", "unfused"], "attention=unfused"),
    ("torchtitan 0.3", [*TITAN, "--gpus", "8", "--precision", "fp8"], "precision=fp8"),
    ("torchtitan 0.3", [*TITAN, "--gpus", "8", *EVERY_SECOND], "recompute_layers=2"),
    ("torchtitan 0.3", ["llama3-405b", *TITAN[1:], "--gpus", "8"], "model=llama3-405b"),
    ("deepspeed", [*LLAMA, "--gpus", "8", "--pp", "2"], "pp=2"),
    ("deepspeed", [*GPT, "--gpus", "8", "--recompute", "selective"], "recompute=selective"),
    ("megatron-lm", ["gpt-oss-20b", "--gpus", "8", "--global-batch", "8"], "gpt-oss-20b has"),
    ("megatron-lm", ["deepseek-v3", "--gpus", "8", "--global-batch", "8"], "latent"),
    ("megatron-bridge", ["mixtral-8x7b", "--gpus", "8", "--global-batch", "8"], "model=mixtral"),
    ("accelerate", [*DDP, "--gpus", "8", "--sync-each-microbatch", "--micro-batch", "8"], ""),
    ("accelerate", [*LLAMA, "--gpus", "8", "--tp", "2", "--zero", "0"], "tp=2"),
    (
        "torchrun",
        [*DDP, "--gpus", "8", "--set", "gradient_bucket_parameters=1000000"],
        "stack.gradient_bucket_parameters=1000000",
    ),
    ("accelerate", [*TITAN, "--gpus", "8", "--tp", "2"], "tp=2"),
]


@pytest.mark.parametrize(("name", "words", "field"), REFUSED)
def test_what_a_framework_cannot_express_is_named_and_nothing_is_written(
    name: str, words: list[str], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    name, *version = name.split()
    chosen = ["--framework-version", *version] if version else []
    plan = str(plan_file(words, tmp_path))
    status = main(["export", plan, "--to", name, *chosen, "--out", str(out)])
    assert status == (2 if field else 0)
    if field:
        line = capsys.readouterr().err
        assert line.startswith("error: ")
        assert field in line
        assert f" cannot be expressed for {name}; allowed: " in line
        assert not out.exists()
        assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


SWAPS = "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes"
MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype"
TENSOR = """distributed_type: FSDP
num_processes: 8
fsdp_config:
  fsdp_version: 2
parallelism_config:
  parallelism_config_tp_size: 3
"""
WRONG = [
    ("a.toml", "[training]\nsteps = 1\n[parallelism]\ntensor_parallel_degre = 2\n", "l_degree"),
    ("a.toml", "[parallelism]\ncontext_parallel_load_balancer = 'ptrr'\n", "allowed: headtail"),
    ("a.toml", "[activation_checkpoint]\nselective_ac_option = 'x'\n", "allowed: op, a number"),
    ("a.json", '{"zero_optimization": {"stage": 4}}', "allowed: 0, 1, 2, 3"),
    ("a.json", '{"zero_optimisation": {"stage": 1}}', "JSON is read of: deepspeed"),
    ("a.yaml", "distributed_type: MEGATRON_LM\n", "allowed: MULTI_GPU, FSDP, DEEPSPEED"),
    ("a.yaml", "distributed_type: FSDP\nfsdp_config:\n  - x\n", "'fsdp_config' of acc"),
    ("a.yaml", TENSOR, "allowed: a divisor of 8 processes"),
    (
        "titan.sh",
        "torchrun -m torchtitan.train --module llama3 --config llama3_8b",
        "disable_cuda_graphs of torchtitan is missing",
    ),
    ("a.sh", "torchrun pretrain_gpt.py --num-layers 3 --seq-length 2048", "num_layers 3, not 32"),
    ("a.sh", "torchrun pretrain_gpt.py --expert-model-parallel-size 2", "allowed: 1"),
    ("a.sh", "torchrun pretrain_gpt.py --delay-wgrad-compute", "allowed: none; or overlap-moe"),
    (
        "mixtral.sh",
        "torchrun pretrain_gpt.py --expert-model-parallel-size 2",
        "alltoall, flex",
    ),
    ("mixtral.sh", "torchrun pretrain_gpt.py --num-experts 4", "num_experts 4, not 8"),
    ("mixtral.sh", "torchrun pretrain_gpt.py --num-experts 8 --moe-layer-freq 2", "a list of 32"),
    ("a.sh", "torchrun pretrain_gpt.py --exp-avg-dtype bf16", "exp-avg-dtype=bf16 of megatron-lm"),
    ("a.sh", f"torchrun pretrain_gpt.py {MOMENTS} bf16 --exp-avg-sq-dtype fp32", "allowed: bf16"),
    ("a.sh", f"torchrun pretrain_gpt.py {MOMENTS} nvfp4", "allowed: fp32, fp16, bf16, fp8"),
    (
        "a.sh",
        f"torchrun pretrain_gpt.py {SWAPS} 2 2",
        "2 sizes whose product is context-parallel-size=8",
    ),
    ("a.sh", "torchrun pretrain_gpt.py --recompute-granularity full", "(block, uniform)"),
    ("a.txt", "", "no command that starts training"),
]


@pytest.mark.parametrize(("name", "text", "said"), WRONG)
def test_a_file_that_no_plan_can_say_is_refused_a_line_each(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / name, tmp_path / "plan.json"
    file.write_text(text)
    model = "mixtral-8x7b" if name == "mixtral.sh" else "llama3-8b"
    told = ["--model", model, "--gpus", "8", "--global-batch", "8"]
    source = ["--from", "torchtitan"] if name == "titan.sh" else []
    assert main(["import", str(file), *source, *WHERE, *told, "--out", str(out)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    assert any(said in line for line in lines)
    assert not out.exists()


ODD = (
    None,
    True,
    0,
    -1,
    3,
    10**40,
    0.5,
    float("nan"),
    "",
    "x",
    [],
    [1],
    [[]],
    [["x"]],
    {},
    {"x": 1},
)


@pytest.mark.parametrize("name", [each.name for each in FRAMEWORKS.values() if each.is_read])
def test_whatever_a_file_says_is_read_or_refused(name: str) -> None:
    """No fault of ours is told as one of the file: nothing else is caught where a row is read."""
    framework, refused = FRAMEWORKS[name], 0
    profile, codecs = framework.profile, framework.program.codecs
    tried: set[str] = set()  # an entry reads its keys whatever plan they are of
    for words, _ in PLANS[name]:
        saved = plan_of_options(" ".join(words), "dgx-h100")
        facts = facts_of(saved)
        keys, _table = keys_of(saved, framework, facts)
        known = {*table_of(profile, keys).keys} - tried
        tried |= known
        for beside in (Facts({}, saved.job.model), Facts({**facts.values}, saved.job.model)):
            for key, odd in product(sorted(known), ODD):
                file = {**keys, key: odd}
                try:
                    found = read_keys(profile, table_of(profile, file), file, beside, codecs)
                    refused += bool(found.complaints)
                except PlanError:
                    refused += 1
    assert refused > 100


MICRO, STEPS = '"train_micro_batch_size_per_gpu"', '"gradient_accumulation_steps"'


@pytest.mark.parametrize(
    ("sizes", "told", "found"),
    [
        ('"train_batch_size": 64', "--gpus 8", (64, 8)),
        ('"train_batch_size": 64, "gradient_accumulation_steps": 4', "--gpus 8", (64, 2)),
        ('"train_micro_batch_size_per_gpu": 4', "--gpus 8", (32, 4)),
        ('"train_micro_batch_size_per_gpu": "auto"', "--gpus 8 --global-batch 16", (16, 2)),
        ('"train_batch_size": 64', "--gpus 8 --micro-batch 2", (64, 2)),
        (f'"train_batch_size": 64, {STEPS}: "auto"', "--gpus 8 --micro-batch 2", (64, 2)),
        (f'"train_batch_size": 64, {STEPS}: "auto"', "--gpus 8", "--micro-batch (the file does "),
        (f"{MICRO}: 2, {STEPS}: 4", "--gpus 8 --global-batch 32", "allowed: 2"),
        ('"train_batch_size": 64', "", "--gpus (the file leaves out one of "),
        ('"seed": 1', "--gpus 8", "--micro-batch (the file does not say train_micro_batch"),
        ('"train_batch_size": 60', "--gpus 8", "allowed: multiples of 8 on 8 ranks"),
    ],
)
def test_sizes_that_a_deepspeed_file_leaves_out_are_filled_in_as_deepspeed_does(
    sizes: str,
    told: str,
    found: tuple[int, int] | str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(f'{{"zero_optimization": {{"stage": 2}}, {sizes}}}')
    known = ["--model", "gpt2", "--seq-len", "1024", "--recompute", "none"]
    status = main(["import", str(file), *WHERE, *known, *told.split()])
    out, err = capsys.readouterr()
    if isinstance(found, str):
        assert status == 2
        assert found in err
        return
    plan = json.loads(out)
    assert (plan["job"]["global_batch_size"], plan["plan"]["microbatch_size"]) == found
    assert plan["plan"]["dp"] == 8


@pytest.mark.parametrize(
    ("fact", "overlaps"), [((), True), (("--set", "tp_in_pieces=false"), False)]
)
def test_megatron_lm_is_told_to_overlap_where_the_stack_moves_tokens_in_pieces(
    tmp_path: Path, fact: tuple[str, ...], *, overlaps: bool
) -> None:
    words = [*LLAMA, "--gpus", "16", "--tp", "2", "--sequence-parallel", *fact]
    plan, out = plan_file(words, tmp_path), tmp_path / "out"
    assert main(["export", str(plan), "--to", "megatron-lm", "--out", str(out)]) == 0
    assert ("--tp-comm-overlap" in out.read_text()) == overlaps
    again = tmp_path / "again.json"
    source = ["--from", "megatron-lm", *WHERE, *CORE]
    assert main(["import", str(out), *source, "--out", str(again)]) == 0
    # What Transformer Engine moves beside backward products without the flag stays overlapped.
    assert json.loads(again.read_text()) == json.loads(plan.read_text())


def test_flash_attention_with_sinks_is_that_of_transformers_models_with_sinks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["gpt-oss-20b", "--stack", "fsdp", "--gpus", "32", "--global-batch", "32"]
    words += ["--seq-len", "4096", "--attention", "flash"]
    plan = plan_file(words, tmp_path, "dgx-h100")
    assert main(["export", str(plan), "--to", "accelerate"]) == 0
    kernel = 'attn_implementation="kernels-community/vllm-flash-attn3"'
    assert kernel in capsys.readouterr().err


# What each framework's own examples have: stages by the names of torchtitan's modules
# (distributed/pipeline_parallel.py), of Megatron-LM data that nobody has to fetch.
STAGES = ["--gpus", "16", "--pp", "2", "--stages", "15,17"]
NAMED = [f"layers.{number}" for number in range(32)]
PARTS = [["tok_embeddings", *NAMED[:15]], [*NAMED[15:], "norm", "output"]]
PARTS_OF_COMMAND = [",".join(PARTS[0]), ",".join([*PARTS[1][:-1], "lm_head"])]
COMMANDS: dict[str, tuple[list[str], list[str], list[list[str]]]] = {
    "megatron-lm": (
        [*LLAMA, *STAGES],
        ["torchrun", "--nnodes=2"],
        [
            ["pretrain_gpt.py", "--micro-batch-size", "1"],
            ["--pipeline-model-parallel-layout", "Et*15|t*17L"],
            ["--tokenizer-type", "NullTokenizer", "--mock-data"],
            ["--vocab-size", "128255"],  # NullTokenizer adds a word
        ],
    ),
    "megatron-bridge": (
        [*LLAMA, *STAGES],
        ["torchrun", "--nnodes=2"],
        [
            ["scripts/training/run_recipe.py", "--recipe", "llama3_8b_pretrain_config"],
            ["--mode", "pretrain", "--dataset", "mock"],
            ["model.pipeline_model_parallel_layout=Et*15|t*17L"],
        ],
    ),
    "torchtitan 0.2": (
        [*TITAN, *STAGES],
        ["torchrun", "--nnodes=2"],
        [["-m", "torchtitan.train", "--job.config_file", "train.toml"]],
    ),
    "torchtitan 0.3": (
        [*LLAMA, "--stack", "torchtitan@0.3", *STAGES],
        ["torchrun", "--nnodes=2"],
        [
            ["-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_8b"],
            ["--parallelism.module_fqns_per_model_part", *PARTS_OF_COMMAND, "--training.no-enable"],
            ["--compile.components", "model", "activation-checkpoint:none"],
        ],
    ),
    "deepspeed": (SPEED, ["torchrun"], [["my.py", "--deepspeed_config", "ds_config.json"]]),
    "accelerate": (
        [*DDP, "--gpus", "16"],
        ["accelerate", "launch", "--machine_rank"],
        [["--config_file", "accelerate.yaml", "my.py"]],
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_those_of_the_frameworks_examples(name: str) -> None:
    options, start, stretches = COMMANDS[name]
    framework, _, version = name.partition(" ")
    saved = plan_of_options(" ".join(options), "dgx-h100")
    files = export_plan(saved, FRAMEWORKS[framework], version or None, slurm=True).files
    command = files["run.sbatch"].partition("srun --kill-on-bad-exit=1")[2]
    command = command.replace("${SCRIPT:?is not set: your script}", "my.py").replace("\\\n", " ")
    words = shlex.split(command)
    if words[:2] == ["bash", "-c"]:
        words = shlex.split(words[2])
    assert words[: len(start)] == start
    said = "\0".join(words)
    assert all("\0".join(each) in said for each in stretches)
    assert words[-1] == stretches[-1][-1] or framework.startswith("megatron")
    if version == "0.2":
        parallelism = tomllib.loads(files["train.toml"])["parallelism"]
        assert parallelism["module_fqns_per_model_part"] == PARTS


@pytest.mark.parametrize(
    ("strategy", "number", "num_shards", "frees"),
    [
        ("FULL_SHARD", 1, 16, True),
        ("SHARD_GRAD_OP", 2, 16, False),
        ("HYBRID_SHARD", 4, 8, True),
        ("HYBRID_SHARD_ZERO2", 5, 8, False),
    ],
)
def test_strategies_of_fsdp_shard_as_pytorch_documents_them(
    strategy: str, number: int, num_shards: int, tmp_path: Path, *, frees: bool
) -> None:
    """Hybrid ones shard within a node of two; all but the first of both keep what is gathered."""
    config, out = tmp_path / "a.yaml", tmp_path / "plan.json"
    sharded = (GOLDEN / "accelerate-sharded-1.yaml").read_text()
    for said in (strategy, number):
        line = f"fsdp_sharding_strategy: {said}"
        config.write_text(sharded.replace("fsdp_sharding_strategy: 2", line))
        source = ["--from", "accelerate", *WHERE, *SHARDED, *EACH]
        assert main(["import", str(config), *source, "--out", str(out)]) == 0
        plan = json.loads(out.read_text())["plan"]
        assert (plan["dp"], plan["dp_shard"]) == (16, num_shards)
        assert plan["reshard_after_forward"] == frees


@pytest.mark.parametrize(("gpus", "machines"), [(4, 1), (16, 2)])
def test_ranks_and_machines_of_a_configuration_are_those_of_the_plan(
    gpus: int, machines: int
) -> None:
    """Half a machine is one, and a batch is a microbatch, its steps and the ranks, multiplied."""
    own = ["--gpus", str(gpus), "--micro-batch", "2"]
    yaml, of_deepspeed = (
        export_plan(plan_of_options(" ".join([*words, *own]), "dgx-h100"), FRAMEWORKS[name]).files
        for name, words in (("accelerate", DDP), ("deepspeed", [*GPT, "--stack", "deepspeed"]))
    )
    said = [line for line in yaml["accelerate.yaml"].splitlines() if not line.startswith("#")]
    assert said == [
        "distributed_type: MULTI_GPU",
        f"num_machines: {machines}",
        f"num_processes: {gpus}",
        "mixed_precision: bf16",
    ]
    batches = json.loads(of_deepspeed["ds_config.json"])
    assert batches["train_batch_size"] == 64
    assert batches["train_micro_batch_size_per_gpu"] == 2
    assert batches["gradient_accumulation_steps"] == 64 // (2 * gpus)


# By config.json of openai-community/gpt2 and meta-llama/Meta-Llama-3-8B, and by the options beside.
SCRIPTS = {
    "gpt2 --stack ddp --gpus 16 --global-batch 64 --micro-batch 2 --precision fp16 --find-unused": (
        {"NUM_LAYERS": 12, "WIDTH": 768, "FFN_WIDTH": 3072, "NUM_HEADS": 12, "NUM_KV_HEADS": 12}
        | {"VOCABULARY": 50257, "MAX_POSITIONS": 1024, "POSITIONS": "learned", "TIED": True}
        | {"NORM": "layernorm", "GATED": False, "FUSED_QKV": True, "DROPOUT": 0.1}
        | dict.fromkeys(("ATTENTION_BIAS", "OUTPUT_BIAS", "MLP_BIAS"), True)
        | {"SEQ_LEN": 1024, "MICROBATCH": 2, "NUM_MICROBATCHES": 2, "PRECISION": "fp16"}
        | {"SHARDED": False, "RECOMPUTES": False, "REDUCED": "fp32", "FINDS_UNUSED": True}
    ),
    "llama3-8b --stack fsdp --gpus 16 --global-batch 64 --seq-len 4096 --dp-shard 8 "
    "--recompute full --offload parameters --no-reshard-after-forward": (
        {"NUM_LAYERS": 32, "WIDTH": 4096, "FFN_WIDTH": 14336, "NUM_HEADS": 32, "NUM_KV_HEADS": 8}
        | {"VOCABULARY": 128256, "MAX_POSITIONS": 8192, "POSITIONS": "rotary", "TIED": False}
        | {"NORM": "rmsnorm", "GATED": True, "FUSED_QKV": False, "DROPOUT": 0.0}
        | dict.fromkeys(("ATTENTION_BIAS", "OUTPUT_BIAS", "MLP_BIAS"), False)
        | {"SEQ_LEN": 4096, "MICROBATCH": 1, "NUM_MICROBATCHES": 4, "PRECISION": "bf16"}
        | {"SHARDED": True, "NUM_SHARDS": 8, "RECOMPUTES": True, "RESHARDS": False}
        | {"OFFLOADS": True}
    ),
}


@pytest.mark.parametrize("words", SCRIPTS)
def test_a_script_of_pytorch_has_the_published_model_and_the_plan(words: str) -> None:
    saved = plan_of_options(words, "dgx-h100")
    program = ast.parse(export_plan(saved, FRAMEWORKS["torchrun"]).files["train.py"])
    first = next(number for number, each in enumerate(program.body) if isinstance(each, ast.Import))
    found = {
        ast.unparse(each.targets[0]): ast.literal_eval(each.value)
        for each in program.body[:first]
        if isinstance(each, ast.Assign)
    }
    assert {name: found[name] for name in SCRIPTS[words]} == SCRIPTS[words]


def test_an_option_may_not_say_other_than_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": 8}')
    told = ["--model", "gpt2", "--gpus", "8", "--micro-batch", "1", "--global-batch", "16"]
    assert main(["import", str(file), *WHERE, *told]) == 2
    assert "--global-batch 16 is not what" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("framework", "content", "says"),
    [
        ("torchtitan", "x = " + "9" * 5000, "too many digits"),
        ("torchtitan", "x = " + "[" * 5000, "nested too deeply"),
        ("deepspeed", '{"train_batch_size": ' + "9" * 5000 + "}", "too many digits"),
        ("deepspeed", "[" * 100_000, "nested too deeply"),
        ("deepspeed", '{"a": 1, "a": 2}', "appears twice"),
        ("torchtitan", None, "no regular file"),
        ("deepspeed", '{"train_batch_size": [6]}', "train_batch_size=[6] of deepspeed is in no"),
        ("torchtitan", '[training]\nlocal_batch_size = "x"', "training.local_batch_size='x' of "),
        (
            "torchtitan",
            '[training]\nglobal_batch_size = "x"',
            "global_batch_size='x' of torchtitan is in",
        ),
    ],
)
def test_what_can_be_no_configuration_is_refused_in_one_line(
    framework: str,
    content: str | None,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "theirs"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content, encoding="utf-8")
    known = ["--model", "llama3-8b", "--gpus", "8", *WHERE]
    assert main(["import", str(path), "--from", framework, *known]) == 2
    out, err = capsys.readouterr()
    first = err.splitlines()[0]  # what is missing beside may follow
    assert out == ""
    assert says in first
    assert first.count("theirs") == 1
