"""One eager layer of each framework's own code, against the graph's: every byte, FLOP and call."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from block_graph import as_measured
from block_witness import Given, Measured, count_pass
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from witnesses import megatron_job
from witnesses.dense_layers import (
    DenseLayer,
    torchtitan_llama,
    torchtitan_qwen3,
    transformers_gpt2,
    transformers_llama,
)

from meshwright.hwprofiles import Kernels, Precision, Recompute, RecomputeModule, load_stack
from meshwright.planner.reports import SavedPlan
from meshwright.simulator.blocks import BlockShape, BorderGradients, walk
from meshwright.simulator.graph import BlockMemory
from meshwright.simulator.model import TRANSFORMER_LAYER, ModelSpec, parse_model
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.outside import load_outside_plans
from meshwright.validate.programs.megatron import default_dtype
from meshwright.validate.programs.pytorch import autocast

PLANS = {plan.name: plan for plan in load_outside_plans()}
SCALE_BYTES = 4  # of the softmax: Megatron-Core makes a tensor of it, which a GPU has on the host
NUM_SEQUENCES = 2


def derived(shape: BlockShape, *, keeps_gradients: bool) -> tuple[Measured, int]:
    """Return what the graph says of a layer, and of what it shares with all others."""
    found = walk(shape, TRANSFORMER_LAYER, ending=BorderGradients(keeps_gradients=keeps_gradients))
    return as_measured(found), BlockMemory.of(found).buffer


HEADS = {"head_dim": 128, "qk_norm": "head"}
ONE_GROUP = {**HEADS, "num_kv_heads": 2}  # on each of 2 tensor ranks
HALVES = {"rotary_fraction": 0.5}
UNBIASED = {"mlp_bias": False}
SQUARED = {"activation": "squared relu"}


def with_facts(saved: SavedPlan, facts: dict[str, object]) -> SavedPlan:
    """Return a plan whose model has some facts more."""
    model = parse_model({**saved.job.transformer.model_dump(), **facts}, origin="plan")
    return replace(saved, job=replace(saved.job, model=model))


CORE, MLP, NORMS = RecomputeModule.CORE_ATTN, RecomputeModule.MLP, RecomputeModule.LAYERNORM


def repeating(saved: SavedPlan, modules: tuple[RecomputeModule, ...]) -> SavedPlan:
    """Return a plan that runs parts of a layer again."""
    recompute = Recompute.SELECTIVE if modules else saved.plan.recompute
    plan = replace(saved.plan, recompute=recompute, recompute_modules=modules)
    return replace(saved, plan=plan)


@pytest.mark.parametrize(
    ("name", "facts", "modules"),
    [
        ("megatron zero 0", {}, ()),
        ("megatron zero 0", SQUARED, ()),
        ("megatron tp", {}, ()),
        ("megatron tp", HEADS, ()),
        ("megatron tp sp", {}, ()),
        ("megatron tp sp", HEADS, ()),
        ("megatron tp sp", ONE_GROUP, ()),
        ("megatron llama interleaved", {}, ()),
        ("megatron llama interleaved", HEADS, ()),
        ("megatron llama interleaved", HALVES, ()),
        ("megatron zero 0", {}, (CORE,)),
        ("megatron tp", {}, (CORE,)),
        ("megatron tp", UNBIASED, (MLP,)),
        ("megatron tp sp", UNBIASED, (CORE, MLP)),
        ("megatron llama interleaved", {}, (MLP,)),
        ("megatron zero 0", {}, (NORMS,)),
        ("megatron tp sp", {}, (NORMS,)),
        ("megatron tp sp", UNBIASED, (CORE, MLP, NORMS)),
    ],
)
def test_a_layer_of_megatrons_local_spec_is_byte_exact(
    name: str, facts: dict[str, object], modules: tuple[RecomputeModule, ...]
) -> None:
    saved = repeating(with_facts(PLANS[name].saved(), facts), modules)
    model, plan = saved.job.transformer, saved.plan
    tokens = saved.job.seq_len // (plan.tp if plan.sequence_parallel else 1)
    with megatron_job.built(saved) as job:
        gpt = job._chunks[0].module.module
        layer, rotary_embedding = gpt.decoder.layers[0], None
        if model.positions == "rotary":
            rotary_embedding = gpt.rotary_pos_emb(saved.job.seq_len)
        given = Given((tokens, plan.microbatch_size, model.hidden_size))
        counted = count_pass(
            lambda x: layer(x, None, rotary_pos_emb=rotary_embedding)[0],
            [given],
            RankOracle(job.groups),
        )
    found, buffer = derived(BlockShape.of(saved.job, plan, saved.stack), keeps_gradients=False)
    lasting = buffer + SCALE_BYTES
    again = SCALE_BYTES * (CORE in modules)
    assert found == replace(
        counted,
        saved_bytes=counted.saved_bytes - lasting,
        forward_peak_bytes=counted.forward_peak_bytes - lasting,
        backward_peak_bytes=counted.backward_peak_bytes - lasting - again,
        left_bytes=counted.left_bytes - buffer,
        forward_calls=tuple(each for each in counted.forward_calls if each.axis == "tp"),
        backward_calls=tuple(each for each in counted.backward_calls if each.axis == "tp"),
    )


def drop_gradients(module: nn.Module) -> None:
    """Let the gradients of weights go as soon as they would be added to sums."""
    for each in module.parameters():
        each.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))


@pytest.mark.parametrize(
    ("make", "stack", "facts"),
    [
        (torchtitan_llama, "torchtitan@0.2", {}),
        (torchtitan_qwen3, "torchtitan@0.2", HEADS),
        (transformers_llama, "fsdp", {}),
        (transformers_llama, "ddp", {}),
    ],
)
def test_a_layer_of_pytorchs_operators_is_byte_exact(
    make: Callable[[ModelSpec, int, int], DenseLayer],
    stack: str,
    facts: dict[str, object],
) -> None:
    saved = with_facts(PLANS["ddp llama"].saved(), facts)
    model, tokens = saved.job.transformer, saved.job.seq_len
    profile = load_stack(stack).model_copy(update={"kernels": Kernels.EAGER})
    plan = replace(saved.plan, microbatch_size=NUM_SEQUENCES)
    shape = BlockShape.of(saved.job, plan, profile)
    dtype = torch.float32 if profile.autocast else torch.bfloat16
    precision = Precision.BF16 if profile.autocast else Precision.FP32
    with fake_cluster(0, 1):
        with default_dtype(dtype):
            layer = make(model, tokens, NUM_SEQUENCES)
        if profile.autocast:
            drop_gradients(layer.module)

        def run(x: Tensor) -> Tensor:
            with autocast(precision, "cpu"):
                return layer(x)

        given = Given((NUM_SEQUENCES, tokens, model.hidden_size), dtype)
        counted = count_pass(run, [given], RankOracle({}))
    found, buffer = derived(shape, keeps_gradients=not profile.autocast)
    assert (found, buffer) == (counted, 0)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_a_layer_of_gpt2_is_byte_exact_under_autocast(recompute: Recompute) -> None:
    saved = PLANS["ddp gpt"].saved()
    model, tokens = saved.job.transformer, saved.job.seq_len
    plan = replace(saved.plan, microbatch_size=NUM_SEQUENCES, recompute=recompute)
    with fake_cluster(0, 1):
        layer = transformers_gpt2(model, tokens, NUM_SEQUENCES)
        drop_gradients(layer.module)

        def run(x: Tensor) -> Tensor:
            with autocast(Precision.BF16, "cpu"):
                if recompute is Recompute.FULL:
                    return checkpoint(layer, x, use_reentrant=False)
                return layer(x)

        given = Given((NUM_SEQUENCES, tokens, model.hidden_size), torch.float32)
        counted = count_pass(run, [given], RankOracle({}))
    found, _ = derived(BlockShape.of(saved.job, plan, saved.stack), keeps_gradients=False)
    named = 2 * NUM_SEQUENCES * tokens * model.hidden_size  # attn_output, until the block returns
    assert found == replace(counted, forward_peak_bytes=counted.forward_peak_bytes - named)
