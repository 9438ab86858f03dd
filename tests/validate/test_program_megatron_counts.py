"""Megatron's program in a fake cluster against closed forms: bytes, FLOPs, collectives."""

from dataclasses import dataclass, replace
from math import prod

import pytest

torch = pytest.importorskip("torch")

from meshwright.hwprofiles import Attention, Recompute, StackProfile, load_stack  # noqa: E402
from meshwright.simulator import ModelSpec, PlanError, ResolvedPlan, TrainingJob, load_model  # noqa: E402
from meshwright.simulator.model.parameters import (  # noqa: E402
    local_shape,
    padded_vocab_size,
    parameter_tensors,
)
from meshwright.validate.counting.fake_cluster import fake_cluster  # noqa: E402
from meshwright.validate.counting.oracle import RankOracle  # noqa: E402
from meshwright.validate.programs.contract.request import ProgramRequest  # noqa: E402
from meshwright.validate.programs.megatron.program import MegatronProgram  # noqa: E402
from meshwright.validate.ranks.measurement import ByteKind, CollectiveCount  # noqa: E402

UNFUSED, FLASH = Attention.UNFUSED, Attention.FLASH
S, B, H, A = 2048, 1, 12288, 96  # GPT-3
GPT3 = load_model("gpt3-175b")
TINY = ModelSpec(
    name="tiny-gpt", num_layers=4, hidden_size=32, num_heads=4, vocab_size=256, seq_len=16
)


def request(
    job: TrainingJob,
    plan: ResolvedPlan,
    stack: str | StackProfile,
    rank: int = 0,
    *,
    num_microbatches: int | None = None,
    dropout: float = 0.1,
) -> ProgramRequest:
    return ProgramRequest(
        job=job,
        plan=plan,
        stack=load_stack(stack) if isinstance(stack, str) else stack,
        rank=rank,
        device=torch.device("cpu"),
        initialise=False,
        num_microbatches=num_microbatches or plan.num_microbatches(job),
        dropout=dropout,
    )


def second_step(wanted: ProgramRequest) -> tuple[MegatronProgram, RankOracle]:
    with fake_cluster(wanted.rank, wanted.plan.world_size):
        program = MegatronProgram(wanted)
        oracle = RankOracle(program.groups)
        with oracle:
            for step in range(2):
                for tensor, kind in program.persistent_tensors():
                    oracle.mark(tensor, kind)
                oracle.start_step()
                program.run_step(step)
    return program, oracle


@dataclass(frozen=True, kw_only=True)
class LayerCounts:
    kept_bytes: int
    flops: int
    forward: tuple[CollectiveCount, ...]
    both: tuple[CollectiveCount, ...]


def one_layer(*, dropout: float, **options: object) -> LayerCounts:
    """Count one layer of GPT-3 at tp 8 in 16 bits, forward and backward."""
    plan = ResolvedPlan(tp=8, stages=(1,), **options)
    model = GPT3.model_copy(update={"num_layers": 1})
    job = TrainingJob(model=model, global_batch_size=1, seq_len=S)
    with fake_cluster(0, 8):
        program = MegatronProgram(request(job, plan, "megatron-core", dropout=dropout))
        layer = program.stages[0].layers["0"]
        tokens = S // 8 if plan.sequence_parallel else S
        inputs = torch.empty(tokens, B, H, dtype=torch.bfloat16, requires_grad=True)
        oracle = RankOracle(program.groups)
        with oracle:
            out = layer(inputs)
            kept = oracle.live_bytes + inputs.nbytes - out.nbytes
            forward = oracle.collectives
            out.backward(torch.empty_like(out))
            return LayerCounts(
                kept_bytes=kept, flops=oracle.flops, forward=forward, both=oracle.collectives
            )


