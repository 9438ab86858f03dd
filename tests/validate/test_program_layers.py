"""Layers beyond those of GPT and Llama: fake ranks count what the simulator says of them."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_checks import failed_on_fakes  # noqa: E402
from test_agreement_gloo import (  # noqa: E402
    BALANCED,
    DEEPSEEK,
    FALCON,
    GEMMA,
    GPT,
    LLAMA,
    NEOX,
    OLMO,
    PREDICTING,
    SCOUT,
    SINKS,
    SQUARED,
    STRAIGHT,
    UNWEIGHTED,
    WINDOWED,
    saved,
)

from meshwright.hwprofiles import Attention, ContextParallel, Precision, Recompute  # noqa: E402
from meshwright.planner.reports.plan_file import SavedPlan  # noqa: E402
from meshwright.simulator import ModelSpec, PlanError  # noqa: E402
from meshwright.validate.comparison.checks import CheckVerdict, compare_rank  # noqa: E402
from meshwright.validate.programs.build import build_program  # noqa: E402
from meshwright.validate.programs.contract.request import ProgramRequest  # noqa: E402
from meshwright.validate.programs.pytorch.reference import reference_losses  # noqa: E402
from meshwright.validate.ranks.prediction import predict_ranks  # noqa: E402
from meshwright.validate.runs.fake import measure_fakes  # noqa: E402

TOKENS = 512  # so many that activations weigh
SIZES: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "ffn_hidden_size": 512}


def wide(model: ModelSpec, stack: str, **fields: Any) -> SavedPlan:
    """Return a plan of a model that is wide enough for a peak to compare."""
    usual = {"dp": 2, "microbatch_size": 2}
    case = saved(model.model_copy(update=SIZES), stack, **(usual | fields))
    return replace(case, job=replace(case.job, seq_len=TOKENS, precision=Precision.BF16))


def latent(model: ModelSpec, stack: str, **fields: Any) -> SavedPlan:
    """Return a plan of a model whose latents are wide, too, and narrower in values than in keys."""
    assert model.latent is not None
    widths = {"kv_rank": 64, "plain_head_dim": 48, "rotary_head_dim": 16, "value_head_dim": 32}
    if model.latent.query_rank:
        widths["query_rank"] = 96
    made = model.model_copy(update={"latent": model.latent.model_copy(update=widths)})
    return wide(made, stack, **fields)


NEMOTRON = SQUARED.model_copy(update={"positions": "rotary", "tied_embeddings": False})
# As transformers has them: Phi-3 has queries, keys and values in one product, too.
FUSED: dict[str, dict[str, Any]] = {
    "phi3": {"fused_qkv": True, "rotary_fraction": 0.5},
    "glm4": {"norm_places": "both", "rotary_fraction": 0.5, "attention_bias": True},
}
FULL: dict[str, Any] = {"recompute": Recompute.FULL}
SELECTIVE: dict[str, Any] = {"recompute": Recompute.SELECTIVE, "attention": Attention.UNFUSED}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
SWAP: dict[str, Any] = {"cp": 2, "cp_type": ContextParallel.ALL_TO_ALL}


def chunked(size: int) -> ModelSpec:
    """Return layers that attend in chunks of a *size* between layers without positions."""
    return SCOUT.model_copy(update={"window": size})


LONG = GPT.model_copy(update={"max_positions": TOKENS, "num_kv_heads": 2})  # shared by two heads
CASES = {
    "windows": wide(WINDOWED, "megatron-core", tp=2, sequence_parallel=True),
    "windows and sinks over cp": wide(SINKS, "megatron-core", **SWAP),
    "windows of scores": wide(WINDOWED, "megatron-core", attention=Attention.UNFUSED),
    "latents over tp": latent(STRAIGHT, "megatron-core", **SP),
    "latents, full": latent(STRAIGHT, "megatron-core", **FULL),
    "latents over a ring": latent(STRAIGHT, "megatron-core", cp=4, **SP),
    "latents over a ring of swaps": latent(
        STRAIGHT, "megatron-core", cp=4, cp_type=ContextParallel.HYBRID_RING, cp_inner=2
    ),
    "deepseek": latent(DEEPSEEK, "megatron-core", pp=2, ep=4, etp=1, **SP),
    "deepseek over cp": latent(DEEPSEEK, "megatron-core", cp=2, ep=4, etp=1, **SP),
    "deepseek, selective": latent(
        DEEPSEEK, "megatron-core", ep=2, etp=2, recompute=Recompute.SELECTIVE, **SP
    ),
    "deepseek, 2024": latent(DEEPSEEK, "megatron-core-2024", ep=2),
    "titan latents": latent(STRAIGHT, "torchtitan@0.2", cp=2, dp=4, dp_shard=2, microbatch_size=1),
    "titan deepseek": latent(BALANCED, "torchtitan@0.2", ep=2, microbatch_size=1),
    "predictions and loss alone on a stage": wide(
        PREDICTING, "megatron-core", pp=2, stages=(4, 0), zero_stage=1, **FULL
    ),
    "predictions behind a layer, apart from the loss": wide(
        PREDICTING.model_copy(update={"prediction_layers": 1}),
        "megatron-core",
        pp=4,
        dp=1,
        stages=(3, 1, 0, 0),
        prediction_stage=1,
        zero_stage=1,
    ),
    "predictions on the first stage": wide(
        PREDICTING, "megatron-core", pp=2, stages=(4, 0), prediction_stage=0, zero_stage=1, **FULL
    ),
    "predictions over cp": wide(
        PREDICTING.model_copy(update={"prediction_layers": 1}), "megatron-core", cp=4, dp=1
    ),
    "sinks": wide(SINKS, "megatron-core", **SP),
    "sinks beside scores": wide(SINKS, "megatron-core", **SP, **SELECTIVE),
    "sinks of shards": wide(SINKS, "fsdp"),
    "sinks of shards, full": wide(SINKS, "fsdp", **FULL),
    "caps of shards": wide(GEMMA, "fsdp", **FULL),
    "without positions": wide(chunked(TOKENS // 4), "megatron-core", **SP),
    "without positions, scores": wide(chunked(192), "megatron-core", **SELECTIVE),
    "without positions in a pipeline": wide(chunked(192), "megatron-core", pp=2, **FULL),
    "without positions over cp": wide(chunked(TOKENS), "megatron-core", **SWAP),
    "learned positions": wide(LONG, "megatron-core"),
    "norms without weights": wide(UNWEIGHTED, "megatron-core", **SP),
    "such norms beside layer norms": wide(
        LONG.model_copy(update={"qk_norm": "unweighted"}), "megatron-core"
    ),
    "such norms, one norm a layer": wide(
        FALCON.model_copy(update={"qk_norm": "unweighted"}), "ddp"
    ),
    "such norms of shards": wide(UNWEIGHTED, "fsdp", **FULL),
    "norms after, of all heads": wide(OLMO, "fsdp"),
    "norms before and after, caps, scales": wide(GEMMA, "ddp"),
    "one norm of both": wide(FALCON, "fsdp", recompute=Recompute.FULL),
    "two norms of both": wide(
        NEOX.model_copy(update={"positions": "rotary", "rotary_fraction": 0.25}), "ddp"
    ),
    "squared relu under autocast": wide(NEMOTRON, "ddp"),
    "squared relu": wide(NEMOTRON, "fsdp", recompute=Recompute.FULL),
    **{
        f"gate and value of {family} in one product on {stack}": wide(
            LLAMA.model_copy(update={"spelling": family, **facts}), stack
        )
        for stack, (family, facts) in zip(("ddp", "fsdp"), FUSED.items(), strict=True)
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_of_such_layers_counts_what_the_simulator_says(name: str) -> None:
    assert failed_on_fakes(CASES[name]) == []


def test_ranks_with_windows_among_gathered_tokens_count_what_is_said_of_each() -> None:
    """The first has fewer tokens before its own than the last, and smaller gradients of them."""
    sizes = {"window": 300, "layer_pattern": "W", "num_kv_heads": 4, "head_dim": 256}
    gathered = wide(WINDOWED, "megatron-core", cp=2, dp=1, cp_type=ContextParallel.ALL_GATHER)
    job = gathered.job
    model = job.transformer.model_copy(update=sizes | {"ffn_hidden_size": 64})
    case = replace(gathered, job=replace(job, model=model, seq_len=4 * TOKENS))
    predicted = predict_ranks(case, (0, 1))
    assert predicted[0].flops < predicted[1].flops
    assert predicted[0].spread_bytes > predicted[1].spread_bytes == 0
    for measured in measure_fakes(case, (0, 1)):
        checks = compare_rank(predicted[measured.rank], measured)
        assert [each for each in checks if each.verdict is CheckVerdict.FAILED] == []
        low = predicted[measured.rank].peak_bytes - measured.peak_bytes
        assert low == pytest.approx(predicted[measured.rank].spread_bytes, abs=1e5)


def on_gpus(case: SavedPlan) -> ProgramRequest:
    return ProgramRequest.of(case, 0, torch.device("cuda"), initialise=False)


def test_latents_of_tokens_that_are_not_split_are_refused_by_name() -> None:
    whole = latent(STRAIGHT, "megatron-core", tp=2)
    with pytest.raises(PlanError, match="sequence_parallel=False is not offered"):
        predict_ranks(whole, [0])


@pytest.mark.parametrize(
    ("model", "without"),
    [
        (SINKS, {"attention_sinks": False}),
        (GEMMA, {"attention_softcap": 0.0}),
        (SCOUT, {"rotary_layers": "all"}),
        (SCOUT, {"chunked_window": False}),
        (UNWEIGHTED, {"qk_norm": "none"}),
    ],
)
def test_what_is_learned_depends_on_each_fact_of_attention(
    model: ModelSpec, without: dict[str, Any]
) -> None:
    models = model, model.model_copy(update=without)
    found, other = (reference_losses(saved(each, "ddp").job, 2) for each in models)
    # Five times what losses of ranks may be apart.
    assert max(abs(one - two) for one, two in zip(found, other, strict=True)) > 5e-5


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("windows", "window"),
        ("without positions", "chunked_window"),
        ("sinks of shards", "attention_sinks"),
        ("caps of shards", "attention_softcap"),
        ("latents, full", "latent"),
    ],
)
def test_what_attention_on_gpus_does_not_take_is_refused_by_name(name: str, fact: str) -> None:
    with pytest.raises(PlanError, match=f"{fact} of tiny-llama has no PyTorch program on"):
        build_program(on_gpus(CASES[name]))


@pytest.mark.parametrize("stack", ["ddp", "fsdp"])
def test_norms_without_weights_need_positions_where_transformers_does(stack: str) -> None:
    learned = wide(LONG.model_copy(update={"qk_norm": "unweighted"}), stack)
    with pytest.raises(
        PlanError, match="positions=learned; allowed: rotary with qk_norm=unweighted"
    ):
        next(iter(measure_fakes(learned, [0])))
