"""The commands: what they print, write and return."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from meshwright import (
    Precision,
    ResolvedPlan,
    TrainingJob,
    list_clusters,
    list_models,
    list_stacks,
    load_cluster,
    load_model,
    load_stack,
    main,
    simulate,
)
from meshwright.simulator import SCHEDULES

STEP = ["simulate", "gpt2", "--cluster", "dgx-a100", "--gpus", "16", "--global-batch", "32"]
LAYOUT = ["--tp", "2", "--pp", "2"]
SEARCH = ["search", "gpt2", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "16"]

STEP_KEYS = {
    "model",
    "plan",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "model_flops_per_s_per_gpu",
    "mfu_fraction",
    "hfu_fraction",
    "bubble_fraction",
    "schedule_bubble_fraction",
    "exposed_comm_s",
    "time_breakdown_s",
    "memory",
    "provenance",
    "warnings",
}
SEARCH_KEYS = {
    "space_size",
    "feasible",
    "simulated",
    "optimal",
    "bound_gap_fraction",
    "rejections",
    "plans",
    "frontier",
    "nearest",
}
PICTURES = {"breakdown.png", "stage_memory.png", "timeline.png"}
STEP_FILES = {"plan.json", "result.json", "plans.csv", "stages.csv"} | PICTURES


class Runner:
    """Runs commands in this process and returns what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str, status: int = 0) -> str:
        assert main(words) == status
        out, err = self._capsys.readouterr()
        if status == 2:
            assert out == ""
            assert err.startswith("error: ")
            assert err.count("\n") == 1
            return err
        assert err == ""
        return out

    def document(self, *words: str, status: int = 0) -> dict:
        return json.loads(self(*words, "--json", "-", status=status))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys)


