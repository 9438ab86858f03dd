"""Megatron-Core's own latent attention on one of a few ranks, against the graph's: every byte.

`MLASelfAttention` of megatron/core/transformer/multi_latent_attention.py (core 0.16) stands there
whole, with tensor ranks and with up-projections that run again.  What of it needs a GPU are its
parts: of Transformer Engine the products that all ranks have whole, attention and norms, here
PyTorch's; and the kernel that turns heads, here one that keeps nothing.
"""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from block_graph import as_measured
from block_witness import Given, Measured, count_pass
from torch import Tensor, nn
from torchtitan.models.deepseek_v3.model import model as deepseek
from witnesses import megatron_job
from witnesses.boundary import modules_converted, values_answered
from witnesses.expert_layers import LATENT, NUM_SEQUENCES, TOKENS

from meshwright.hwprofiles import Attention, Precision, Recompute, RecomputeModule, load_stack
from meshwright.simulator import ModelSpec, ParallelPlan, TrainingJob
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.blocks.dense import Columns, LayerDims, _latent
from meshwright.simulator.blocks.kinds import lowering_of
from meshwright.simulator.graph import Backward, Block, Repetition, Tape, WeightGradients
from meshwright.simulator.layout import Axis
from meshwright.simulator.model import EXPERT_LAYER
from meshwright.validate.counting import RankOracle, fake_cluster
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
from megatron.core.transformer.transformer_config import MLATransformerConfig  # isort: skip

UP = RecomputeModule.MLA_UP_PROJ
STRAIGHT = LATENT.model_copy(
    update={"latent": LATENT.latent.model_copy(update={"query_rank": 0})}  # no latent of queries
)
ANGLE_BYTES = 4


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
    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(self, *given: Tensor, **_: object) -> Tensor:
        return FusedAttention.apply(0, Scores(causal=True), *given[:3]).flatten(2)


class Turned(AutogradFunction):
    """A kernel that turns heads and keeps nothing."""

    @staticmethod
    def forward(_ctx: Context, x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    @staticmethod
    def backward(_ctx: Context, gradient: Tensor) -> Tensor:
        return gradient.new_empty(gradient.shape)


def megatrons(model: ModelSpec, tp: int, modules: list[str]) -> nn.Module:
    """Return Megatron-Core's layer on one of *tp* ranks, of which *modules* run again."""
    latent = model.latent
    assert latent is not None
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, create_gloo_process_groups=False)
    config = MLATransformerConfig(
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
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="selective" if modules else None,
        recompute_modules=modules or None,
    )
    parts = multi_latent_attention.MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=Whole,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=Whole,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=Core,
        linear_proj=RowParallelLinear,
        q_layernorm=Norm,
        kv_layernorm=Norm,
    )
    return multi_latent_attention.MLASelfAttention(config, parts, 1, AttnMaskType.causal)


def counted(model: ModelSpec, tp: int, *, again: bool) -> Measured:
    """Return what it does with tokens, but for the table of angles, which it makes once."""
    fresh = SimpleNamespace(get_tensor=lambda shape, dtype, _: torch.empty(shape, dtype=dtype))
    with (
        fake_cluster(0, tp),
        values_answered(),
        modules_converted(),
        megatron_job.answers(),
        patch.object(multi_latent_attention, "TELinear", Whole),
        patch.object(
            multi_latent_attention, "apply_rotary_pos_emb", lambda x, *_, **__: Turned.apply(x)
        ),
        patch.object(layers, "get_global_memory_buffer", lambda: fresh),
    ):
        with default_dtype(torch.bfloat16):
            layer = megatrons(model, tp, [str(UP)] if again else [])
        given = Given((TOKENS // tp, NUM_SEQUENCES, model.hidden_size))
        found = count_pass(lambda x: layer(x, None)[0], [given], RankOracle({(0, 1): "tp"}))
    table = ANGLE_BYTES * TOKENS * model.latent.rotary_head_dim
    names = "saved_bytes", "forward_peak_bytes", "backward_peak_bytes", "left_bytes"
    return replace(found, **{name: getattr(found, name) - table for name in names})


def derived(model: ModelSpec, tp: int, *, again: bool) -> Measured:
    """Return what the graph says of it."""
    job = TrainingJob(
        model=model, global_batch_size=NUM_SEQUENCES, seq_len=TOKENS, precision=Precision.BF16
    )
    plan = ParallelPlan(
        tp=tp,
        sequence_parallel=tp > 1,
        microbatch_size=NUM_SEQUENCES,
        stages=(model.num_layers,),
        attention=Attention.FLASH,
    )
    shape = BlockShape.of(job, plan, load_stack("megatron-core"))
    kept = replace(lowering_of(shape), weight_gradients=WeightGradients.KEPT)
    block = Block({Axis.TP: tp} if tp > 1 else {}, kept, shape.element_bytes)
    dims = LayerDims.of(shape, Columns(tp=tp, cp=1, microbatch_size=NUM_SEQUENCES))
    x = dims.stream(block, shape)
    _latent(block, x, shape, dims, EXPERT_LAYER)
    parts = frozenset({UP}) if again else frozenset()
    tape = Tape(block, Repetition(parts, held=parts))
    tape.run_forward(x)
    backward = Backward(tape, WeightGradients.KEPT)
    backward.run()
    return as_measured(backward)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "mla_up_proj"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", [LATENT, STRAIGHT], ids=["latent of queries", "straight"])
def test_latent_attention_of_megatron_core_is_byte_exact(
    model: ModelSpec, tp: int, *, again: bool
) -> None:
    assert derived(model, tp, again=again) == counted(model, tp, again=again)


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
