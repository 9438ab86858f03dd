"""Expert layers of torchtitan, against the graph's: every byte and FLOP.

Routing is balanced by torchtitan's own switch.  On a rank without data a grouped product counts its
padding, too.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from block_witness import Given, count_pass
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.models.deepseek_v3.model import model as deepseek
from torchtitan.models.llama3.model import model as llama
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp
from torchtitan.models.moe import utils
from torchtitan.models.moe.moe import MoE
from torchtitan.models.qwen3.model import args as qwen3_args
from torchtitan.models.qwen3.model import model as qwen3
from witnesses.expert_layers import (
    HEADS,
    LATENT,
    NUM_SEQUENCES,
    SHARING,
    SPEC,
    TOKENS,
    WEIGHING,
    Run,
    counted,
    derived,
    module_of,
)
from witnesses.torchtitan_job import answers, moe_args, places
from witnesses.torchtitan_parts import rows_answered

from meshwright.simulator.model import Experts, ModelSpec
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.programs.megatron import default_dtype

INT32_BYTES = 4


def torchtitan_layer(experts: Experts) -> Run:
    """Return a layer of torchtitan's Llama with torchtitan's experts in the place of its MLP."""
    width, heads = SPEC.hidden_size, {"n_heads": SPEC.num_heads, "n_kv_heads": SPEC.num_kv_heads}
    sizes = llama.TransformerModelArgs(dim=width, max_seq_len=TOKENS, **heads)
    layer = llama.TransformerBlock(0, sizes)
    args = moe_args(experts)
    layer.feed_forward = MoE(args, dim=width, hidden_dim=experts.hidden_size)
    angles = torch.empty(TOKENS, SPEC.head_dim // 2, dtype=torch.complex64)
    return lambda x: layer(x, angles, None)


def qwen3_layer(experts: Experts) -> Run:
    """Return a layer of torchtitan's Qwen3."""
    sizes = qwen3_args.Qwen3ModelArgs(
        dim=HEADS.hidden_size,
        n_heads=HEADS.num_heads,
        n_kv_heads=HEADS.num_kv_heads,
        head_dim=HEADS.head_dim,
        max_seq_len=TOKENS,
        moe_enabled=True,
        moe_inter_dim=experts.hidden_size,
        moe_args=moe_args(experts),
    )
    layer = qwen3.TransformerBlock(0, sizes)
    table = torch.empty(TOKENS, 2 * HEADS.head_dim, dtype=torch.float32)
    return lambda x: layer(x, table, None)


def deepseek_layer(experts: Experts) -> Run:
    """Return a layer of torchtitan's DeepSeek-V3."""
    latent = LATENT.latent
    assert latent is not None
    args = deepseek.DeepSeekV3ModelArgs(
        dim=LATENT.hidden_size,
        n_heads=LATENT.num_heads,
        n_dense_layers=0,
        moe_inter_dim=experts.hidden_size,
        moe_args=moe_args(experts),
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.plain_head_dim,
        qk_rope_head_dim=latent.rotary_head_dim,
        v_head_dim=latent.value_head_dim,
        max_seq_len=TOKENS,
    )
    args.moe_impl = "standard"  # its configuration sets it
    layer = deepseek.TransformerBlock(0, args)
    angles = torch.empty(TOKENS, latent.rotary_head_dim // 2, dtype=torch.complex64)
    return lambda x: layer(x, angles, None)


of_each_layer = pytest.mark.parametrize(
    ("make", "model"),
    [
        (torchtitan_layer, SPEC),
        (torchtitan_layer, SHARING),
        (torchtitan_layer, WEIGHING),
        (qwen3_layer, HEADS),
        (deepseek_layer, LATENT),
    ],
    ids=["softmax", "sigmoid, shared", "llama 4", "qwen3", "latent attention"],
)


@of_each_layer
def test_an_expert_layer_of_torchtitan_is_byte_exact(
    make: Callable[[Experts], Run], model: ModelSpec
) -> None:
    experts = model.experts
    assert experts is not None
    with patch.object(utils, "generate_permute_indices", places):
        found = counted(lambda: make(experts), NUM_SEQUENCES, TOKENS)
    padding = 2 * 8 * experts.num_experts * 3 * SPEC.hidden_size * experts.hidden_size
    assert derived(model, "torchtitan@0.2") == replace(
        found,
        forward_flops=found.forward_flops - padding,
        backward_flops=found.backward_flops - 2 * padding,
    )


@of_each_layer
def test_a_layer_of_torchtitan_with_experts_of_several_ranks_is_byte_exact(
    make: Callable[[Experts], Run], model: ModelSpec
) -> None:
    """Beyond a pass the module keeps the places of its last rows."""
    experts, ep = model.experts, 4
    assert experts is not None

    def divided() -> Run:
        run = make(experts)
        apply_moe_ep_tp(model_of(run), None, mesh, None, None)
        return run

    rows = NUM_SEQUENCES * TOKENS * experts.experts_per_token
    with fake_cluster(0, ep), answers(), rows_answered(rows // ep), default_dtype(torch.bfloat16):
        mesh = init_device_mesh("cpu", (ep,), mesh_dim_names=("ep",))
        found = count_pass(
            divided(),
            [Given((NUM_SEQUENCES, TOKENS, SPEC.hidden_size))],
            RankOracle({tuple(range(ep)): "ep"}),
        )
    own = experts.num_experts // ep
    padding = 2 * 8 * own * 3 * SPEC.hidden_size * experts.hidden_size
    assert derived(model, "torchtitan@0.2", ep=ep) == replace(
        found,
        forward_flops=found.forward_flops - padding,
        backward_flops=found.backward_flops - 2 * padding,
        left_bytes=found.left_bytes - INT32_BYTES * (rows + 8 * own),
    )


def model_of(run: Run) -> object:
    """Return a model of the one layer that *run* passes through, its experts named as a MoE's."""
    layer = module_of(run)
    layer.moe_enabled, layer.moe = True, getattr(layer, "moe", None) or layer.feed_forward
    return SimpleNamespace(layers={"0": layer})
