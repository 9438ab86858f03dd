"""Parts of a layer that selective recomputation runs again."""

from dataclasses import replace

import pytest

from meshwright.hwprofiles import (
    Attention,
    Precision,
    Recompute,
    RecomputeModule,
    StackProfile,
    load_stack,
)
from meshwright.simulator import ModelSpec, PlanError, ResolvedPlan, TrainingJob, load_model
from meshwright.simulator.blocks import BlockShape, walk
from meshwright.simulator.graph import BlockMemory, Phase, Product
from meshwright.simulator.layout import read_modules, stack_refusal
from meshwright.simulator.model import EXPERT_LAYER, TRANSFORMER_LAYER

STACK = load_stack("megatron-core")
LLAMA = load_model("llama3-8b")
MIXTRAL = load_model("mixtral-8x7b")
assert isinstance(MIXTRAL, ModelSpec)
MLP, NORMS = RecomputeModule.MLP, RecomputeModule.LAYERNORM
TOKENS = LLAMA.seq_len


def job_of(model: object = LLAMA, precision: Precision = Precision.BF16) -> TrainingJob:
    assert isinstance(model, ModelSpec)
    return TrainingJob(model=model, global_batch_size=8, seq_len=model.seq_len, precision=precision)


def plan_of(*modules: RecomputeModule) -> ResolvedPlan:
    recompute = Recompute.SELECTIVE if modules else Recompute.NONE
    return ResolvedPlan(
        recompute=recompute, recompute_modules=modules, attention=Attention.FLASH, stages=(32,)
    )


def saved_bytes(*modules: RecomputeModule, stack: StackProfile = STACK) -> int:
    shape = BlockShape.of(job_of(), plan_of(*modules), stack)
    return int(BlockMemory.of(walk(shape, TRANSFORMER_LAYER)).saved)


def test_an_mlp_that_runs_again_keeps_its_input_alone() -> None:
    # Beside it are gate and up, and what the last product reads, in 16 bits.
    assert saved_bytes() - saved_bytes(MLP) == 2 * TOKENS * 3 * LLAMA.ffn_hidden_size


def test_norms_that_are_made_again_keep_neither_output_nor_deviation() -> None:
    each = 2 * TOKENS * LLAMA.hidden_size + 4 * TOKENS
    apart = STACK.model_copy(update={"transformer_engine": False})
    assert saved_bytes(stack=apart) - saved_bytes(NORMS, stack=apart) == 2 * each


def test_norms_inside_of_products_do_not_run_again() -> None:
    """Those that queries, keys and values, or an MLP, alone read: see tests_outside."""
    assert saved_bytes() == saved_bytes(NORMS)
    saved = []
    for modules in ((), (NORMS,)):
        shape = BlockShape.of(job_of(MIXTRAL), plan_of(*modules), STACK)
        saved.append(BlockMemory.of(walk(shape, EXPERT_LAYER)).saved)
    # Routing weights read the norm's output in 16 bits, and it keeps a deviation of each token.
    each = 2 * MIXTRAL.hidden_size + 4
    assert saved[0] - saved[1] == MIXTRAL.seq_len * each


