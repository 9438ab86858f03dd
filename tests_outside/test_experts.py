"""Expert layers of transformers, against the graph's: every byte and FLOP.

Routing is as it comes: nothing of what transformers keeps depends on it.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from block_graph import PYTORCH, GraphCase
from block_witness import Given, count_pass
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils.checkpoint import checkpoint
from transformers import (
    DeepseekV2Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2DecoderLayer,
    apply_rotary_emb,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeDecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer
from witnesses.expert_layers import (
    GATED,
    HEADS,
    LATENT,
    NUM_SEQUENCES,
    OSS,
    SPEC,
    TOKENS,
    Run,
    counted,
    derived,
    module_of,
)
from witnesses.huggingface_job import deepseek_config
from witnesses.torchtitan_job import counts
from witnesses.torchtitan_parts import rows_answered

from meshwright.hwprofiles import Kernels, Recompute
from meshwright.simulator import graph
from meshwright.simulator.blocks.parts.feed_forward import gated
from meshwright.simulator.graph import Block, Dim, Rotary, RotaryFormula, pass_through, rotary
from meshwright.simulator.model import (
    EXPERT_LAYER,
    TRANSFORMER_LAYER,
    WINDOWED_EXPERT_LAYER,
    BlockKind,
    ModelSpec,
)
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.programs.fused import Context
from meshwright.validate.programs.megatron import default_dtype

INT32_BYTES = 4
WIDTH = 32  # of heads


def transformers_layer(model: ModelSpec) -> Run:
    """Return a layer of Mixtral, Qwen2-MoE or Qwen3-MoE with grouped products."""
    experts = model.experts
    assert experts is not None
    heads = {"num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads}
    sizes = {"hidden_size": model.hidden_size, "num_experts_per_tok": experts.experts_per_token}
    make = MixtralDecoderLayer
    if model.qk_norm == "head":
        make, sizes["head_dim"] = Qwen3MoeDecoderLayer, model.head_dim
        sizes |= {"moe_intermediate_size": experts.hidden_size, "norm_topk_prob": True}
        config = Qwen3MoeConfig(**heads, **sizes, num_experts=experts.num_experts)
    elif experts.shared_gate:
        make, sizes["shared_expert_intermediate_size"] = (
            Qwen2MoeDecoderLayer,
            experts.shared_hidden_size,
        )
        sizes |= {"moe_intermediate_size": experts.hidden_size, "norm_topk_prob": True}
        config = Qwen2MoeConfig(**heads, **sizes, num_experts=experts.num_experts)
    else:
        sizes |= {"intermediate_size": experts.hidden_size}
        config = MixtralConfig(**heads, **sizes, num_local_experts=experts.num_experts)
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    layer = make(config, 0)
    angles = torch.empty(NUM_SEQUENCES, TOKENS, model.head_dim)
    return lambda x: layer(x, position_embeddings=(angles, angles), attention_mask=None)


def transformers_latents(model: ModelSpec, *, is_dense: bool = False) -> Run:
    """Return a layer of DeepSeek-V3, or of V2 where scores are a softmax; perhaps with an MLP."""
    sizes = {
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_heads,
        "first_k_dense_replace": int(is_dense),
    }
    config = deepseek_config(model, sizes)
    half = torch.empty(1, TOKENS, config.qk_rope_head_dim // 2)
    if isinstance(config, DeepseekV2Config):
        make, angles = DeepseekV2DecoderLayer, torch.complex(half.float(), half.float())
    else:
        make, angles = DeepseekV3DecoderLayer, (half.repeat(1, 1, 2),) * 2
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    layer = make(config, 0)
    return lambda x: layer(x, position_embeddings=angles, attention_mask=None)


@pytest.mark.parametrize("model", [SPEC, GATED, HEADS], ids=["mixtral", "qwen2", "qwen3"])
def test_an_expert_layer_of_transformers_is_byte_exact(model: ModelSpec) -> None:
    found = counted(lambda: transformers_layer(model), NUM_SEQUENCES, TOKENS)
    assert derived(model, "fsdp") == found


def having(experts: dict[str, object], **fields: object) -> ModelSpec:
    """Return latent attention beside other experts, with other facts."""
    assert LATENT.experts is not None
    return LATENT.model_copy(update=fields | {"experts": LATENT.experts.model_copy(update=experts)})


# GLM-4.5's: heads that positions turn in part, beside experts as DeepSeek-V3 has them.
GLM = HEADS.model_copy(
    update={
        "spelling": "glm4_moe",
        "rotary_fraction": 0.5,
        "attention_bias": True,
        "experts": LATENT.experts.model_copy(update={"routing_bias": True}),
    }
)


def glm_layer(*, is_dense: bool) -> Run:
    """Return a layer of GLM-4.5."""
    experts = GLM.experts
    assert experts is not None
    config = Glm4MoeConfig(
        hidden_size=GLM.hidden_size,
        num_attention_heads=GLM.num_heads,
        num_key_value_heads=GLM.num_kv_heads,
        head_dim=GLM.head_dim,
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=GLM.rotary_fraction,
        intermediate_size=GLM.ffn_hidden_size,
        moe_intermediate_size=experts.hidden_size,
        n_routed_experts=experts.num_experts,
        num_experts_per_tok=experts.experts_per_token,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=int(is_dense),
    )
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    layer = Glm4MoeDecoderLayer(config, 0)
    angles = (torch.empty(1, TOKENS, int(GLM.head_dim * GLM.rotary_fraction)),) * 2
    return lambda x: layer(x, position_embeddings=angles, attention_mask=None)


@pytest.mark.parametrize("kind", [EXPERT_LAYER, TRANSFORMER_LAYER])
def test_a_layer_of_glm_is_byte_exact(kind: BlockKind) -> None:
    is_dense = kind == TRANSFORMER_LAYER
    found = counted(lambda: glm_layer(is_dense=is_dense), NUM_SEQUENCES, TOKENS)
    assert derived(GLM, "fsdp", kind=kind) == found


GROUPS: dict[str, object] = {"num_groups": 4, "groups_per_token": 2}
SOFT: dict[str, object] = {"scores": "softmax"}
FEW: dict[str, object] = {"num_experts": 4, "hidden_size": 128, "shared_hidden_size": 1024}
MANY: dict[str, object] = {"num_experts": 64, "hidden_size": 32, "shared_hidden_size": 32}
MANY_HEADS: dict[str, object] = {"num_heads": 64, "num_kv_heads": 64}
STRAIGHT = LATENT.latent.model_copy(update={"query_rank": 0})
DEEPSEEKS = {
    "v3": having(GROUPS | {"routing_bias": True}),
    "v3, few experts": having(FEW),
    "v3, many heads": having(MANY, **MANY_HEADS),
    "v2": having(SOFT, latent=STRAIGHT),
    "v2, groups": having(SOFT | GROUPS),
    "v2, many heads": having(SOFT | MANY, **MANY_HEADS),
}


@pytest.mark.parametrize("name", DEEPSEEKS)
def test_a_layer_of_transformers_deepseek_is_byte_exact(name: str) -> None:
    """With many heads attention is the peak, else the experts, or the one who is shared."""
    model = DEEPSEEKS[name]
    found = counted(lambda: transformers_latents(model), NUM_SEQUENCES, TOKENS)
    assert derived(model, "fsdp") == found


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("name", ["v3", "v2, many heads"])
def test_a_dense_layer_of_transformers_deepseek_is_byte_exact(
    name: str, recompute: Recompute
) -> None:
    model = DEEPSEEKS[name]

    def make() -> Run:
        run = transformers_latents(model, is_dense=True)
        if recompute is Recompute.NONE:
            return run
        return lambda x: checkpoint(run, x, use_reentrant=False)

    found = counted(make, NUM_SEQUENCES, TOKENS)
    assert derived(model, "fsdp", kind=TRANSFORMER_LAYER, recompute=recompute) == found


def turned(block: Block, formula: RotaryFormula) -> Sequence[graph.Tensor]:
    """Write down how queries and the key that all heads have get RoPE, and are concatenated."""
    places, heads = (Dim("tokens", TOKENS), Dim("batch", NUM_SEQUENCES)), LATENT.num_heads
    query = block.tensor("queries", *places, Dim("queries", heads * WIDTH, WIDTH))
    key = block.tensor("key", *places, Dim("key", WIDTH, WIDTH))
    with block.module(query, key):
        made = rotary(block, query, key, how=Rotary(formula=formula))
        both = made[0].like("both", dims=(*places, Dim("both", (heads + 1) * WIDTH, WIDTH)))
        pass_through(block, made, both)
        block.hold(*made)
    return query, key


@pytest.mark.parametrize("formula", [RotaryFormula.NEIGHBOURS, RotaryFormula.CAST_COMPLEX])
def test_what_turns_transformers_latent_heads_is_byte_exact_by_itself(
    formula: RotaryFormula,
) -> None:
    """In a whole layer nothing of it is at the peak."""

    def run(query: Tensor, key: Tensor) -> Tensor:
        given = query.unflatten(-1, (LATENT.num_heads, WIDTH)).transpose(1, 2), key.unsqueeze(1)
        if formula is RotaryFormula.NEIGHBOURS:
            return torch.cat(apply_rotary_pos_emb_interleave(*given, *tables), dim=1)
        return torch.cat(apply_rotary_emb(*given, numbers), dim=1)

    with fake_cluster(0, 1), default_dtype(torch.bfloat16):
        tables = [torch.empty(1, TOKENS, WIDTH)] * 2
        numbers = torch.empty(1, TOKENS, WIDTH // 2, dtype=torch.complex64)
        shapes = (LATENT.num_heads * WIDTH, WIDTH)
        given = [Given((NUM_SEQUENCES, TOKENS, width)) for width in shapes]
        found = count_pass(run, given, RankOracle({}))
    lowering = replace(PYTORCH, kernels=Kernels.EAGER, uses_transformers_ops=True)
    case = GraphCase(build=lambda block: turned(block, formula), lowering=lowering)
    assert case.derive() == found


@pytest.mark.parametrize(
    "model",
    [SPEC, GATED, HEADS, OSS, DEEPSEEKS["v3"], DEEPSEEKS["v2"]],
    ids=["mixtral", "qwen2", "qwen3", "gpt-oss", "deepseek v3", "deepseek v2"],
)
def test_a_layer_of_transformers_with_experts_of_several_ranks_is_byte_exact(
    model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sinks", with_sinks)
    monkeypatch.setattr(torch, "histc", counts)
    experts, ep = model.experts, 4
    assert experts is not None
    rows = NUM_SEQUENCES * TOKENS * experts.experts_per_token
    with fake_cluster(0, ep), rows_answered(rows // ep), default_dtype(torch.bfloat16):
        mesh = init_device_mesh("cpu", (ep, 1), mesh_dim_names=("ep", "tp"))
        make = transformers_layer if model.latent is None else transformers_latents
        run = gpt_oss_layer() if model is OSS else make(model)
        layer = module_of(run)
        names = [f"mlp.experts.{name}" for name, _ in layer.mlp.experts.named_parameters()]
        styles = dict.fromkeys(names, "grouped_gemm") | {"mlp.experts": "ep_dispatch_experts"}
        apply_expert_parallelism(layer, mesh["ep"], mesh["tp"], styles)
        layer.mlp.experts.register_forward_pre_hook(narrowed)
        given = [Given((NUM_SEQUENCES, TOKENS, model.hidden_size))]
        found = count_pass(run, given, RankOracle({tuple(range(ep)): "ep"}))
    assert derived(model, "fsdp", ep=ep) == found


def narrowed(_module: object, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return what fully_shard gives a unit that it computes in 16 bits."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    state = SimpleNamespace(_mp_policy=policy)
    return FSDPState._cast_forward_inputs(state, given, {})[0]


class Sinks(torch.autograd.Function):
    """A kernel's sinks: PyTorch's attention has none, flash-attn's makes their gradient, too."""

    @staticmethod
    def forward(ctx: Context, out: Tensor, sinks: Tensor) -> Tensor:
        ctx.sinks = sinks.shape
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_empty(ctx.sinks)


