"""Context parallelism: what a rank computes, keeps and sends where sequences are cut."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.hwprofiles import Attention, ContextParallel, Precision, load_cluster, load_stack
from meshwright.simulator import (
    Category,
    CostModel,
    PlanError,
    ResolvedPlan,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.account import rank_flops, rank_traffic
from meshwright.simulator.blocks import (
    BlockOperators,
    BlockShape,
    BlockTable,
    Collective,
    FlashAttention,
    Gemm,
    MemoryBound,
    Operator,
    RingMessages,
    walk,
)
from meshwright.simulator.costs.spans import GroupSpans
from meshwright.simulator.engine.world import simulate_folded, simulate_unfolded
from meshwright.simulator.graph import Kind
from meshwright.simulator.layout import Axis, GroupSpan, Mesh
from meshwright.simulator.model import (
    EMBEDDING,
    EXPERT_LAYER,
    HEAD,
    TRANSFORMER_LAYER,
    WINDOWED_LAYER,
    BlockKind,
)
from meshwright.simulator.step import build_step

CORE, TITAN = load_stack("megatron-core"), load_stack("torchtitan@0.2")
LLAMA, DEEPSEEK = load_model("llama3-8b"), load_model("deepseek-v3")
RING, GATHER, SWAP, NESTED = ContextParallel
TOKENS = 32_768
NESTED_BY_TWO = {"cp_type": NESTED, "cp_inner": 2}
WIDTH, KEYS, HEADS = 4096, 1024, 32  # of queries and of keys, and query heads (Llama 3 8B)


def job_of(seq_len: int = TOKENS, model: object = LLAMA, batch: int = 8) -> TrainingJob:
    return TrainingJob(
        model=model,  # type: ignore[arg-type]
        global_batch_size=batch,
        seq_len=seq_len,
        precision=Precision.BF16,
    )


def plan_of(cp: int, cp_type: ContextParallel | None = None, **fields: object) -> ResolvedPlan:
    said = {"attention": Attention.FLASH, "zero_stage": 1, "cp": cp, "cp_type": cp_type}
    said |= {"cp_inner": 2} if cp_type is NESTED and cp > 1 else {}
    return ResolvedPlan.of(said | fields)


def shape_of(
    cp: int, cp_type: ContextParallel | None = None, seq_len: int = TOKENS, **fields: object
) -> BlockShape:
    return BlockShape.of(job_of(seq_len), plan_of(cp, cp_type, **fields), CORE)


def calls(operators: tuple[Operator, ...]) -> Counter[tuple[str, int]]:
    """Return how often each context-parallel collective of a size runs."""
    found: Counter[tuple[str, int]] = Counter()
    for each in operators:
        if isinstance(each, Collective | RingMessages) and each.axis is not Axis.TP:
            for op, size_bytes, count in each.collectives:
                found[op.value, size_bytes] += count
    return found


@pytest.mark.parametrize("cp_type", ContextParallel)
@pytest.mark.parametrize("tp", [1, 2])
def test_all_but_attention_is_that_of_a_shorter_sequence(cp_type: ContextParallel, tp: int) -> None:
    fields = {"tp": tp, "sequence_parallel": True, "microbatch_size": 2}
    cut, short = shape_of(4, cp_type, **fields), shape_of(1, seq_len=TOKENS // 4, **fields)
    for kind in (EMBEDDING, TRANSFORMER_LAYER, HEAD):
        one, other = (_token_wise(BlockTable().operators(each, kind)) for each in (cut, short))
        assert one == other
    assert cut.message_bytes == short.message_bytes
    assert cut.num_logits == short.num_logits


def _token_wise(operators: BlockOperators) -> list[object]:
    """Return products and tensor-parallel collectives."""
    return [
        each
        for phase in operators
        for each in phase
        if isinstance(each, Gemm) or (isinstance(each, Collective) and each.axis is Axis.TP)
    ]


@given(cp=st.sampled_from([2, 4, 8]), cp_type=st.sampled_from([*ContextParallel]))
def test_ranks_share_the_work_of_attention_evenly(cp: int, cp_type: ContextParallel) -> None:
    whole = rank_flops(job_of(), plan_of(1), CORE, 0, microbatches=1)
    assert rank_flops(job_of(), plan_of(cp, cp_type), CORE, 0, microbatches=1) * cp == whole
    table, shape = BlockTable(), shape_of(cp, cp_type)
    operators = table.operators(shape, TRANSFORMER_LAYER)
    (flash,) = (each for each in operators.forward if isinstance(each, FlashAttention))
    # Two products of half a square of scores; a multiply-add counts two.
    assert flash.flops == 2 * TOKENS**2 * WIDTH // cp


@given(cp=st.sampled_from([2, 4, 8, 16]), tp=st.sampled_from([1, 2]))
def test_what_travels_is_what_transformer_engine_sends(cp: int, tp: int) -> None:
    """By its loops: see the docstrings of `blocks.parts.context`."""
    own = 2 * TOKENS // cp  # bytes of a column of a rank's tokens in bf16
    keys, queries, pair = own * KEYS // tp, own * WIDTH // tp, 2 * own * KEYS // tp
    found = {
        each: BlockTable().operators(shape_of(cp, each, tp=tp), TRANSFORMER_LAYER)
        for each in (RING, GATHER, SWAP)
        if each is not SWAP or tp * cp <= 8  # its key heads
    }
    ring = found[RING]
    assert calls(ring.forward) == {("p2p", pair): cp - 1}
    middle = {("p2p", 2 * pair): cp - 2} if cp > 2 else {}
    assert calls(ring.backward) == {("p2p", pair): 2} | middle
    gather = found[GATHER]
    assert calls(gather.forward) == {("all_gather", cp * keys): 2}
    assert calls(gather.backward) == {
        ("all_gather", cp * keys): 2,
        ("reduce_scatter", cp * keys): 2,
    }
    if SWAP in found:
        expected = Counter([("all_to_all", queries)] * 2 + [("all_to_all", keys)] * 2)
        assert calls(found[SWAP].forward) == calls(found[SWAP].backward) == expected


@given(cp=st.sampled_from([2, 4, 8]), inner=st.sampled_from([1, 2]))
def test_what_is_made_of_latents_travels_as_wide_as_it_is(cp: int, inner: int) -> None:
    """Keys one behind the other with values (AttnFuncWithCPAndKVP2P): 192 and 128 a head."""
    outer, job = cp // inner, job_of(model=DEEPSEEK)
    plan = plan_of(cp, NESTED, cp_inner=inner)
    operators = BlockTable().operators(BlockShape.of(job, plan, CORE), EXPERT_LAYER)
    key, value = (2 * TOKENS // cp * 128 * width for width in (192, 128))
    swaps = [("all_to_all", size) for size in (key, key, value, value)] if inner > 1 else []
    around = [("p2p", key + value)] * (outer - 1)
    back = [("p2p", key + value)] * 2 + [("p2p", 2 * (key + value))] * (outer - 2)
    assert calls(operators.forward) == Counter(swaps + around)
    assert calls(operators.backward) == Counter(swaps + (back if outer > 1 else []))


@given(cp=st.sampled_from([4, 8, 16]), inner=st.sampled_from([1, 2, 4, 8]))
def test_a_ring_of_swaps_sends_what_is_swapped_and_goes_by_fewer_ranks(cp: int, inner: int) -> None:
    """AttnFuncWithCPAndKVP2P with two groups: a tensor is as large after its swap as before."""
    inner = min(inner, cp)
    own = 2 * TOKENS // cp
    keys, queries, pair = own * KEYS, own * WIDTH, 2 * own * KEYS
    shape = shape_of(cp, NESTED, cp_inner=inner)
    table, outer = BlockTable(), cp // inner
    operators = table.operators(shape, TRANSFORMER_LAYER)
    swaps = [("all_to_all", queries)] * 2 + [("all_to_all", keys)] * 2
    swapped = Counter(swaps if inner > 1 else [])
    around = [("p2p", pair)] * (outer - 1)
    back = [("p2p", pair)] * 2 + [("p2p", 2 * pair)] * (outer - 2) if outer > 1 else []
    assert calls(operators.forward) == swapped + Counter(around)
    assert calls(operators.backward) == swapped + Counter(back)
    (flash,) = (each for each in operators.forward if isinstance(each, FlashAttention))
    assert flash.flops == 2 * TOKENS**2 * WIDTH // cp
    assert (flash.batch_heads, flash.ranks) == (HEADS // inner, outer)


@pytest.mark.parametrize(("inner", "way"), [(1, RING), (8, SWAP)])
def test_a_ring_of_swaps_ends_in_a_ring_and_in_a_swap(inner: int, way: ContextParallel) -> None:
    cluster, job = load_cluster("dgx-h100"), job_of()
    nested, plain = (
        simulate(job, plan, cluster, CORE)
        for plan in (plan_of(8, NESTED, cp_inner=inner), plan_of(8, way))
    )
    assert nested.step_ps == plain.step_ps
    assert nested.memory == plain.memory


@given(cp=st.sampled_from([2, 4, 8]), microbatch=st.sampled_from([1, 2]))
def test_gathered_keys_live_in_order_beside_those_that_are_not(cp: int, microbatch: int) -> None:
    """Backward has keys and values, their gradients, those of both halves, and one not in order.

    The halves attend to all tokens and to half of the rank's own besides; what is handed on, keys
    and values of a rank, counts elsewhere.  AttnFuncWithCPAndKVAllGather puts one after the other
    in order, and frees it: the wider one, of latent attention the keys, is there twice last.
    """
    plan = plan_of(cp, GATHER, microbatch_size=microbatch)
    for model, kind, keys, values, queries in (
        (LLAMA, TRANSFORMER_LAYER, KEYS, KEYS, WIDTH),
        (DEEPSEEK, EXPERT_LAYER, 128 * 192, 128 * 128, 128 * 192),
    ):
        found = walk(BlockShape.of(job_of(model=model), plan, CORE), kind).tape.block.operators
        (attention,) = (each for each in found if each.kind is Kind.ATTENTION)
        column = 2 * TOKENS * microbatch  # of all tokens
        both, twice = column * (keys + values), column * max(keys, values)
        assert sum(each.nbytes for each in {*attention.scratch}) == both + twice
        halves, pass_through = both + both // (2 * cp), both // cp
        expected = both + both + halves + twice - pass_through + column * queries // cp
        assert sum(each.nbytes for each in {*attention.backward_scratch}) == expected


def test_halves_of_a_window_have_gradients_of_the_tokens_that_they_see() -> None:
    """By get_kv_seq_info_after_all_gather: from the window of the first row to the last row.

    Rows 2,048 to 4,095 and 4,096 to 6,143 of the last of two ranks see 4,095 tokens before them.
    """
    seq_len, model, seen = 8192, load_model("mistral-7b"), 4096 + (6144 - 1)
    cut, short = (
        BlockShape.of(job_of(tokens, model), plan_of(ranks, GATHER), CORE)
        for ranks, tokens in ((2, seq_len), (1, seq_len // 2))
    )
    (attention,) = (
        each
        for each in walk(cut, WINDOWED_LAYER).tape.block.operators
        if each.kind is Kind.ATTENTION
    )
    pair, queries = 2 * 2 * KEYS, 2 * seq_len // 2 * WIDTH
    # In order, their gradients, keys or values twice, but not a rank's own that are handed on.
    twice, pass_through = pair // 2 * seq_len, pair * seq_len // 2
    lives = pair * (2 * seq_len + seen) + twice - pass_through + queries
    assert sum(each.nbytes for each in {*attention.backward_scratch}) == lives
    ordered = 2 * seq_len
    again = pair * (ordered + seq_len + 3 * seen + ordered)
    assert moved(cut, WINDOWED_LAYER)[1] - moved(short, WINDOWED_LAYER)[1] == again


@pytest.mark.parametrize("cp", [2, 8])
def test_a_ring_holds_what_came_and_what_was_made_in_all_steps(cp: int) -> None:
    """Buffers and outputs of steps of AttnFuncWithCPAndKVP2P, but for the buffer that is kept.

    Backward has two of keys and values with their gradients, of which one is handed on.
    """
    found = walk(shape_of(cp, RING), TRANSFORMER_LAYER).tape.block.operators
    (attention,) = (each for each in found if each.kind is Kind.ATTENTION)
    queries, pair = 2 * TOKENS // cp * WIDTH, 4 * TOKENS // cp * KEYS
    assert sum(each.nbytes for each in attention.scratch) == (cp - 1) * pair + cp * queries
    step = pair + queries
    assert sum(each.nbytes for each in attention.backward_scratch) == (4 - 1) * pair + step


@pytest.mark.parametrize(("cp", "way", "pairs"), [(2, RING, 1), (8, RING, 2), (8, GATHER, 8)])
def test_pytorchs_ring_holds_what_came_and_four_outputs_in_fp32(
    cp: int, way: ContextParallel, pairs: int
) -> None:
    """`_SDPAMerger` has the sum, a step's output, their difference and its product at once.

    Beside them two numbers of fp32 a row, what is attended to and what comes in meanwhile: of two
    ranks no more does, and what is gathered stays.
    """
    shape = BlockShape.of(job_of(), plan_of(cp, way, zero_stage=3), TITAN)
    found = walk(shape, TRANSFORMER_LAYER).tape.block.operators
    (attention,) = (each for each in found if each.kind is Kind.ATTENTION)
    tokens = TOKENS // cp
    wanted = pairs * 4 * tokens * KEYS + 4 * 4 * tokens * WIDTH + 2 * 4 * tokens * HEADS
    assert sum(each.nbytes for each in attention.scratch) == wanted


def moved(shape: BlockShape, kind: BlockKind = TRANSFORMER_LAYER) -> list[int]:
    """Return what kernels of a layer read and write beside its products, forward and backward."""
    operators = BlockTable().operators(shape, kind)
    phases = operators.forward, operators.backward
    return [sum(each.size_bytes for each in p if isinstance(each, MemoryBound)) for p in phases]


@pytest.mark.parametrize("cp", [4, 8])
def test_kernels_beside_attention_read_and_write_what_those_of_the_frameworks_do(cp: int) -> None:
    """Bytes by hand, of the rank that has most: the last one, which skips no rows of any step.

    Transformer Engine (context_parallel.py): a kernel that copies reads and writes, one that adds
    reads two.  PyTorch (_SDPAMerger of _attention.py) sums in fp32.
    """
    queries, keys = 2 * TOKENS // cp * WIDTH, 2 * TOKENS // cp * KEYS
    pair, copied, added = 2 * keys, 2, 3

    def ring(steps: int) -> tuple[int, float]:
        rows = queries * (copied + added * (steps - 1))
        # The pair that came last is copied; earlier tokens have gradients of half of the keys, of
        # which the first are copied, and a rank's own, added last, of all of them.
        back = copied + copied / 2 + added / 2 * (steps - 2) + added
        return copied * pair + rows, rows + back * pair

    # `movedim().contiguous()` and `index_select()`, one before and one after the all-to-all.
    swap = 2 * copied * (2 * queries + pair)
    order = copied * pair * cp  # index_select
    # They are gathered and put in order again; gradients are zeroed, added and put in order.
    back = order + pair * cp + added * pair * cp + order
    around = ring(cp // 2)
    numbers, of_pair = queries // 2, pair // 2
    # A step's output is cast; all but the first are taken from the sum, multiplied and taken from
    # it again; the sum is cast.
    merged = numbers * ((2 + 4) * cp + (12 + 8 + 12) * (cp - 1) + (4 + 2))
    # Gradients are zeroed, added step by step and cast; of half of the keys beside a copy of them;
    # each message has them in one tensor, all but the first beside what came.
    summed = numbers * (4 + 10 * cp + 6)
    summed += of_pair * (4 + 10 + 13 * (cp - 1) + 6 + 8 * cp + 4 * (cp - 1))
    wanted = {
        (CORE, RING): ring(cp),
        (CORE, GATHER): (order, back),
        (CORE, SWAP): (swap, swap),
        (CORE, NESTED): (swap + around[0], swap + around[1]),
        (TITAN, RING): (merged, summed),
        (TITAN, GATHER): (merged, summed),
    }
    for (stack, way), expected in wanted.items():
        stage = 3 if stack is TITAN else 1
        cut, short = (
            moved(BlockShape.of(job_of(seq_len), plan_of(ranks, way, zero_stage=stage), stack))
            for ranks, seq_len in ((cp, TOKENS), (1, TOKENS // cp))
        )
        assert [one - other for one, other in zip(cut, short, strict=True)] == [*expected], way


@given(cp=st.sampled_from([2, 3, 4, 8]), window=st.integers(1, 48), half=st.integers(1, 6))
def test_ranks_have_the_scores_of_a_window_between_them(cp: int, window: int, half: int) -> None:
    """Scores of the diagonal count half, and the kernel starts at the first key of a window."""
    tokens = 2 * cp * half
    assume(window < tokens)
    call = FlashAttention("", 1, tokens, 1, window=window, ranks=cp)
    counted = [call.flops_of(rank) for rank in range(cp)]
    for rank, flops in enumerate(counted):
        parts = rank, 2 * cp - 1 - rank
        rows = [row for part in parts for row in range(part * half, (part + 1) * half)]
        scores = sum(min(row + 1, window) for row in rows)
        assert flops / 4 == pytest.approx(scores, abs=len(rows) / 2)
    assert call.flops == pytest.approx(max(counted), abs=2)


@pytest.mark.parametrize("inner", [2, 4])
def test_a_ring_of_swaps_keeps_what_a_swap_does_and_one_pair(inner: int) -> None:
    """Backward reads swapped queries, the output before its swap, and the pair that came last."""
    table = BlockTable()
    shapes = shape_of(8, NESTED, cp_inner=inner), shape_of(8, SWAP)
    nested, swap = (
        [(each.name, each.size_bytes) for each in table.saved_tensors(shape, TRANSFORMER_LAYER)]
        for shape in shapes
    )
    keys = 2 * TOKENS // 8 * KEYS
    swapped = {("rotated keys swapped", keys), ("values swapped", keys)}
    assert {*swap} - {*nested} >= swapped
    assert sum(size for _, size in nested) == sum(size for _, size in swap)
    assert ("keys and values", 2 * keys) in nested


def test_swaps_of_a_node_leave_its_network_to_the_ring() -> None:
    """Of 16 ranks eight swap over NVLink: what a swap of all sends between nodes goes nowhere."""
    costs = CostModel(load_cluster("dgx-h100"), CORE, 64)
    shape, table = shape_of(16, NESTED, cp_inner=8), BlockTable()
    (inner, *_), (ring,) = (
        [each for each in table.operators(shape, TRANSFORMER_LAYER).forward if isinstance(each, k)]
        for k in (Collective, RingMessages)
    )
    spans = GroupSpans(64, 8)
    assert spans.of_block(inner.axis, shape) == (8, 1, 8)
    assert spans.of_block(ring.axis, shape) == (2, 2, 1)
    sent = costs.collective(inner.op, inner.size_bytes, GroupSpan(16, 2, 8), Axis.CP)
    assert costs.operator_cost(inner, shape)[1].time_ps < sent.time_ps


def test_pytorch_sends_gradients_in_fp32_once_more() -> None:
    pair = 2 * 2 * KEYS * TOKENS // 4
    plan = {each: plan_of(4, each, zero_stage=3) for each in (RING, GATHER)}
    found = {
        way: BlockTable().operators(BlockShape.of(job_of(), each, TITAN), TRANSFORMER_LAYER)
        for way, each in plan.items()
    }
    gradients = {("all_to_all", 2 * pair): 4}
    assert calls(found[RING].forward) == {("all_to_all", pair): 3}
    assert calls(found[RING].backward) == {("all_to_all", pair): 3} | gradients
    assert calls(found[GATHER].forward) == {("all_gather", 4 * pair): 1}
    assert calls(found[GATHER].backward) == {("all_gather", 4 * pair): 1} | gradients


def test_a_ring_keeps_one_tensor_of_keys_and_values() -> None:
    """Whole products are kept without it, as values are a part of them: 24 of these MiB."""
    tokens, table = TOKENS // 4, BlockTable()
    saved = dict(table.saved_tensors(shape_of(4, RING), TRANSFORMER_LAYER))
    assert saved["keys and values"] == 2 * 2 * tokens * KEYS
    assert saved["log-sum-exp"] == 4 * tokens * HEADS
    whole = sum(saved.values())
    without = table.saved_tensors(shape_of(1, seq_len=tokens), TRANSFORMER_LAYER)
    product = 2 * tokens * (WIDTH + 2 * KEYS)
    keys = 2 * tokens * KEYS
    assert whole == sum(each.size_bytes for each in without) - product - keys + 2 * keys


@given(cp=st.sampled_from([2, 4, 8]), slower=st.sampled_from([1, 20, 400]))
def test_steps_of_attention_hide_messages_up_to_their_time(cp: int, slower: int) -> None:
    cluster = load_cluster("dgx-h100")
    network = cluster.inter_node
    slow = network.model_copy(
        update={"bandwidth_bytes_per_s": network.bandwidth_bytes_per_s / slower}
    )
    cluster = cluster.model_copy(update={"inter_node": slow})
    costs = CostModel(cluster, CORE, 64)
    shape = shape_of(cp, RING, tp=8)  # neighbours are on different nodes
    forward = BlockTable().operators(shape, TRANSFORMER_LAYER).forward
    (flash,) = (each for each in forward if isinstance(each, FlashAttention))
    step_ps = costs.operator_cost(flash, shape)[1].time_ps // cp
    sent, latency = costs.message(2 * 2 * KEYS // 8 * TOKENS // cp, crosses_nodes=True)
    expected = (cp - 1) * max(0, sent.time_ps + latency.time_ps - step_ps)
    cost = costs.phase_cost(forward, shape)
    assert cost.category_ps(Category.CP_COMM) == expected


def test_gradients_and_shards_are_those_of_as_many_data_parallel_ranks() -> None:
    """Ranks of one context-parallel group see parts of a batch, and count in it as one."""
    cut, plain = (plan_of(cp, dp=dp, tp=2, stages=(32,)) for cp, dp in ((4, 2), (1, 8)))
    assert cut.num_microbatches(job_of()) == 4
    traffic = [
        [each for each in rank_traffic(job_of(), plan, CORE, 0) if each.axis is Axis.DP]
        for plan in (cut, plain)
    ]
    assert traffic[0] == traffic[1] != []
    cluster = load_cluster("dgx-h100")
    one, other = (
        simulate(job_of(8192), plan, cluster, CORE).memory.by_stage[0] for plan in (cut, plain)
    )
    assert one.optimizer_states_bytes == other.optimizer_states_bytes
    assert one.parameters_bytes == other.parameters_bytes


@pytest.mark.parametrize("cp_type", ContextParallel)
def test_every_rank_runs_like_its_representative(cp_type: ContextParallel) -> None:
    model = load_model("gpt2-medium")
    job = TrainingJob(model=model, global_batch_size=8, seq_len=1024)
    plan = plan_of(4, cp_type, tp=2, pp=2, dp=1, stages=(12, 12))
    costs = CostModel(load_cluster("dgx-a100"), CORE, plan.world_size)
    work = build_step(job, plan, costs).work
    folded, unfolded = simulate_folded(work), simulate_unfolded(work, Mesh.of(plan, 8))
    assert folded.step_ps == unfolded.step_ps
    assert len(unfolded.ranks) == 16


@pytest.mark.parametrize(
    ("model", "stack", "changes", "complaint"),
    [
        ("llama3-8b", "megatron-core", {"cp": 3}, "seq_len=32768 is not divisible by 2 x cp=3"),
        ("bert-large", "megatron-core", {}, "bert-large, which is not causal; allowed: 1"),
        ("resnet50", "megatron-core", {}, "resnet50, which has no attention; allowed: 1"),
        ("llama3-8b", "ddp", {}, "cp=2 is not offered by stack ddp@2.13; allowed: 1"),
        ("llama3-8b", "torchtitan@0.2", {"cp_type": SWAP}, "allowed: all-gather, ring"),
        ("llama3-8b", "torchtitan@0.2", NESTED_BY_TWO, "allowed: all-gather, ring"),
        (
            "mistral-7b",
            "megatron-core",
            NESTED_BY_TWO,
            "for mistral-7b; allowed: all-gather, all-to-all",
        ),
        (
            "llama3-8b",
            "megatron-core",
            {"cp": 16, "cp_type": NESTED, "cp_inner": 16},
            "cp_inner=16 is not offered by stack megatron-core@0.18 for llama3-8b; allowed: a divi",
        ),
        ("llama3-8b", "megatron-core", {"attention": Attention.UNFUSED}, "allowed: flash"),
        ("deepseek-v3", "megatron-core-2024", {}, "2024 for deepseek-v3; allowed: 1"),
        ("deepseek-v3", "megatron-core@0.16", {"cp_type": SWAP}, "allowed: ring, ring+all-to-all"),
        ("deepseek-v3", "megatron-core@0.16", NESTED_BY_TWO, "allowed: a smaller divisor of cp"),
        ("mistral-7b", "megatron-core", {}, "for mistral-7b; allowed: all-gather, all-to-all"),
        ("llama3-8b", "megatron-core", {"cp": 16, "cp_type": SWAP}, "a divisor of 8 for tp x cp"),
    ],
)
def test_what_no_framework_runs_is_refused(
    model: str, stack: str, changes: dict[str, object], complaint: str
) -> None:
    trained = load_model(model)
    job = job_of({"bert-large": 512, "resnet50": 1}.get(model, TOKENS), trained)
    plan = replace(plan_of(2, zero_stage=0, stages=(trained.num_layers,)), **changes)
    with pytest.raises(PlanError) as refusal:
        simulate(job, plan, load_cluster("dgx-h100"), load_stack(stack))
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)
