"""The stacks `dataparallel` and `parameter-server` on the command line."""

import json
from pathlib import Path

import pytest
from words_said import said_once

from meshwright import main
from meshwright.hwprofiles import ProfileError, load_stack

pytestmark = pytest.mark.usefixtures("no_pictures")
JOB = ["gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--global-batch", "16"]
MODULE = ["simulate", *JOB, "--stack", "dataparallel"]
SERVER = ["simulate", *JOB, "--stack", "parameter-server"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [MODULE, SERVER, [*SERVER, "--servers", "all"], [*SERVER, "--async", "--slow-worker", "2"]],
    ids=["module", "servers", "all", "async"],
)
def test_every_file_is_written_and_the_plan_file_repeats_the_result(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, trace = tmp_path / "out", tmp_path / "trace.json"
    first = printed(capsys, *words, "--json", "-", "--out", str(out), "--trace", str(trace))
    assert {"plan.json", "timeline.png", "stage_memory.png", "breakdown.png", "plans.csv"} <= {
        path.name for path in out.iterdir()
    }
    assert printed(capsys, "simulate", "--plan", str(out / "plan.json"), "--json", "-") == first
    document = json.loads(first)
    names = {each["name"] for each in document["lanes"]}
    events = json.loads(trace.read_text())["traceEvents"]
    overhead = set() if "--async" in words else {"step overhead"}
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == names | overhead
    assert all(event["dur"] > 0 for event in events if event["ph"] == "X")
    assert "step time" in printed(capsys, *words)


def test_staleness_is_a_histogram(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, *SERVER, "--async", "--json", "-"))["asynchronous"]
    counts = {each["updates"]: each["count"] for each in found["staleness"]["histogram"]}
    mean = sum(updates * count for updates, count in counts.items()) / sum(counts.values())
    assert found["staleness"]["mean"] == pytest.approx(mean)
    assert found["staleness"]["max"] == max(counts)
    assert [each["worker"] for each in found["workers"]] == [0, 1, 2, 3]
    assert "stale by" in printed(capsys, *SERVER, "--async")


@pytest.mark.parametrize(
    "words",
    [["--servers", "all"], ["--servers", "2"], ["--async"], ["--slow-worker", "2"]],
    ids=" ".join,
)
def test_each_option_changes_the_result_and_is_refused_elsewhere(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    usual = json.loads(printed(capsys, *SERVER, "--json", "-"))
    changed = json.loads(printed(capsys, *SERVER, *words, "--json", "-"))
    assert changed["step_time_s"] != usual["step_time_s"]
    assert main([*MODULE, *words]) == 2
    names = {"--async": "asynchronous", "--slow-worker": "slow_worker", "--servers": "servers"}
    said = f"error: {names[words[0]]}="
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert " is not offered by stack dataparallel@1.6; allowed: with a stack of strategy" in error


REFUSED = {
    "search over nodes": (
        ["search", *JOB, "--gpus", "16", "--stack", "dataparallel"],
        "8 devices of a node",
    ),
    "search of tp": (["search", *JOB, "--stack", "parameter-server", "--tp", "2"], "tp=2 is not"),
    "options of a search": (["search", *JOB, "--servers", "2"], "--servers"),
    "nodes": ([*MODULE, "--gpus", "16"], "8 devices of a node"),
    "tp": ([*MODULE, "--tp", "2"], "tp=2 is not offered"),
    "pp": ([*SERVER, "--pp", "2"], "pp=2 is not offered"),
    "zero": ([*MODULE, "--zero", "1"], "zero_stage=1"),
    "schedule": ([*SERVER, "--schedule", "gpipe"], "schedule=gpipe"),
    "flash": ([*MODULE, "--attention", "flash"], "attention=flash"),
    "precision": ([*MODULE, "--precision", "bf16"], "precision=bf16"),
    "servers": ([*SERVER, "--servers", "al"], "allowed: a whole number or all"),
    "no servers": ([*SERVER, "--servers", "0"], "servers=0"),
    "fast worker": ([*SERVER, "--slow-worker", "0.5"], "slow_worker=0.5"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_mistakes_are_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, said = REFUSED[case]
    assert main(said_once(words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("ddp", "[fitted]", '[fitted]\nhost_per_launch = "5 us"', "host_per_launch"),
        ("dataparallel", "tensor_parallel = false", "tensor_parallel = true", "tensor_parallel"),
        ("dataparallel", "zero_stages = [0]", "zero_stages = [0, 1]", "zero_stages"),
        ("dataparallel", '= "dataparallel"\n\n', '= "data"\n\n', "strategy"),
    ],
)
def test_a_stack_file_cannot_say_what_its_strategy_ignores(
    name: str, old: str, new: str, said: str, tmp_path: Path
) -> None:
    source = (
        Path(__file__).parents[1] / "meshwright" / "hwprofiles" / "data" / "stacks" / f"{name}.toml"
    )
    text = source.read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(ProfileError, match=said):
        load_stack(path)
