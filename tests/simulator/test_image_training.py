"""Training of residual networks and chains: throughput, stages, messages, bytes, refusals."""

import csv
from pathlib import Path

import pytest

from meshwright.hwprofiles import (
    Attention,
    Cluster,
    Precision,
    Recompute,
    load_cluster,
    load_device,
    load_stack,
)
from meshwright.simulator import (
    PlanError,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.layout import model_stages, whole_model
from meshwright.simulator.memory import block_bytes, stage_messages
from meshwright.simulator.model import AnyModel, parse_any_model

GOLDEN = Path(__file__).parents[1] / "golden" / "resnet50_throughput.csv"
CLUSTERS = {"a100-sxm4-80gb": "dgx-a100", "v100-sxm2-32gb": "dgx-1v", "v100-sxm2-16gb": "dgx-1v"}
PUBLISHED_BATCH = 2048  # a step's images; gradients of several microbatches are added up


def published() -> list[dict[str, str]]:
    with GOLDEN.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def machine(device: str) -> Cluster:
    return load_cluster(CLUSTERS[device]).model_copy(update={"device": load_device(device)})


def run(
    model: AnyModel, stack: str, *, batch: int, cluster: str = "dgx-a100", **plan: object
) -> StepResult:
    job = TrainingJob(model=model, global_batch_size=batch, seq_len=1, precision=Precision.FP16)
    layout = ResolvedPlan(**{"attention": Attention.UNFUSED, "zero_stage": 0, **plan})
    return simulate(job, layout, load_cluster(cluster), load_stack(stack))


def chain(*shapes: tuple[int, int], activation: bool = False) -> AnyModel:
    layers = [{"inputs": a, "outputs": b, "activation": activation} for a, b in shapes]
    return parse_any_model({"name": "chain", "kind": "chain", "linear": layers}, origin="test")


@pytest.mark.parametrize("row", published(), ids=lambda row: "-".join([*row.values()][:4]))
def test_resnet50_trains_as_fast_as_published(row: dict[str, str]) -> None:
    size, num_gpus = int(row["microbatch_size"]), int(row["num_gpus"])
    passes = PUBLISHED_BATCH // (size * num_gpus)
    job = TrainingJob(
        model=load_model("resnet50"),
        global_batch_size=passes * size * num_gpus,
        seq_len=1,
        precision=Precision(row["precision"]),
    )
    plan = ResolvedPlan(
        dp=num_gpus, microbatch_size=size, attention=Attention.UNFUSED, zero_stage=0
    )
    result = simulate(job, plan, machine(row["device"]), load_stack("ddp"))
    wanted = pytest.approx(float(row["images_per_s"]), rel=float(row["rel_tol"]))
    assert result.tokens_per_s == wanted
    assert result.memory.fits


def test_stages_of_a_pipeline_hold_blocks_of_several_kinds() -> None:
    model = load_model("resnet50")
    stages = model_stages(model, (4, 4, 4, 4))
    assert [stage.num_layers for stage in stages] == [4, 4, 4, 4]
    assert [len(stage.layers) for stage in stages] == [3, 2, 1, 3]
    assert (stages[0].has_embedding, stages[3].has_head) == (True, True)


def test_messages_between_blocks_shrink_with_the_images() -> None:
    model, plan = load_model("resnet50"), ResolvedPlan(pp=4, dp=1, stages=(3, 4, 6, 3))
    job = TrainingJob(model=model, global_batch_size=8, seq_len=1, precision=Precision.FP16)
    shape = BlockShape.of(job, plan, load_stack("deepspeed"))
    blocks = block_bytes(BlockTable(), shape)
    sent = [stage_messages(blocks, stage).output for stage in model_stages(model, plan.stages)]
    sizes = [2 * channels * side**2 for channels, side in ((256, 56), (512, 28), (1024, 14))]
    assert sent == [*sizes, 0]


def test_a_whole_network_keeps_each_activation_once() -> None:
    """As one stage: what its blocks keep adds up to what PyTorch keeps of all of them.

    Of an image in fp32: the image, each convolution's and each norm's output (the first is the
    norm's input, the second, made positive in place, the next one's), places of maxima and what
    the pool makes, two numbers a channel of each norm; logarithms of 1,000 probabilities, means.
    """
    model = load_model("resnet50")
    job = TrainingJob(model=model, global_batch_size=1, seq_len=1, precision=Precision.FP32)
    shape = BlockShape.of(job, ResolvedPlan(zero_stage=0), load_stack("ddp"))
    blocks = block_bytes(BlockTable(), shape)
    saved = sum(count * blocks[kind].saved for kind, count in whole_model(model).blocks)
    convolved = normal = 112**2 * 64
    channels = 64
    for kind in model.layers:
        outputs = kind.out_side**2 * kind.out_channels
        inner = (kind.side**2 + kind.out_side**2) * kind.inner_channels
        convolved += inner + outputs * (2 if kind.projects else 1)
        normal += inner + outputs * (2 if kind.projects else 1)
        channels += 2 * kind.inner_channels + kind.out_channels * (2 if kind.projects else 1)
        normal -= outputs if kind.projects else 0  # a projection's is added, and goes
    pooled = 56**2 * 64
    numbers = 3 * 224**2 + convolved + normal + pooled + 2 * channels + 2048 + 1000
    assert saved == 4 * numbers + 8 * pooled


def test_pure_data_parallelism_beats_pipelines_of_blocks() -> None:
    model = load_model("resnet50")
    data = run(model, "deepspeed", batch=256, dp=4, microbatch_size=64)
    pipeline = run(model, "deepspeed", batch=256, pp=4, dp=1, microbatch_size=32)
    assert data.step_ps < pipeline.step_ps


def test_dataparallel_is_slower_than_distributed_data_parallel() -> None:
    model = load_model("resnet50")
    results = [
        run(model, stack, batch=512, cluster="dgx-1v", dp=8, microbatch_size=64)
        for stack in ("ddp", "dataparallel")
    ]
    assert results[0].step_ps < results[1].step_ps


def test_the_textbook_chain_has_one_matrix_on_each_stage() -> None:
    model, plan = chain((5, 8), (8, 3)), ResolvedPlan(pp=2, stages=(1, 1))
    job = TrainingJob(model=model, global_batch_size=4, seq_len=1, precision=Precision.FP32)
    shape = BlockShape.of(job, plan, load_stack("megatron-core"))
    first, second = model_stages(model, plan.stages)
    assert [shape.parameters[each.layers[0].kind] for each in (first, second)] == [40, 24]
    assert stage_messages(block_bytes(BlockTable(), shape), first).output == 8 * 4


def test_a_chain_splits_over_tensor_ranks_with_one_sum_a_pair_of_layers() -> None:
    result = run(chain(*[(64, 64)] * 4), "megatron-core", batch=8, tp=2, microbatch_size=8)
    assert result.exposed_comm_s > 0
    job, stack = result.job, load_stack("megatron-core")
    shape = BlockShape.of(job, ResolvedPlan(tp=2, stages=(4,)), stack)
    assert [shape.parameters[kind] for kind, _ in job.model.layer_runs] == [64 * 32] * 4


@pytest.mark.parametrize(
    ("stack", "plan", "said"),
    [
        ("megatron-core", {"tp": 2}, "tp=2 does not go with resnet50: convolutions are whole"),
        (
            "torchtitan@0.2",
            {},
            "resnet50 has layers of its own, which stack torchtitan@0.2 is not known to",
        ),
        ("deepspeed", {"pp": 17}, "17 stages are more than the model's 16 layers"),
        ("ddp", {"recompute": Recompute.SELECTIVE}, "no attention; allowed: none, full"),
    ],
)
def test_what_a_residual_network_cannot_have_is_refused(
    stack: str, plan: dict[str, object], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        run(load_model("resnet50"), stack, batch=64, **plan)


def test_what_is_gone_of_kept_rows_is_no_buffer() -> None:
    ended = run(chain(*[(256, 256)] * 4), "ddp", batch=4, microbatch_size=4).memory.by_stage[0]
    # As fullest, behind two of four layers, casts of weights that wait are gone; bytes of it all:
    static = ended.parameters_bytes + ended.gradients_bytes + ended.optimizer_states_bytes
    assert (ended.buffers_bytes, ended.activations_bytes) == (0, 5_376_000 - static)


@pytest.mark.parametrize(
    ("model", "num_weights"),
    [(chain(*[(64, 64)] * 4), 64 * 64), (load_model("resnet50"), 2048_000)],
)
def test_linear_layers_of_each_kind_of_model_have_stand_ins(
    model: AnyModel, num_weights: int
) -> None:
    old, new = (
        run(model, f"megatron-core{later}", batch=8, microbatch_size=8).memory.peak_bytes
        for later in ("", "-2026")
    )
    assert new - old == 2 * num_weights
