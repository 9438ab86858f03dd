"""What layers may have beyond those of GPT and Llama: what it costs, and who offers it."""

from dataclasses import replace

import pytest

from meshwright.hwprofiles import Attention, CollectiveOp, Precision, load_stack
from meshwright.simulator import ModelSpec, ResolvedPlan, TrainingJob, load_model, model_flops
from meshwright.simulator.blocks import BlockShape, BlockTable, FlashAttention
from meshwright.simulator.layout import Axis, model_stages, stack_refusal, strided_span
from meshwright.simulator.ledger.closing import tensor_sums
from meshwright.simulator.model import parse_model
from meshwright.simulator.replication import WireBytes

QWEN = load_model("qwen3-8b")
GEMMA = load_model("gemma3-27b")


def job_of(model: ModelSpec, seq_len: int) -> TrainingJob:
    return TrainingJob(model=model, global_batch_size=8, seq_len=seq_len, precision=Precision.BF16)


def changed(model: ModelSpec, **fields: object) -> ModelSpec:
    return parse_model({**model.model_dump(), **fields}, origin="model")


@pytest.mark.parametrize(("seq_len", "seen"), [(8192, 1024), (1024, 1024), (512, 512)])
def test_a_window_is_all_that_a_windowed_layer_costs(seq_len: int, seen: int) -> None:
    """Counted score by score: token t sees min(t + 1, window) of them, but for half a diagonal."""
    plan = ResolvedPlan(stages=(62,), dp=8, attention=Attention.FLASH)
    shape = BlockShape.of(job_of(GEMMA, seq_len), plan, load_stack("fsdp"))
    table, work = BlockTable(), 4 * GEMMA.num_heads * GEMMA.head_dim
    flops = {}
    for kind in ("layer", "windowed layer"):
        operators = table.operators(shape, kind).forward
        (flops[kind],) = (each.flops for each in operators if isinstance(each, FlashAttention))
    scores = sum(min(token + 1, seen) for token in range(seq_len)) - seen / 2
    assert flops["windowed layer"] == work * scores
    assert flops["layer"] == work * seq_len**2 // 2
    both = (table.memory(shape, kind) for kind in flops)
    assert len(set(both)) == 1
    full = model_flops(job_of(changed(GEMMA, window=0, layer_pattern="F"), seq_len))
    windowed = sum(run.num_blocks for run in GEMMA.layer_runs if run.kind == "windowed layer")
    assert (windowed, GEMMA.num_layers) == (52, 62)
    less = 3 * work * windowed * (seq_len - seen) * 8 * seq_len
    assert model_flops(job_of(GEMMA, seq_len)) == full - less


@pytest.mark.parametrize(
    ("model", "stack", "message"),
    [
        (
            GEMMA,
            "megatron-core",
            "norm_places of gemma3-27b is not offered by stack megatron-core",
        ),
        (QWEN, "megatron-lm-2022", "qk_norm=head of qwen3-8b is not offered by stack megatron-lm"),
        (
            QWEN,
            "torchtitan-2024-12",
            "qk_norm=head of qwen3-8b is not offered by stack torchtitan",
        ),
        (changed(QWEN, head_dim=64), "ddp", None),
        (changed(QWEN, window=64), "torchtitan@0.2", "window of qwen3-8b is not offered by stack"),
        (changed(QWEN, window=4096), "torchtitan@0.2", None),
        (changed(QWEN, attention_softcap=50.0), "fsdp", None),
    ],
)
def test_a_stack_refuses_what_it_lacks_by_name(
    model: ModelSpec, stack: str, message: str | None
) -> None:
    profile = load_stack(stack)
    plan = ResolvedPlan(
        stages=(model.num_layers,), attention=profile.attention, zero_stage=profile.zero_stage
    )
    refusal = stack_refusal(job_of(model, 4096), plan, profile)
    assert refusal is None if message is None else (refusal or "").startswith(message)


def test_capped_scores_are_not_kept_in_memory() -> None:
    capped, stack = job_of(changed(QWEN, attention_softcap=50.0), 4096), load_stack("fsdp")
    plan = ResolvedPlan(stages=(36,), attention=stack.attention_kernels[1], zero_stage=3)
    refusal = stack_refusal(capped, plan, stack)
    said = "attention=unfused does not go with attention_softcap; allowed: flash (not modelled"
    assert str(refusal).startswith(said)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_of_heads_are_summed_over_tensor_ranks(*, sequence_parallel: bool) -> None:
    """Megatron-Core sums them always, the others where tokens are split; all as one."""
    stack, job = load_stack("megatron-core"), job_of(QWEN, 4096)
    plan = ResolvedPlan(tp=2, stages=(36,), sequence_parallel=sequence_parallel)
    shape, stages = BlockShape.of(job, plan, stack), model_stages(QWEN, plan.stages)
    wire = WireBytes.of(stack, job.precision, plan)
    (found,) = tensor_sums(shape, tuple(stages), wire, strided_span(0, 1, 2, 8))
    norms = 36 * 2 * QWEN.head_dim
    others = (36 * 2 + 1) * QWEN.hidden_size
    size = (norms + others * sequence_parallel) * wire.reduce_bytes
    assert (found.op, found.axis, found.size_bytes) == (CollectiveOp.ALL_REDUCE, Axis.TP, size)


def test_a_norm_of_all_heads_is_not_split() -> None:
    width = changed(QWEN, qk_norm="width")
    assert width.split_refusal(1) is None
    assert "qk_norm=width" in str(width.split_refusal(2))


def test_usual_facts_are_not_written_down() -> None:
    llama = load_model("llama3-8b").model_dump()
    assert not {"head_dim", "qk_norm", "window", "spelling"} & {*llama}
    assert parse_model(llama, origin="plan") == load_model("llama3-8b")
    written = GEMMA.model_dump(mode="json")
    assert parse_model(written, origin="plan") == GEMMA
    assert replace(job_of(GEMMA, 64)).model.layer_runs[:2] == (("windowed layer", 5), ("layer", 1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0, "layer_pattern": "WF"}, "window=0 and layer_pattern='WF' disagree"),
        ({"window": 8, "layer_pattern": "F"}, "window=8 and layer_pattern='F' disagree"),
        ({"window": 8, "causal": False}, "window=8 is of attention to earlier tokens"),
        ({"layer_pattern": "X"}, "layer_pattern='X': string should match"),
        ({"rotary_fraction": 0.5, "positions": "alibi"}, "rotary_fraction=0.5 turns 64"),
        ({"parallel_mlp": "one norm", "norm_places": "both"}, "parallel_mlp='one norm' goes"),
        ({"activation": "squared relu"}, "activation='squared relu' is of an MLP without a gate"),
        ({"spelling": "phi3", "gated_mlp": False}, "spelling='phi3' is of a gated MLP"),
        ({"attention_softcap": -1.0}, "attention_softcap=-1.0: input should be greater"),
    ],
)  # fmt: skip
def test_facts_that_do_not_go_together_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=r"^model: ") as refusal:
        changed(QWEN, **fields)
    assert message in str(refusal.value)