def imported(words: list[str]) -> set[str]:
    """Return the modules that a fresh process has imported when the command ends."""
    code = (
        "import sys, meshwright; meshwright.main(sys.argv[1:]);print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("name", meshwright.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(meshwright, name) is not None


def test_a_script_of_a_user_runs_and_prints_short_records() -> None:
    script = Path(__file__).with_name("user_script.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert re.fullmatch(
        r"<StepResult gpt2 on dgx-a100: ResolvedPlan\(.*\), [0-9.]+ s, .*>\n", done.stdout
    )


def test_public_records_are_told_by_name() -> None:
    cluster, model = meshwright.load_cluster("dgx-a100"), meshwright.load_model("gpt2")
    assert (repr(cluster), repr(model)) == ("Cluster('dgx-a100')", "ModelSpec('gpt2')")


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sercah'"):
        _ = meshwright.sercah


def test_public_names_are_listed_before_they_are_imported() -> None:
    assert dir(meshwright) == sorted(meshwright.__all__)


def test_version_imports_nothing_heavy() -> None:
    assert not imported(["--version"]) & {"numpy", "pandas", "matplotlib", "rich", "typer"}


def test_search_imports_no_tables_no_pictures_and_no_readers_of_configurations() -> None:
    readers = "meshwright.simulator.model.huggingface.llama"
    assert not imported([*SEARCH, "--json", "-"]) & {"pandas", "matplotlib", "torch", readers}


def test_version_is_printed(run: Runner) -> None:
    assert run("--version") == "meshwright 0.1.0\n"


def test_no_words_show_the_help(run: Runner) -> None:
    text = run()
    assert all(command in text for command in ("search", "simulate", "models", "schedules"))


def test_simulate_json_has_the_promised_keys(run: Runner) -> None:
    document = run.document(*STEP, *LAYOUT)
    assert document.keys() >= STEP_KEYS
    assert document["model"].keys() == {"name", "parameters", "flops_per_step", "flops_convention"}
    # Written only where they say something.
    left_out = {"recompute_layers", "recompute_method", "microbatch_group_size"}
    left_out |= {"expert_overlap", "moment_precision", "prediction_stage"}
    left_out |= {"offload_layers", "offload_modules"}
    assert document["plan"].keys() == set(ResolvedPlan.__dataclass_fields__) - left_out
    memory = document["memory"]
    assert memory.keys() >= {"peak_bytes", "reserved_bytes", "device_bytes", "capacity_bytes"}
    assert memory.keys() >= {"fits", "worst_rank"}
    assert [stage["stage"] for stage in memory["by_stage"]] == [0, 1]
    assert memory["peak_bytes"] == max(stage["peak"] for stage in memory["by_stage"])
    shares = document["provenance"]
    assert list(shares) == ["measured", "fitted", "datasheet", "extrapolated"]
    assert sum(shares.values()) == pytest.approx(1)


def test_simulate_json_holds_the_numbers_of_the_library(run: Runner) -> None:
    document = run.document(*STEP, *LAYOUT, "--zero", "0", "--micro-batch", "2")
    job = TrainingJob(model=load_model("gpt2"), global_batch_size=32, seq_len=1024)
    stack = load_stack("megatron-core")
    plan = ResolvedPlan(
        tp=2, pp=2, dp=4, microbatch_size=2, attention=stack.attention, stages=(6, 6)
    )
    result = simulate(job, plan, load_cluster("dgx-a100"), stack)
    assert document["step_time_s"] == result.step_time_s
    assert document["mfu_fraction"] == result.mfu_fraction
    assert document["memory"]["device_bytes"] == result.memory.device_bytes
    assert sum(document["time_breakdown_s"].values()) == pytest.approx(result.step_time_s)


def test_two_runs_give_identical_bytes(run: Runner) -> None:
    assert run(*SEARCH, "--json", "-") == run(*SEARCH, "--json", "-")


def test_search_json_has_the_promised_keys(run: Runner) -> None:
    document = run.document(*SEARCH, "--top", "3")
    assert document.keys() >= SEARCH_KEYS
    assert document["optimal"]
    assert document["bound_gap_fraction"] == 0
    assert document["nearest"] is None
    assert document["space_size"] == document["feasible"] + sum(document["rejections"].values())
    times = [plan["step_time_s"] for plan in document["plans"]]
    assert len(times) == 3
    assert times == sorted(times)
    assert all(plan.keys() >= STEP_KEYS for plan in document["plans"])
    assert all(
        point.keys() == {"plan", "step_time_s", "device_bytes", "proven", "bound_gap_fraction"}
        for point in document["frontier"]
    )


@pytest.mark.usefixtures("no_pictures")
def test_best_plan_of_a_search_simulates_to_the_same_document(run: Runner, tmp_path: Path) -> None:
    first, second, *_ = run.document(*SEARCH, "--out", str(tmp_path / "out"))["plans"]
    for name, step in (("plan.json", first), ("plan-2.json", second)):
        again = run.document("simulate", "--plan", str(tmp_path / "out" / name))
        assert {**again, "like": step["like"]} == step


def test_search_respects_pins_and_limits(run: Runner) -> None:
    words = ["--tp", "2", "--max-pp", "2", "--recompute", "full", "--no-sequence-parallel"]
    document = run.document(*SEARCH, *words, "--schedule", "1f1b", "--micro-batch", "1")
    for step in document["plans"]:
        plan = step["plan"]
        assert (plan["tp"], plan["recompute"], plan["schedule"]) == (2, "full", "1f1b")
        assert plan["pp"] <= 2
        assert plan["microbatch_size"] == 1
        assert not plan["sequence_parallel"]


def test_search_in_which_nothing_fits_returns_1_and_says_what_is_nearest(
    run: Runner, tmp_path: Path
) -> None:
    words = ["search", "gpt3-175b", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "8"]
    file = tmp_path / "result.json"
    text = run(*words, "--json", str(file), status=1)
    nearest = json.loads(file.read_text(encoding="utf-8"))["nearest"]
    assert nearest["lacks_bytes"] > 0
    assert nearest["changes"]
    assert "none of" in text
    assert "nearest" in text


def test_search_in_which_nothing_fits_leaves_only_the_result(run: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run(*SEARCH, "--memory-limit", "1 MiB", "--out", str(folder), status=1)
    assert [path.name for path in folder.iterdir()] == ["result.json"]


def test_simulate_returns_0_for_a_plan_that_does_not_fit(run: Runner) -> None:
    document = run.document(*STEP, *LAYOUT, "--memory-limit", "1 GiB")
    assert document["memory"]["fits"] is False
    assert any("does not fit" in warning for warning in document["warnings"])
    assert "DOES NOT FIT" in run(*STEP, *LAYOUT, "--memory-limit", "1 GiB")


@pytest.mark.parametrize(
    ("cluster", "stack", "expected"),
    [
        ("dgx-a100", "megatron-core", Precision.BF16),
        ("dgx-a100", "megatron-lm-2021", Precision.FP16),
        ("dgx-a100", "megatron-lm-2022", Precision.BF16),
        ("dgx-1v", "megatron-core", Precision.FP16),
    ],
)
def test_default_precision(run: Runner, cluster: str, stack: str, expected: Precision) -> None:
    words = ["simulate", "gpt2", "--cluster", cluster, "--gpus", "8", "--global-batch", "8"]
    assert run.document(*words, "--stack", stack)["job"]["precision"] == expected
    assert f"tokens, {expected}" in run(*words, "--stack", stack)


def test_defaults_of_a_layout_come_from_devices_and_stack(run: Runner) -> None:
    plan = run.document(*STEP, *LAYOUT)["plan"]
    assert plan == {
        "tp": 2,
        "pp": 2,
        "cp": 1,
        "dp": 4,
        "cp_type": None,
        "cp_inner": None,
        "ep": 1,
        "etp": None,
        "dispatcher": None,
        "num_virtual_stages": 1,
        "microbatch_size": 1,
        "zero_stage": 1,
        "sequence_parallel": False,
        "recompute": "none",
        "attention": "flash",
        "schedule": "1f1b",
        "stages": [6, 6],
        "dp_shard": 4,
        "reshard_after_forward": None,
        "gradient_precision": "fp32",
        "recompute_modules": [],
        "reduce_precision": "fp32",
        "sync_each_microbatch": False,
        "find_unused": False,
        "offload": "none",
        "parameter_server": None,
    }


def test_virtual_stages_choose_the_interleaved_schedule(run: Runner) -> None:
    plan = run.document(*STEP, *LAYOUT, "--vpp", "3")["plan"]
    assert plan["schedule"] == "interleaved"
    assert plan["stages"] == [2] * 6


def test_device_without_the_flash_kernel_gets_unfused_attention(run: Runner) -> None:
    words = ["simulate", "gpt2", "--cluster", "dgx-1v", "--gpus", "8", "--global-batch", "8"]
    assert run.document(*words)["plan"]["attention"] == "unfused"


def test_a_kernel_that_was_asked_for_is_not_replaced_by_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--gpus", "16", "--global-batch", "64", "--precision", "fp8", "--cluster", "dgx-h100"]
    words += ["--set", "flash_kernel=te-cudnn-mxfp8"]
    assert main(["simulate", "llama3-8b", *words]) == 2
    assert "has no kernel 'te-cudnn-mxfp8'" in capsys.readouterr().err


def test_flags_override_the_stack(run: Runner) -> None:
    words = ["--zero", "0", "--attention", "unfused", "--stages", "5,7", "--sequence-parallel"]
    plan = run.document(*STEP, *LAYOUT, *words, "--recompute", "selective")["plan"]
    assert (plan["zero_stage"], plan["attention"], plan["stages"]) == (0, "unfused", [5, 7])
    assert plan["sequence_parallel"]
    assert plan["recompute"] == "selective"


def test_report_fits_100_columns_and_tells_the_resolved_plan(run: Runner) -> None:
    words = ["simulate", "gpt3-175b", "--cluster", "dgx-a100", "--gpus", "3072"]
    text = run(*words, "--global-batch", "1536", "--tp", "8", "--pp", "64")
    assert max(map(len, text.splitlines())) <= 100
    for fact in ("tp=8 pp=64 dp=6", "zero_stage=1", "sequence_parallel=no", "schedule=1f1b"):
        assert fact in text
    for word in ("MFU", "HFU", "bubble", "exposed", "allocated", "reserved", "device", "fitted"):
        assert word in text


def test_days_and_cost_of_a_number_of_tokens(run: Runner) -> None:
    words = [*STEP, *LAYOUT, "--tokens", "1e12", "--price", "2.5 USD/GPU-hour"]
    document = run.document(*words)
    training = document["training_run"]
    days = 1e12 / (document["tokens_per_s_per_gpu"] * 16) / 86400
    assert training["days"] == pytest.approx(days)
    assert training["cost_usd"] == pytest.approx(days * 24 * 16 * 2.5)
    assert f"{days:,.1f} days" in run(*words)
    assert "cost USD" in run(*SEARCH, "--tokens", "1e9", "--price", "2 USD/GPU-hour")


def test_price_of_the_cluster_file_is_the_default(run: Runner, tmp_path: Path) -> None:
    cluster = tmp_path / "mine.toml"
    cluster.write_text(
        'name = "mine"\ntitle = "Mine"\ndevice = "a100-sxm4-80gb"\ndevices_per_node = 8\n'
        'intra_node = "nvlink3-nvswitch"\ninter_node = "infiniband-hdr"\nnics_per_node = 8\n'
        'price = "3 USD/GPU-hour"\nsource = "test"\n'
    )
    words = ["simulate", "gpt2", "--cluster", str(cluster), "--gpus", "8", "--global-batch", "8"]
    training = run.document(*words, "--tokens", "1e9")["training_run"]
    assert training["cost_usd"] == pytest.approx(training["gpu_hours"] * 3)
    # What is not built in is written out: the plan file works where the cluster file is gone.
    document = run.document(*words, "--out", str(tmp_path / "out"))
    cluster.unlink()
    assert run.document("simulate", "--plan", str(tmp_path / "out" / "plan.json")) == document


def test_out_writes_plan_result_tables_and_pictures(run: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    text = run(*STEP, *LAYOUT, "--out", str(folder), "--json", "-")
    assert {path.name for path in folder.iterdir()} == STEP_FILES
    assert (folder / "result.json").read_text() == text
    assert (folder / "plans.csv").read_text().count("\n") == 2
    assert (folder / "stages.csv").read_text().count("\n") == 3
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


@pytest.mark.usefixtures("no_pictures")
def test_out_of_a_search_has_every_plan(run: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run(*SEARCH, "--top", "3", "--out", str(folder))
    expected = STEP_FILES | {"plan-2.json", "plan-3.json", "memory_time.png"}
    assert {path.name for path in folder.iterdir()} == expected


@pytest.mark.usefixtures("no_pictures")
def test_out_refuses_a_folder_in_use_unless_forced(run: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run(*SEARCH, "--top", "3", "--out", str(folder))
    (folder / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "not empty" in run(*STEP, *LAYOUT, "--out", str(folder), status=2)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    run(*STEP, *LAYOUT, "--out", str(folder), "--force")
    # Plans of the earlier search would be taken for runners-up of this result.
    expected = STEP_FILES | {"notes.txt", "memory_time.png"}
    assert {path.name for path in folder.iterdir()} == expected
    assert json.loads((folder / "plan.json").read_text())["plan"]["tp"] == 2


def test_failure_while_writing_leaves_nothing_behind(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("meshwright.planner.reports.result_files.plans_csv", fail)
    error = run(*STEP, *LAYOUT, "--out", str(tmp_path / "out"), status=2)
    assert error == f"error: {tmp_path / 'out'} cannot be written: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


def test_json_and_trace_go_to_files(run: Runner, tmp_path: Path) -> None:
    result, trace = tmp_path / "result.json", tmp_path / "trace.json"
    text = run(*STEP, *LAYOUT, "--json", str(result), "--trace", str(trace))
    assert "step time" in text
    assert json.loads(result.read_text()).keys() >= STEP_KEYS
    assert json.loads(trace.read_text())["traceEvents"]
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "trace.json"}


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("models", list_models()),
        ("clusters", list_clusters()),
        ("stacks", list_stacks()),
        ("schedules", tuple(SCHEDULES)),
    ],
)
def test_lists_name_everything_and_show_sources(
    run: Runner, command: str, names: tuple[str, ...]
) -> None:
    text = run(command)
    starts = [line.split()[0] for line in text.splitlines() if line[:1].strip()]
    assert {*starts} >= {*names} if command == "stacks" else starts == list(names)
    for name in names:
        shown = run(command, name)
        assert name in shown
        assert "source" in shown
        assert max(map(len, shown.splitlines())) <= 100


def test_hybrid_sharding_is_printed_and_refused_where_it_cannot_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = ["simulate", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "32"]
    step += ["--global-batch", "64", "--stack", "torchtitan@0.2"]
    assert meshwright.main([*step, "--dp-shard", "8"]) == 0
    assert "4 replicas of 8 shards" in capsys.readouterr().out
    assert meshwright.main([*step, "--dp-shard", "5"]) == 2
    assert capsys.readouterr().err == "error: dp_shard=5 does not divide dp=32\n"
    core = [*step[:-1], "megatron-core", "--dp-shard", "8"]
    assert meshwright.main(core) == 0
    assert "4 replicas of 8 shards" in capsys.readouterr().out
    assert meshwright.main([*core, "--zero", "0"]) == 2
    assert "dp_shard=8 is not offered by stack megatron-core" in capsys.readouterr().err
