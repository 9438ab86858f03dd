"""Mistakes of a user end in one plain line on standard error and exit status 2."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from words_said import said_once

from fuzzing.cases import Case
from fuzzing.run import fuzz, outcome
from meshwright import main

JOB = ["gpt2", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "16"]
STEP = ["simulate", *JOB]
SEARCH = ["search", *JOB]
BESIDE = ["--expert-overlap", "microbatches"]
V100 = ["simulate", "gpt2", "--cluster", "dgx-1v", "--gpus", "8", "--global-batch", "8"]


def run(words: list[str]) -> tuple[int, str, str]:
    """Return exit status, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(said_once(words))
    return status, out.getvalue(), err.getvalue()


def complaint(words: list[str]) -> str:
    """Return the one line that a mistaken command prints."""
    status, out, err = run(words)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


MISTAKES = {
    "command": (["serach"], ["'serach'", "nearest: search"]),
    "option": ([*STEP, "--gpu", "8"], ["--gpu", "--gpus"]),
    "unbuilt option": ([*STEP, "--recompute-chunks", "2"], ["--recompute-chunks"]),
    "option of another command": ([*STEP, "--max-tp", "2"], ["--max-tp"]),
    "option without value": (["simulate", "gpt2", "--gpus"], ["--gpus"]),
    "extra word": ([*STEP, "extra"], ["extra"]),
    "no model": (["simulate", "--gpus", "8"], ["MODEL"]),
    "no cluster": (["simulate", "gpt2", "--gpus", "8"], ["--cluster"]),
    "no gpus": (["search", "gpt2", "--cluster", "dgx-a100"], ["--gpus"]),
    "no batch": (STEP[:-2], ["--global-batch"]),
    "model": (["simulate", "gtp2", *JOB[1:]], ["'gtp2'", "gpt2"]),
    "cluster": ([*STEP, "--cluster", "dgx-a10"], ["'dgx-a10'", "dgx-a100"]),
    "stack": ([*STEP, "--stack", "megatron"], ["'megatron'", "megatron-core"]),
    "schedule": ([*STEP, "--schedule", "1f2b"], ["'1f2b'", "1f1b"]),
    "schedule of a search": ([*SEARCH, "--schedule", "1f2b"], ["'1f2b'", "1f1b"]),
    "hosts that are not known": (
        [*SEARCH, "--cluster", "h100-96gb", "--stack", "fsdp", "--also", "offload"],
        ["offload=parameters", "h100-96gb, which says nothing of its hosts"],
    ),
    "no switch": ([*SEARCH, "--also", "cp_typ"], ["--also 'cp-typ'", "nearest: cp-type"]),
    "switch of experts": ([*SEARCH, "--also", "dispatcher"], ["gpt2", "allowed: cp-type"]),
    "overlap in a plain pipeline": (
        ["search", "mixtral-8x7b", *JOB[1:], "--pp", "2", "--vpp", "1", *BESIDE],
        ["at pp=2 need virtual stages", "vpp of 2 or more, or pp=1"],
    ),
    "switch that is pinned": (
        [*SEARCH, "--also", "moment-precision,cp-type", "--moment-precision", "bf16"],
        ["--also moment-precision and --moment-precision contradict"],
    ),
    "model name": (["models", "gtp2"], ["'gtp2'", "gpt2"]),
    "cluster name": (["clusters", "dgx-a10"], ["'dgx-a10'", "dgx-a100"]),
    "stack name": (["stacks", "megatron"], ["'megatron'", "megatron-core"]),
    "schedule name": (["schedules", "1f"], ["'1f'", "1f1b"]),
    "no gpus at all": ([*STEP, "--gpus", "0"], ["--gpus 0", "1 to 10000000"]),
    "negative gpus": ([*STEP, "--gpus", "-8"], ["--gpus -8", "1 to 10000000"]),
    "absurd gpus": ([*STEP, "--gpus", "10000001"], ["10000001", "1 to 10000000"]),
    "huge gpus": ([*STEP, "--gpus", "9" * 5000], ["--gpus", "30 digits"]),
    "fractional gpus": ([*STEP, "--gpus", "8.0"], ["--gpus", "'8.0'", "whole number"]),
    "other digits": ([*STEP, "--gpus", "\uff18"], ["--gpus", "whole number"]),
    "batch": ([*STEP, "--global-batch", "0"], ["--global-batch 0"]),
    "steps too long": (
        [
            *STEP,
            *[
                "--stack",
                "torchtitan@0.2",
                "--pp",
                "2",
                "--schedule",
                "gpipe",
                "--global-batch",
                "10000000",
            ],
        ],
        ["microbatches", "raise microb"],
    ),
    "top": ([*SEARCH, "--top", "0"], ["--top 0", "1 to 1000"]),
    "gpus of a layout": ([*STEP, "--tp", "3"], ["gpus=8", "tp=3", "nearest: 6 or 9"]),
    "gpus of pins": ([*SEARCH, "--tp", "3"], ["gpus=8", "tp=3"]),
    "three degrees": (
        ["simulate", *JOB, "--gpus", "64", "--tp", "4", "--pp", "4", "--dp", "3"],
        ["gpus=64", "tp=4 x pp=4 x dp=3 = 48"],
    ),
    "three pins": (
        ["search", *JOB, "--gpus", "64", "--tp", "4", "--pp", "4", "--dp", "2"],
        ["gpus=64", "tp=4 x pp=4 x dp=2 = 32"],
    ),
    "heads": ([*STEP, "--tp", "8"], ["num_heads=12", "tp=8"]),
    "heads of a search": ([*SEARCH, "--tp", "8"], ["num_heads=12", "tp=8"]),
    "batch over replicas": ([*STEP, "--global-batch", "12"], ["12", "dp=8", "nearest: 8 or 16"]),
    "batch over pins": (
        [*SEARCH, "--global-batch", "12", "--dp", "8"],
        ["12", "dp=8", "nearest: 8 or 16"],
    ),
    "microbatches": ([*STEP, "--micro-batch", "3"], ["microbatch_size=3"]),
    "stages": (["simulate", *JOB, "--gpus", "16", "--pp", "16"], ["16 stages", "12 layers"]),
    "stages of a search": (["search", *JOB, "--gpus", "16", "--pp", "16"], ["16 stages", "12"]),
    "stage list": ([*STEP, "--stages", "6,6"], ["2 stages", "pp=1"]),
    "stage sum": ([*STEP, "--pp", "2", "--stages", "6,5"], ["11 layers", "12"]),
    "stage rule": ([*STEP, "--stages", "evn"], ["'evn'", "even"]),
    "stages in a search": ([*SEARCH, "--stages", "6,6"], ["--stages 6,6", "balanced"]),
    "vpp of 1f1b": ([*STEP, "--pp", "2", "--vpp", "2", "--schedule", "1f1b"], ["vpp=2"]),
    "pins of vpp": ([*SEARCH, "--vpp", "2", "--schedule", "1f1b"], ["--vpp 2", "1f1b"]),
    "pin above limit": ([*SEARCH, "--tp", "2", "--max-tp", "1"], ["--tp 2", "--max-tp 1"]),
    "unknown precision": ([*STEP, "--precision", "fp6"], ["'fp6'", "fp16"]),
    "precision of a device": (
        [*STEP, "--cluster", "dgx-a100", "--precision", "fp8"],
        ["precision=fp8", "a100-sxm4-80gb", "bf16, fp16, fp32"],
    ),
    "precision of a stack": (
        [*STEP, "--cluster", "dgx-h100", "--stack", "ddp", "--precision", "fp8"],
        ["precision=fp8", "ddp", "fp32"],
    ),
    "precision of a product": (
        ["matmul", "4x5", "5x8", "--devices", "2", "--cluster", "dgx-h100", "--precision", "fp8"],
        ["precision=fp8", "whole layers", "bf16, fp16, fp32"],
    ),
    "precision": ([*V100, "--precision", "bf16"], ["bf16", "v100", "fp16"]),
    "precision of a search": (["search", *V100[1:], "--precision", "bf16"], ["bf16", "fp16"]),
    "attention of the device": ([*V100, "--attention", "flash"], ["flash", "v100"]),
    "zero": ([*STEP, "--zero", "2"], ["zero_stage=2", "megatron-core", "0, 1, 3"]),
    "zero of a pipeline": (
        [*STEP, "--zero", "3", "--pp", "2"],
        ["zero_stage=3", "megatron-core", "0, 1", "pp=1"],
    ),
    "zero of a search": ([*SEARCH, "--zero", "-1"], ["zero_stage=-1", "0, 1"]),
    "stack limits": (
        [*STEP, "--stack", "megatron-lm-2021", "--tp", "2", "--sequence-parallel"],
        ["sequence_parallel", "megatron-lm-2021"],
    ),
    "pins of a stack": (
        [*SEARCH, "--stack", "megatron-lm-2021", "--recompute", "selective"],
        ["recompute=selective", "megatron-lm-2021"],
    ),
    **{
        f"{option} {value} of {command} without attention": (
            [command, "resnet50", *JOB[1:], "--gpus", "8", option, value],
            [f"{option[2:]}={value} does not go with resnet50", allowed],
        )
        for command in ("simulate", "search")
        for option, value, allowed in (
            ("--attention", "flash", "leave it out"),
            ("--attention", "unfused", "leave it out"),
            ("--recompute", "selective", "none, full"),
            ("--recompute", "selective-op", "none, full"),
        )
    },
    "sequence": ([*STEP, "--seq-len", "2048"], ["seq_len=2048", "1024"]),
    "memory without unit": ([*STEP, "--memory-limit", "72"], ["--memory-limit", "'72'", "GiB"]),
    "memory unit": ([*STEP, "--memory-limit", "72 GB/s"], ["'GB/s'", "GiB"]),
    **{
        f"memory that a device of {command[0]} lacks": (
            [*command, "--memory-limit", "200 GiB"],
            ["memory_limit=200 GiB", "a100-sxm4-80gb", "at most 80 GiB"],
        )
        for command in (STEP, SEARCH)
    },
    "no memory": ([*STEP, "--memory-limit", "0 GiB"], ["--memory-limit", "more than 0"]),
    "tokens": ([*STEP, "--tokens", "nan"], ["--tokens", "'nan'"]),
    "endless tokens": ([*STEP, "--tokens", "1e999"], ["--tokens inf", "1e+18"]),
    "price": ([*STEP, "--tokens", "1e9", "--price", "2 EUR"], ["'EUR'", "USD/GPU-hour"]),
    "short form of a whole number": ([*STEP, "--seq-len", "8K"], ["'8K'", "whole number"]),
    "price alone": ([*STEP, "--price", "2 USD/GPU-hour"], ["--tokens"]),
    "missing folder": ([*STEP, "--json", "no/such/result.json"], ["--json", "no/such"]),
    "json folder": ([*STEP, "--json", "."], ["--json", "folder"]),
    "trace folder": ([*STEP, "--trace", "no/such/trace.json"], ["--trace", "no/such"]),
    "no name": ([*STEP, "--out", ""], ["--out ''"]),
    "null": ([*STEP, "--json", "a\0b"], ["--json"]),
    "endless name": ([*STEP, "--json", "a" * 5000], ["--json"]),
    "missing plan": (["simulate", "--plan", "no-such.json"], ["no-such.json"]),
    "plan is a folder": (["simulate", "--plan", "."], ["cannot be read"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake_names_what_is_wrong_and_what_is_allowed(case: str) -> None:
    words, parts = MISTAKES[case]
    line = complaint(words)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("name", "option"), [("model.json", None), ("cluster.toml", "--cluster"), ("p.json", "--plan")]
)
def test_binary_file_is_refused(tmp_path: Path, name: str, option: str | None) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe" * 10)
    words = ["simulate", str(path), *JOB[1:]] if option is None else [*STEP, option, str(path)]
    assert name in complaint(words)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("name = ", "TOML"),
        ('name = "x"\nnum_nodez = 3\n', "num_nodez"),
        ('name = "x"\nbandwidth = 3\n', "bandwidth"),
    ],
)
def test_malformed_cluster_names_file_and_key(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content)
    line = complaint([*STEP, "--cluster", str(path)])
    assert "mine.toml" in line
    assert part in line


