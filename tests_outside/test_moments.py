"""What Megatron-Core's optimizer and gradients take beside weights: states, and dummy gradients."""

import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer, optimizer_config
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers
from torch import Tensor, nn

from meshwright.hwprofiles import Precision, load_stack
from meshwright.simulator.layout import optimizer_bytes

TYPES = {
    Precision.FP32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
    Precision.FP8: torch.uint8,
}
NUMEL = 96


class FusedAdam:
    """Transformer Engine's, of which the configuration reads the signature alone."""

    def __init__(
        self,
        master_weight_dtype: torch.dtype,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        use_decoupled_grad: object,
    ) -> None:
        """Take what it takes."""


def config_of(
    training: Precision, moments: torch.dtype, **said: object
) -> optimizer_config.OptimizerConfig:
    """Return Megatron-Core's own configuration, checked as it does."""
    module = ModuleType("transformer_engine.pytorch.optimizers")
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    names = ("transformer_engine", "transformer_engine.pytorch")
    fakes = {name: ModuleType(name) for name in names} | {module.__name__: module}
    with (
        patch.dict(sys.modules, fakes),
        patch.object(optimizer_config, "is_te_min_version", lambda _: True),
    ):
        return optimizer_config.OptimizerConfig(
            bf16=training is not Precision.FP16,
            fp16=training is Precision.FP16,
            fp8_recipe="mxfp8" if training is Precision.MXFP8 else None,
            reuse_grad_buf_for_mxfp8_param_ag=True,
            use_distributed_optimizer=True,
            use_precision_aware_optimizer=True,
            exp_avg_dtype=moments,
            exp_avg_sq_dtype=moments,
            **said,
        )


def allocated_bytes(config: optimizer_config.OptimizerConfig) -> int:
    """Return the bytes of states that a distributed optimizer allocates for a weight."""
    weight = nn.Parameter(torch.empty(NUMEL, dtype=torch.bfloat16))
    found: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    keys = dict.fromkeys(distrib_optimizer.param_group_identifier_keys, 1)
    groups = [{"params": [0], "step": 1, **keys}]
    ranges = {"gbuf_world": range(NUMEL)}
    inner = SimpleNamespace(
        state={},
        state_dict=lambda: {"param_groups": groups},
        load_state_dict=found.update,
    )
    optimizer = SimpleNamespace(
        config=config,
        ddp_config=SimpleNamespace(use_megatron_fsdp=False),
        is_stub_optimizer=False,
        optimizer=inner,
        grad_scaler=None,
        gbuf_ranges=[{torch.bfloat16: [{"param_map": {weight: ranges}}]}],
        model_param_group_index_map={weight: (0, 0)},
    )
    state = {"optimizer": {"param_groups": groups}}
    with patch.object(torch.cuda, "current_device", lambda: "cpu"):
        DistributedOptimizer.load_state_dict(optimizer, state)
    tensors = found["state"][0]
    return sum(each.nbytes for name, each in tensors.items() if name != "step")


@pytest.mark.parametrize("training", [Precision.BF16, Precision.FP16, Precision.MXFP8])
@pytest.mark.parametrize("moments", TYPES)
def test_states_take_what_megatron_core_allocates(training: Precision, moments: Precision) -> None:
    config = config_of(training, TYPES[moments])
    found = allocated_bytes(config) // NUMEL
    if not config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        # It holds the fp32 copy itself then (_build_model_and_main_param_groups).
        found += torch.float32.itemsize
    ours, _ = optimizer_bytes(load_stack("megatron-core"), training, moments)
    assert ours == found


@pytest.mark.parametrize("training", [Precision.FP16, Precision.MXFP8])
def test_copies_of_weights_in_fp16_take_what_megatron_core_allocates(training: Precision) -> None:
    told = {"main_params_dtype": torch.float16, "store_param_remainders": False}
    config = config_of(training, torch.bfloat16, **told)
    assert config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    stack = load_stack("megatron-core").model_copy(update={"main_precision": Precision.FP16})
    ours, scratch = optimizer_bytes(stack, training, Precision.BF16)
    assert ours == allocated_bytes(config) // NUMEL
    assert scratch == torch.float32.itemsize


def test_whole_copies_of_weights_take_what_megatron_core_allocates() -> None:
    config = config_of(Precision.BF16, torch.bfloat16, store_param_remainders=False)
    stack = load_stack("megatron-core").model_copy(update={"parameter_remainders": False})
    ours, _ = optimizer_bytes(stack, Precision.BF16, Precision.BF16)
    assert ours == allocated_bytes(config) // NUMEL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_added_to_its_sum_leaves_a_stand_in_of_the_weights_shape(
    dtype: torch.dtype,
) -> None:
    """Where Transformer Engine is there, it is asked for one of each shape, which it keeps."""
    kept: dict[tuple[int, ...], Tensor] = {}

    def get_dummy_wgrad(shape: list[int], dtype: torch.dtype) -> Tensor:
        return kept.setdefault((*shape,), torch.empty(shape, dtype=dtype)).detach()

    weights = [nn.Parameter(torch.ones(rows, 4, dtype=dtype)) for rows in (6, 6, 8)]
    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=lambda *_: None)
    engine = {"HAVE_TE": True, "get_dummy_wgrad": get_dummy_wgrad}
    engine |= {"fused_weight_gradient_mlp_cuda": kernel}
    x = torch.ones(2, 1, 4, dtype=dtype, requires_grad=True)
    with patch.multiple(layers, create=True, **engine):
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            given = x, weight, None, True, False, False, None, False, None
            made = layers.LinearWithGradAccumulationAndAsyncCommunication.apply(*given)
            made.sum().backward()
    assert {shape: each.dtype for shape, each in kept.items()} == {(6, 4): dtype, (8, 4): dtype}
    assert all(weight.grad_added_to_main_grad for weight in weights)  # type: ignore[attr-defined]
