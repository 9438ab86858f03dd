"""The same programs as one rank of a fake cluster: what they send and hold, at any scale."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from meshwright.hwprofiles import Attention, Precision, Recompute, load_stack
from meshwright.simulator import ModelSpec, PlanError, ResolvedPlan, TrainingJob
from meshwright.validate.counting.fake_cluster import fake_cluster
from meshwright.validate.counting.internals import tensors_in
from meshwright.validate.counting.oracle import RankOracle
from meshwright.validate.programs.contract.request import ProgramRequest, RankProgram
from meshwright.validate.programs.contract.weights import initial_weight
from meshwright.validate.programs.layers.selective_recompute import operator_contexts
from meshwright.validate.programs.pytorch.fully_sharded import mixed_precision, shard_stage
from meshwright.validate.programs.pytorch.layout import build_stage, make_layout
from meshwright.validate.programs.pytorch.optimizer import local_gradients
from meshwright.validate.programs.pytorch.parts import initial_parameter, plain_parts
from meshwright.validate.programs.pytorch.programs import build_ddp, build_fully_sharded
from meshwright.validate.ranks.measurement import ByteKind

WIDTH, TOKENS, LAYERS, VOCABULARY, SIZE = 32, 16, 2, 1024, 2
SIZES: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_heads": 8,
    "vocab_size": VOCABULARY,
    "seq_len": TOKENS,
}
GPT = ModelSpec(name="tiny-gpt", **SIZES)
LLAMA = ModelSpec(
    name="tiny-llama",
    num_kv_heads=2,
    ffn_hidden_size=48,
    gated_mlp=True,
    tied_embeddings=False,
    positions="rotary",
    norm="rmsnorm",
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    **SIZES,
)
# Elements of a layer: four norms' tensors, then weights and biases of the products.
LAYER = 4 * WIDTH + 12 * WIDTH**2 + (3 + 1 + 4 + 1) * WIDTH
TIED, POSITIONS = VOCABULARY * WIDTH + 2 * WIDTH, TOKENS * WIDTH
ROOT = TIED + POSITIONS
# One microbatch of activations, or of one number a token.
MESSAGE, PER_TOKEN = SIZE * TOKENS * WIDTH, SIZE * TOKENS


def plan(**fields: Any) -> ResolvedPlan:
    usual = {
        "stages": (LAYERS,),
        "zero_stage": 3,
        "attention": Attention.FLASH,
        "microbatch_size": SIZE,
    }
    return ResolvedPlan(**(usual | fields))


def request(
    stack: str,
    parallel: ResolvedPlan,
    *,
    rank: int = 0,
    model: ModelSpec = GPT,
    precision: Precision = Precision.BF16,
    microbatches: int = 2,
) -> ProgramRequest:
    batch = parallel.dp * parallel.microbatch_size * microbatches
    return ProgramRequest(
        job=TrainingJob(model=model, global_batch_size=batch, seq_len=TOKENS, precision=precision),
        plan=parallel,
        stack=load_stack(stack),
        rank=rank,
        device=torch.device("cpu"),
        initialise=False,
        num_microbatches=microbatches,
    )


def build(asked: ProgramRequest) -> RankProgram:
    return (build_ddp if asked.stack.name.startswith("ddp@") else build_fully_sharded)(asked)


def counted(asked: ProgramRequest) -> tuple[RankOracle, dict[ByteKind, int]]:
    """Return the counts of a second step, and the bytes that are held after it."""
    _clear_sharding_prop_cache()  # it remembers groups of an earlier cluster of the same shape
    with fake_cluster(asked.rank, asked.plan.world_size):
        program = build(asked)
        oracle = RankOracle(program.groups)
        with oracle:
            program.run_step(0)
            for tensor, kind in program.persistent_tensors():
                oracle.mark(tensor, kind)
            oracle.start_step()
            program.run_step(1)
            for tensor, kind in program.persistent_tensors():
                oracle.mark(tensor, kind)
        storages = {
            local.untyped_storage()._cdata: (kind, local.untyped_storage().nbytes())
            for tensor, kind in program.persistent_tensors()
            for local in tensors_in(tensor)
        }
    held: Counter[ByteKind] = Counter()
    for kind, size in storages.values():
        held[kind] += size
    return oracle, dict(held)


def calls(oracle: RankOracle) -> dict[tuple[str, str, int], int]:
    """Return how often each axis ran each operation on how many bytes."""
    return {(c.axis, c.op, c.size_bytes): c.num_calls for c in oracle.collectives}


def test_a_sharded_layer_is_gathered_twice_and_reduced_once_a_microbatch() -> None:
    found = calls(counted(request("fsdp", plan(dp=4)))[0])
    assert found == {
        ("dp", "all_gather", 2 * LAYER): 2 * 2 * LAYERS,
        ("dp", "all_gather", 2 * TIED): 2,  # kept from forward to backward
        ("dp", "all_gather", 2 * POSITIONS): 2,
        ("dp", "reduce_scatter", 2 * LAYER): 2 * LAYERS,
        ("dp", "reduce_scatter", 2 * TIED): 2,
        ("dp", "reduce_scatter", 2 * POSITIONS): 2,
        ("dp", "all_reduce", 4 * (12 * LAYERS + 4)): 1,  # a norm a weight
    }


def test_layers_that_are_kept_are_gathered_once() -> None:
    found = calls(counted(request("fsdp", plan(dp=4, reshard_after_forward=False)))[0])
    assert found["dp", "all_gather", 2 * LAYER] == 2 * LAYERS


def test_replicas_of_shards_sum_their_shards() -> None:
    found = calls(counted(request("torchtitan@0.2", plan(dp=6, dp_shard=2)))[0])
    assert found["dp", "reduce_scatter", 4 * LAYER] == 2 * LAYERS
    assert found["replica", "all_reduce", 4 * LAYER // 2] == 2 * LAYERS


def test_buckets_of_ddp_hold_all_gradients_once() -> None:
    oracle, held = counted(request("ddp", plan(dp=4, zero_stage=0)))
    size = 4 * (LAYERS * LAYER + ROOT)
    # The second step also tells the other ranks of the buckets' new order.
    found = [c for c in oracle.collectives if c.op == "all_reduce"]
    reduced = sum(c.size_bytes * c.num_calls for c in found)
    assert reduced == held[ByteKind.PARAMETERS] == held[ByteKind.GRADIENTS] == size


def test_tensor_parallel_layers_share_their_inputs() -> None:
    found = calls(counted(request("torchtitan@0.2", plan(tp=4), microbatches=1))[0])
    activations = {op: n for (axis, op, size), n in found.items() if size == 2 * MESSAGE}
    # Four a layer, one after the word table, one before the head.
    assert activations == {"all_reduce": 4 * LAYERS + 2}
    assert found["tp", "all_reduce", 4 * PER_TOKEN] == 3  # the loss


def test_sequence_parallel_layers_gather_and_scatter_instead() -> None:
    parallel = plan(tp=4, sequence_parallel=True)
    found = calls(counted(request("torchtitan@0.2", parallel, microbatches=1))[0])
    # A layer: gather and scatter forward, and for their gradients scatter and gather backward.
    assert found["tp", "all_gather", 2 * MESSAGE] == 4 * LAYERS + 2
    assert found["tp", "reduce_scatter", 2 * MESSAGE] == 4 * LAYERS + 2


def test_a_tied_table_is_summed_between_the_ends_of_a_pipeline() -> None:
    found = calls(counted(request("torchtitan@0.2", plan(pp=2, stages=(1, 1))))[0])
    assert found == {
        ("pp", "send", 2 * MESSAGE): 2,
        ("pp", "recv", 2 * MESSAGE): 2,
        ("pp", "all_reduce", 4 * VOCABULARY * WIDTH): 1,
        ("pp", "all_reduce", 4): 1,
    }


def test_a_message_of_a_sequence_parallel_pipeline_is_split() -> None:
    parallel = plan(tp=4, pp=2, stages=(1, 1), sequence_parallel=True)
    found = calls(counted(request("torchtitan@0.2", parallel))[0])
    assert found["pp", "send", 2 * MESSAGE // 4] == 2


def test_recomputation_trades_memory_for_flops() -> None:
    peaks, flops = {}, {}
    for mode in Recompute:
        asked = plan(dp=2, recompute=mode, microbatch_size=16)
        oracle, _ = counted(request("torchtitan@0.2", asked, microbatches=1))
        peaks[mode], flops[mode] = oracle.peak_bytes, oracle.flops
    assert peaks[Recompute.FULL] < peaks[Recompute.NONE]
    assert flops[Recompute.NONE] < flops[Recompute.SELECTIVE] < flops[Recompute.FULL]


@pytest.mark.parametrize("sequence", [False, True])
def test_chosen_operators_run_again_and_others_do_not(
    sequence: bool,  # noqa: FBT001 - a parameter of pytest
) -> None:
    """Keys, attention output, the MLP's value; gathers, and a sum that is not scattered."""
    usual = {"tp": 2, "sequence_parallel": sequence}
    model = LLAMA.model_copy(update={"dropout": False})
    none, chosen, full = (
        counted(
            request(
                "torchtitan-2024-12", plan(recompute=mode, **usual), model=model, microbatches=1
            )
        )[0]
        for mode in (Recompute.NONE, Recompute.SELECTIVE_OP, Recompute.FULL)
    )
    weights = WIDTH * (8 + WIDTH + 48)
    assert chosen.flops - none.flops == LAYERS * 2 * PER_TOKEN * weights // 2
    assert none.flops < chosen.flops < full.flops
    more = Counter(calls(chosen))
    more.subtract(calls(none))
    expected = {("tp", "all_gather", 2 * MESSAGE): 2 * LAYERS}
    if not sequence:
        expected = {("tp", "all_reduce", 2 * MESSAGE): LAYERS}
    assert {call: num for call, num in more.items() if num} == expected


