"""A search that finds nothing says why first, and what to do; what it says to do helps."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from meshwright import main
from meshwright.hwprofiles import load_cluster, load_stack, stack_frameworks, with_facts
from meshwright.planner import SpaceLimits, enumerate_space, search
from meshwright.planner.search import Cause, Verdict
from meshwright.planner.space import cannot_be_expressed, lacks
from meshwright.simulator import TrainingJob

CLUSTER = load_cluster("dgx-h100")
LLAMA = TrainingJob(model="llama3-8b", global_batch_size=16, seq_len=4096)
COMMON = ["--cluster", "dgx-h100", "--global-batch", "16", "--seq-len", "4096"]


def verdict_of(job: TrainingJob, stack: str, gpus: int, **pins: object) -> Verdict:
    limits = SpaceLimits(**pins)  # type: ignore[arg-type]
    found = search(job, CLUSTER, stack, gpus, limits=limits, top=1).verdict
    assert found is not None
    return found


def test_a_search_that_finds_something_has_no_verdict() -> None:
    assert search(LLAMA, CLUSTER, "fsdp", 16, top=1).verdict is None


def test_what_lacks_memory_is_told_from_what_is_refused_by_counts() -> None:
    found = verdict_of(LLAMA, "ddp", 16)
    space = enumerate_space(LLAMA, load_stack("ddp"), 16, SpaceLimits())
    refused = int(np.count_nonzero(lacks(space)))
    inexpressible = int(np.count_nonzero(cannot_be_expressed(space) & ~lacks(space)))
    assert found.cause is Cause.MEMORY
    rest = len(space) - refused - inexpressible
    assert found.layouts == {
        Cause.UNDIVIDED: found.layouts[Cause.UNDIVIDED],
        Cause.REFUSED: refused,
        Cause.INEXPRESSIBLE: inexpressible,
        Cause.MEMORY: rest,
    }
    assert sum(each.layouts for each in found.rules) == refused + inexpressible
    assert found.text.startswith(
        f"no memory: the smallest of {rest} layouts that ddp@2.13 runs lacks "
    )
    assert found.text.endswith("of h100-sxm5-80gb")


def test_the_one_rule_that_refuses_all_is_named_with_its_release_and_what_is_allowed() -> None:
    found = verdict_of(LLAMA, "torchtitan@0.2", 16, tp=(16,))
    assert found.cause is Cause.REFUSED
    assert found.text.startswith("refused: all ")
    assert "maybe_enable_amp of torchtitan 0.2.2" in found.text
    assert found.ways[0].options == "without --tp"


def test_what_a_framework_cannot_be_told_runs_with_any() -> None:
    found = verdict_of(LLAMA, "megatron-core", 16, schedule=("gpipe",), pp=(2,))
    assert found.cause is Cause.INEXPRESSIBLE
    assert found.text.startswith("not told: all ")
    assert "Megatron-LM core_v0.16.1: schedule other than 1f1b" in found.text
    ways = {each.options: each for each in found.ways}
    free = search(
        LLAMA,
        CLUSTER,
        "megatron-core",
        16,
        limits=SpaceLimits(schedule=("gpipe",), pp=(2,), any_layout=1),
        top=1,
    )
    assert ways["--any"].step_ps == free.plans[0].step_ps
    assert {"without --schedule", "without --pp"} < ways.keys()


def test_what_does_not_divide_names_the_number_and_the_nearest_that_does() -> None:
    job = TrainingJob(model="llama3-8b", global_batch_size=9, seq_len=4096)
    found = verdict_of(job, "megatron-core", 16, max_tp=2, max_pp=2)
    assert found.cause is Cause.UNDIVIDED
    assert found.layouts[Cause.UNDIVIDED] == 4
    assert found.text.startswith("not divisible: none of 4 ways to split 16 GPUs; ")
    assert found.text.endswith("nearest: 8 or 16")


def test_ways_are_in_the_order_of_what_they_change() -> None:
    found = verdict_of(LLAMA, "megatron-core", 8, max_tp=1, max_pp=1, recompute=("none",))
    counts = [each.options.count("--") for each in found.ways]
    assert counts == sorted(counts)
    assert len({each.options for each in found.ways}) == len(found.ways)


def test_what_an_option_widens_is_no_way_out() -> None:
    found = verdict_of(LLAMA, "ddp", 16, recompute=("none", "full"), max_tp=1)
    assert not [each for each in found.ways if each.options == "without --recompute"]


def test_fragments_alone_are_a_matter_of_the_allocator() -> None:
    stack = load_stack("ddp")
    _, loose = with_facts(CLUSTER, stack, ["allocator_fraction=0.5"])
    found = search(LLAMA, "dgx-b200", loose, 16, top=1).verdict
    assert found is not None
    ways = {each.options: each for each in found.ways}
    assert ways["--set allocator=expandable"].note.endswith("expandable_segments:True")
    _, grown = with_facts(CLUSTER, stack, ["allocator=expandable", "allocator_fraction=0.5"])
    assert search(LLAMA, "dgx-b200", grown, 16, top=1).verdict is None


@pytest.mark.parametrize(
    "words",
    [
        ["mixtral-8x7b", *COMMON, "--gpus", "16", "--stack", "fsdp"],
        ["llama3-405b", *COMMON, "--gpus", "8"],
        ["llama3-8b", *COMMON, "--gpus", "16", "--stack", "ddp"],
        ["llama3-8b", *COMMON, "--gpus", "16", "--memory-limit", "8 GiB"],
    ],
    ids=["mixtral on fsdp", "llama 405b", "ddp", "memory limit"],
)
def test_what_the_first_lines_say_to_do_finds_something(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    assert main(["search", *words, "--json", str(file)]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    found = json.loads(file.read_text())["verdict"]
    assert found["text"].startswith("no memory: ")
    assert first[:30] == found["text"][:30]
    way = found["ways"][0]
    assert any(line.startswith(f"do: {way['options']}: ") for line in others)
    assert main(["search", *changed(words, way["options"]), "--top", "1"]) == 0


def changed(words: list[str], options: str) -> list[str]:
    """Return a command with *options* in place of those of the same name, or without one."""
    given = dict(zip(words[1::2], words[2::2], strict=True))
    added = shlex.split(options)
    if added[0] == "without":
        del given[added[1]]
    else:
        given |= zip(added[::2], added[1::2], strict=True)
    return [words[0], *(word for pair in given.items() for word in pair)]


@pytest.mark.parametrize(
    ("words", "rule", "stacks"),
    [
        (["llama3-8b", "--stack", "ddp", "--tp", "8"], "keeps all parameters on", "torchtitan"),
        (["llama3-8b", "--stack", "ddp", "--precision", "fp8"], "not modelled here: ", "fsdp"),
        (["qwen3-8b", "--stack", "torchtitan-2024-12"], "not modelled here: ", "fsdp"),
        (["llama3-8b", "--stack", "torchtitan", "--cp", "2"], "torchtitan 0.3", "torchtitan@0.2"),
    ],
)
def test_what_a_stack_lacks_is_refused_with_the_rule_and_the_stacks_that_have_it(
    words: list[str], rule: str, stacks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", *words, *COMMON, "--gpus", "16"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert rule in said
    listed = said.rstrip().partition("stacks with it: ")[2].partition(" (")[0].split(", ")
    assert stacks in listed
    assert {each.partition("@")[0] for each in listed} <= {*stack_frameworks()}


def test_another_release_is_no_way_out_of_what_a_users_own_switch_refuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--stack", "megatron-core", "--set", "cuda_graphs=layers", "--recompute", "full"]
    assert main(["simulate", "llama3-8b", *COMMON, "--gpus", "16", *words]) == 2
    listed = capsys.readouterr().err.rstrip().partition("stacks with it: ")[2].split(", ")
    assert "torchtitan" in listed
    assert not [each for each in listed if each.startswith("megatron-core")]


@pytest.mark.parametrize(
    "words", [["torchtitan", "fp8.precomputes_scales"], ["fsdp", "fp8.gathers_parameters"]]
)
def test_no_stack_is_said_to_have_a_users_own_switch_that_it_was_not_asked_about(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--precision", "fp8", "--stack", words[0], "--set", f"{words[1]}=true"]
    assert main(["simulate", "llama3-8b", *COMMON, "--gpus", "16", *asked]) == 2
    said = capsys.readouterr().err
    assert f"{words[1]}=True is not offered" in said
    assert "stacks with it" not in said


def test_a_framework_that_launches_another_stack_names_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["search", "llama3-8b", *COMMON, "--gpus", "16", "--for", "torchtitan"]) == 2
    assert "stacks that it launches: torchtitan" in capsys.readouterr().err
