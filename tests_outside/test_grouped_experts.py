"""Experts in grouped products as Megatron-Core's own module runs them, against the graph's.

Its products, and the kernel that its activation is compiled to, need a GPU: others stand for them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from block_graph import as_measured
from block_witness import Given, Measured, count_pass
from torch import Tensor, nn
from witnesses import megatron_config, megatron_job
from witnesses.boundary import modules_converted, values_answered
from witnesses.expert_layers import LLAMA4, OSS, SPEC
from witnesses.strided import StridedElements

from meshwright.hwprofiles import Attention, Precision, Recompute, RecomputeModule, load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.blocks.kinds import lowering_of
from meshwright.simulator.blocks.parts.megatron_experts import _grouped_mlp
from meshwright.simulator.blocks.parts.routed_dims import ExpertMesh, RoutedDims
from meshwright.simulator.graph import (
    Backward,
    Block,
    Dim,
    Repetition,
    Tape,
    Traffic,
    WeightGradients,
)
from meshwright.simulator.model import Experts, ModelSpec
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.programs.fused import AutogradFunction, Context
from meshwright.validate.programs.megatron import default_dtype

from megatron.core.fusions import fused_bias_geglu, fused_bias_swiglu  # isort: skip  (after what stands for Apex)
from megatron.core.transformer.mlp import MLPSubmodules  # isort: skip
from megatron.core.transformer.moe.experts import TEGroupedMLP  # isort: skip

NUM_ROWS = 4096
FORMATS = {Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}
# As Megatron-Bridge's provider of gpt-oss has them (models/gpt_oss/gpt_oss_provider.py, v0.3.0).
OSS_SETTINGS = {
    "add_bias_linear": True,
    "bias_dropout_fusion": False,
    "activation_func": fused_bias_geglu.quick_gelu,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
}


class GroupedProduct(AutogradFunction):
    """Rows of each expert times its own weight, in one kernel that keeps both."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, *biases: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, *biases)
        rows = x.view(len(weight), -1, x.shape[-1])
        return torch.bmm(rows, weight.transpose(1, 2)).view(len(x), -1)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, ...]:
        x, weight, *biases = ctx.saved_tensors
        rows, given = (each.view(len(weight), -1, each.shape[-1]) for each in (x, gradient))
        back = torch.bmm(given, weight).view_as(x)
        return back, torch.bmm(given.transpose(1, 2), rows), *map(torch.empty_like, biases)


class GroupedLinear(nn.Module):
    """What Transformer Engine's module does: it adds biases in its products, or gives them out."""

    def __init__(
        self, num: int, inputs: int, outputs: int, *, bias: bool, skip_bias_add: bool, **_: object
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, outputs, inputs))
        own = [nn.Parameter(torch.empty(outputs)) for _ in range(num * bias)]
        self.biases, self.gives_out = nn.ParameterList(own), bias and skip_bias_add

    def forward(self, x: Tensor, _rows: object) -> tuple[Tensor, list[Tensor] | None]:
        added = () if self.gives_out else tuple(self.biases)
        made = GroupedProduct.apply(x, self.weight, *added)
        return made, list(self.biases) if self.gives_out else None


