"""Megatron-Core's configuration of a plan, and the specs of its layers."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.hwprofiles import Precision, Recompute, RecomputeMethod
from meshwright.planner.tables.texts import layout_text
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.simulator.layout import recomputed_modules
from meshwright.simulator.model import ModelSpec
from witnesses import apex

apex.install()  # before Megatron-Core, which looks for it

from megatron.core.activations import squared_relu
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def block_spec(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """Return the spec of a stage's layers without Transformer Engine."""
    kind = config.normalization
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=kind, vp_stage=stage
    )
    # The norm after the last layer would be Apex's, which has no RMSNorm.
    return replace(spec, layer_norm=WrappedTorchNorm) if kind == "RMSNorm" else spec


def prediction_spec(config: TransformerConfig, stage: int | None) -> ModuleSpec | None:
    """Return the spec of the MTP layers, where there are some.

    They are as the model's last layer, which may be on another stage.
    """
    if not config.mtp_num_layers:
        return None
    layers = get_gpt_decoder_layer_specs(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    return get_gpt_mtp_block_spec(config, layers[-1], use_transformer_engine=False, vp_stage=stage)


def recompute_settings(plan: ResolvedPlan) -> dict[str, object]:
    """Return the recompute options of a plan."""
    if plan.recompute is Recompute.NONE:
        return {}
    if plan.recompute is Recompute.SELECTIVE:
        modules = recomputed_modules(plan.recompute, plan.recompute_modules)
        return {
            "recompute_granularity": "selective",
            "recompute_modules": [*map(str, modules)],
        }
    default = RecomputeMethod.BLOCK if plan.recompute_layers else RecomputeMethod.UNIFORM
    return {
        "recompute_granularity": "full",
        "recompute_method": str(plan.recompute_method or default),
        "recompute_num_layers": plan.recompute_layers or 1,
    }


def embedding_ranks(ranks: list[int], *, config: TransformerConfig, tied: bool) -> list[int]:
    """Return the *ranks* of a pipeline that share an embedding, as pretrain_gpt.py does."""
    ends = [ranks[0], *([ranks[-1]] if tied else []), *get_mtp_ranks(ranks, config)]
    return sorted({*ends})


def layout_of(plan: ResolvedPlan, count_mtp_layers: int = 0) -> str | None:
    """Return the pipeline layout of stages that are not equal."""
    if len({*plan.stages}) <= 1:
        return None
    return layout_text(plan.stages, count_mtp_layers, plan.prediction_stage)


def activation_of(model: ModelSpec) -> Callable[[Tensor], Tensor]:
    """Return the activation of Megatron-Core's MLP of a model."""
    if model.activation == "squared relu":
        return squared_relu
    return functional.silu if model.gated_mlp else functional.gelu


def transformer_config(job: TrainingJob, plan: ResolvedPlan) -> TransformerConfig:
    """Return Megatron-Core's configuration of a plan."""
    model = job.transformer
    is_bf16 = job.precision is Precision.BF16
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    dropout = 0.1 if model.dropout else 0.0
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        qk_layernorm=model.qk_norm == "head",
        ffn_hidden_size=model.ffn_hidden_size,
        add_bias_linear=model.mlp_bias,
        add_qkv_bias=model.attention_bias,
        gated_linear_unit=model.gated_mlp,
        activation_func=activation_of(model),
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        hidden_dropout=dropout,
        attention_dropout=dropout,
        bf16=is_bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=plan.tp,
        pipeline_model_parallel_size=plan.pp,
        virtual_pipeline_model_parallel_size=(
            plan.num_virtual_stages if plan.num_virtual_stages > 1 else None
        ),
        pipeline_model_parallel_layout=layout_of(plan, model.prediction_layers),
        mtp_num_layers=model.prediction_layers or None,
        sequence_parallel=plan.sequence_parallel,
        perform_initialization=False,
        masked_softmax_fusion=True,
        gradient_accumulation_fusion=True,
        overlap_p2p_comm=plan.num_virtual_stages > 1,
        microbatch_group_size_per_vp_stage=plan.microbatch_group_size,
        batch_p2p_comm=plan.num_virtual_stages == 1,
        deallocate_pipeline_outputs=True,
        **recompute_settings(plan),
    )
