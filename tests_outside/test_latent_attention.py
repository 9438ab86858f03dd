"""Up-projections of latents that run again: Megatron-Core's checkpoint, torchtitan's layers.

Megatron-Core's own latent attention is of Transformer Engine's layers, which need a GPU; around
what its `qkv_up_proj_and_rope_apply` runs (megatron/core/transformer/multi_latent_attention.py,
core 0.16) stands its own CheckpointWithoutOutput, given up behind attention as there.
"""

from dataclasses import replace

import pytest
import torch
from block_graph import as_measured
from block_witness import Given, Measured, count_pass
from torch import Tensor
from torchtitan.models.deepseek_v3.model import model as deepseek
from witnesses import megatron_job
from witnesses.expert_layers import LATENT, NUM_SEQUENCES, TOKENS, Run

from meshwright.hwprofiles import Attention, Kernels, Precision, RecomputeModule, load_stack
from meshwright.simulator import ParallelPlan, TrainingJob
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.blocks.dense import Columns, LayerDims, _latent
from meshwright.simulator.blocks.kinds import lowering_of
from meshwright.simulator.graph import Backward, Block, Repetition, Tape, WeightGradients
from meshwright.simulator.model import EXPERT_LAYER
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.programs.megatron import default_dtype

from megatron.core.tensor_parallel import CheckpointWithoutOutput  # isort: skip

UP = RecomputeModule.MLA_UP_PROJ


def attention(angles: Tensor, *, again: bool) -> Run:
    """Return latent attention of torchtitan's layers in the order of Megatron-Core."""
    latent = LATENT.latent
    assert latent is not None
    own = deepseek.Attention(
        deepseek.DeepSeekV3ModelArgs(
            dim=LATENT.hidden_size,
            n_heads=LATENT.num_heads,
            q_lora_rank=latent.query_rank,
            kv_lora_rank=latent.kv_rank,
            qk_nope_head_dim=latent.plain_head_dim,
            qk_rope_head_dim=latent.rotary_head_dim,
            v_head_dim=latent.value_head_dim,
            max_seq_len=TOKENS,
        )
    )
    plain, turned, width = latent.plain_head_dim, latent.rotary_head_dim, latent.value_head_dim

    def up(queries: Tensor, pairs: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = own.wq_b(queries).unflatten(-1, (-1, plain + turned))
        first, last = given.split([plain, turned], -1)
        query = torch.cat([first, deepseek.apply_rotary_emb(last, angles)], -1)
        shared = deepseek.apply_rotary_emb(shared.unsqueeze(2), angles)
        keys, value = own.wkv_b(pairs).unflatten(-1, (-1, plain + width)).split([plain, width], -1)
        key = torch.cat([keys, shared.expand(-1, -1, LATENT.num_heads, -1)], -1)
        return query, key, value

    def run(x: Tensor) -> Tensor:
        queries = own.wq_a(x)
        pairs, shared = own.wkv_a(x).split([latent.kv_rank, turned], -1)
        given = own.q_norm(queries), own.kv_norm(pairs), shared
        del queries, pairs, shared
        checkpoint = CheckpointWithoutOutput()
        made = checkpoint.checkpoint(up, *given) if again else up(*given)
        del given
        scale = own.softmax_scale
        context = own.inner_attention(*(each.transpose(1, 2) for each in made), scale=scale)
        if again:
            checkpoint.discard_output_and_register_recompute(context)
        return own.wo(context.transpose(1, 2).contiguous().flatten(2))

    return run


def counted(*, again: bool) -> Measured:
    """Return what these layers do with tokens."""
    with fake_cluster(0, 1), megatron_job.answers():
        angles = torch.empty(TOKENS, 4, dtype=torch.complex64)
        with default_dtype(torch.bfloat16):
            run = attention(angles, again=again)
        return count_pass(run, [Given((NUM_SEQUENCES, TOKENS, LATENT.hidden_size))], RankOracle({}))


def derived(*, again: bool) -> Measured:
    """Return what the graph says of them."""
    job = TrainingJob(
        model=LATENT, global_batch_size=NUM_SEQUENCES, seq_len=TOKENS, precision=Precision.BF16
    )
    plan = ParallelPlan(
        microbatch_size=NUM_SEQUENCES, stages=(LATENT.num_layers,), attention=Attention.FLASH
    )
    profile = load_stack("torchtitan").model_copy(update={"kernels": Kernels.EAGER})
    shape = BlockShape.of(job, plan, profile)
    block = Block({}, replace(lowering_of(shape), copies_operands=True), shape.element_bytes)
    dims = LayerDims.of(shape, Columns(tp=1, cp=1, microbatch_size=NUM_SEQUENCES))
    x = dims.stream(block, shape)
    _latent(block, x, shape, dims, EXPERT_LAYER)
    parts = frozenset({UP}) if again else frozenset()
    tape = Tape(block, Repetition(parts, held=parts))
    tape.run_forward(x)
    backward = Backward(tape, WeightGradients.KEPT)
    backward.run()
    return as_measured(backward)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "mla_up_proj"])
def test_up_projections_of_latents_are_byte_exact(*, again: bool) -> None:
    assert derived(again=again) == counted(again=again)