@contextmanager
def kernels() -> Iterator[None]:
    """Let the compiled activation be one kernel each way, which makes what it returns."""

    def forward(x: Tensor, weights: Tensor, *_offset: Tensor) -> Tensor:
        return x.new_empty(len(x), x.shape[-1] // 2)

    def backward(
        _gradient: Tensor, x: Tensor, weights: Tensor, *_offset: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(weights)

    with (
        patch.object(fused_bias_swiglu, "weighted_swiglu", forward),
        patch.object(fused_bias_swiglu, "weighted_swiglu_back", backward),
        patch.object(fused_bias_geglu, "weighted_quick_geglu", forward),
        patch.object(fused_bias_geglu, "weighted_quick_geglu_back", backward),
    ):
        yield


def plan_of(modules: tuple[RecomputeModule, ...]) -> ResolvedPlan:
    return ResolvedPlan(
        stages=(2,),
        attention=Attention.FLASH,
        recompute=Recompute.SELECTIVE if modules else Recompute.NONE,
        recompute_modules=modules,
    )


JOB = TrainingJob(model=SPEC, global_batch_size=2, seq_len=1024, precision=Precision.BF16)


def counted(experts: Experts, modules: tuple[RecomputeModule, ...], shares: Precision) -> Measured:
    """Return what Megatron-Core's module does with rows that are sorted by expert."""
    with fake_cluster(0, 1), values_answered(), modules_converted(), megatron_job.answers():
        config = replace(
            megatron_config.transformer_config(JOB, plan_of(())),
            num_moe_experts=experts.num_experts,
            moe_ffn_hidden_size=experts.hidden_size,
            moe_router_topk=experts.experts_per_token,
            moe_router_score_function=experts.scores,
            moe_apply_probs_on_input=experts.weighs_inputs,
            moe_grouped_gemm=True,
            bias_activation_fusion=True,
            **(OSS_SETTINGS if experts.bias else {}),
            **megatron_config.recompute_settings(plan_of(modules)),
        )
        own = SimpleNamespace(ep=None, expt_tp=None)
        parts = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        with default_dtype(torch.bfloat16):
            grouped = TEGroupedMLP(experts.num_experts, config, parts, own)
        each = NUM_ROWS // experts.num_experts
        sizes = SimpleNamespace(tolist=lambda: [each] * experts.num_experts)
        given = [
            Given((NUM_ROWS, SPEC.hidden_size)),
            Given((NUM_ROWS,), FORMATS[shares]),
        ]
        with kernels():
            return count_pass(lambda x, p: grouped(x, sizes, p)[0], given, RankOracle({}))


def walked(experts: Experts, modules: tuple[RecomputeModule, ...], shares: Precision) -> Backward:
    """Return the walk of the graph that stands for them."""
    shape = BlockShape.of(JOB, plan_of(modules), load_stack("megatron-core"))
    block = Block({}, lowering_of(shape), shape.element_bytes)
    rows, hidden = Dim("rows", NUM_ROWS), Dim("hidden", SPEC.hidden_size)
    x, weights = (
        block.tensor("rows", rows, hidden),
        block.tensor("weights", rows, width=shares.num_bytes),
    )
    count = Dim("tokens", NUM_ROWS // experts.experts_per_token)
    tokens = block.tensor("tokens", count, Dim("batch", 1), hidden)
    mesh = ExpertMesh()
    dims = RoutedDims.of(tokens, experts, mesh)
    with block.module(x):
        _grouped_mlp(block, x, weights, dims, experts)
    tape = Tape(block, Repetition(frozenset(modules), held=frozenset(modules)))
    tape.run_forward(x, weights)
    backward = Backward(tape, WeightGradients.KEPT)
    backward.run()
    return backward


@pytest.mark.parametrize(
    ("model", "shares"),
    [
        (SPEC, Precision.BF16),
        (LLAMA4, Precision.BF16),
        (OSS, Precision.BF16),
        (OSS, Precision.FP32),
    ],
    ids=["mixtral", "llama 4", "gpt-oss", "gpt-oss, shares in fp32"],
)
@pytest.mark.parametrize("modules", [(), (RecomputeModule.MOE_ACT,)], ids=["kept", "moe_act"])
def test_experts_in_grouped_products_are_byte_exact(
    model: ModelSpec, shares: Precision, modules: tuple[RecomputeModule, ...]
) -> None:
    assert model.experts is not None
    found = counted(model.experts, modules, shares)
    if model.experts.bias:
        # The offset is a tensor of one number, which backward keeps; what the checkpoint makes of
        # the shares' gradient stays apart until all of its gradients are there.
        kept = 0 if modules else Precision.BF16.num_bytes
        apart = Precision.BF16.num_bytes + shares.num_bytes * NUM_ROWS if modules else kept
        found = replace(
            found,
            saved_bytes=found.saved_bytes - kept,
            forward_peak_bytes=found.forward_peak_bytes - kept,
            backward_peak_bytes=found.backward_peak_bytes - apart,
        )
    assert as_measured(walked(model.experts, modules, shares)) == found


@pytest.mark.parametrize("modules", [(), (RecomputeModule.MOE_ACT,)], ids=["kept", "moe_act"])
def test_kernels_over_slices_make_as_many_elements(modules: tuple[RecomputeModule, ...]) -> None:
    assert OSS.experts is not None
    with StridedElements() as mode:
        counted(OSS.experts, modules, Precision.BF16)
    steps = walked(OSS.experts, modules, Precision.BF16).tape.steps
    works = [each.work for each in steps if isinstance(each.work, Traffic)]
    assert mode.count == sum(each.strided or 0 for each in works)