# Korthikanti et al. 2022 (arXiv 2205.05198), equations 2 and 4; without dropout flash attention
# keeps no mask and no square, but a number a row and head.
SBH = S * B * H
KEPT = {
    "tp": (
        {"attention": UNFUSED},
        0.1,
        SBH * 10 + SBH * 24 // 8 + 5 * A * S * S * B // 8,
    ),
    "tp and sp": (
        {"attention": UNFUSED, "sequence_parallel": True},
        0.1,
        (34 * SBH + 5 * A * S * S * B) // 8,
    ),
    "sp, selective": (
        {
            "attention": UNFUSED,
            "sequence_parallel": True,
            "recompute": Recompute.SELECTIVE,
        },
        0.1,
        34 * SBH // 8,
    ),
    "flash": ({"attention": FLASH}, 0.0, SBH * 8 + SBH * 24 // 8 + 4 * S * B * A // 8),
    "flash and sp": (
        {"attention": FLASH, "sequence_parallel": True},
        0.0,
        (32 * SBH + 4 * S * B * A) // 8,
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_layer_keeps_what_the_paper_says(name: str) -> None:
    options, dropout, wanted = KEPT[name]
    kept = one_layer(dropout=dropout, **options).kept_bytes
    statistics = 2 * 2 * S * B * 4  # two a token and norm, in fp32; the CPU has them in 16 bits
    assert wanted < kept <= wanted + statistics


def test_a_layer_has_four_collectives_or_with_sequence_parallelism_ten() -> None:
    size = 2 * SBH
    plain = one_layer(dropout=0.1, attention=UNFUSED)
    assert plain.forward == (CollectiveCount("tp", "all_reduce", 8, size, 2),)
    assert plain.both == (CollectiveCount("tp", "all_reduce", 8, size, 4),)
    split = one_layer(dropout=0.1, attention=UNFUSED, sequence_parallel=True)
    assert split.forward == (
        CollectiveCount("tp", "all_gather", 8, size, 2),
        CollectiveCount("tp", "reduce_scatter", 8, size, 2),
    )
    # Backward gathers the gradients of two sums and, again, the inputs of two products.
    assert split.both == (
        CollectiveCount("tp", "all_gather", 8, size, 6),
        CollectiveCount("tp", "reduce_scatter", 8, size, 4),
    )


def test_flops_of_a_layer() -> None:
    products, square = 24 * B * S * H * H, 4 * B * S * S * H  # of a forward pass
    unfused = one_layer(dropout=0.1, attention=UNFUSED).flops
    assert unfused == 3 * (products + square) // 8
    assert one_layer(dropout=0.1, attention=UNFUSED, sequence_parallel=True).flops == unfused
    # Flash attention computes the scores again in backward: five products for two.
    assert one_layer(dropout=0.0, attention=FLASH).flops == (3 * products + 7 * square // 2) // 8


@pytest.mark.parametrize(
    ("recompute", "again"),
    [(Recompute.SELECTIVE, 4 * 16 * 16 * 32), (Recompute.FULL, 24 * 16 * 32**2 + 4 * 16 * 16 * 32)],
)
def test_recomputation_repeats_all_of_what_it_does_not_keep(
    recompute: Recompute, again: int
) -> None:
    job = TrainingJob(model=TINY, global_batch_size=3, seq_len=16)
    plan = ResolvedPlan(stages=(4,), recompute=recompute)
    flops = [
        second_step(request(job, each, "megatron-lm-2022"))[1].flops
        for each in (plan, replace(plan, recompute=Recompute.NONE))
    ]
    assert flops[0] - flops[1] == 3 * 4 * again


def model_states(model: ModelSpec, num_layers: int, tp: int) -> int:
    """Return the parameters of *num_layers* layers on one rank."""
    tensors = parameter_tensors(model, vocab_size=padded_vocab_size(model, tp, 128))
    return num_layers * sum(
        prod(local_shape(model, each, tp=tp)) for each in tensors if each.block == "layer"
    )


@pytest.mark.parametrize(
    ("name", "stages", "pp_rank"),
    [("megatron-1t", (2,) * 64, 20), ("gpt3-175b", (1,) * 32 + (2,) * 32, 40)],
)
def test_one_rank_of_3072(name: str, stages: tuple[int, ...], pp_rank: int) -> None:
    model = load_model(name)
    plan = ResolvedPlan(
        tp=8, pp=64, dp=6, stages=stages, zero_stage=1, sequence_parallel=True, attention=FLASH
    )
    job = TrainingJob(model=model, global_batch_size=1536, seq_len=2048)
    wanted = request(job, plan, "megatron-core", rank=pp_rank * 48 + 11, num_microbatches=3)
    _, oracle = second_step(wanted)
    h = model.hidden_size
    layer = 3 * 24 * B * S * h * h + 7 * 2 * B * S * S * h
    assert oracle.flops == 3 * 2 * layer // 8
    parameters = model_states(model, 2, 8)
    kinds = oracle.bytes_at_peak
    assert kinds[ByteKind.PARAMETERS] == pytest.approx(2 * parameters, abs=200)
    assert kinds[ByteKind.GRADIENTS] == pytest.approx(4 * parameters, abs=400)
    assert kinds[ByteKind.OPTIMIZER] == pytest.approx(12 * parameters / 6, abs=400)
    message = 2 * B * S * h // 8
    messages = [call for call in oracle.collectives if call.axis == "pp"]
    assert messages == [CollectiveCount("pp", op, 2, message, 2 * 3) for op in ("recv", "send")]


def replica_calls(oracle: RankOracle) -> list[tuple[str, int, int]]:
    return [
        (call.op, call.size_bytes, call.num_calls)
        for call in oracle.collectives
        if call.axis == "dp"
    ]


def buckets_of(limit: int) -> dict[str, int]:
    keys = ("gradient_bucket_parameters", "gradient_bucket_parameters_per_replica")
    return dict(zip(keys, (limit, 0), strict=True))


def test_buckets_close_when_full_from_the_back_of_each_chunk() -> None:
    h, limit = 32, 4352
    stack = load_stack("megatron-core").model_copy(update=buckets_of(limit))
    job = TrainingJob(model=TINY, global_batch_size=4, seq_len=16)
    plan = ResolvedPlan(pp=2, dp=2, stages=(1, 3), zero_stage=0, attention=FLASH)
    program, oracle = second_step(request(job, plan, stack))
    mlp = [h, 4 * h * h, 4 * h, 4 * h * h]  # biases and weights from the back
    # Both norms; queries, keys and values ahead of the output product, which is made first.
    attention = [h, h, 3 * h, 3 * h * h, h, h, h, h * h]
    assert sum(mlp[:3]) < limit == sum(attention)
    sizes = [bucket.weights.numel() for bucket in program.buffers[0].buckets]
    assert sizes == [sum(mlp), limit, 16 * h + 256 * h]
    assert replica_calls(oracle) == sorted(("all_reduce", 4 * size, 1) for size in sizes)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_sharded_table_on_two_stages_has_a_bucket_of_its_own(zero_stage: int) -> None:
    job = TrainingJob(model=TINY, global_batch_size=4, seq_len=16)
    plan = ResolvedPlan(pp=2, dp=2, stages=(2, 2), zero_stage=zero_stage, attention=FLASH)
    for rank, first in ((0, False), (2, True)):
        program, _ = second_step(request(job, plan, "megatron-core", rank))
        sizes = [bucket.weights.numel() for bucket in program.buffers[0].buckets]
        assert len(sizes) == 1 + zero_stage
        if zero_stage:
            assert sizes[0 if first else 1] == 256 * 32


def test_only_the_first_stage_is_reduced_in_buckets() -> None:
    stack = load_stack("megatron-core").model_copy(update=buckets_of(4288))
    job = TrainingJob(model=TINY, global_batch_size=4, seq_len=16)
    plan = ResolvedPlan(pp=2, dp=2, stages=(2, 2), zero_stage=1, attention=FLASH)
    counts = []
    for rank in (0, 2):
        program, _ = second_step(request(job, plan, stack, rank))
        counts.append(len(program.buffers[0].buckets))
    assert counts[0] > 3
    assert counts[1] == 2


def test_without_overlap_each_chunk_is_reduced_once() -> None:
    job = TrainingJob(model=TINY, global_batch_size=4, seq_len=16)
    plan = ResolvedPlan(
        pp=2, dp=2, num_virtual_stages=2, schedule="interleaved", stages=(1, 1, 1, 1)
    )
    program, oracle = second_step(request(job, plan, "megatron-lm-2022"))
    sizes = [each.buckets[0].weights.numel() for each in program.buffers]
    assert [len(each.buckets) for each in program.buffers] == [1, 1]
    assert replica_calls(oracle) == sorted(("all_reduce", 4 * size, 1) for size in sizes)


def test_all_collectives_of_a_step_of_a_hybrid_plan() -> None:
    job = TrainingJob(model=TINY, global_batch_size=8, seq_len=16)
    plan = ResolvedPlan(
        tp=2, pp=2, dp=2, stages=(2, 2), zero_stage=1, sequence_parallel=True, attention=FLASH
    )
    h, m = 32, 4
    activation = 2 * 16 * h
    table = 128 * h
    layer = (12 * h * h + 7 * h) // 2 + 6 * h  # split weights and biases; norms, row biases
    shared = 2 * 6 * h  # what sequence parallelism leaves partial: norms and row biases
    ends = [
        CollectiveCount("dp", "all_gather", 2, 2 * table, 1),
        CollectiveCount("dp", "reduce_scatter", 2, 4 * table, 1),
        CollectiveCount("pp", "all_reduce", 2, 4 * table, 1),
        CollectiveCount("pp", "recv", 2, activation // 2, m),
        CollectiveCount("pp", "send", 2, activation // 2, m),
        CollectiveCount("world", "all_reduce", 8, 4, 1),
    ]
    first = [
        *ends,
        CollectiveCount("dp", "all_gather", 2, 2 * (2 * layer + 16 * h), 1),
        CollectiveCount("dp", "reduce_scatter", 2, 4 * (2 * layer + 16 * h), 1),
        # Learned positions: the look-up is summed whole, then split; its gradient is gathered.
        CollectiveCount("tp", "all_gather", 2, activation, m * (2 * 6 + 1)),
        CollectiveCount("tp", "all_reduce", 2, 4 * shared, 1),
        CollectiveCount("tp", "all_reduce", 2, activation, m),
        CollectiveCount("tp", "reduce_scatter", 2, activation, m * 2 * 4),
    ]
    last = [
        *ends,
        CollectiveCount("dp", "all_gather", 2, 2 * (2 * layer + 2 * h), 1),
        CollectiveCount("dp", "reduce_scatter", 2, 4 * (2 * layer + 2 * h), 1),
        CollectiveCount("tp", "all_gather", 2, activation, m * (2 * 6 + 2)),
        CollectiveCount("tp", "all_gather", 2, 2 * 3 * 4 * 16, m),  # the loss's statistics
        CollectiveCount("tp", "all_reduce", 2, 4 * (shared + 2 * h), 1),
        CollectiveCount("tp", "reduce_scatter", 2, activation, m * (2 * 4 + 1)),
    ]
    for rank, wanted in ((0, first), (5, last)):
        program, oracle = second_step(request(job, plan, "megatron-core", rank, num_microbatches=m))
        assert list(oracle.collectives) == sorted(wanted)
        assert program.reports is (rank == 4)


def test_messages_are_cut_between_tensor_ranks_that_all_hold_them() -> None:
    job = TrainingJob(model=TINY, global_batch_size=4, seq_len=16)
    plan = ResolvedPlan(tp=2, pp=2, stages=(2, 2), microbatch_size=2)
    _, oracle = second_step(request(job, plan, "megatron-lm-2021", rank=1))
    activation = 2 * 2 * 16 * 32
    calls = {(call.axis, call.op, call.size_bytes): call.num_calls for call in oracle.collectives}
    assert calls["pp", "send", activation // 2] == 2
    assert calls["pp", "recv", activation // 2] == 2
    assert calls["tp", "all_gather", activation] == 2


def test_a_stage_keeps_its_input_and_not_its_output() -> None:
    model = TINY.model_copy(update={"seq_len": 256, "max_positions": 256})
    plan = ResolvedPlan(pp=4, stages=(1, 1, 1, 1), schedule="gpipe")
    peaks = []
    for num_microbatches in (2, 3):
        job = TrainingJob(model=model, global_batch_size=num_microbatches, seq_len=256)
        _, oracle = second_step(request(job, plan, "megatron-lm-2021", rank=1))
        peaks.append(oracle.bytes_at_peak[ByteKind.ACTIVATIONS])
    statistics = 4 * 4 * 256  # two a norm and token, fp32 as on a GPU
    loss_share = 2  # the number from which backward starts
    assert peaks[1] - peaks[0] == 34 * 256 * 32 + 5 * 4 * 256 * 256 + statistics + loss_share


@pytest.mark.parametrize(
    ("stack", "temporary"),
    [("megatron-lm-2021", 4), ("megatron-lm-2022", 0), ("megatron-core@0.12", 0)],
)
def test_an_update_copies_16_bit_gradients_alone(stack: str, temporary: int) -> None:
    sizes = {"hidden_size": 256, "head_dim": 256 // TINY.num_heads, "ffn_hidden_size": 1024}
    model = TINY.model_copy(update=sizes)
    job = TrainingJob(model=model, global_batch_size=1, seq_len=2)
    plan = ResolvedPlan(tp=1, stages=(4,))
    program, oracle = second_step(request(job, plan, stack))
    parameters = sum(bucket.weights.numel() for bucket in program.buffers[0].buckets)
    assert load_stack(stack).optimizer_temporary_bytes == temporary
    extra = oracle.bytes_at_peak[ByteKind.ACTIVATIONS]
    assert temporary * parameters <= extra <= (temporary + 0.5) * parameters
    kinds = oracle.bytes_at_peak
    assert kinds[ByteKind.PARAMETERS] == 2 * parameters
    assert kinds[ByteKind.GRADIENTS] == load_stack(stack).gradient_bytes * parameters
    assert kinds[ByteKind.OPTIMIZER] == 12 * parameters


def test_plans_without_a_program_are_refused() -> None:
    job = TrainingJob(model=TINY, global_batch_size=4, seq_len=16)
    plan = ResolvedPlan(stages=(4,))
    for model, degree, message in (
        (TINY.model_copy(update={"num_kv_heads": 1}), 2, "num_kv_heads=1 and tp=2"),
        (TINY.model_copy(update={"positions": "alibi"}), 1, "no program"),
        (TINY.model_copy(update={"mlm_head": True}), 1, "no program"),
    ):
        wanted = request(replace(job, model=model), replace(plan, tp=degree), "megatron-core")
        with pytest.raises(PlanError, match=message):
            MegatronProgram(wanted)