def test_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    assert "is a file" in complaint([*STEP, "--out", str(path)])
    assert "no folder" in complaint([*STEP, "--out", str(path / "inner")])
    assert path.read_text() == "mine"


def test_line_breaks_in_words_stay_on_one_line() -> None:
    assert "\\n" in complaint(["simulate", "gpt2\nTraceback", *JOB[1:]])
    complaint([*STEP, "--json", "no/such\n\x1b[31m/file"])


PLAN = {
    "format": "meshwright-plan-1",
    "model": "gpt2",
    "cluster": "dgx-a100",
    "stack": "megatron-core",
    "job": {"global_batch_size": 16, "seq_len": 1024, "precision": "bf16"},
    "plan": {
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "num_virtual_stages": 1,
        "microbatch_size": 1,
        "zero_stage": 1,
        "sequence_parallel": False,
        "recompute": "none",
        "attention": "flash",
        "schedule": "1f1b",
        "stages": [6, 6],
    },
}


def edited(place: str, key: str, value: object) -> dict[str, object]:
    """Return `PLAN` with one value changed, or removed where it is ``...``."""
    document = json.loads(json.dumps(PLAN))
    target = document[place] if place else document
    if value is ...:
        del target[key]
    else:
        target[key] = value
    return document


@pytest.mark.parametrize(
    ("place", "key", "value", "parts"),
    [
        ("", "format", "meshwright-plan-9", ["format", "meshwright-plan-2"]),
        ("", "cluster", "dgx-a10", ["cluster", "dgx-a100"]),
        ("", "model", {"name": "x"}, ["model", "missing"]),
        ("", "stack", {"name": "x"}, ["stack", "missing"]),
        ("", "modle", "gpt2", ["'modle'", "nearest: model"]),
        ("", "job", 3, ["job"]),
        ("job", "seq_len", "1024", ["job.seq_len", "1024"]),
        ("job", "global_batch_size", 0, ["job.global_batch_size", "0"]),
        ("plan", "tp", ..., ["plan.tp", "missing"]),
        ("plan", "tp", 2.5, ["plan.tp", "2.5"]),
        ("plan", "tp", True, ["plan.tp", "True"]),
        ("plan", "zero", 1, ["plan", "'zero'", "nearest: zero_stage"]),
        ("plan", "recompute", "ful", ["plan.recompute", "full"]),
        ("plan", "stages", [12], ["stages", "pp=2"]),
        ("plan", "schedule", "1f2b", ["'1f2b'", "1f1b"]),
        ("plan", "pp", 10**40, ["plan.pp"]),
    ],
)
def test_mistake_in_a_plan_file_names_the_key(
    tmp_path: Path, place: str, key: str, value: object, parts: list[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(edited(place, key, value)))
    line = complaint(["simulate", "--plan", str(path)])
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "not valid JSON"),
        ("{", "line 1"),
        ("[1]", "JSON object"),
        ('{"format": 1, "format": 2}', "appears twice"),
        ("[" * 100_000, "JSON"),
        ("9" * 10_000, "JSON"),
        (" " * 5_000_000, "too large"),
    ],
)
def test_file_that_is_no_plan_is_refused(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    assert part in complaint(["simulate", "--plan", str(path)])


def test_fuzzed_commands_and_files_end_in_an_answer_or_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds of each; `scripts/fuzz` runs more, and what starts processes."""
    monkeypatch.setattr("tempfile.tempdir", None)
    assert list(fuzz(27, 400, 400, with_runs=False)) == []


def test_a_fuzzed_command_that_breaks_its_contract_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("meshwright.planner.cli.growth.simulate", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert "status 70" in str(outcome(Case(STEP, {})))
    monkeypatch.setattr("meshwright.planner.cli.growth.simulate", lambda *_, **__: 1 / 0)
    assert "ZeroDivisionError" in str(outcome(Case(STEP, {})))


@pytest.mark.parametrize(
    "words",
    [
        ["--gpus", "8"],
        ["--gpus=8"],
        ["--tp", "1", "--tp=2"],
        ["--sequence-parallel", "--no-sequence-parallel"],
    ],
    ids=" ".join,
)
def test_an_option_that_is_given_twice_is_refused(words: list[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert main([*STEP, *words]) == 2
    option = words[0].partition("=")[0]
    assert err.getvalue() == f"error: {option} is given more than once; allowed: once\n"
