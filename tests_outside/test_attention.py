"""Attention against transformers' and Megatron-Core's: values, gradients, what turning holds."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from block_graph import as_measured
from block_witness import Given, Measured, count_pass
from torch import Tensor, nn
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from witnesses.strided import StridedElements

from meshwright.hwprofiles import Attention, Precision, Recompute, load_stack
from meshwright.simulator import ModelSpec, ResolvedPlan, TrainingJob
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.blocks.dense import _rotary
from meshwright.simulator.blocks.kinds import lowering_of
from meshwright.simulator.graph import (
    Backward,
    Block,
    Dim,
    Repetition,
    Tape,
    Traffic,
    WeightGradients,
    rotary,
)
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.programs.fused import ANGLE_FACTOR, apply_rope_unfused
from meshwright.validate.programs.layers import AttentionCore, LayerOptions
from meshwright.validate.programs.layers.pointwise import NORM_EPSILON, UnweightedNorm

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb  # isort: skip
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (  # isort: skip
    _yarn_get_concentration_factor_from_config,
)

BATCH, TOKENS, HEADS, GROUPS, WIDTH, CAP = 2, 12, 4, 2, 8, 0.5
BATCH_FIRST = 1
MODEL = ModelSpec(
    name="wide heads",
    num_layers=1,
    hidden_size=HEADS * WIDTH,
    num_heads=HEADS,
    num_kv_heads=GROUPS,
    vocab_size=64,
    seq_len=TOKENS,
)
SINKS = MODEL.model_copy(update={"attention_sinks": True})
CAPPED = MODEL.model_copy(update={"attention_softcap": CAP})
FLASH, SCORES = Attention.FLASH, Attention.UNFUSED


def hidden_beyond(window: int) -> Tensor:
    """Return what transformers adds to scores of causal attention to a window, 0 for all."""
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(1 - (window or TOKENS))
    return torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~seen, float("-inf"))


def attended(core: AttentionCore, given: tuple[Tensor, ...], window: int) -> Tensor:
    """Return what transformers makes of queries, keys and values, with heads first."""
    of_gpt_oss = core.sinks is not None
    code = modeling_gpt_oss if of_gpt_oss else modeling_gemma2
    facts = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=core.sinks, training=True)
    by_heads = (each.transpose(1, 2) for each in given)
    more = {} if of_gpt_oss else {"softcap": CAP}
    how = cast("nn.Module", facts), *by_heads, hidden_beyond(window)
    out: Tensor = code.eager_attention_forward(*how, scaling=WIDTH**-0.5, **more)[0]
    return out


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("model", "kernel"), [(SINKS, FLASH), (SINKS, SCORES), (CAPPED, FLASH)])
def test_sinks_and_caps_are_those_of_transformers(
    model: ModelSpec, kernel: Attention, window: int
) -> None:
    options = LayerOptions(attention=kernel, recompute=Recompute.NONE, dropout=0.0)
    torch.manual_seed(0)
    core = AttentionCore(model, options, BATCH_FIRST, window)
    for each in core.parameters():
        nn.init.normal_(each)
    shapes = (BATCH, TOKENS, HEADS, WIDTH), *((BATCH, TOKENS, GROUPS, WIDTH),) * 2
    given = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    found, wanted = core(*given), attended(core, given, window)
    torch.testing.assert_close(found, wanted)
    leaves, incoming = [*given, *core.parameters()], torch.randn_like(wanted)
    slopes = [torch.autograd.grad(each, leaves, incoming) for each in (found, wanted)]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)  # fp32, sums in other orders


def test_norms_without_weights_are_those_of_llama_4() -> None:
    values = torch.randn(3, 4, WIDTH)
    wanted = Llama4TextL2Norm(NORM_EPSILON)(values)
    torch.testing.assert_close(UnweightedNorm()(values), wanted)


# As Megatron-Bridge has gpt-oss (models/gpt_oss/gpt_oss_provider.py, v0.2.1 to v0.3.0).
YARN = SimpleNamespace(
    apply_rope_fusion=True,
    mrope_section=None,
    rotary_interleaved=False,
    multi_latent_attention=False,
    yarn_rotary_scaling_factor=32.0,
    yarn_mscale=None,
    yarn_mscale_all_dim=None,
)
SCALED = MODEL.model_copy(update={"scaled_angles": True, "positions": "rotary"})
WHERE = 0, 10_000.0, (0,), WIDTH


def turned_by_core(x: Tensor) -> Tensor:
    """Return what Megatron-Core makes of heads by angles of YaRN, which its own kernel cannot."""
    _, base, _, width = WHERE
    frequencies = base ** (-torch.arange(width // 2) / (width // 2))
    angles = torch.outer(torch.arange(len(x)).float(), frequencies).repeat(1, 2)[:, None, None]
    factor = _yarn_get_concentration_factor_from_config(YARN)
    with pytest.warns(UserWarning, match="not supported by TE's fused RoPE"):
        out: Tensor = apply_rotary_pos_emb(x, angles, YARN, mscale=factor, cp_group=object())
    return out


def counted(run: Callable[[Tensor], Tensor]) -> Measured:
    """Return what turning takes, but for the angles of a table in fp32."""
    with fake_cluster(0, 1):
        return count_pass(run, [Given((TOKENS, BATCH, HEADS, WIDTH))], RankOracle({}))


def walked() -> Backward:
    """Return the walk of the graph that stands for it."""
    job = TrainingJob(
        model=SCALED, global_batch_size=BATCH, seq_len=TOKENS, precision=Precision.BF16
    )
    plan = ResolvedPlan(microbatch_size=BATCH, stages=(1,), attention=FLASH)
    shape = BlockShape.of(job, plan, load_stack("megatron-core"))
    block = Block({}, lowering_of(shape), shape.element_bytes)
    sizes = {"tokens": TOKENS, "batch": BATCH}
    outer = [Dim(name, size) for name, size in sizes.items()]
    x = block.tensor("queries", *outer, Dim("heads", HEADS * WIDTH, WIDTH))
    with block.module(x):
        rotary(block, x, how=_rotary(shape))
    tape = Tape(block, Repetition())
    tape.run_forward(x)
    backward = Backward(tape, WeightGradients.KEPT)
    backward.run()
    return backward


def test_scaled_angles_are_those_of_megatron_core() -> None:
    values = torch.randn(TOKENS, BATCH, HEADS, WIDTH)
    assert pytest.approx(_yarn_get_concentration_factor_from_config(YARN)) == ANGLE_FACTOR
    torch.testing.assert_close(apply_rope_unfused(values, *WHERE), turned_by_core(values))
    walk = walked()
    ours, wanted = counted(lambda x: apply_rope_unfused(x, *WHERE)), as_measured(walk)
    assert ours == wanted
    with StridedElements() as mode:
        theirs = counted(turned_by_core)  # forward with a RoPE cache in fp32, shared by others
    assert replace(theirs, forward_peak_bytes=wanted.forward_peak_bytes) == wanted
    assert 0 <= theirs.forward_peak_bytes - wanted.forward_peak_bytes <= 2 * 4 * TOKENS * WIDTH
    works = [each.work for each in walk.tape.steps if isinstance(each.work, Traffic)]
    of_table = TOKENS * WIDTH // 2  # positions times frequencies, once for all layers
    assert mode.count - of_table == sum(each.strided or 0 for each in works)
