"""``meshwright validate``: what it compares, prints, writes, returns and refuses."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from words_said import said_once

import meshwright
from meshwright.planner.reports.plan_file import SavedPlan
from meshwright.validate.ranks.measurement import RankMeasurement
from meshwright.validate.runs import fake as fake_run
from meshwright.validate.runs.fake import check_torch

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("no_pictures")

MODEL = """
name = "tiny-gpt"
num_layers = 2
hidden_size = 64
num_heads = 4
vocab_size = 512
seq_len = 64
"""


def make_plan(folder: Path, *words: str) -> str:
    """Write the plan of a tiny model; return the name of its file."""
    model = folder / "tiny.toml"
    model.write_text(MODEL, encoding="utf-8")
    base = ["simulate", str(model), "--cluster", "localhost-cpu", "--global-batch", "8"]
    out = ["--precision", "fp32", "--json", str(folder / "step.json"), "--out", str(folder / "out")]
    assert meshwright.main(said_once([*base, *words, *out])) == 0
    return str(folder / "out" / "plan.json")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_plan(tmp_path_factory.mktemp("plan"), "--gpus", "2", "--pp", "2")


@pytest.fixture(scope="module")
def gloo_run(plan: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two processes."""
    folder = tmp_path_factory.mktemp("gloo") / "out"
    words = ["--backend", "gloo", "--ranks", "2", "--steps", "2", "--out", str(folder)]
    assert meshwright.main(["validate", plan, *words]) == 0
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line with which a command is refused."""
    assert meshwright.main(["validate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err[len("error: ") : -1]


def test_a_fake_rank_of_each_kind_agrees(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        assert meshwright.main(["validate", plan, "--out", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 100
    assert "3 of 8 microbatches were run; the counts scale exactly with their number" in out
    assert out.count("\nrank 0 ") == out.count("\nrank 1 ") == 2
    assert "all exact quantities agree, peak live bytes within 0.5%" in out
    names = ["plan.json", "rank-00000.json", "rank-00001.json", "report.md", "validation.json"]
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    page = (folders[0] / "report.md").read_text(encoding="utf-8")
    assert "## rank 1" in page
    assert "| quantity | predicted | measured | difference | verdict |" in page
    document = json.loads((folders[0] / "validation.json").read_text(encoding="utf-8"))
    assert document["agrees"]
    assert (document["num_microbatches_run"], document["num_microbatches"]) == (3, 8)
    assert [kind["ranks"] for kind in document["ranks"]] == [[0], [1]]


def test_one_rank_as_json_alone(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert meshwright.main(["validate", plan, "--rank", "1", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    (kind,) = document["ranks"]
    assert kind["ranks"] == [1]
    flops = kind["checks"][0]
    assert flops["quantity"] == "FLOPs"
    assert flops["predicted"] == flops["measured"] > 0
    assert flops["difference_fraction"] == 0


def test_a_count_that_differs_is_listed_and_returns_1(
    plan: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = fake_run.measure_fake

    def one_call_less(saved: SavedPlan, rank: int) -> RankMeasurement:
        measured = measure(saved, rank)
        first, *others = measured.collectives
        fewer = first._replace(num_calls=first.num_calls - 1)
        return replace(measured, collectives=(fewer, *others))

    monkeypatch.setattr(fake_run, "measure_fake", one_call_less)
    assert meshwright.main(["validate", plan, "--rank", "0"]) == 1
    out = capsys.readouterr().out
    assert "quantities that do not agree: 1" in out
    assert re.search(r"  rank 0: pp all_reduce of .*: 1 predicted, 0 measured; must be equal", out)


def test_processes_learn_what_one_does(gloo_run: Path) -> None:
    page = (gloo_run / "report.md").read_text(encoding="utf-8")
    assert "all exact quantities agree" in page
    document = json.loads((gloo_run / "validation.json").read_text(encoding="utf-8"))
    assert document["num_microbatches_run"] == document["num_microbatches"] == 8
    loss, *times = document["run"]
    assert (loss["verdict"], loss["unit"]) == ("pass", "nats")
    assert abs(loss["difference_fraction"]) < 1e-5
    assert [each["verdict"] for each in times] == ["reported"] * 3
    assert times[0]["quantity"] == "step time, median of 2 steps"
    measured = json.loads((gloo_run / "rank-00001.json").read_text(encoding="utf-8"))
    assert len(measured["step_times_s"]) == 2
    assert len(measured["losses"]) == 8  # two to settle, three counted, one to warm up, two timed
    assert set(measured["versions"]) == {"torch", "python", "device"}
    assert "within 0.5% and what gloo may hold" in page


def test_what_came_back_is_compared_likewise(
    gloo_run: Path, plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meshwright.main(["validate", plan, "--collect", str(gloo_run), "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    written = json.loads((gloo_run / "validation.json").read_text(encoding="utf-8"))
    assert document == written


def test_a_run_that_failed_is_diagnosed(
    gloo_run: Path, plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "job-1"
    shutil.copytree(gloo_run / "run-1", run)
    heartbeat = run / "rank-00001.heartbeat.json"
    text = heartbeat.read_text(encoding="utf-8").replace('"done"', '"step 1"')
    heartbeat.write_text(text, encoding="utf-8")
    assert meshwright.main(["validate", plan, "--collect", str(run)]) == 1
    said = capsys.readouterr().out
    assert "rank 1 was silent: killed, or still running; last phase: step 1" in said
    assert meshwright.main(["validate", plan, "--collect", str(run), "--json", "-"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["agrees"]
    assert document["failure"]["rank"] == 1
    shutil.copytree(run, tmp_path / "job-2")
    several = refused(capsys, plan, "--collect", str(tmp_path))
    assert "holds 2 runs; allowed: " in several
    other = refused(capsys, plan, "--collect", str(run), "--backend", "nccl")
    assert other == "--backend nccl is not that of the run; allowed: gloo"


@pytest.mark.parametrize(("launcher", "script"), [("slurm", "run.sbatch"), ("torchrun", "run.sh")])
def test_a_launch_folder_says_how_to_bring_results_back(
    launcher: str, script: str, plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "job"
    words = ["--emit", launcher, "--steps", "7", "--timeout", "90", "--out", str(folder)]
    assert meshwright.main(["validate", plan, *words]) == 0
    names = sorted(["README.md", "plan.json", "spec.json", script])
    assert sorted(path.name for path in folder.iterdir()) == names
    spec = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    assert (spec["backend"], spec["num_steps"], spec["step_timeout_s"]) == ("nccl", 7, 90)
    notes = (folder / "README.md").read_text(encoding="utf-8")
    assert "meshwright validate plan.json --collect results/" in notes
    assert script in notes
    assert notes in capsys.readouterr().out
    assert "is not empty" in refused(capsys, plan, *words)
    assert "no run.json" in refused(capsys, plan, "--collect", str(folder))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rank", "2"], "--rank 2 is out of range; allowed 0 to 1"),
        (["--rank", "-1"], "--rank -1 is out of range; allowed 0 to 1"),
        (["--backend", "mpi"], "--backend 'mpi' is unknown; "),
        (["--backend", "gloo", "--ranks", "3"], "--ranks 3 is not the plan's number; allowed: 2"),
        (["--ranks", "2"], "--ranks 2 has no effect with --backend fake; allowed with: "),
        (["--backend", "gloo", "--rank", "0"], "--rank 0 has no effect with "),
        (["--steps", "3"], "--steps 3 has no effect with --backend fake; allowed with: "),
        (["--backend", "gloo", "--steps", "0"], "--steps 0 is out of range; allowed 1 to 1000"),
        (["--backend", "gloo", "--timeout", "0"], "--timeout 0 is out of range; allowed 1 to "),
        (["--emit", "slurm"], "--emit needs a folder to write; allowed: --out DIR"),
        (["--emit", "slurm", "--out", "x", "--json", "-"], "--json - has no effect with --emit"),
        (["--emit", "slurm", "--collect", "x"], "--emit and --collect are two commands"),
        (["--emit", "slurm", "--out", "x", "--backend", "fake"], "--emit with --backend fake"),
        (["--device", "cpu"], "--device cpu has no effect with --backend fake; allowed with: "),
        (["--backend", "probe", "--device", "tpu"], "device=tpu is not here; allowed: cpu"),
        (["--backend", "probe", "--rank", "2"], "rank=2 is out of range; allowed: 0 to 1"),
        (["--emit", "slurm", "--out", "x", "--backend", "probe"], "--emit with --backend probe"),
        (["--collect", "."], "holds no run.json; allowed: "),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str],
    says: str,
    plan: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, plan, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_needed_and_must_have_a_program(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert refused(capsys).startswith("PLAN is missing; allowed: a plan.json ")
    other = make_plan(tmp_path, "--gpus", "2", "--stack", "zero-broadcast")
    capsys.readouterr()
    assert "stack zero-broadcast@2019 has no PyTorch program" in refused(capsys, other)
    (folder := tmp_path / "eager").mkdir()
    eager = make_plan(folder, "--gpus", "2", "--set", "kernels=eager")
    capsys.readouterr()
    said = "kernels = eager has no PyTorch program on stack megatron-core@0.18; allowed: fused"
    assert said in refused(capsys, eager)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["--stack", "dataparallel"], [0, 1]),
        (["--stack", "parameter-server", "--cluster", "dgx-a100", "--async"], [0, 2]),
        (["--stack", "parameter-server", "--servers", "all"], [0]),
    ],
)
def test_replicas_and_servers_agree(
    words: list[str], ranks: list[int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = make_plan(tmp_path, "--gpus", "2", "--global-batch", "4", *words)
    capsys.readouterr()
    assert meshwright.main(["validate", other, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [kind["ranks"] for kind in document["ranks"]] == [[rank] for rank in ranks]
    if "--async" in words or "dataparallel" in words:
        said = refused(capsys, other, "--backend", "nccl")
        assert said.endswith("allowed: fake, gloo")


@pytest.mark.slow
def test_asynchronous_workers_report_how_stale_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--stack", "parameter-server", "--cluster", "dgx-a100", "--async"]
    other = make_plan(tmp_path, "--gpus", "1", "--global-batch", "2", *words)
    capsys.readouterr()
    words = ["--backend", "gloo", "--ranks", "2", "--steps", "2", "--json", "-"]
    assert meshwright.main(["validate", other, *words]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    late = [each for each in run if each["quantity"].startswith("updates after")]
    assert sum(each["measured"] for each in late) == 8
    assert {each["verdict"] for each in run} == {"reported"}


@pytest.mark.slow
def test_replicas_of_one_process_train_as_one_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = make_plan(tmp_path, "--gpus", "2", "--global-batch", "4", "--stack", "dataparallel")
    capsys.readouterr()
    words = ["--backend", "gloo", "--steps", "2", "--json", "-"]
    assert meshwright.main(["validate", other, *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [kind["ranks"] for kind in document["ranks"]] == [[0]]
    assert document["run"][0]["verdict"] == "pass"


def test_a_probe_reports_times_and_judges_the_peak(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "probe"
    words = ["--backend", "probe", "--rank", "1", "--device", "cpu", "--steps", "1"]
    assert meshwright.main(["validate", plan, *words, "--out", str(folder)]) == 0
    assert "peak live bytes within 1%; times are reported" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [
        "plan.json",
        "probe.json",
        "report.md",
    ]
    document = json.loads((folder / "probe.json").read_text(encoding="utf-8"))
    *times, peak = document["checks"]
    assert {each["verdict"] for each in times} == {"reported"}
    assert (peak["quantity"], peak["verdict"]) == ("peak live bytes", "pass")
    assert (document["rank"], document["device"], document["num_steps"]) == (1, "cpu", 1)


def test_a_machine_that_cannot_run_the_plan_is_spared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["gpt3-175b", "--cluster", "dgx-a100", "--gpus", "512", "--global-batch", "64"]
    layout = ["--tp", "8", "--pp", "64", "--out", str(tmp_path / "out")]
    assert meshwright.main(["simulate", *words, *layout]) == 0
    capsys.readouterr()
    large = str(tmp_path / "out" / "plan.json")
    said = refused(capsys, large, "--backend", "gloo")
    assert said.startswith("--backend gloo: 512 ranks need about ")
    assert said.endswith("allowed: a smaller plan, --backend fake")
    said = refused(capsys, large, "--backend", "nccl")
    assert said.startswith("--backend nccl needs a GPU for each rank; PyTorch finds ")


def test_without_pytorch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_run, "find_spec", lambda _: None)
    with pytest.raises(meshwright.PlanError, match=r'pip install "meshwright\[validate\]"'):
        check_torch()
