"""Where Megatron-Core cuts gradients into buckets, of layers in modules of Transformer Engine.

Its own experts, attention, layer and DistributedDataParallel; Transformer Engine's two linear
modules, of which the order of their weights counts alone, have placeholders (`LayerNormLinear` and
`GroupedLinear`, transformer_engine/pytorch/module, 2.9).
"""

from collections.abc import Iterable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from witnesses import megatron_experts
from witnesses.expert_layers import HEADS, OSS, PLAIN, SPEC, TOKENS
from witnesses.megatron_experts import dispatched, megatron_module

from meshwright.hwprofiles import load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import EXPERT_LAYER, BlockRun, ModelSpec
from meshwright.simulator.replication import bucket_parts
from meshwright.validate.counting import fake_cluster
from meshwright.validate.programs.megatron import default_dtype

from megatron.core.distributed import (  # isort: skip  (after what stands for Apex)
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.mlp import MLPSubmodules  # isort: skip
from megatron.core.transformer.moe.experts import TEGroupedMLP  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip

RANKS, LAYERS = 8, 3
local_spec = megatron_experts.get_gpt_layer_local_spec


class NormLinear(nn.Module):
    """A product behind its norm."""

    def __init__(
        self, inputs: int, outputs: int, *, config: object, bias: bool, **_: object
    ) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.empty(inputs))
        if config.normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.empty(inputs))
        outputs //= config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None


class GroupedLinear(nn.Module):
    """Products of experts, each of which has its bias behind its weight."""

    def __init__(self, num: int, inputs: int, outputs: int, *, bias: bool, **_: object) -> None:
        super().__init__()
        shapes = {"weight": (outputs, inputs)} | ({"bias": (outputs,)} if bias else {})
        for index in range(num):
            for name, shape in shapes.items():
                weight = nn.Parameter(torch.empty(shape))
                weight.allreduce = False  # TEGroupedLinear says so where ranks divide experts
                self.register_parameter(f"{name}{index}", weight)


def engine_spec(**said: object) -> ModuleSpec:
    """Return Megatron-Core's local spec with its modules of Transformer Engine."""
    spec = local_spec(**said)
    parts = spec.submodules
    own = parts.self_attention
    attention = replace(own, submodules=replace(own.submodules, linear_qkv=NormLinear))
    grouped = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    experts = ModuleSpec(module=TEGroupedMLP, submodules=grouped)
    mlp = replace(parts.mlp, submodules=replace(parts.mlp.submodules, experts=experts))
    parts = replace(parts, input_layernorm=IdentityOp, self_attention=attention, mlp=mlp)
    return replace(spec, submodules=parts)


def counted(model: ModelSpec, tp: int, ep: int, limit: int) -> list[list[int]]:
    """Return the parameters of each bucket of layers, and of their experts, in order."""
    with fake_cluster(0, RANKS), dispatched(model, tp):
        with (
            default_dtype(torch.bfloat16),
            patch.object(megatron_experts, "get_gpt_layer_local_spec", engine_spec),
        ):
            layers = [megatron_module(model, tp, ep, 1) for _ in range(LAYERS)]
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=limit
        )
        found = DistributedDataParallel(layers[0].config, settings, nn.ModuleList(layers))
        return [sizes(found.buffers), sizes(found.expert_parallel_buffers)]


def sizes(buffers: Iterable[object]) -> list[int]:
    return [
        sum(weight.numel() for weight in bucket.params)
        for buffer in buffers
        for bucket in buffer.buckets
    ]


def predicted(model: ModelSpec, tp: int, ep: int, limit: int) -> list[list[int]]:
    plan = ResolvedPlan(tp=tp, dp=RANKS // tp, ep=ep, etp=1, zero_stage=1, stages=(LAYERS,))
    changes = {"gradient_bucket_parameters": limit, "gradient_bucket_parameters_per_replica": 0}
    stack = load_stack("megatron-core").model_copy(
        update=changes | {"buckets_first_stage_only": False}
    )
    job = TrainingJob(model=model, global_batch_size=RANKS, seq_len=TOKENS)
    shape = BlockShape.of(job, plan, stack)
    stage = Stage((BlockRun(EXPERT_LAYER, LAYERS),), has_embedding=False, has_head=False)
    parts = bucket_parts(shape, stage, RANKS // tp)[::-1]
    return [
        [size for part in parts for size in part.buckets],
        [size for part in parts for size in part.expert_buckets],
    ]


# Limits that are no sums of a few weights: Megatron-Core counts the gaps behind the few numbers
# of sinks and biases, too.
@pytest.mark.parametrize("limit", [1000, 150_000, 300_000, 450_000, 1_234_567])
@pytest.mark.parametrize(
    ("model", "tp", "ep"),
    [(OSS, 1, 4), (OSS, 2, 4), (PLAIN, 1, 2), (SPEC, 1, 8), (HEADS, 2, 4)],
    ids=["gpt-oss", "gpt-oss tp", "plain", "mixtral", "qwen tp"],
)
def test_megatron_cuts_gradients_where_ours_are_cut(
    model: ModelSpec, tp: int, ep: int, limit: int
) -> None:
    if tp > 1:  # PyTorch's RMSNorm, for the norms that stay apart, does not go with split tokens
        model = model.model_copy(update={"norm": "layernorm"})
    assert counted(model, tp, ep, limit) == predicted(model, tp, ep, limit)