def test_every_second_product_is_kept() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    calls: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    def products(values: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            values = (values @ weight).exp()
        return values

    with Watch():
        out = checkpoint(
            products, torch.ones(2, 2), use_reentrant=False, context_fn=operator_contexts
        )
        forward = len(calls)
        out.sum().backward()
    assert calls[:forward].count(torch.ops.aten.mm.default) == 4
    again = calls[forward:]
    # Up to the output of the last exponential; then two products a step of the backward pass.
    assert again.count(torch.ops.aten.exp.default) == 4
    assert again.count(torch.ops.aten.mm.default) == 2 + 4 + 3


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_states_are_three_fp32_numbers_a_parameter_whatever_the_precision(
    precision: Precision,
) -> None:
    _, held = counted(request("torchtitan@0.2", plan(dp=1), precision=precision))
    parameters = LAYERS * LAYER + ROOT
    num_tensors = LAYERS * 16 + 4
    assert held == {
        ByteKind.PARAMETERS: 4 * parameters,
        ByteKind.GRADIENTS: 4 * parameters,
        ByteKind.OPTIMIZER: 8 * parameters + 4 * num_tensors,  # moments, and a count of steps
    }


def test_the_update_needs_no_temporaries() -> None:
    oracle, held = counted(request("torchtitan@0.2", plan(dp=1), microbatches=1))
    states = sum(held.values())
    largest = oracle.largest_at_peak(3)
    assert oracle.peak_bytes >= states
    assert all(group.size_bytes <= 4 * VOCABULARY * WIDTH for group in largest)


def test_the_last_stage_keeps_logits_of_one_microbatch() -> None:
    few, many = (
        counted(request("torchtitan@0.2", plan(pp=2, stages=(1, 1)), rank=1, microbatches=count))[0]
        for count in (2, 4)
    )
    # For each microbatch: tokens and targets, the buffer that PyTorch receives it in, its loss.
    assert many.peak_bytes - few.peak_bytes == 2 * (2 * PER_TOKEN * 8 + 2 * MESSAGE + 2 * 4)


def test_shards_may_stay_in_host_memory() -> None:
    asked = request("fsdp", plan(dp=2))
    parts = plain_parts(GPT, vocab_size=GPT.vocab_size, dropout=0.1)
    with fake_cluster(0, 2):
        layout = make_layout(asked)
        stage = build_stage(asked, 0, parts, asked.device)
        policy = mixed_precision(Precision.BF16, asked.stack)
        shard_stage(stage, layout.data_mesh, policy, asked.stack, reshards=True, offloads=True)
        stage(torch.zeros((SIZE, TOKENS), dtype=torch.long)).sum().backward()
        gradients = local_gradients(stage.parameters())
    assert {gradient.device.type for gradient in gradients} == {"cpu"}
    assert len(gradients) == 16 * LAYERS + 5  # the tables and the head's norm and matrix


BIG = {
    "three axes on 3,072": (
        "torchtitan@0.2",
        GPT,
        plan(
            tp=8,
            dp=96,
            pp=4,
            stages=(0, 1, 1, 0),
            schedule="1f1b",
            sequence_parallel=True,
        ),
    ),
    "hybrid on 1,024": (
        "torchtitan@0.2",
        LLAMA,
        plan(tp=2, dp=512, dp_shard=8, recompute=Recompute.FULL),
    ),
    "ddp on 1,000": ("ddp", LLAMA, plan(dp=1000, zero_stage=0)),
    "interleaved on 512": (
        "torchtitan@0.2",
        LLAMA,
        plan(dp=128, pp=4, num_virtual_stages=2, stages=(1,) * 8, schedule="interleaved"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BIG)
def test_any_rank_of_a_large_cluster_runs(name: str) -> None:
    stack, model, parallel = BIG[name]
    model = model.model_copy(update={"num_layers": sum(parallel.stages)})
    middle, last = parallel.world_size // 2, parallel.world_size - 1
    for rank in (middle, last) if parallel.pp > 1 else (middle,):
        asked = request(stack, parallel, rank=rank, model=model, microbatches=parallel.pp)
        oracle, held = counted(asked)
        axes = {call.axis for call in oracle.collectives}
        assert axes & {"dp", "world", "parts"}
        assert "other" not in axes
        assert oracle.flops > 0
        assert set(held) == {ByteKind.PARAMETERS, ByteKind.GRADIENTS, ByteKind.OPTIMIZER}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"positions": "alibi"}, "positions=alibi; allowed: learned, rotary"),
        ({"mlm_head": True}, "mlm_head=True; allowed: False"),
        ({"token_types": 2}, "token_types=2; allowed: 0"),
        ({"embedding_norm": True}, "embedding_norm=True; allowed: False"),
        ({"num_kv_heads": 2}, "tp=4; allowed: a divisor of num_kv_heads=2"),
    ],
)
def test_what_pytorch_cannot_express_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    asked = request("torchtitan@0.2", plan(tp=4), model=GPT.model_copy(update=change))
    with pytest.raises(PlanError) as caught:
        build_fully_sharded(asked)
    assert str(caught.value) == f"tiny-gpt has no PyTorch program with {words}"


def test_more_stages_than_microbatches_are_refused() -> None:
    asked = request("torchtitan@0.2", plan(pp=2, stages=(1, 1)), microbatches=1)
    words = "num_microbatches=1; allowed: schedule=1f1b needs pp=2 or more"
    with pytest.raises(PlanError, match=words):
        build_fully_sharded(asked)


def test_queries_keys_and_values_take_their_rows_of_the_canonical_projection() -> None:
    whole = initial_weight("layers.1.qkv.weight", (8 * 4 + 2 * 2 * 4, WIDTH))
    rows = [
        initial_parameter(LLAMA, f"layers.1.attention.{name}.weight").unflatten(0, (2, -1))
        for name in ("query", "key", "value")
    ]
    assert torch.cat(rows, dim=1).flatten(0, 1).equal(whole)


def test_gate_and_value_are_the_halves_of_the_canonical_matrix() -> None:
    whole = initial_weight("layers.0.mlp_in.weight", (96, WIDTH))
    halves = [
        initial_parameter(LLAMA, f"layers.0.mlp.{name}.weight") for name in ("gate", "expand")
    ]
    assert torch.cat(halves).equal(whole)
