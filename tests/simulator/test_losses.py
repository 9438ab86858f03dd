"""Every loss with every stack: a result, or a refusal of what the stack does not offer."""

from itertools import product

import pytest

from meshwright.hwprofiles import (
    CollectiveOp,
    LossKernel,
    Precision,
    StackProfile,
    list_stacks,
    load_cluster,
    load_stack,
)
from meshwright.simulator import (
    ModelSpec,
    PlanError,
    ResolvedPlan,
    TrainingJob,
    simulate,
)
from meshwright.simulator.blocks import BlockShape, BlockTable

CLUSTER, TABLE = load_cluster("dgx-h100"), BlockTable()
DENSE = ModelSpec(
    name="dense",
    num_layers=2,
    hidden_size=256,
    num_heads=8,
    vocab_size=4096,
    seq_len=512,
    ffn_hidden_size=512,
    gated_mlp=True,
    positions="rotary",
    norm="rmsnorm",
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    dropout=False,
    tied_embeddings=False,
)
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "hidden_size": 256}
LATENT = {"query_rank": 128, "kv_rank": 64, "value_head_dim": 32}
HEADS = {"plain_head_dim": 32, "rotary_head_dim": 16}
MODELS = {
    "dense": DENSE,
    "experts": ModelSpec(**DENSE.model_dump() | {"experts": EXPERTS}),
    "latent": ModelSpec(**DENSE.model_dump() | {"latent": LATENT | HEADS, "experts": EXPERTS}),
}
# Attention in MXFP8 has a kernel on other devices.
ELSEWHERE = {"megatron-core-fused-attention", "megatron-core-fused-head"}


def job_of(
    model: ModelSpec, num_sequences: int = 8, precision: Precision = Precision.BF16
) -> TrainingJob:
    return TrainingJob(
        model=model, global_batch_size=num_sequences, seq_len=512, precision=precision
    )


def plan_of(stack: StackProfile, **fields: object) -> ResolvedPlan:
    usual = {"attention": stack.attention, "zero_stage": stack.zero_stage}
    return ResolvedPlan.of({**usual, "stages": (2,), **fields})


def is_simulated(model: ModelSpec, plan: ResolvedPlan, stack: StackProfile) -> bool:
    """Return whether a plan has a result; else it is refused."""
    known = stack.precisions
    job = job_of(model, precision=Precision.BF16 if Precision.BF16 in known else known[0])
    try:
        result = simulate(job, plan, CLUSTER, stack)
    except PlanError:
        return False
    assert result.step_ps > 0
    return True


@pytest.mark.parametrize("name", list_stacks())
def test_every_loss_has_a_result_or_is_refused(name: str) -> None:
    base = load_stack(name)
    simulated = set()
    for loss, model, tp in product(LossKernel, MODELS, (1, 2, 4)):
        stack = base.model_copy(update={"loss": loss})
        for sequence_parallel in {False, base.sequence_parallel and tp > 1}:
            plan = plan_of(stack, tp=tp, dp=8 // tp, sequence_parallel=sequence_parallel)
            if is_simulated(MODELS[model], plan, stack):
                simulated.add(loss)
    assert simulated == (set() if name in ELSEWHERE else set(LossKernel))


@pytest.mark.parametrize("num_sequences", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_loss_of_one_kernel_needs_its_logits_alone(tp: int, num_sequences: int) -> None:
    """The gradient takes the place of 16-bit logits; the numbers of tokens lie flat, uncopied."""
    stack = load_stack("torchtitan@0.2").model_copy(update={"loss": LossKernel.FUSED})
    plan = plan_of(stack, tp=tp, microbatch_size=num_sequences)
    shape = BlockShape.of(job_of(DENSE, num_sequences), plan, stack)
    ops = [each.op for each in TABLE.operators(shape, "head").forward if hasattr(each, "op")]
    assert ops == [CollectiveOp.ALL_GATHER] * (tp > 1)
    *_, logits = TABLE.saved_tensors(shape, "head")
    assert logits.size_bytes == 2 * num_sequences * 512 * 4096 // tp
    loss = 4  # is there while the forward needs the most
    assert TABLE.memory(shape, "head").forward == loss
