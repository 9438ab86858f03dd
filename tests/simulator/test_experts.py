"""Layers with routed experts beside dense ones, and what their stacks refuse."""

from collections import Counter
from dataclasses import replace

import pytest

from meshwright.hwprofiles import (
    Attention,
    CollectiveOp,
    Kernels,
    Precision,
    Recompute,
    StackProfile,
    load_cluster,
    load_stack,
)
from meshwright.simulator import (
    CostModel,
    ModelSpec,
    PlanError,
    ResolvedPlan,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.account import rank_traffic, token_traffic
from meshwright.simulator.blocks import BlockShape, hardware_flops, model_flops, walk
from meshwright.simulator.graph import (
    Backward,
    BlockMemory,
    FusedAttention,
    Phase,
    Product,
    Traffic,
)
from meshwright.simulator.layout import Axis, ExpertAxis, Mesh, stack_refusal
from meshwright.simulator.model import (
    EXPERT_LAYER,
    TRANSFORMER_LAYER,
    WINDOWED_LAYER,
    Experts,
    count_active_parameters,
    count_parameters,
    parameters_by_kind,
    parse_model,
)
from meshwright.simulator.replication import replication_of

TOKENS, HIDDEN, WIDTH = 512, 1024, 2816
DENSE = ModelSpec(
    name="dense",
    num_layers=2,
    hidden_size=HIDDEN,
    num_heads=16,
    num_kv_heads=4,
    ffn_hidden_size=WIDTH,
    vocab_size=50257,
    seq_len=TOKENS,
    gated_mlp=True,
    tied_embeddings=False,
    positions="rotary",
    norm="rmsnorm",
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    dropout=False,
)
ONE = DENSE.model_copy(
    update={"experts": Experts(num_experts=1, experts_per_token=1, hidden_size=WIDTH)}
)
PLAN = ResolvedPlan(stages=(2,))


def job_of(model: ModelSpec) -> TrainingJob:
    return TrainingJob(model=model, global_batch_size=2, seq_len=model.seq_len)


def walked(model: ModelSpec, stack: str | StackProfile, plan: ResolvedPlan = PLAN) -> Backward:
    profile = load_stack(stack) if isinstance(stack, str) else stack
    shape = BlockShape.of(job_of(model), plan, profile)
    return walk(shape, EXPERT_LAYER if model.experts else TRANSFORMER_LAYER)


def products(found: Backward, phase: Phase) -> int:
    works = (step.work for step in found.tape.steps if step.phase is phase)
    return sum(int(each.flops) for each in works if isinstance(each, Product | FusedAttention))


def traffic(found: Backward) -> int:
    works = (step.work for step in found.tape.steps if step.phase is Phase.FORWARD)
    return sum(int(each.nbytes) for each in works if isinstance(each, Traffic))


# Beside the router torchtitan sums a token's one row, times its share.
@pytest.mark.parametrize(
    ("stack", "sums"), [("megatron-core", 0), ("fsdp", 0), ("torchtitan@0.2", 1)]
)
def test_one_expert_is_the_dense_layer_a_router_and_copies(stack: str, sums: int) -> None:
    dense, one = walked(DENSE, stack), walked(ONE, stack)
    layers = parameters_by_kind(DENSE)[TRANSFORMER_LAYER], parameters_by_kind(ONE)[EXPERT_LAYER]
    assert layers[1] == layers[0] + HIDDEN
    more = 2 * TOKENS * HIDDEN * (1 + sums)
    assert products(one, Phase.FORWARD) == products(dense, Phase.FORWARD) + more
    assert products(one, Phase.BACKWARD) == products(dense, Phase.BACKWARD) + 2 * more
    # A sorted row is written and read again at least once on each way: there and back.
    assert traffic(one) >= traffic(dense) + 2 * 2 * 2 * TOKENS * HIDDEN


@pytest.mark.parametrize("kind", ["gelu", "squared relu"])
def test_one_expert_without_a_gate_is_the_mlp_without_one_and_a_router(kind: str) -> None:
    plain = DENSE.model_copy(
        update={"gated_mlp": False, "activation": "usual" if kind == "gelu" else kind}
    )
    experts = Experts(num_experts=1, experts_per_token=1, hidden_size=WIDTH, activation=kind)
    routed = plain.model_copy(update={"experts": experts})
    dense, one = walked(plain, "megatron-core"), walked(routed, "megatron-core")
    assert count_parameters(routed) == count_parameters(plain) + plain.num_layers * HIDDEN
    more = 2 * TOKENS * HIDDEN
    assert products(one, Phase.FORWARD) == products(dense, Phase.FORWARD) + more
    # Beside what a gated one keeps: the activation, before it is weighed.
    rows, places, shares, row_map, weight = 2 * HIDDEN, 8, 4, 3 * 4, 2
    own = rows + places + shares + row_map + weight + 2 * WIDTH
    assert BlockMemory.of(one).saved == BlockMemory.of(dense).saved + TOKENS * own
    job = job_of(routed)
    for stack in ("torchtitan@0.2", "fsdp"):
        profile = load_stack(stack)
        refusal = stack_refusal(job, replace(PLAN, zero_stage=3), profile)
        assert refusal is not None
        assert f"activation of dense is not offered by stack {stack}" in refusal.replace(
            f"={kind}", ""
        )


def test_experts_and_mlps_of_a_model_have_gates_alike() -> None:
    experts = Experts(num_experts=2, experts_per_token=1, hidden_size=WIDTH, activation="gelu")
    data = DENSE.model_dump(exclude_defaults=True) | {"experts": experts.model_dump()}
    with pytest.raises(PlanError, match="gated_mlp=True does not go with experts; allowed: False"):
        parse_model(data, origin="mixed.toml")


def test_experts_that_run_one_after_the_other_keep_what_megatrons_own_do() -> None:
    """Without grouped products a rank's experts have operators of their own, each its own rows."""
    apart = load_stack("megatron-core").model_copy(update={"grouped_experts": False})
    experts = Experts(num_experts=4, experts_per_token=2, hidden_size=WIDTH)
    model = DENSE.model_copy(update={"experts": experts})
    grouped, found = walked(model, "megatron-core"), walked(model, apart)
    assert products(found, Phase.FORWARD) == products(grouped, Phase.FORWARD)
    names = [step.operator.name for step in found.tape.steps if step.phase is Phase.FORWARD]
    assert names.count("gate and up") == 4


def test_what_one_expert_keeps_is_what_the_dense_layer_keeps_and_its_rows() -> None:
    """Megatron-Core keeps sorted rows beside tokens, which the router keeps, and some numbers."""
    dense, one = (BlockMemory.of(walked(model, "megatron-core")).saved for model in (DENSE, ONE))
    rows, places, shares, row_map, weight = 2 * HIDDEN, 8, 4, 3 * 4, 2
    assert one == dense + TOKENS * (rows + places + shares + row_map + weight)


def test_only_active_parameters_make_model_flops() -> None:
    model = load_model("mixtral-8x7b")
    assert isinstance(model, ModelSpec)
    job = TrainingJob(model=model, global_batch_size=1, seq_len=4096, precision=Precision.BF16)
    table = model.vocab_size * model.hidden_size
    norms = (2 * model.num_layers + 1) * model.hidden_size
    weights = count_active_parameters(model) - table - norms
    attention = 2 * model.num_layers * model.hidden_size * 4096
    assert model_flops(job) == 6 * 4096 * (weights + attention)
    plan = ResolvedPlan(stages=(32,))
    assert hardware_flops(job, plan, load_stack("megatron-core")) == model_flops(job)
    again, divided = (
        hardware_flops(
            job,
            replace(
                plan, recompute=Recompute.FULL, tp=tp, dp=8 // tp, ep=ep, etp=1 if ep > 1 else None
            ),
            load_stack("megatron-core"),
        )
        for tp, ep in ((1, 1), (4, 8))
    )
    assert divided == again > model_flops(job)
    assert round(count_active_parameters(load_model("deepseek-v3")) / 1e9) == 38
    assert count_active_parameters(DENSE) == count_parameters(DENSE)


def test_tensor_parallel_experts_gather_rows_and_scatter_sums() -> None:
    """With k experts a token, k times as much as sequence parallelism moves for an MLP."""
    update = {"experts": Experts(num_experts=8, experts_per_token=2, hidden_size=WIDTH)}
    model = DENSE.model_copy(update=update)
    plan = ResolvedPlan(tp=2, sequence_parallel=True, stages=(2,))
    found = walked(model, "megatron-core", plan)
    tokens = 2 * TOKENS * HIDDEN
    calls = [
        (str(step.work.op), step.work.nbytes)
        for step in found.tape.steps
        if step.phase is Phase.FORWARD and hasattr(step.work, "op")
    ]
    attention = [("all_gather", tokens), ("reduce_scatter", tokens)]
    told = ("all_gather", 2 * 8 * 8)  # rows of 8 experts, of 2 ranks
    rows = [("all_gather", 2 * tokens), ("all_gather", 2 * 2 * TOKENS)]
    assert calls == [*attention, told, *rows, ("reduce_scatter", 2 * tokens)]


EIGHT = DENSE.model_copy(
    update={"experts": Experts(num_experts=8, experts_per_token=2, hidden_size=WIDTH)}
)


def calls_of(found: Backward, phase: Phase) -> list[tuple[str, str, object]]:
    steps = [step for step in found.tape.steps if step.phase is phase and hasattr(step.work, "op")]
    return [(str(step.work.axis), str(step.work.op), step.work.nbytes) for step in steps]


def test_rows_go_to_the_ranks_of_their_experts_and_back() -> None:
    """Each token has two rows; a rank's own tokens are as many as it gets."""
    found = walked(EIGHT, "megatron-core", ResolvedPlan(dp=4, ep=4, stages=(2,)))
    rows, weights = 2 * TOKENS * 2 * HIDDEN, 2 * TOKENS * 2
    there = [("ep", "all_to_all", rows), ("ep", "all_to_all", weights)]
    told = ("ep", "all_gather", 4 * 8 * 8)  # rows of 8 experts, of 4 ranks
    assert calls_of(found, Phase.FORWARD) == [told, *there, ("ep", "all_to_all", rows)]
    assert sorted(calls_of(found, Phase.BACKWARD)) == sorted([*there, ("ep", "all_to_all", rows)])


def with_capacity(factor: float) -> StackProfile:
    return load_stack("megatron-core").model_copy(update={"expert_capacity": factor})


@pytest.mark.parametrize(("factor", "each"), [(1.0, 128), (1.25, 160), (0.501, 65)])
def test_experts_with_a_capacity_take_equal_rows_of_which_no_rank_is_told(
    factor: float, each: int
) -> None:
    """Of 512 tokens with two experts each 1,024 rows, 128 an expert; get_capacity rounds up."""
    plan = ResolvedPlan(dp=4, ep=4, stages=(2,))
    found = walked(EIGHT, with_capacity(factor), plan)
    rows = 8 * each * 2 * HIDDEN
    sent = [("ep", "all_to_all", size) for size in (rows, 8 * each * 2, rows)]
    assert calls_of(found, Phase.FORWARD) == sent
    whole = sum(
        step.work.flops
        for step in found.tape.steps
        if step.phase is Phase.FORWARD and isinstance(step.work, Product) and step.work.batch == 2
    )
    assert whole == 2 * 8 * each * HIDDEN * 3 * WIDTH


EAGER = load_stack("fsdp").model_copy(update={"kernels": Kernels.EAGER})
CLAMPED = EIGHT.model_copy(
    update={
        "experts": Experts(
            num_experts=8,
            experts_per_token=2,
            hidden_size=WIDTH,
            activation="clamped",
            scores="softmax of chosen",
            bias=True,
        )
    }
)
LLAMA4 = load_model("llama4-maverick")


def moved(found: Backward) -> dict[str, tuple[int, int]]:
    """Return what the kernels that make a tensor read and write, forward and backward, by name.

    Views of it have its name, too.
    """
    sizes: dict[str, tuple[int, int]] = {}
    for each in found.tape.block.operators:
        back = [work for slope in each.gradients for work in slope.work]
        here, there = (
            sum(int(work.nbytes) for work in works if isinstance(work, Traffic))
            for works in (each.work, back)
        )
        name = each.outputs[0].name
        sizes[name] = max(sizes.get(name, (0, 0)), (here, there))
    return sizes


def test_kernels_around_experts_read_and_write_what_their_code_names() -> None:
    """Elements of two bytes, masks of one: of 512 tokens with two of eight experts each."""
    tokens, rows, divided = TOKENS, 2 * TOKENS, ResolvedPlan(dp=4, ep=4, stages=(2,))
    # torchtitan's ExpertParallel: an empty row behind all, then whole lines of eight for each of
    # two experts; a token's two rows are summed.
    titan = walked(EIGHT, "torchtitan@0.2", replace(divided, zero_stage=3))
    lines = 2 * (rows + 1 + rows + 2 * 8) * HIDDEN
    found = moved(titan)
    assert found["rows and an empty one"] == (4 * rows * HIDDEN, 0)
    assert found["padded rows"] == found["rows in order"] == (lines, lines)
    assert found["weighted"] == (2 * (rows + tokens) * HIDDEN, 0)
    sent = ("ep", "all_to_all", 2 * rows * HIDDEN)
    told = ("ep", "all_to_all", 8 * 8)  # how many rows of each expert, in int64
    assert calls_of(titan, Phase.FORWARD) == [told, sent, sent]
    # apply_router_token_dropping: the largest shares of each expert and their numbers, a mask of
    # zeros that these are spread over, its cast, and what it leaves.
    taken = 8 * 160
    found = moved(walked(EIGHT, with_capacity(1.25), divided))
    whole = tokens * 8
    forward = 2 * (7 * whole + 4 * taken)
    assert found["shares of tokens taken"] == (forward, 2 * 3 * whole)
    # GptOssExperts: a bias of each row is added in place; a gate has one bound, a value two, and
    # backward compares for each, and clears; a weight's gradient is a sum over its row.
    found, size = moved(walked(CLAMPED, EAGER, ResolvedPlan(zero_stage=3, stages=(2,)))), 2 * rows
    assert found["expert gate and up biased"] == (3 * size * 2 * WIDTH, 0)
    assert found["hidden biased"] == (3 * size * HIDDEN, 0)
    part = rows * WIDTH
    assert found["bounded expert gate"] == (2 * 2 * part, (2 + 1 + 2 * 2) * part)
    assert found["bounded expert up"] == (2 * 2 * part, (2 * (2 + 1) + 2 * 2) * part)
    assert found["weighted rows"] == (2 * size * HIDDEN, 4 * size * HIDDEN)


def test_a_gate_of_shared_experts_has_a_gradient_as_large_as_they_make() -> None:
    """Times a number a token: a kernel forward, and backward one for each factor."""
    experts = EIGHT.experts.model_copy(update={"shared_hidden_size": WIDTH, "shared_gate": True})
    found = walked(EIGHT.model_copy(update={"experts": experts}), "megatron-core")
    size = 2 * TOKENS * HIDDEN
    assert moved(found)["weighed shared out"] == (2 * size, 2 * 2 * size)
    (gate,) = (
        each for each in found.tape.block.operators if each.outputs[0].name == "weighed shared out"
    )
    assert [each.nbytes for each in gate.backward_scratch] == [size]


@pytest.mark.parametrize("stack", ["megatron-core", "fsdp"])
def test_shared_experts_are_added_and_halves_of_heads_are_joined(stack: str) -> None:
    """DeepSeek-V3: 7,168 columns of tokens, of heads 128 without and 64 with positions."""
    profile = load_stack(stack)
    job = TrainingJob(model=load_model("deepseek-v3"), global_batch_size=8, seq_len=TOKENS)
    plan = ResolvedPlan(
        dp=8, zero_stage=profile.zero_stage, attention=Attention.FLASH, stages=(61,)
    )
    found = moved(walk(BlockShape.of(job, plan, profile), EXPERT_LAYER))
    assert found["all experts out"] == (3 * 2 * TOKENS * 7168, 0)
    assert found["queries joined"] == (2 * 2 * TOKENS * 128 * (128 + 64), 0)
    # Transformer Engine wants values that lie together.
    assert ("values apart" in found) == (stack == "megatron-core")


def test_chunks_of_llama_4_are_copied_there_and_back() -> None:
    """12,288 tokens are filled up with zeros to two chunks of 8,192 (Llama4SelfAttention)."""
    job = TrainingJob(model=LLAMA4, global_batch_size=1, seq_len=12_288)
    plan = ResolvedPlan(attention=Attention.FLASH, stages=(48,))
    shape = BlockShape.of(job, plan, load_stack("megatron-core"))
    walked_layer = walk(shape, WINDOWED_LAYER)
    found, columns, whole = moved(walked_layer), 40 * 128, 2 * 8192
    zeros = [
        int(tensor.nbytes)
        for each in walked_layer.tape.block.operators
        if each.outputs[0].name == "queries apart filled up"
        for tensor in each.scratch
    ]
    assert zeros == [2 * (whole - 12_288) * columns]
    assert found["queries apart filled up"] == (2 * (12_288 + whole) * columns, 0)
    copied = 2 * 2 * whole * columns
    assert found["queries apart in chunks"] == (copied, copied)
    assert found["attention in order"] == (copied, copied)


def test_with_a_capacity_no_expert_is_hotter_than_others() -> None:
    plan = ResolvedPlan(dp=4, ep=4, stages=(2,))
    job = TrainingJob(model=EIGHT, global_batch_size=4, seq_len=TOKENS, imbalance=2.0)
    steps = [
        simulate(each, plan, load_cluster("dgx-h100"), with_capacity(1.25))
        for each in (job, replace(job, imbalance=1.0))
    ]
    assert steps[0].step_ps == steps[1].step_ps
    assert steps[0].memory.peak_bytes == steps[1].memory.peak_bytes


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 4, 1), (2, 4, 1), (2, 2, 2), (2, 8, None)])
def test_divided_experts_multiply_as_much_and_hold_their_part(
    tp: int, ep: int, etp: int | None
) -> None:
    """With even routing ``ep`` times as many rows meet each of a rank's ``E / ep`` experts."""
    whole = ResolvedPlan(tp=tp, dp=16 // tp, sequence_parallel=tp > 1, stages=(2,))
    found, one = (
        walked(EIGHT, "megatron-core", plan) for plan in (replace(whole, ep=ep, etp=etp), whole)
    )
    flops = [
        sum(step.work.flops for step in each.tape.steps if isinstance(step.work, Product))
        for each in (found, one)
    ]
    assert flops[0] == flops[1]
    sizes = [
        sum(x.numel for x in each.tape.block.weights if len(x.dims) == 3) for each in (one, found)
    ]
    assert sizes[0] * tp == 3 * 8 * HIDDEN * WIDTH
    assert sizes[1] == 3 * 8 * HIDDEN * WIDTH // (ep * (etp or tp))


def test_gradients_of_experts_are_reduced_over_ranks_that_hold_the_same() -> None:
    """Four ranks hold an expert at dp=16 and ep=4, and share its optimizer's states."""
    plan = ResolvedPlan(dp=16, ep=4, zero_stage=1, stages=(2,))
    stack, job = (
        load_stack("megatron-core"),
        replace(job_of(EIGHT), global_batch_size=16),
    )
    traffic = rank_traffic(job, plan, stack, 0)
    reduced: Counter[object] = Counter()
    for each in traffic:
        if each.op is CollectiveOp.REDUCE_SCATTER:
            reduced[each.axis] += each.size_bytes * each.num_calls
    ranks = {each.axis: each.num_ranks for each in traffic}
    experts = 2 * 3 * 8 * HIDDEN * WIDTH // 4
    padded = -(-50257 // 128) * 128 - 50257
    others = count_parameters(EIGHT) - 4 * experts + 2 * padded * HIDDEN
    assert (ranks[Axis.DP], ranks[ExpertAxis.EDP], ranks[ExpertAxis.EP]) == (16, 4, 4)
    assert reduced == {Axis.DP: 4 * others, ExpertAxis.EDP: 4 * experts}
    memory = simulate(job, plan, load_cluster("dgx-h100"), stack).memory.by_stage[0]
    assert memory.gradients_bytes == 4 * (others + experts)
    assert memory.optimizer_states_bytes == 12 * (-(-others // 16) + experts // 4)


@pytest.mark.parametrize(
    ("cluster", "num_ranks", "published_us"),
    [
        ("dgx-h100", 8, 1271),
        ("dgx-h100", 16, 5701),
        ("dgx-h100", 32, 7937),
        ("dgx-h100", 64, 8946),
        ("gb200-nvl72", 8, 738),
        ("gb200-nvl72", 64, 878),
    ],
)
def test_an_all_to_all_takes_what_was_published(
    cluster: str, num_ranks: int, published_us: int
) -> None:
    """The means of dispatch and combine, arXiv 2603.07685, Table 7.

    Across nodes nothing is fitted to them: the cards' share of the line rate is that of
    all-reduces, 0.80 where 64 ranks reached 0.92.
    """
    rows = 4096 * 8 * 7168 * 2
    span = Mesh(
        dp=num_ranks, experts=(1, num_ranks), node_size=load_cluster(cluster).devices_per_node
    )
    costs = CostModel(load_cluster(cluster), load_stack("megatron-core"), num_ranks)
    found = costs.collective(CollectiveOp.ALL_TO_ALL, rows, span.span(ExpertAxis.EP), ExpertAxis.EP)
    assert found.time_ps / 1e6 == pytest.approx(published_us, rel=0.16)


@pytest.mark.parametrize(
    ("name", "stack", "changes", "message"),
    [
        ("mixtral-8x7b", "ddp", {}, "experts of mixtral-8x7b is not offered by stack ddp@2.13; "),
        (
            "mixtral-8x7b",
            "torchtitan@0.2",
            {"tp": 2, "dp": 2, "sequence_parallel": True},
            "tp=2 is not offered",
        ),
        ("mixtral-8x7b", "megatron-core", {"tp": 2}, "sequence_parallel=False is not offered"),
        ("deepseek-v3", "ddp", {}, "experts of deepseek-v3 is not offered by stack ddp@2.13; "),
        (
            "deepseek-v3",
            "fsdp",
            {"tp": 2},
            "tp=2 is not offered by stack fsdp@2.13 for deepseek-v3",
        ),
        ("kimi-k2", "megatron-core", {"tp": 2}, "sequence_parallel=False is not offered"),
        (
            "llama3-8b",
            "megatron-core",
            {"ep": 8, "dp": 8},
            "ep=8 does not go with llama3-8b, which",
        ),
        (
            "mixtral-8x7b",
            "torchtitan@0.2",
            {"ep": 2, "etp": 2, "dp": 8},
            "etp=2 is not offered by stack torchtitan@0.2 for mixtral-8x7b; allowed: 1, or that of",
        ),
        (
            "mixtral-8x7b",
            "torchtitan@0.2",
            {"ep": 2, "dp": 48},
            "dp=48 is not offered by stack torchtitan@0.2 for mixtral-8x7b; allowed: a divisor of ",
        ),
    ],
)
def test_what_no_stack_runs_is_refused(
    name: str, stack: str, changes: dict[str, object], message: str
) -> None:
    profile = load_stack(stack)
    plan = ResolvedPlan.of(
        {"zero_stage": profile.zero_stage, "attention": profile.attention, "stages": (61,)}
        | changes
    )
    job = TrainingJob(model=load_model(name), global_batch_size=16, seq_len=4096)
    refusal = stack_refusal(job, plan, profile)
    assert refusal is not None
    assert refusal.startswith(message)


def test_experts_of_several_ranks_are_slices_of_a_set_of_shards() -> None:
    with pytest.raises(PlanError, match="ep=8 x etp=1 does not divide the 4 ranks that have a set"):
        ResolvedPlan(dp=8, dp_shard=4, ep=8, zero_stage=3)
    plan = ResolvedPlan(dp=16, dp_shard=8, ep=4, zero_stage=3, attention=Attention.FLASH)
    found = replication_of(plan, load_stack("torchtitan@0.2"), Mesh.of(plan, 8))
    assert found.experts is not None
    of_all, of_experts = (
        (each.span.num_ranks, each.replica_span and each.replica_span.num_ranks)
        for each in (found, found.experts)
    )
    assert (of_all, of_experts) == ((8, 2), (2, 2))


@pytest.mark.parametrize(
    ("pp_rank", "predictions", "num_layers"), [(0, 1, 4), (15, 0, 1), (15, 1, 2)]
)
def test_routing_biases_move_by_tokens_that_all_ranks_of_a_stage_sum(
    pp_rank: int, predictions: int, num_layers: int
) -> None:
    """A number of fp32 for each of 256 experts; the first three layers have none."""
    model = load_model("deepseek-v3").model_copy(update={"prediction_layers": predictions})
    plan = ResolvedPlan(
        tp=2,
        pp=16,
        dp=32,
        ep=64,
        etp=1,
        sequence_parallel=True,
        zero_stage=1,
        stages=(7, *(4,) * 13, 1, 1),
    )
    job = TrainingJob(model=model, global_batch_size=512, seq_len=4096)
    (summed,) = token_traffic(job, plan, load_stack("megatron-core"), pp_rank)
    assert (summed.op, summed.num_ranks) == (CollectiveOp.ALL_REDUCE, 64)
    assert (summed.size_bytes, summed.num_calls) == (4 * 256 * num_layers, 1)