@pytest.mark.parametrize("tp", [1, 2])
def test_outputs_that_are_made_again_leave_no_copies_in_8_bits(tp: int) -> None:
    """Each product keeps one of its input along columns, 33 bytes for 32 elements."""
    model, stack = load_model("deepseek-v3"), load_stack("megatron-core-2026")
    assert isinstance(model, ModelSpec)
    assert model.experts is not None
    job = job_of(model, Precision.MXFP8)

    def saved(*modules: RecomputeModule) -> int:
        plan = replace(plan_of(*modules), tp=tp, sequence_parallel=tp > 1, dp=8, ep=8, etp=1)
        return int(BlockMemory.of(walk(BlockShape.of(job, plan, stack), EXPERT_LAYER)).saved)

    tokens, wide = job.seq_len // tp, model.hidden_size
    # Both down projections and shared experts; routing weights read 16 bits.
    norms = tokens * (3 * wide * 33 // 32 + 2 * wide + 2 * 4)
    assert saved() - saved(NORMS) == norms
    rows = tokens * model.experts.experts_per_token
    copies = rows * model.experts.hidden_size * 33 // 32
    assert saved() - saved(RecomputeModule.MOE_ACT) == copies
    assert saved() - saved(RecomputeModule.MOE_ACT, NORMS) == norms + copies


def test_an_activation_of_experts_that_is_made_again_is_not_kept() -> None:
    job = job_of(MIXTRAL)
    plans = plan_of(), plan_of(RecomputeModule.MOE_ACT)
    shapes = [BlockShape.of(job, plan, STACK) for plan in plans]
    kept, freed = (BlockMemory.of(walk(shape, EXPERT_LAYER)) for shape in shapes)
    experts = MIXTRAL.experts
    assert experts is not None
    rows = job.seq_len * experts.experts_per_token
    assert kept.saved - freed.saved == 2 * rows * experts.hidden_size


def test_an_mlp_that_runs_again_makes_its_products_once_more() -> None:
    shape = BlockShape.of(job_of(), plan_of(MLP), STACK)
    steps = walk(shape, TRANSFORMER_LAYER).tape.steps
    products = [
        each.work
        for each in steps
        if each.phase is Phase.RECOMPUTE and isinstance(each.work, Product)
    ]
    flops = sum(2 * each.m * each.n * each.k * each.batch for each in products)
    assert flops == 2 * TOKENS * 3 * LLAMA.hidden_size * LLAMA.ffn_hidden_size


def test_up_projections_of_latents_that_are_made_again_keep_latents_alone() -> None:
    model = load_model("deepseek-v3")
    assert isinstance(model, ModelSpec)
    assert model.latent is not None
    latent, job = model.latent, job_of(model, Precision.MXFP8)
    plan = replace(plan_of(RecomputeModule.MLA_UP_PROJ), stages=(model.num_layers,))
    assert stack_refusal(job, plan, STACK) is None
    steps = walk(BlockShape.of(job, plan, STACK), EXPERT_LAYER).tape.steps
    again = [each for each in steps if each.phase is Phase.RECOMPUTE]
    made = [each.work for each in again if isinstance(each.work, Product)]
    pairs = model.num_heads * (latent.plain_head_dim + latent.value_head_dim)
    queries = model.num_heads * latent.query_head_dim
    widths = latent.query_rank * queries + latent.kv_rank * pairs
    assert sum(each.m * each.n * each.k for each in made) == job.seq_len * widths


@pytest.mark.parametrize(
    ("job", "module", "stack", "said"),
    [
        (
            job_of(),
            MLP,
            "torchtitan@0.2",
            "not offered by stack torchtitan@0.2; allowed: leave it out",
        ),
        (job_of(), RecomputeModule.MOE, "megatron-core", "llama3-8b, which has no experts"),
        (
            job_of(),
            RecomputeModule.MLA_UP_PROJ,
            "megatron-core",
            "llama3-8b, which has no latent attention",
        ),
        (job_of(load_model("gpt2")), MLP, "megatron-core", "gpt2, which has biases in its MLP"),
        (job_of(precision=Precision.MXFP8), NORMS, "megatron-core@0.12", "with precision=mxfp8"),
        (job_of(precision=Precision.FP8), NORMS, "megatron-core-2026", "delayed scaling"),
    ],
)
def test_parts_that_cannot_run_again_are_refused_by_name(
    job: TrainingJob, module: RecomputeModule, stack: str, said: str
) -> None:
    profile = load_stack(stack)
    # Stacks without selective recomputation refuse that first.
    if Recompute.SELECTIVE not in profile.recompute_modes:
        profile = profile.model_copy(update={"recompute_modes": tuple(Recompute)})
    refusal = stack_refusal(job, replace(plan_of(module), stages=()), profile)
    assert refusal is not None
    assert said in refusal


def test_parts_go_with_a_selection_alone_and_are_read_in_one_order() -> None:
    with pytest.raises(PlanError, match="mlp does not go with recompute=full; allowed: selective"):
        replace(plan_of(MLP), recompute=Recompute.FULL)
    assert read_modules("layernorm,mlp") == (MLP, NORMS)
    with pytest.raises(PlanError, match="recompute_modules='mpl' is unknown; nearest: mlp"):
        read_modules("mpl")


def test_an_activation_is_no_part_beside_all_of_its_experts() -> None:
    plan = plan_of(RecomputeModule.MOE, RecomputeModule.MOE_ACT)
    refusal = stack_refusal(job_of(MIXTRAL), plan, STACK)
    assert refusal is not None
    assert "does not go with moe" in refusal
