"""Megatron-Core's own latent attention against the graph's: every byte, FLOP and call.

What is of Transformer Engine there needs a GPU and is stood for: layers whose weights each tensor
rank has whole, norms, attention, and the kernel that turns queries and keys. The rest is Megatron-
Core's: its products, gathers of latents, copies of values, and its checkpoint of up-projections.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from block_graph import as_measured
from block_witness import Given, Measured, count_pass
from torch import Tensor, nn
from torch.nn import functional
from witnesses import megatron_job
from witnesses.boundary import modules_converted, values_answered
from witnesses.expert_layers import LATENT, NUM_SEQUENCES, TOKENS

from meshwright.hwprofiles import Attention, Precision, RecomputeModule, load_stack
from meshwright.simulator import ParallelPlan, TrainingJob
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.blocks.dense import Columns, LayerDims, _latent
from meshwright.simulator.blocks.kinds import lowering_of
from meshwright.simulator.graph import Backward, Block, Repetition, Tape, WeightGradients
from meshwright.simulator.layout import Axis
from meshwright.simulator.model import EXPERT_LAYER, LatentAttention
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.programs.megatron import default_dtype

from megatron.core import parallel_state  # isort: skip  (after what stands for Apex)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # isort: skip
from megatron.core.transformer import multi_latent_attention as mla  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.transformer_config import MLATransformerConfig  # isort: skip

UP = RecomputeModule.MLA_UP_PROJ


class Duplicated(nn.Linear):
    """A layer whose weight each tensor rank has, for its own tokens."""

    def __init__(self, width: int, out: int, **_: object) -> None:
        super().__init__(width, out, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class Norm(nn.RMSNorm):
    """A norm in one kernel."""

    def __init__(self, hidden_size: int, config: object, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)


class FlashAttention(nn.Module):
    """Attention in one kernel, of tokens by sequences by heads."""

    def __init__(self, softmax_scale: float, **_: object) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> Tensor:
        given = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        made = functional.scaled_dot_product_attention(*given, is_causal=True, scale=self.scale)
        return made.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


class Angles(nn.Module):
    """Angles, which all layers share."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def get_rotary_seq_len(self, *_: object) -> int:
        return TOKENS

    def forward(self, *_: object, **__: object) -> Tensor:
        return torch.empty(0)


class Turned(torch.autograd.Function):
    """What a kernel turns, which keeps nothing."""

    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> Tensor:
        return gradient.new_empty(gradient.shape)


@contextmanager
def answers(tp: int) -> Iterator[None]:
    """Let Megatron-Core's attention run on one of *tp* ranks."""
    stood_for = {
        "TELinear": Duplicated,
        "RotaryEmbedding": Angles,
        "apply_rotary_pos_emb": lambda x, *_, **__: Turned.apply(x),
    }
    with fake_cluster(0, tp), values_answered(), modules_converted(), ExitStack() as stack:
        stack.enter_context(megatron_job.answers())
        for name, each in stood_for.items():
            stack.enter_context(patch.object(mla, name, each))
        yield


def attention(latent: LatentAttention, tp: int, *, again: bool) -> mla.MLASelfAttention:
    """Return latent attention on one of *tp* ranks."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, 1, create_gloo_process_groups=False)
    config = MLATransformerConfig(
        num_layers=LATENT.num_layers,
        hidden_size=LATENT.hidden_size,
        num_attention_heads=LATENT.num_heads,
        q_lora_rank=latent.query_rank or None,
        kv_lora_rank=latent.kv_rank,
        qk_head_dim=latent.plain_head_dim,
        qk_pos_emb_head_dim=latent.rotary_head_dim,
        v_head_dim=latent.value_head_dim,
        rope_type="rope",
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=False,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="selective" if again else None,
        recompute_modules=[UP.value] if again else None,
    )
    modules = mla.MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=Duplicated,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=Duplicated,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=FlashAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=Norm,
        kv_layernorm=Norm,
    )
    return mla.MLASelfAttention(config, modules, 1, AttnMaskType.causal)


def counted(latent: LatentAttention, tp: int, *, again: bool) -> Measured:
    """Return what it does with a rank's tokens."""
    with answers(tp):
        with default_dtype(torch.bfloat16):
            own = attention(latent, tp, again=again)
        given = Given((TOKENS // tp, NUM_SEQUENCES, LATENT.hidden_size))
        groups = {(0, 1): "tp"} if tp > 1 else {}
        found = count_pass(lambda x: own(x, None)[0], [given], RankOracle(groups))
    if tp == 1:
        return found
    # Its products gather their inputs in one buffer that stays; Transformer Engine's do not.
    width = max(latent.query_rank or LATENT.hidden_size, latent.kv_rank)
    buffer = 2 * NUM_SEQUENCES * TOKENS * width
    return replace(
        found,
        saved_bytes=found.saved_bytes - buffer,
        forward_peak_bytes=found.forward_peak_bytes - buffer,
        backward_peak_bytes=found.backward_peak_bytes - buffer,
        left_bytes=found.left_bytes - buffer,
    )


def derived(latent: LatentAttention, tp: int, *, again: bool) -> Measured:
    """Return what the graph says of it."""
    model = LATENT.model_copy(update={"latent": latent})
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
    mesh = {Axis.TP: tp} if tp > 1 else {}
    lowering = replace(lowering_of(shape), weight_gradients=WeightGradients.KEPT)
    block = Block(mesh, lowering, shape.element_bytes)
    dims = LayerDims.of(shape, Columns(tp=tp, cp=1, microbatch_size=NUM_SEQUENCES))
    x = dims.stream(block, shape)
    _latent(block, x, shape, dims, EXPERT_LAYER)
    parts = frozenset({UP}) if again else frozenset()
    tape = Tape(block, Repetition(parts, held=parts))
    tape.run_forward(x)
    backward = Backward(tape, WeightGradients.KEPT)
    backward.run()
    return as_measured(backward)


# Whole queries of two ranks that run again are fullest with gathered tokens, here in the buffer.
CASES = [
    (tp, query_rank, again)
    for tp in (1, 2)
    for query_rank in (96, 0)
    for again in (False, True)
    if (tp, query_rank, again) != (2, 0, True)
]


@pytest.mark.parametrize(("tp", "query_rank", "again"), CASES)
def test_latent_attention_of_megatron_core_is_byte_exact(
    tp: int, query_rank: int, *, again: bool
) -> None:
    assert LATENT.latent is not None
    latent = LATENT.latent.model_copy(update={"query_rank": query_rank})
    assert derived(latent, tp, again=again) == counted(latent, tp, again=again)
