"""Results as files: JSON documents, plan files, tables, folders."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    PS_PER_S,
    Attention,
    Precision,
    Recompute,
    load_cluster,
    load_stack,
)
from meshwright.planner import SearchResult, SpaceLimits
from meshwright.planner.reports.documents import json_text, search_document, step_document
from meshwright.planner.reports.money import Budget, training_run
from meshwright.planner.reports.output_folder import new_file, new_folder
from meshwright.planner.reports.plan_file import SavedPlan, plan_document, read_plan
from meshwright.planner.reports.result_files import saved_plan
from meshwright.planner.reports.tables_csv import plans_csv, stages_csv
from meshwright.planner.search import search
from meshwright.simulator import (
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_model,
    resolve,
    simulate,
)

CLUSTER = load_cluster("dgx-a100")
STACK = load_stack("megatron-core")
MODEL = load_model("gpt2")
JOB = TrainingJob(model=MODEL, global_batch_size=16, seq_len=1024)
PLAN = ResolvedPlan(tp=2, pp=2, dp=2, zero_stage=1, attention=Attention.FLASH, stages=(6, 6))


@pytest.fixture(scope="module")
def step() -> StepResult:
    return simulate(JOB, PLAN, CLUSTER, STACK)


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(JOB, CLUSTER, STACK, 8, limits=SpaceLimits(max_tp=2), top=3)


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_step_document_is_plain_json(step: StepResult) -> None:
    document = step_document(step)
    assert json.loads(json_text(document)) == document
    assert "training_run" not in document


def test_step_document_reads_back_without_loss(step: StepResult) -> None:
    document = json.loads(json_text(step_document(step)))
    assert document["step_time_s"] == step.step_ps / PS_PER_S
    assert document["tokens_per_s_per_gpu"] == step.tokens_per_s_per_gpu
    assert document["memory"]["by_stage"][0]["parameters"] == (
        step.memory.by_stage[0].parameters_bytes
    )


def test_parts_of_a_stage_add_up_to_its_peak(step: StepResult) -> None:
    parts = ("parameters", "gradients", "optimizer_states", "activations", "buffers")
    for stage in json.loads(json_text(step_document(step)))["memory"]["by_stage"]:
        assert stage["peak"] == sum(stage[part] for part in parts)


def test_search_document_sorts_reasons(found: SearchResult) -> None:
    shuffled = replace(found, rejections={"b": 1, "a": 2})
    assert list(json.loads(json_text(search_document(shuffled)))["rejections"]) == ["a", "b"]


def test_search_document_holds_every_plan_and_frontier_point(found: SearchResult) -> None:
    document = json.loads(json_text(search_document(found, Budget(tokens=1e9))))
    assert [len(plan.pop("like")) for plan in document["plans"]] == list(map(len, found.like))
    assert document["plans"] == [
        json.loads(json_text(step_document(plan, Budget(tokens=1e9)))) for plan in found.plans
    ]
    assert [point["device_bytes"] for point in document["frontier"]] == [
        point.device_bytes for point in found.frontier
    ]
    assert document["plans"][0]["training_run"]["cost_usd"] is None


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"mfu_fraction": float("nan")})


PLANS = st.builds(
    lambda pp, **fields: ResolvedPlan(pp=pp, stages=(12 // pp,) * pp, **fields),
    pp=st.sampled_from([1, 2, 3]),
    dp=st.sampled_from([1, 2, 8]),
    zero_stage=st.integers(0, 1),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from(Recompute),
    attention=st.sampled_from(Attention),
)
JOBS = st.builds(
    TrainingJob,
    model=st.just(MODEL),
    global_batch_size=st.integers(1, 10**6),
    seq_len=st.integers(1, 1024),
    precision=st.sampled_from(Precision),
)


@given(job=JOBS, plan=PLANS)
def test_plan_file_reads_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    job: TrainingJob,
    plan: ResolvedPlan,
) -> None:
    whole = resolve(job, CLUSTER, STACK, plan)
    saved = SavedPlan(job=job, plan=whole, cluster=CLUSTER, stack=STACK)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(json_text(plan_document(saved)))
    assert read_plan(path) == saved


def test_plan_file_names_what_is_built_in(step: StepResult) -> None:
    document = plan_document(saved_plan(step))
    assert document["model"] == "gpt2"
    assert document["cluster"] == "dgx-a100"
    assert document["stack"] == "megatron-core@0.18"


def test_plan_file_writes_out_what_is_not_built_in(step: StepResult, tmp_path: Path) -> None:
    # The same names with other content: a name alone would bring back something else.
    saved = SavedPlan(
        job=replace(JOB, model=MODEL.model_copy(update={"vocab_size": 1000})),
        plan=resolve(JOB, CLUSTER, STACK, PLAN),
        cluster=CLUSTER.model_copy(update={"nics_per_node": 1}),
        stack=STACK.model_copy(update={"kernel_gap_s": 1e-6}),
    )
    path = tmp_path / "plan.json"
    path.write_text(json_text(plan_document(saved)))
    assert read_plan(path) == saved


def test_plan_file_finds_files_beside_it(step: StepResult, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\ntitle = "Mine"\ndevice = "a100-sxm4-80gb"\ndevices_per_node = 4\n'
        'intra_node = "nvlink3-nvswitch"\ninter_node = "infiniband-hdr"\nnics_per_node = 4\n'
        'source = "test"\n'
    )
    path = tmp_path / "plan.json"
    path.write_text(json_text({**plan_document(saved_plan(step)), "cluster": "mine.toml"}))
    assert read_plan(path).cluster.devices_per_node == 4


def test_plans_table_has_a_row_a_plan(found: SearchResult) -> None:
    budget = Budget(tokens=1e9, price_usd_per_gpu_hour=2.0)
    table = rows(plans_csv(found.plans, budget, found.like))
    assert [row["plan"] for row in table] == ["1", "2", "3"]
    assert [int(row["like"]) for row in table] == list(map(len, found.like))
    for row, plan in zip(table, found.plans, strict=True):
        assert float(row["step_time_s"]) == plan.step_time_s
        assert int(row["tp"]) == plan.plan.tp
        assert float(row["cost_usd"]) == pytest.approx(2 * float(row["gpu_hours"]))


def test_stages_table_has_a_row_a_pipeline_rank(step: StepResult) -> None:
    table = rows(stages_csv([step]))
    assert [row["stage"] for row in table] == ["0", "1"]
    assert [row["layers"] for row in table] == ["6", "6"]
    assert [int(row["peak_bytes"]) for row in table] == [
        stage.peak_bytes for stage in step.memory.by_stage
    ]
    times_s = [float(row["peak_time_s"]) for row in table]
    assert times_s == pytest.approx([each.peak_time_ps * 1e-12 for each in step.memory.by_stage])
    assert 0 < max(times_s) <= step.step_time_s


def test_stages_table_adds_up_virtual_stages() -> None:
    plan = replace(PLAN, num_virtual_stages=3, schedule="interleaved", stages=(3, 2, 2, 2, 2, 1))
    table = rows(stages_csv([simulate(JOB, plan, CLUSTER, STACK)]))
    assert [row["layers"] for row in table] == ["7", "5"]


@given(
    tokens=st.floats(1, 1e18),
    rate=st.floats(1, 1e12),
    num_gpus=st.integers(1, 10**7),
    price=st.floats(0, 1e3),
)
def test_cost_is_price_times_gpu_hours(
    tokens: float, rate: float, num_gpus: int, price: float
) -> None:
    run = training_run(tokens, tokens_per_s=rate, num_gpus=num_gpus, price_usd_per_gpu_hour=price)
    assert run.cost_usd == pytest.approx(tokens / rate / 3600 * num_gpus * price)
    assert run.days * 24 * num_gpus == pytest.approx(run.gpu_hours)


def test_unfinished_file_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), new_file(path) as written:
        _ = [written.write_text(str(1 // size)) for size in (1, 0)]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_device_is_written_to_and_stays_a_device() -> None:
    with new_file(Path("/dev/null")) as written:
        written.write_text("gone")
    assert not Path("/dev/null").is_file()


def test_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    with new_file(link) as written:
        written.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.parametrize("exists", [False, True])
def test_unfinished_folder_leaves_nothing(tmp_path: Path, *, exists: bool) -> None:
    folder = tmp_path / "out"
    if exists:
        folder.mkdir()
    with pytest.raises(ZeroDivisionError), new_folder(folder) as files:
        _ = [(files / name).write_text(str(1 // size)) for name, size in (("a", 1), ("b", 0))]
    assert list(tmp_path.iterdir()) == ([folder] if exists else [])
    assert not exists or list(folder.iterdir()) == []
