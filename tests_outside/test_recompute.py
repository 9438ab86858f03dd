"""Layers of a stage that Megatron-Core's own TransformerBlock recomputes: bytes and FLOPs."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from block_witness import Given, Measured, count_pass
from witnesses import megatron_job

from meshwright.hwprofiles import Precision, Recompute, RecomputeMethod, RecomputeModule, load_stack
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import ResolvedPlan, TrainingJob, load_model
from meshwright.simulator.account.counts import counted_flops
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.layout import rank_stages, stack_refusal
from meshwright.simulator.memory import block_bytes, virtual_stage_memory
from meshwright.validate.counting import RankOracle
from meshwright.validate.outside import load_outside_plans

from megatron.core.extensions import transformer_engine_spec_provider  # isort: skip  (after Apex's)
from megatron.core.models.gpt import gpt_layer_specs  # isort: skip
from megatron.core.transformer import transformer_config  # isort: skip
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip

PLANS = {plan.name: plan for plan in load_outside_plans()}
SCALE_BYTES = 4  # of the softmax, of each layer: a GPU has it on the host
NUM_LAYERS = 6
BLOCK, UNIFORM = RecomputeMethod.BLOCK, RecomputeMethod.UNIFORM


def recomputing(name: str, method: RecomputeMethod | None, number: int | None) -> SavedPlan:
    """Return a plan of six layers a virtual stage, of which some run again."""
    saved = PLANS[name].saved()
    count = saved.plan.num_stages
    model = saved.job.transformer.model_copy(update={"num_layers": NUM_LAYERS * count})
    recompute = Recompute.NONE if number == 0 else Recompute.FULL
    plan = replace(
        saved.plan,
        stages=(NUM_LAYERS,) * count,
        recompute=recompute,
        recompute_method=method,
        recompute_layers=number or None,
    )
    return replace(saved, job=replace(saved.job, model=model), plan=plan)


def counted(saved: SavedPlan) -> Measured:
    """Return what the layers of the first rank's last virtual stage do."""
    model, plan = saved.job.transformer, saved.plan
    tokens = saved.job.seq_len // (plan.tp if plan.sequence_parallel else 1)
    with megatron_job.built(saved) as job:
        gpt = job._chunks[-1].module.module
        gpt.decoder.final_layernorm, rotary_embedding = None, None
        if model.positions == "rotary":
            rotary_embedding = gpt.rotary_pos_emb(saved.job.seq_len)
        given = Given((tokens, plan.microbatch_size, model.hidden_size))

        def run(x: object) -> object:
            gpt.decoder.set_input_tensor(x)
            return gpt.decoder(x, None, rotary_pos_emb=rotary_embedding)

        return count_pass(run, [given], RankOracle(job.groups))


@pytest.mark.parametrize(
    ("name", "method", "number"),
    [
        ("megatron zero 0", None, 0),
        ("megatron zero 0", None, None),
        ("megatron zero 0", UNIFORM, 1),
        ("megatron zero 0", UNIFORM, 2),
        ("megatron zero 0", UNIFORM, 6),
        ("megatron zero 0", BLOCK, 1),
        ("megatron zero 0", BLOCK, 4),
        ("megatron zero 0", BLOCK, 9),
        ("megatron tp", UNIFORM, 3),
        ("megatron tp sp", UNIFORM, 3),
        ("megatron tp sp", BLOCK, 5),
        ("megatron llama", None, None),
        ("megatron llama", UNIFORM, 2),
        ("megatron llama", BLOCK, 2),
        ("megatron interleaved", BLOCK, 2),
        ("megatron interleaved", UNIFORM, 3),
        ("megatron llama interleaved", BLOCK, 3),
    ],
)
def test_layers_that_run_again_are_byte_exact(
    name: str, method: RecomputeMethod | None, number: int | None
) -> None:
    saved = recomputing(name, method, number)
    witness, table = counted(saved), BlockTable()
    # Layers by themselves: no schedule holds the gradient that they receive.
    stack = saved.stack.model_copy(update={"holds_messages": False})
    shape = BlockShape.of(saved.job, saved.plan, stack)
    stage = rank_stages(saved.job.model, saved.plan, 0)[-1]
    stage = stage._replace(has_embedding=False, has_head=False)
    kinds = [kind for kind, _ in stage.passes]
    found = virtual_stage_memory(shape, stage, block_bytes(table, shape, others=kinds))
    derived = (
        found.saved_bytes,
        found.saved_bytes + found.forward_workspace_bytes,
        found.saved_bytes + found.backward_workspace_bytes,
    )
    measured = witness.saved_bytes, witness.forward_peak_bytes, witness.backward_peak_bytes
    beside = [
        theirs - ours - found.buffer_bytes for theirs, ours in zip(measured, derived, strict=True)
    ]
    # A scale for each layer whose scores are there.
    assert all(each in range(0, SCALE_BYTES * NUM_LAYERS + 1, SCALE_BYTES) for each in beside)
    flops = sum(counted_flops(table.operators(shape, kind)) * count for kind, count in stage.passes)
    assert flops == witness.forward_flops + witness.backward_flops


@pytest.mark.parametrize("module", [RecomputeModule.LAYERNORM, RecomputeModule.MOE_ACT])
@pytest.mark.parametrize(
    ("precision", "recipe"), [(Precision.FP8, "delayed"), (Precision.MXFP8, "mxfp8")]
)
def test_outputs_run_again_in_8_bits_where_megatron_core_lets_them(
    precision: Precision, recipe: str, module: RecomputeModule
) -> None:
    model = load_model("mixtral-8x7b")
    job = TrainingJob(model=model, global_batch_size=8, seq_len=4096, precision=precision)
    selection = {"recompute": Recompute.SELECTIVE, "recompute_modules": (module,)}
    plan = ResolvedPlan(dp=8, ep=8, zero_stage=1, **selection)
    ours = stack_refusal(job, plan, load_stack("megatron-core-2026"))
    told = {"fp8": "hybrid", "fp8_recipe": recipe, "bf16": True, "moe_grouped_gemm": True}
    told |= {"recompute_granularity": "selective", "recompute_modules": [str(module)]}
    theirs = ""
    with patch.object(transformer_config, "is_te_min_version", lambda *_, **__: True):
        try:
            transformer_config.TransformerConfig(
                num_layers=2, hidden_size=64, num_attention_heads=4, num_moe_experts=8, **told
            )
        except ValueError as error:
            theirs = str(error)
    assert (ours is None) == (not theirs)
    if ours is not None:
        assert "elayed scaling" in ours
        assert "Delayed scaling" in theirs


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("experts", [None, 8])
def test_norms_are_modules_where_several_products_read_them(
    experts: int | None, *, latent: bool
) -> None:
    provider = transformer_engine_spec_provider
    with (
        patch.object(provider, "is_te_min_version", lambda *_, **__: True),
        patch.object(gpt_layer_specs, "TESpecProvider", provider.TESpecProvider, create=True),
    ):
        parts = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=True, multi_latent_attention=latent
        ).submodules
    assert (parts.input_layernorm is not IdentityOp) == latent
    assert (parts.pre_mlp_layernorm is not IdentityOp) == (experts is not None)
