"""Megatron-Core's own latent attention on one of a few ranks, against the graph's: every byte.

`MLASelfAttention` of megatron/core/transformer/multi_latent_attention.py (core 0.16) stands there
whole, with tensor ranks, with context-parallel ranks in the groups that Megatron-Core makes, and
with up-projections or attention that run again.  What of it needs a GPU are its parts: of
Transformer Engine the products that all ranks have whole, norms and attention, whose loops over
ranks are those of our programs; and the kernel that turns heads, here one that keeps nothing.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from block_graph import as_measured
from block_witness import Given, Measured, count_pass
from torch import Tensor, nn
from torchtitan.models.deepseek_v3.model import model as deepseek
from witnesses import megatron_job
from witnesses.boundary import modules_converted, values_answered
from witnesses.expert_layers import LATENT, NUM_SEQUENCES, TOKENS

from meshwright.hwprofiles import (
    Attention,
    ContextParallel,
    Precision,
    Recompute,
    RecomputeModule,
    load_stack,
)
from meshwright.simulator import ModelSpec, ResolvedPlan, TrainingJob
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.blocks.dense import _latent
from meshwright.simulator.blocks.dims import Columns, LayerDims
from meshwright.simulator.blocks.kinds import lowering_of
from meshwright.simulator.graph import Backward, Block, Phase, Repetition, Tape, WeightGradients
from meshwright.simulator.graph import FusedAttention as FlashWork
from meshwright.simulator.layout import Axis, ContextAxis, Mesh
from meshwright.simulator.model import EXPERT_LAYER
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.programs.context import (
    AllGatherAttention,
    ContextGroup,
    RingAttention,
    UlyssesAttention,
)
from meshwright.validate.programs.fused import (
    AutogradFunction,
    Context,
    FusedAttention,
    RmsNorm,
    Scores,
)
from meshwright.validate.programs.layers import LayerOptions
from meshwright.validate.programs.layers.latent import LatentSelfAttention
from meshwright.validate.programs.megatron import default_dtype
from meshwright.validate.programs.pytorch import plain_parts

from megatron.core import parallel_state  # isort: skip
from megatron.core.tensor_parallel import (  # isort: skip
    ColumnParallelLinear,
    RowParallelLinear,
    layers,
)
from megatron.core.transformer import multi_latent_attention  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_config import MLATransformerConfig  # isort: skip

UP, CORE = RecomputeModule.MLA_UP_PROJ, RecomputeModule.CORE_ATTN
RING = ContextParallel.RING
WIDER = LATENT.model_copy(
    update={"latent": LATENT.latent.model_copy(update={"plain_head_dim": 40})}  # than values
)
STRAIGHT = LATENT.model_copy(
    update={"latent": LATENT.latent.model_copy(update={"query_rank": 0})}  # no latent of queries
)
ANGLE_BYTES = 4
MASK_BYTES = 4  # a tensor that tells attention which runs again what kind of mask it has


class Whole(nn.Linear):
    """Transformer Engine's product that every rank has whole."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **_: object) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class Norm(nn.Module):
    def __init__(self, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(hidden_size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return RmsNorm.apply(x, self.weight, self.eps)


class Core(nn.Module):
    """Attention of one rank's tokens, or of those that several share as *way* says."""

    def __init__(self, way: ContextParallel | None = None, **_: object) -> None:
        super().__init__()
        self.over = over_ranks(way) if way else None

    def forward(self, *given: Tensor, **_: object) -> Tensor:
        if self.over is not None:
            return self.over(*given[:3]).flatten(2)
        return FusedAttention.apply(0, Scores(causal=True), *given[:3]).flatten(2)


class Flash(nn.Module):
    def forward(self, *given: Tensor) -> Tensor:
        return FusedAttention.apply(0, Scores(causal=True), *given)


def over_ranks(way: ContextParallel) -> nn.Module:
    """Return attention over the context-parallel ranks that Megatron-Core has made."""
    if way is ContextParallel.HYBRID_RING:
        levels = parallel_state.get_hierarchical_context_parallel_groups()
        inner, outer = (ranks_of(group) for group in levels)
        return UlyssesAttention(RingAttention(outer), inner)
    over = ranks_of(parallel_state.get_context_parallel_group())
    cores = {ContextParallel.RING: RingAttention, ContextParallel.ALL_GATHER: AllGatherAttention}
    return cores[way](over) if way in cores else UlyssesAttention(Flash(), over)


def ranks_of(group: dist.ProcessGroup) -> ContextGroup:
    return ContextGroup(group, group.rank(), group.size(), num_tokens=TOKENS)


class RotatedParts(AutogradFunction):
    """A kernel that turns heads and keeps nothing."""

    @staticmethod
    def forward(_ctx: Context, x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    @staticmethod
    def backward(_ctx: Context, gradient: Tensor) -> Tensor:
        return gradient.new_empty(gradient.shape)


def levels_of(plan: ResolvedPlan) -> list[int] | None:
    """Return the ranks of each level of hybrid ring + all-to-all."""
    return [plan.cp_inner, plan.cp // plan.cp_inner] if plan.cp_inner else None


def config_of(model: ModelSpec, plan: ResolvedPlan) -> MLATransformerConfig:
    """Return what Megatron-Core is told of a layer of *model* on ranks of *plan*."""
    latent, modules = model.latent, [str(each) for each in plan.recompute_modules]
    assert latent is not None
    return MLATransformerConfig(
        num_layers=1,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        q_lora_rank=latent.query_rank or None,
        kv_lora_rank=latent.kv_rank,
        qk_head_dim=latent.plain_head_dim,
        qk_pos_emb_head_dim=latent.rotary_head_dim,
        v_head_dim=latent.value_head_dim,
        rope_type="rope",
        normalization="RMSNorm",
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=plan.tp,
        sequence_parallel=plan.tp > 1,
        context_parallel_size=plan.cp,
        hierarchical_context_parallel_sizes=levels_of(plan),
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="selective" if modules else None,
        recompute_modules=modules or None,
    )


def megatrons(model: ModelSpec, plan: ResolvedPlan) -> nn.Module:
    """Return Megatron-Core's layer on a rank of *plan*."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        plan.tp,
        context_parallel_size=plan.cp,
        hierarchical_context_parallel_sizes=levels_of(plan),
        create_gloo_process_groups=False,
    )
    parts = multi_latent_attention.MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=Whole,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=Whole,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=ModuleSpec(Core, params={"way": plan.cp_type}),
        linear_proj=RowParallelLinear,
        q_layernorm=Norm,
        kv_layernorm=Norm,
    )
    config = config_of(model, plan)
    return multi_latent_attention.MLASelfAttention(config, parts, 1, AttnMaskType.causal)


def counted(model: ModelSpec, plan: ResolvedPlan) -> Measured:
    """Return what its last rank does, but for the RoPE cache, which it makes once."""
    mesh, rank = Mesh.of(plan), plan.world_size - 1
    # Of a ring without swaps both names of its ranks are there: the last one counts.
    axes = [axis for axis in (*ContextAxis, Axis.TP, Axis.CP) if mesh.degree(axis) > 1]
    names = {mesh.group(rank, axis): str(axis) for axis in axes}
    fresh = SimpleNamespace(get_tensor=lambda shape, dtype, _: torch.empty(shape, dtype=dtype))
    with (
        fake_cluster(rank, plan.world_size),
        values_answered(),
        modules_converted(),
        megatron_job.answers(),
        patch.object(multi_latent_attention, "TELinear", Whole),
        patch.object(
            multi_latent_attention,
            "apply_rotary_pos_emb",
            lambda x, *_, **__: RotatedParts.apply(x),
        ),
        patch.object(layers, "get_global_memory_buffer", lambda: fresh),
    ):
        with default_dtype(torch.bfloat16):
            layer = megatrons(model, plan)
        given = Given((TOKENS // plan.world_size, NUM_SEQUENCES, model.hidden_size))
        found = count_pass(lambda x: layer(x, None)[0], [given], RankOracle(names))
    table = ANGLE_BYTES * TOKENS // plan.cp * model.latent.rotary_head_dim
    names = "saved_bytes", "forward_peak_bytes", "backward_peak_bytes", "left_bytes"
    return replace(found, **{name: getattr(found, name) - table for name in names})


def plan_of(tp: int = 1, *modules: RecomputeModule, **fields: Any) -> ResolvedPlan:
    """Return a plan whose *modules* run again."""
    if modules:
        fields |= {"recompute": Recompute.SELECTIVE, "recompute_modules": modules}
    return ResolvedPlan(
        tp=tp,
        sequence_parallel=tp > 1,
        microbatch_size=NUM_SEQUENCES,
        stages=(LATENT.num_layers,),
        attention=Attention.FLASH,
        **fields,
    )


def derived(model: ModelSpec, plan: ResolvedPlan) -> Measured:
    """Return what the graph says of it."""
    job = TrainingJob(
        model=model, global_batch_size=NUM_SEQUENCES, seq_len=TOKENS, precision=Precision.BF16
    )
    shape = BlockShape.of(job, plan, load_stack("megatron-core"))
    kept = replace(lowering_of(shape), weight_gradients=WeightGradients.KEPT)
    mesh = Mesh.of(plan)
    ranks = {axis: mesh.degree(axis) for axis in (Axis.TP, Axis.CP, *ContextAxis)}
    block = Block({axis: n for axis, n in ranks.items() if n > 1}, kept, shape.element_bytes)
    dims = LayerDims.of(shape, Columns.of(shape))
    x = dims.stream(block, shape)
    _latent(block, x, shape, dims, EXPERT_LAYER)
    parts = frozenset(plan.recompute_modules)
    tape = Tape(block, Repetition(parts, held=parts & {UP}))
    tape.run_forward(x)
    backward = Backward(tape, WeightGradients.KEPT)
    backward.run()
    found = as_measured(backward)
    if plan.cp == 1:
        return found
    forward, again = (hidden_flops(tape, plan, is_first=first) for first in (True, False))
    return replace(
        found,
        forward_flops=found.forward_flops - forward,
        backward_flops=found.backward_flops - again,
    )


def hidden_flops(tape: Tape, plan: ResolvedPlan, *, is_first: bool) -> int:
    """Return the FLOPs of attention that a program of several steps does not count.

    Of all steps of a ring the first alone has a mask, and counts the square that it hides half of;
    of gathered tokens each half of a rank's own has one.
    """
    masked = 2 if plan.cp_type is ContextParallel.ALL_GATHER else 1
    works = [step.work for step in tape.steps if (step.phase is Phase.FORWARD) is is_first]
    calls = [each for each in works if isinstance(each, FlashWork)]
    return sum((each.flops - each.flops // (each.ranks * masked)) // 2 for each in calls)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "mla_up_proj"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", [LATENT, STRAIGHT], ids=["latent of queries", "straight"])
def test_latent_attention_of_megatron_core_is_byte_exact(
    model: ModelSpec, tp: int, *, again: bool
) -> None:
    plan = plan_of(tp, *([UP] if again else []))
    assert derived(model, plan) == counted(model, plan)


OVER_RANKS = {
    "ring of 2": plan_of(cp=2, cp_type=RING),
    "ring of 4, up-projections again": plan_of(2, UP, cp=4, cp_type=RING),
    "ring of 2, attention again": plan_of(2, CORE, cp=2, cp_type=RING),
    "ring of swaps": plan_of(cp=4, cp_type=ContextParallel.HYBRID_RING, cp_inner=2),
    "ring of swaps, all again": plan_of(
        2, UP, CORE, cp=4, cp_type=ContextParallel.HYBRID_RING, cp_inner=2
    ),
    # Which Transformer Engine takes with such heads from 2.15 on.
    "gather": plan_of(2, UP, cp=2, cp_type=ContextParallel.ALL_GATHER),
    "swap": plan_of(2, UP, cp=2, cp_type=ContextParallel.ALL_TO_ALL),
}


@pytest.mark.parametrize("name", OVER_RANKS)
def test_latent_attention_of_ranks_that_share_sequences_is_byte_exact(name: str) -> None:
    """But for peaks, which are those of the loops over ranks, and no part of Megatron-Core."""
    plan, none = OVER_RANKS[name], {"forward_peak_bytes": 0, "backward_peak_bytes": 0}
    found = counted(WIDER, plan)
    told = MASK_BYTES * (CORE in plan.recompute_modules)
    assert replace(derived(WIDER, plan), **none) == replace(
        found, **none, saved_bytes=found.saved_bytes - told
    )


def by_halves(weight: Tensor, heads: int, turned: int) -> Tensor:
    """Return rows of heads whose last *turned* numbers turn in neighbours as such of halves."""
    rows = weight.unflatten(0, (heads, -1)).clone()
    rows[:, -turned:] = torch.cat((rows[:, -turned::2], rows[:, -turned + 1 :: 2]), dim=1)
    return rows.flatten(0, 1)


@pytest.mark.parametrize("model", [LATENT, STRAIGHT], ids=["latent of queries", "straight"])
def test_the_programs_latent_attention_makes_what_torchtitans_does(model: ModelSpec) -> None:
    latent, heads = model.latent, model.num_heads
    assert latent is not None
    args = deepseek.DeepSeekV3ModelArgs(
        dim=model.hidden_size,
        n_heads=heads,
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.plain_head_dim,
        qk_rope_head_dim=latent.rotary_head_dim,
        v_head_dim=latent.value_head_dim,
        max_seq_len=64,
        original_seq_len=64,
    )
    torch.manual_seed(0)
    theirs = deepseek.Attention(args)
    options = LayerOptions(attention=Attention.FLASH, recompute=Recompute.NONE, dropout=0.0)
    parts = plain_parts(model, vocab_size=model.vocab_size, dropout=0.0)
    ours, turned = (
        LatentSelfAttention(model, options, parts, args.rope_theta),
        args.qk_rope_head_dim,
    )
    first = (theirs.wq_b, ours.query_up) if latent.query_rank else (theirs.wq, ours.query)
    pairs = [(theirs.wkv_b, ours.kv_up), (theirs.wo, ours.output)]
    if latent.query_rank:
        pairs.append((theirs.wq_a, ours.query_down))
    with torch.no_grad():
        for given, own in pairs:
            own.weight.copy_(given.weight)
        first[1].weight.copy_(by_halves(first[0].weight, heads, turned))
        ours.kv_down.weight.copy_(by_halves(theirs.wkv_a.weight, 1, turned))
    x = torch.randn(2, 64, model.hidden_size)
    expected = theirs(x, deepseek.precompute_freqs_cis(args), None)
    torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-4)