def with_sinks(*given: object, s_aux: Tensor, **how: object) -> tuple[Tensor, None]:
    """Return PyTorch's attention as transformers calls it, and beside it sinks."""
    out, weights = sdpa_attention_forward(*given, **how)
    return Sinks.apply(out, s_aux), weights


def gpt_oss_layer() -> Run:
    """Return a layer of gpt-oss with grouped products."""
    experts = OSS.experts
    assert experts is not None
    config = GptOssConfig(
        hidden_size=OSS.hidden_size,
        num_attention_heads=OSS.num_heads,
        num_key_value_heads=OSS.num_kv_heads,
        head_dim=OSS.head_dim,
        intermediate_size=experts.hidden_size,
        num_local_experts=experts.num_experts,
        num_experts_per_tok=experts.experts_per_token,
    )
    config._attn_implementation, config._experts_implementation = "sinks", "grouped_mm"
    layer = GptOssDecoderLayer(config, 0)
    angles = torch.empty(NUM_SEQUENCES, TOKENS, OSS.head_dim // 2)
    return lambda x: layer(x, position_embeddings=(angles, angles), attention_mask=None)


@pytest.mark.parametrize("kind", [EXPERT_LAYER, WINDOWED_EXPERT_LAYER])
def test_a_layer_of_gpt_oss_is_byte_exact(kind: BlockKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that knows windows keeps as much with one."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sinks", with_sinks)
    assert derived(OSS, "fsdp", kind=kind) == counted(gpt_oss_layer, NUM_SEQUENCES, TOKENS)


def test_the_gate_of_transformers_shared_experts_is_byte_exact_by_itself() -> None:
    """In a whole layer nothing of it is at the peak; here experts hand over what they are given."""
    num, width = NUM_SEQUENCES * TOKENS, SPEC.hidden_size
    with fake_cluster(0, 1):
        with default_dtype(torch.bfloat16):
            layer = module_of(transformers_layer(GATED)).mlp

        def run(x: Tensor, shared: Tensor, routed: Tensor) -> Tensor:
            with (
                patch.object(type(layer.shared_expert), "forward", lambda *_: shared),
                patch.object(type(layer.gate), "forward", lambda *_: (None, None, None)),
                patch.object(type(layer.experts), "forward", lambda *_: routed),
            ):
                return layer(x).flatten(0, 1)

        given = [Given((1, num, width)), *[Given((num, width))] * 2]
        found = count_pass(run, given, RankOracle({}))

    def build(block: Block) -> Sequence[graph.Tensor]:
        dims = Dim("tokens", num), Dim("hidden", width)
        x, shared, routed = (block.tensor(name, *dims) for name in ("x", "shared", "routed"))
        with block.module(x, shared, routed):
            beside = gated(block, x, shared)
            pass_through(block, [routed, beside], routed.like("all experts out"))
            block.hold(beside)
        return x, shared, routed

    assert GraphCase(build=build).derive() == found
