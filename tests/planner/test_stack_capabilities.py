"""No second table drifts: what a stack's file does not list, or refuses, is refused everywhere."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from meshwright import main
from meshwright.hwprofiles import (
    ProfileError,
    Refusal,
    StackProfile,
    common_refusals,
    list_frameworks,
    list_stacks,
    load_framework,
    load_stack,
)
from meshwright.planner import SpaceLimits, enumerate_space
from meshwright.planner.space.rules import lacks
from meshwright.simulator import TrainingJob, load_model
from meshwright.simulator.layout import PLAN_FIELDS, Facts, capabilities, stack_gaps

JOB = ["--global-batch", "64", "--seq-len", "4096", "--cluster", "dgx-h100"]
MIXTRAL, LLAMA = ["mixtral-8x7b", *JOB], ["llama3-8b", *JOB]
EP = ["--ep", "8", "--tp", "2", "--sequence-parallel"]
CP = ["--cp", "2", "--cp-type", "all-gather"]
TITAN, CORE = "torchtitan@0.2", "megatron-core@0.16"
WIDE = """
[refused.wide]
field = "tp"
when = "tp > 4 and model.num_kv_heads < 16"
allowed = ["{model.num_kv_heads} / 2"]
why = "why"
"""
# A stack, the plan of a command, what its file says otherwise, and what is then said of the plan.
ENTRIES = {
    "schedule": (CORE, [*LLAMA, "--pp", "2", "--vpp", "2"], 'schedules = ["gpipe", "1f1b"]',
                 "schedule=interleaved is not offered by stack other; allowed: gpipe, 1f1b"),
    "recompute": (CORE, [*LLAMA, "--recompute", "full"], 'recompute_modes = ["none", "selective"]',
                  "recompute=full is not offered by stack other; allowed: none, selective"),
    "precision": (CORE, [*LLAMA, "--precision", "bf16"], 'precisions = ["fp32", "fp8", "mxfp8"]',
                  "precision=bf16 is not offered by stack other; allowed: fp32, fp8, mxfp8"),
    "cp_type": (CORE, [*LLAMA, *CP], 'context_parallel = ["ring", "ring+all-to-all"]',
                "cp_type=all-gather is not offered by stack other; allowed: ring, ring+all-to-all"),
    "zero_stage": (CORE, [*LLAMA, "--zero", "0"], "zero_stages = [1]\nunits = 'layers'",
                   "zero_stage=0 is not offered by stack other; allowed: 1"),
    "dispatcher": (CORE, [*MIXTRAL, *EP, "--dispatcher", "deepep"], 'dispatchers = ["all-to-all"]',
                   "dispatcher=deepep is not offered by stack other; allowed: all-to-all"),
    "refused": (TITAN, [*LLAMA, "--tp", "8", "--sequence-parallel"],
                WIDE, "tp=8 is not offered by stack other for llama3-8b; allowed: 8 / 2 (why)"),
}  # fmt: skip
GPUS = ["--gpus", "16"]
TO = {CORE: "megatron-lm", TITAN: "torchtitan"}


def other_stack(base: str, change: str, folder: Path) -> Path:
    path = folder / "other.toml"
    path.write_text(f'name = "other"\nbase = "{base}"\n{change}\n')
    return path


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_what_a_file_leaves_out_is_refused_by_commands(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, words, change, message = ENTRIES[name]
    stack = other_stack(base, change, tmp_path)
    file = tmp_path / "file"
    assert main(["simulate", *words, *GPUS, "--stack", base, "--out", str(tmp_path / "run")]) == 0
    plan = tmp_path / "run" / "plan.json"
    assert main(["export", str(plan), "--to", TO[base], "--out", str(file)]) == 0
    capsys.readouterr()
    assert message in refused(["simulate", *words, *GPUS, "--stack", str(stack)], capsys)
    assert message in refused(["simulate", "--plan", str(plan), "--stack", str(stack)], capsys)
    told = ["--model", words[0], *JOB, "--stack", str(stack)]
    assert message in refused(["import", str(file), "--from", TO[base], *told], capsys)


@pytest.mark.parametrize("name", sorted(ENTRIES.keys() - {"precision"}))
def test_what_a_file_leaves_out_is_in_no_layout_that_passes(name: str, tmp_path: Path) -> None:
    base, words, change, _ = ENTRIES[name]
    job = TrainingJob(model=load_model(words[0]), global_batch_size=64, seq_len=4096)
    field = PLAN_FIELDS["tp" if name == "refused" else name]
    option = f"--{field.name.replace('_', '-')}"
    unsaid = {"schedule": "interleaved", "zero_stage": "0"}
    word = unsaid.get(name) or words[words.index(option) + 1]
    value = next((each for each in field.choices if str(each) == word), None)
    code = field.code(int(word) if value is None else value)
    asked = {} if value is None or field.declaration.is_basic else {field.name: (value,)}
    limits = SpaceLimits(**({"max_cp": 2} if name == "cp_type" else {}), **asked)
    for stack, is_there in ((base, True), (other_stack(base, change, tmp_path), False)):
        space = enumerate_space(job, load_stack(stack), 16, limits)
        passes = ~lacks(space) & (space.column("dp") * space.column("cp") > 1)
        assert bool(np.any(space.column(field.name)[passes] == code)) is is_there


def with_rule(when: str, **words: object) -> StackProfile:
    rule = Refusal.model_validate({"field": "tp", "when": when, **words})
    return load_stack("ddp").model_copy(update={"refused": {"rule": rule}})


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("tpp > 1", "'tpp' is no field or fact; nearest: tp"),
        ("model.num_head > 1", "'model.num_head' is no field or fact; nearest: model.num_heads"),
        ("model.__class__ and tp > 1", "'model.__class__' is no field or fact"),
        ("model.model_dump and tp > 1", "'model.model_dump' is no field or fact"),
        ("model.model_fields_set and tp > 1", "'model.model_fields_set' is no field or fact"),
        (
            "model.experts.num > 1",
            "'model.experts.num' is no field or fact; nearest: model.experts.num_",
        ),
        ("recompute_modules.mpl", "nearest: recompute_modules.mlp"),
        ("stack.kernels > 3", "refused.rule: 'stack.kernels > 3': '>' not supported"),
    ],
)
def test_a_condition_names_declared_fields_alone(when: str, said: str) -> None:
    job = TrainingJob(model=load_model("llama3-8b"), global_batch_size=8, seq_len=8)
    with pytest.raises(ProfileError, match=r"^stack ddp@2.13: refused\.rule: ") as caught:
        stack_gaps(with_rule(when), job)
    assert said in str(caught.value)


def test_a_rule_that_says_nothing_of_a_job_costs_nothing() -> None:
    job = TrainingJob(model=load_model("llama3-8b"), global_batch_size=8, seq_len=8)
    for when in ("model.experts and tp > 1", "model.experts.num_experts % tp != 0 and seq_len > 8"):
        assert len(stack_gaps(with_rule(when), job)) == len(stack_gaps(load_stack("ddp"), job))
    gap = next(each for each in stack_gaps(with_rule("seq_len == 8 and num_microbatches > 4"), job)
               if each.fields == {"dp", "microbatch_size"})  # fmt: skip
    assert [bool(gap.lacks({"dp": dp, "microbatch_size": 1}.__getitem__)) for dp in (1, 2)] == [
        True, False,
    ]  # fmt: skip


def test_a_stack_lifts_what_its_base_or_every_stack_refuses(tmp_path: Path) -> None:
    job = TrainingJob(model=load_model("mixtral-8x7b"), global_batch_size=8, seq_len=4096)
    names = "experts-without-sequence-parallel", "offload-of-divided-experts"
    rules = "".join(f'[refused.{each}]\nfield = "tp"\nwhen = ""\n' for each in names)
    stack = load_stack(other_stack("megatron-core", rules, tmp_path))
    lifted = {each.reason for each in stack_gaps(load_stack("megatron-core"), job)}
    lifted -= {each.reason for each in stack_gaps(stack, job)}
    assert lifted == {"experts and tp > 1 without sequence_parallel", "offload with ep > 1"}


def test_a_plan_file_holds_what_its_stack_refuses(tmp_path: Path) -> None:
    """Facts that are not the built-in ones are written whole, and read as they were."""
    out, words = tmp_path / "run", [*LLAMA, *GPUS, "--set", "loss=in-place"]
    assert main(["simulate", *words, "--out", str(out)]) == 0
    text = (out / "plan.json").read_text()
    kept = StackProfile.model_validate(json.loads(text)["stack"])
    assert kept.refused == load_stack("megatron-core").refused
    assert main(["simulate", "--plan", str(out / "plan.json")]) == 0


@pytest.mark.parametrize("name", list_stacks())
@pytest.mark.parametrize("model", ["llama3-8b", "deepseek-v3", "gpt-oss-20b", "resnet50"])
def test_every_rule_reads_what_there_is(name: str, model: str) -> None:
    trained = load_model(model)
    job = TrainingJob(model=trained, global_batch_size=8, seq_len=trained.seq_len)
    assert all("{" not in gap.reason for gap in stack_gaps(load_stack(name), job))


def test_a_search_reads_rules_of_fields_that_it_does_not_vary() -> None:
    job = TrainingJob(model=load_model("gpt2"), global_batch_size=8, seq_len=1024)
    counts = [
        int(np.count_nonzero(lacks(enumerate_space(job, stack, 8, SpaceLimits()))))
        for stack in (
            with_rule("dp > 1 and find_unused"),
            with_rule("dp > 1 and not find_unused"),
            load_stack("ddp"),
        )
    ]
    assert counts[0] == counts[2] < counts[1]


@pytest.mark.parametrize("name", list_stacks())
def test_every_refusal_names_its_rule_or_says_that_it_is_not_modelled(name: str) -> None:
    stack = load_stack(name)
    refusals = {**common_refusals(), **stack.refused}
    assert not [key for key, rule in refusals.items() if rule.when and not rule.words()]
    assert stack.ruled_by


@pytest.mark.parametrize("name", sorted(list_frameworks()))
def test_every_refusal_of_a_framework_names_its_rule(name: str) -> None:
    tables = load_framework(name).tables.values()
    assert not [key for each in tables for key, rule in each.refused.items() if not rule.words()]


@pytest.mark.parametrize("name", list_stacks())
def test_every_value_that_a_list_leaves_out_is_refused_with_a_rule_and_a_release(name: str) -> None:
    stack = load_stack(name)
    for model in ("llama3-8b", "deepseek-v3"):
        job = TrainingJob(model=load_model(model), global_batch_size=64, seq_len=4096)
        for gap in capabilities._lists(Facts(job, stack)):
            assert re.search(r"\d|not modelled here", gap.why), (gap.field, gap.reason)


def test_a_rule_of_no_trait_is_refused() -> None:
    with pytest.raises(ValueError, match="rules: zero_stage_s is no trait; nearest: zero_stages"):
        StackProfile.model_validate(
            load_stack("ddp").model_dump(by_alias=True) | {"rules": {"zero_stage_s": {"why": "x"}}}
        )
