"""No option is accepted and ignored: each changes the result, is refused, or warns."""

import contextlib
import io
import json
import shutil
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from words_said import said_once

import meshwright
from meshwright.planner import options
from meshwright.validate.cli.options import ValidateOptions

BASE = ["llama3-8b", "--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "64"]
# An option of simulate beside a base command: what to add, and to what.
STEP = ["simulate", *BASE, "--tp", "2", "--pp", "2"]
SHARDED = ["simulate", *BASE, "--stack", "torchtitan@0.2"]
DDP = ["simulate", "gpt2", *BASE[1:], "--stack", "ddp"]
SERVED = ["simulate", "gpt2", *BASE[1:], "--stack", "parameter-server"]
SEARCH = ["search", *BASE, "--max-tp", "2", "--max-pp", "2", "--max-micro-batch", "2"]
SEARCH += ["--recompute", "none"]
ROUTED = ["mixtral-8x7b", "--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "16"]
ROUTED += ["--seq-len", "2048", "--pp", "4"]
EXPERTS = ["simulate", *ROUTED]
ROUTED_ALONE = [*EXPERTS, "--pp", "1"]
SPLIT = [*EXPERTS, "--tp", "2", "--sequence-parallel", "--ep", "2"]
EXPERT_SEARCH = ["search", *ROUTED, "--micro-batch", "1", "--zero", "1", "--max-vpp", "1"]
EXPERT_SEARCH += ["--recompute", "none"]

PREDICTED = [*STEP, "--pp", "4", "--stages", "16,16,0,0", "--prediction-layers", "1"]

STEP_CHANGES: dict[str, tuple[list[str], list[str]]] = {
    "model": (["simulate", "llama2-7b", *BASE[1:], "--tp", "2", "--pp", "2"], []),
    "cluster": (STEP, ["--cluster", "dgx-a100"]),
    "gpus": (STEP, ["--gpus", "32"]),
    "global_batch": (STEP, ["--global-batch", "128"]),
    "seq_len": (STEP, ["--seq-len", "4096"]),
    "precision": (STEP, ["--precision", "fp32"]),
    "stack": (STEP, ["--stack", "megatron-lm-2022"]),
    "memory_limit": (STEP, ["--memory-limit", "20 GiB"]),
    "set": (STEP, ["--set", "device.gemm.plateau_fraction=0.5"]),
    "tp": (STEP, ["--tp", "4"]),
    "pp": (STEP, ["--pp", "4"]),
    "cp": (STEP, ["--cp", "2"]),
    "cp_type": ([*STEP, "--cp", "2"], ["--cp-type", "all-to-all"]),
    "cp_inner": ([*STEP, "--cp", "4", "--cp-type", "ring+all-to-all"], ["--cp-inner", "2"]),
    "ep": (EXPERTS, ["--ep", "2"]),
    "etp": (SPLIT, ["--etp", "1"]),
    "dispatcher": ([*EXPERTS, "--ep", "4"], ["--dispatcher", "hybridep"]),
    "expert_overlap": ([*ROUTED_ALONE, "--ep", "4"], ["--expert-overlap", "microbatches"]),
    "imbalance": ([*EXPERTS, "--ep", "4"], ["--imbalance", "2"]),
    "prediction_layers": (STEP, ["--prediction-layers", "1"]),
    "dp": (STEP, ["--dp", "8"]),
    "vpp": (STEP, ["--vpp", "2"]),
    "micro_batch": (STEP, ["--micro-batch", "2"]),
    "schedule": (STEP, ["--schedule", "gpipe"]),
    "zero": (STEP, ["--zero", "0"]),
    "sequence_parallel": (STEP, ["--sequence-parallel"]),
    "recompute": (STEP, ["--recompute", "full"]),
    "recompute_modules": (STEP, ["--recompute-modules", "mlp"]),
    "recompute_layers": (STEP, ["--recompute-layers", "2"]),
    "recompute_method": ([*STEP, "--recompute-layers", "2"], ["--recompute-method", "uniform"]),
    "microbatch_group_size": ([*STEP, "--vpp", "2"], ["--microbatch-group-size", "4"]),
    "max": (STEP, ["--max", "seq-len"]),
    "attention": (STEP, ["--attention", "unfused"]),
    "stages": (STEP, ["--stages", "20,12"]),
    "prediction_stage": (PREDICTED, ["--prediction-stage", "2"]),
    "dp_shard": (SHARDED, ["--dp-shard", "4"]),
    "reshard_after_forward": (SHARDED, ["--no-reshard-after-forward"]),
    "offload": (SHARDED, ["--offload", "parameters"]),
    "bucket_size": (STEP, ["--bucket-size", "2 GB"]),
    "gradient_precision": (STEP, ["--gradient-precision", "bf16"]),
    "reduce_precision": (DDP, ["--reduce-precision", "bf16"]),
    "moment_precision": (STEP, ["--moment-precision", "bf16"]),
    "sync_each_microbatch": (DDP, ["--sync-each-microbatch"]),
    "find_unused": (DDP, ["--find-unused"]),
    "servers": (SERVED, ["--servers", "2"]),
    "async": (SERVED, ["--async"]),
    "slow_worker": (SERVED, ["--slow-worker", "3"]),
    "tokens": (STEP, ["--tokens", "1e9"]),
    "price": ([*STEP, "--tokens", "1e9"], ["--price", "2 USD/GPU-hour"]),
}
SEARCH_CHANGES: dict[str, list[str]] = {
    "max_tp": ["--max-tp", "1"],
    "max_pp": ["--max-pp", "1"],
    "max_cp": ["--max-cp", "1"],
    "max_ep": ["--max-ep", "2"],
    "max_dp": ["--max-dp", "4"],
    "max_vpp": ["--max-vpp", "1"],
    "max_micro_batch": ["--max-micro-batch", "1"],
    "max": ["--max", "micro-batch"],
    "top": ["--top", "2"],
    "tp": ["--tp", "2"],
    "pp": ["--pp", "2"],
    "cp": ["--cp", "2"],
    "cp_type": ["--cp-type", "all-to-all"],
    "cp_inner": ["--cp", "4", "--cp-type", "ring+all-to-all", "--cp-inner", "2"],
    "ep": ["--ep", "2"],
    "etp": ["--etp", "1"],
    "dispatcher": ["--dispatcher", "hybridep"],
    "imbalance": ["--imbalance", "2"],
    "prediction_layers": ["--prediction-layers", "1"],
    "dp": ["--dp", "8"],
    "vpp": ["--vpp", "2"],
    "micro_batch": ["--micro-batch", "1"],
    "schedule": ["--schedule", "1f1b"],
    "zero": ["--zero", "0"],
    "sequence_parallel": ["--no-sequence-parallel"],
    "recompute": ["--recompute", "full"],
    "recompute_modules": ["--recompute-modules", "core_attn"],
    "recompute_layers": ["--recompute-layers", "2"],
    "max_recompute_layers": ["--max-recompute-layers", "2"],
    "recompute_method": ["--recompute-layers", "2", "--recompute-method", "uniform"],
    "moment_precision": ["--moment-precision", "bf16"],
    "also": ["--also", "moment-precision"],
    "for": ["--for", "megatron-bridge"],
    "any": ["--any"],
    "expert_overlap": ["--expert-overlap", "microbatches"],
    "microbatch_group_size": ["--microbatch-group-size", "4"],
    "attention": ["--attention", "unfused"],
    "stages": ["--stages", "balanced"],
    "memory_limit": ["--memory-limit", "40 GiB"],
    "set": ["--set", "sequence_parallel=false", "--set", "device.num_sms=100"],
    "gradient_precision": ["--gradient-precision", "fp32"],
}
# What of layers runs again; the other searches keep all.
RECOMPUTED = {
    "recompute_modules": "selective",
    **dict.fromkeys(("recompute_layers", "max_recompute_layers", "recompute_method"), "full"),
}
# Of switches that another stack has.
SWITCHED = ["search", *BASE, "--stack", "torchtitan@0.2", "--max-tp", "1", "--max-pp", "1"]
SWITCHED += ["--max-micro-batch", "2", "--recompute", "none"]
SWITCH_CHANGES: dict[str, list[str]] = {
    "dp_shard": ["--dp-shard", "4"],
    "reshard_after_forward": ["--reshard-after-forward"],
    "reduce_precision": ["--reduce-precision", "fp32"],
    "sync_each_microbatch": ["--no-sync-each-microbatch"],
    "offload": ["--offload", "parameters"],
}
# An option of validate: the other words of two commands, which must not come to the same.
PROBE = ["PLAN", "--backend", "probe", "--steps", "1"]
EMIT = ["--emit", "slurm", "--out", "OUT"]
VALIDATE_CHANGES: dict[str, tuple[list[str], list[str]]] = {
    "plan": (["PLAN", *EMIT], EMIT),
    "backend": (["PLAN", *EMIT], ["PLAN", *EMIT, "--backend", "gloo"]),
    "rank": (["PLAN", "--rank", "0"], ["PLAN", "--rank", "1"]),
    "device": ([*PROBE, "--rank", "1"], [*PROBE, "--rank", "1", "--device", "tpu"]),
    "ranks": tuple(["PLAN", "--backend", "gloo", "--ranks", each] for each in ("3", "4")),
    "steps": (["PLAN", *EMIT], ["PLAN", *EMIT, "--steps", "9"]),
    "timeout": (["PLAN", *EMIT], ["PLAN", *EMIT, "--timeout", "9"]),
    "emit": (["PLAN", *EMIT], ["PLAN", "--emit", "torchrun", "--out", "OUT"]),
    "collect": (["PLAN", *EMIT], ["PLAN", *EMIT, "--collect", "."]),
}
# Where results go, not what they are; test_command_line.py covers them.
DESTINATIONS = {"json", "out", "force", "plan", "trace"}


def outcome(command: list[str]) -> object:
    """Return the JSON of a command, or its exit status where it is refused."""
    return _outcome(*said_once(command))


@cache
def _outcome(*words: str) -> object:
    """Run a command once, as the base of all options that are added to it."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = meshwright.main([*words, "--json", "-"])
    return status if status == 2 else json.loads(out.getvalue())


@pytest.mark.parametrize("option", STEP_CHANGES)
def test_an_option_of_simulate_changes_the_result(option: str) -> None:
    command, change = STEP_CHANGES[option]
    base = STEP if option == "model" else command
    before, after = outcome(base), outcome([*command, *change])
    assert isinstance(before, dict)
    if option == "dp":  # 16 GPUs are not 2 x 2 x 8: it contradicts, and that is said
        assert after == 2
        return
    assert isinstance(after, dict)
    differing = {key for key in before | after if before.get(key) != after.get(key)}
    assert differing - {"plan", "job", "cluster", "stack", "model", "num_gpus"}


@pytest.mark.parametrize("option", [*SEARCH_CHANGES, *SWITCH_CHANGES])
def test_an_option_of_search_changes_the_result(option: str) -> None:
    command, words = SEARCH, SEARCH_CHANGES.get(option, [])
    if option in {"ep", "etp", "max_ep", "dispatcher", "imbalance"}:
        command = EXPERT_SEARCH
    if option == "expert_overlap":
        command = [*EXPERT_SEARCH, "--pp", "1"]
    if option in RECOMPUTED:
        command = [*SEARCH, "--recompute", RECOMPUTED[option]]
    if option in SWITCH_CHANGES:
        command, words = SWITCHED, SWITCH_CHANGES[option]
    before, after = outcome(command), outcome([*command, *words])
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert before != after


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the plan of a tiny model."""
    folder = tmp_path_factory.mktemp("plan")
    model, out = folder / "tiny.toml", folder / "out"
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 512, "seq_len": 64}
    lines = ['name = "tiny"', *(f"{key} = {value}" for key, value in sizes.items())]
    model.write_text("\n".join(lines), encoding="utf-8")
    base = ["simulate", str(model), "--cluster", "localhost-cpu", "--gpus", "2", "--pp", "2"]
    assert meshwright.main([*base, "--global-batch", "4", "--out", str(out)]) == 0
    return out / "plan.json"


def validation(
    words: list[str], plan: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> object:
    """Return status, output and files of a validation of a plan."""
    capsys.readouterr()
    real = {"PLAN": str(plan), "OUT": str(out)}
    status = meshwright.main(["validate", *(real.get(word, word) for word in words)])
    files = {path.name: path.read_bytes() for path in out.glob("*") if path.is_file()}
    return status, capsys.readouterr(), files


@pytest.mark.parametrize("option", VALIDATE_CHANGES)
def test_an_option_of_validate_changes_the_outcome(
    option: str, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    outcomes, out = [], tmp_path / "out"  # one folder: its name is printed
    for words in VALIDATE_CHANGES[option]:
        outcomes.append(validation(words, plan, out, capsys))
        shutil.rmtree(out, ignore_errors=True)
    assert outcomes[0] != outcomes[1]


def test_every_option_is_walked() -> None:
    names = {each.name for each in fields(ValidateOptions)}
    assert names == set(VALIDATE_CHANGES)
    records = (options.JobOptions, options.MoneyOptions)
    names = {each.name for record in records for each in fields(record)}
    groups = (options.LAYOUT, options.REPLICATION)
    named = {each.name for group in groups for each in group.options}
    assert names | named | {"max"} == set(STEP_CHANGES)
    others = (options.OutputOptions, options.FileOptions)
    assert {each.name for record in others for each in fields(record)} == DESTINATIONS | {"max"}
    searched = {each.name for each in options.LIMITS.options} | {"max", "top"}
    assert searched <= {*SEARCH_CHANGES, *SWITCH_CHANGES}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--sequence-parallel"], "sequence_parallel has no effect at tp=1"),
        (["--zero", "1", "--gpus", "1", "--global-batch", "4"], "has no effect at dp=1"),
        (
            ["--stack", "ddp", "--gpus", "1", "--global-batch", "4", "--sync-each-microbatch"],
            "has no effect at dp=1",
        ),
    ],
)
def test_a_value_on_an_axis_of_degree_one_warns(change: list[str], says: str) -> None:
    data = outcome(["simulate", "gpt2", *BASE[1:], *change])
    assert isinstance(data, dict)
    assert any(says in warning for warning in data["warnings"])
