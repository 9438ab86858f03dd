"""Programs of routed experts on fake tensors: what they count is what the simulator says."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_checks import failed_on_fakes  # noqa: E402

from meshwright.hwprofiles import (  # noqa: E402
    Dispatcher,
    ExpertOverlap,
    Recompute,
    load_cluster,
    load_stack,
)
from meshwright.planner.reports.plan_file import SavedPlan  # noqa: E402
from meshwright.simulator import ModelSpec, PlanError, ResolvedPlan, TrainingJob  # noqa: E402
from meshwright.simulator.model import Experts, LatentAttention  # noqa: E402
from meshwright.validate.programs.experts import Dispatch, ExpertGroup  # noqa: E402
from meshwright.validate.ranks.prediction import predict_ranks  # noqa: E402
from meshwright.validate.runs.fake import measure_fakes  # noqa: E402

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_hidden_size": 512,
    "vocab_size": 2048,
    "seq_len": 512,
    "gated_mlp": True,
    "tied_embeddings": False,
    "positions": "rotary",
    "norm": "rmsnorm",
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "dropout": False,
}
EXPERTS = Experts(num_experts=8, experts_per_token=2, hidden_size=384)
MIXTRAL = ModelSpec(name="small-mixtral", experts=EXPERTS, **SIZES)
# Norms of wide heads, sigmoid scores, shared experts beside routed ones.
SHARED = {"scores": "sigmoid", "shared_hidden_size": 384}
HEADS = {"qk_norm": "head", "head_dim": 64}
SHARING = MIXTRAL.model_copy(update=HEADS | {"experts": EXPERTS.model_copy(update=SHARED)})
# The same, every other layer dense.
MIXED = SHARING.model_copy(
    update={"num_layers": 4, "experts": EXPERTS.model_copy(update=SHARED | {"layer_step": 2})}
)
# Experts beside which nothing else counts: what is gathered and reduced of them decides.
WIDE = MIXTRAL.model_copy(update={"experts": EXPERTS.model_copy(update={"hidden_size": 3072})})
SPLIT: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
FULL: dict[str, Any] = {"recompute": Recompute.FULL}
KEPT: dict[str, Any] = {"reshard_after_forward": False}
SUMMED: dict[str, Any] = {"count": 2, "sync_each_microbatch": False}


def having(experts: dict[str, Any], **fields: Any) -> ModelSpec:
    """Return the small Mixtral with other facts, of its experts and of its own."""
    changed = EXPERTS.model_copy(update=experts)
    return MIXTRAL.model_copy(update=fields | {"experts": changed})


# Of gpt-oss, without its sinks.
BIASED = {"scores": "softmax of chosen", "bias": True, "activation": "clamped"}
BIASES = {"attention_bias": True, "output_bias": True}
OSS = having(BIASED | {"casts_shares": True}, scaled_angles=True, **BIASES)
WIDE_OSS = having(BIASED | {"casts_shares": True, "hidden_size": 3072}, **BIASES)
# Of Llama 4, without its chunks.
SCOUT = having(SHARED | {"experts_per_token": 1, "weighs_inputs": True})
PLAIN = having({"activation": "gelu", "shared_hidden_size": 128}, gated_mlp=False)
NEMOTRON = having(
    SHARED | {"activation": "squared relu"}, gated_mlp=False, activation="squared relu"
)
# Of Qwen2-MoE: a gate weighs what shared experts make.
GATED: dict[str, Any] = {"shared_hidden_size": 512, "shared_gate": True, "casts_shares": True}
QWEN = having(GATED, attention_bias=True)
LATENT: dict[str, Any] = {
    "num_layers": 3,
    "num_kv_heads": 8,
    "latent": LatentAttention(
        query_rank=96, kv_rank=64, plain_head_dim=24, rotary_head_dim=8, value_head_dim=16
    ),
}
DEEPSEEK = having(SHARED | {"routing_bias": True, "first_dense_layers": 1}, **LATENT)
# Of DeepSeek-V2, without its latents.
FOUR = {"experts_per_token": 4, "num_experts": 16}
SECOND = having(
    FOUR | {"num_groups": 4, "groups_per_token": 2, "shared_hidden_size": 64, "layer_step": 2},
    **LATENT | {"ffn_hidden_size": 4096},
)
GROUPED = having(FOUR | {"num_groups": 4, "groups_per_token": 2, "shared_hidden_size": 384})


def saved(
    model: ModelSpec, stack: str = "megatron-core", *, count: int | None = None, **fields: Any
) -> SavedPlan:
    """Return a plan of *count* microbatches, of as few as it takes where nothing is said."""
    profile, pp = load_stack(stack), fields.get("pp", 1)
    count = count or min(pp, 2)
    usual = {
        "stages": (model.num_layers // pp,) * pp,
        "attention": profile.attention,
        "zero_stage": profile.zero_stage,
    }
    return SavedPlan(
        job=TrainingJob(model=model, global_batch_size=count * fields.get("dp", 1), seq_len=512),
        plan=ResolvedPlan(**(usual | fields)),
        cluster=load_cluster("dgx-a100"),
        stack=profile,
    )


def in_small_buckets(case: SavedPlan, limit: int) -> SavedPlan:
    """Return *case* with buckets of so many weights, where it has buckets of 40 million."""
    sizes = {
        "gradient_bucket_parameters": limit,
        "gradient_bucket_parameters_per_replica": 0,
    }
    return replace(case, stack=case.stack.model_copy(update=sizes))


CASES = {
    "mixed, ep over tp and dp, interleaved": saved(
        MIXED,
        pp=2,
        dp=4,
        ep=4,
        etp=1,
        schedule="interleaved",
        num_virtual_stages=2,
        stages=(1, 1, 1, 1),
        **SPLIT,
    ),
    "ep with etp, full": saved(MIXTRAL, count=2, dp=4, ep=2, **SPLIT, **FULL),
    "titan ep of all ranks, pp": saved(
        SHARING.model_copy(update={"qk_norm": "none"}), "torchtitan@0.2", pp=2, dp=4, ep=4
    ),
    "titan, experts cut": saved(WIDE, "torchtitan@0.2", count=2, dp=16, ep=2),
    "titan, experts over cp, hsdp, full": saved(
        WIDE, "torchtitan@0.2", dp=4, dp_shard=2, cp=2, ep=2, **FULL
    ),
    "fsdp, ep of all ranks, full": saved(WIDE, "fsdp", count=2, dp=4, ep=4, **FULL),
    "biases in small buckets, split tokens, full": in_small_buckets(
        saved(OSS, dp=4, ep=4, etp=1, **SPLIT, **FULL), 300_000
    ),
    "biases, pp": saved(OSS, pp=2, dp=2, ep=2),
    "fsdp, biases, ep": saved(WIDE_OSS, "fsdp", count=2, dp=4, ep=2),
    "fsdp, biases, hsdp": saved(OSS, "fsdp", dp=4, dp_shard=2),
    "fsdp, reductions of few ranks": saved(WIDE, "fsdp", dp=2),
    "fsdp, kept from forward": saved(WIDE, "fsdp", dp=4, **KEPT),
    "fsdp, ep of all ranks, kept from forward": saved(WIDE, "fsdp", dp=2, ep=2, **KEPT),
    "fsdp, ep, hsdp, sums": saved(WIDE, "fsdp", dp=4, dp_shard=2, ep=2, **SUMMED),
    "fsdp, ep, hsdp, sums, kept from forward": saved(
        WIDE, "fsdp", dp=4, dp_shard=2, ep=2, **SUMMED, **KEPT
    ),
    "fsdp, shares of a unit": saved(having({"experts_per_token": 4}), "fsdp", dp=4, ep=4, **FULL),
    "weighed inputs, etp, pp": saved(SCOUT, pp=2, dp=2, ep=2, **SPLIT),
    "weighed inputs, split tokens, full": saved(SCOUT, dp=2, ep=4, etp=1, **SPLIT, **FULL),
    "gelu, etp": saved(PLAIN, dp=2, ep=2, **SPLIT),
    "squared relu, pp": saved(NEMOTRON, pp=2, dp=2, ep=2),
    "groups, etp": saved(GROUPED, dp=2, ep=2, **SPLIT),
    "titan groups, pp": saved(GROUPED, "torchtitan@0.2", pp=2, dp=4, ep=4),
    "fsdp groups, full": saved(
        having(FOUR | {"num_groups": 4, "groups_per_token": 2}), "fsdp", dp=4, ep=2, **FULL
    ),
    "ep of the ranks of a sequence": saved(MIXTRAL, cp=2, dp=2, ep=2),
    "gated shared experts, split tokens": saved(QWEN, pp=2, dp=2, ep=4, etp=1, **SPLIT),
    "fsdp, gated shared experts, ep, full": saved(QWEN, "fsdp", dp=4, ep=2, **FULL),
    "fsdp, gated shared experts": saved(QWEN, "fsdp", dp=2),
    "fsdp, latents, experts after an mlp": saved(DEEPSEEK, "fsdp", dp=4, ep=2),
    "fsdp, latents, experts between wide mlps, full": saved(SECOND, "fsdp", dp=2, **FULL),
    "fsdp, latents, experts between, ep, hsdp": saved(SECOND, "fsdp", dp=8, dp_shard=4, ep=2),
    "ep over cp, 2024": saved(MIXTRAL, "megatron-core-2024", count=2, cp=2, dp=2, ep=4),
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_with_experts_counts_what_the_simulator_says(name: str) -> None:
    assert failed_on_fakes(CASES[name]) == []


def test_unequal_rows_go_to_their_experts_and_back_in_order() -> None:
    """Two ranks with other experts, each of two ranks with other parts of them."""
    counts = [[[1, 0, 2, 3], [4, 1, 0, 2]], [[0, 5, 1, 1], [2, 2, 3, 0]]]
    group = ExpertGroup(ep_rank=1, etp_rank=0, num_ep=2, num_etp=2)
    found = Dispatch.of(counts, group)
    assert (found.sent, found.arrived) == ([5, 2], [5, 2])
    assert found.gathered == [7, 5]
    assert [found.sizes[index] for index in found.order] == [2, 1, 0, 3, 3, 1, 2, 0]
    assert found.by_expert == [6, 6]
    sizes, order = found.back
    assert [sizes[index] for index in order] == found.sizes


@pytest.mark.parametrize("stack", ["megatron-core-2024", "torchtitan@0.2"])
def test_biases_of_experts_are_refused_where_no_program_writes_them(stack: str) -> None:
    refuses(saved(OSS, stack), "experts.bias of small-mixtral has no PyTorch program")


def test_plans_of_experts_that_no_program_writes_are_refused_by_name() -> None:
    usual = saved(MIXTRAL, dp=2, ep=2)
    refuses(
        replace(usual, job=replace(usual.job, imbalance=2.0)), "imbalance=2 has no PyTorch program"
    )
    plan = replace(usual.plan, dispatcher=Dispatcher.DEEPEP)
    refuses(replace(usual, plan=plan), "dispatcher=deepep has no PyTorch program")
    plan = replace(usual.plan, expert_overlap=ExpertOverlap.MICROBATCHES)
    refuses(replace(usual, plan=plan), "expert_overlap=microbatches has no PyTorch program")
    refuses(saved(MIXTRAL, dp=2, ep=2, zero_stage=0), "zero_stage=0 with ep=2 has no PyTorch")
    one_by_one = usual.stack.model_copy(update={"grouped_experts": False})
    refuses(replace(usual, stack=one_by_one), "grouped_experts=false has no PyTorch program")
    few = replace(usual, job=replace(usual.job, seq_len=6))
    refuses(few, r"a rank's 6 tokens go to 12 experts in all, which num_experts=8 does not divide")
    split = saved(SHARING.model_copy(update={"experts": None}), "torchtitan@0.2", **SPLIT)
    refuses(split, "no PyTorch program with qk_norm=head and tp=2; allowed: 1")
    biased = MIXTRAL.model_copy(
        update={"experts": EXPERTS.model_copy(update={"routing_bias": True})}
    )
    with pytest.raises(PlanError, match="a routing bias beside scores=softmax, which stack megatr"):
        predict_ranks(saved(biased), [0])
    refuses(saved(MIXTRAL, "ddp"), "experts of small-mixtral has no PyTorch program")


def refuses(case: SavedPlan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        next(iter(measure_fakes(case, [0])))
