"""Megatron-FSDP around Megatron-Core's GPT, on a rank whose tensors have no data."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from meshwright.validate.programs.fused import accumulate_weight_gradient
from meshwright.validate.ranks import ByteKind
from witnesses import apex

apex.install()  # before Megatron-Core, which looks for it

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from megatron.core.transformer import TransformerConfig

Wrapper = mcore_fsdp_adapter.FullyShardedDataParallel
from_group, matmul = DeviceMesh.from_group, torch.matmul


class Idle:
    """A stream, or an event on one: nothing runs there, and nothing is waited for."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take what a stream is made with."""

    def wait(self, *_: object) -> None:
        """Be done."""

    wait_stream = wait_event = synchronize = record = wait

    def record_event(self, *_: object) -> "Idle":
        """Return an event that has come."""
        return self


def product(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a product; over an fp32 gradient of a weight it is written in one kernel.

    Megatron-Core's own layers ask PyTorch for that, which takes no 16-bit tensors there; those of
    Transformer Engine do it so.
    """
    if out is None:
        return matmul(left, right)
    accumulate_weight_gradient(out, right, left.t())
    return out


def with_data(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let *function* make tensors of ranks that it reads."""

    def run(*args: object, **kwargs: object) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


def mesh_of(groups: object, device_type: str, **kwargs: object) -> DeviceMesh:
    """Return a mesh of CPUs in the place of GPUs."""
    return with_data(from_group)(groups, device_type="cpu", **kwargs)


def answers() -> Iterator[AbstractContextManager[object]]:
    """Yield patches for streams, for values and for Transformer Engine's kernels."""
    yield patch.object(torch, "matmul", product)
    yield patch.multiple(
        torch.cuda, Stream=Idle, Event=Idle, current_stream=Idle, stream=lambda _: nullcontext()
    )
    yield patch.multiple(
        mcore_fsdp_adapter,
        _get_dp_tp_mesh=with_data(mcore_fsdp_adapter._get_dp_tp_mesh),
        _get_hsdp_tp_mesh=with_data(mcore_fsdp_adapter._get_hsdp_tp_mesh),
        TELinear=type("TELinear", (), {}),
    )
    yield patch.object(DeviceMesh, "from_group", mesh_of)
    yield patch.object(Wrapper, "sync_rng_states_across_tp_group", lambda _: None)
    # It compares offsets of shards, which have no values.
    yield patch.object(param_and_grad_buffer, "validate_uneven_dtensor", lambda _: None)


def wrap(
    config: TransformerConfig,
    module: torch.nn.Module,
    units: Sequence[type[torch.nn.Module]] | None = None,
    **settings: Any,
) -> Wrapper:
    """Return *module* sharded as ``--data-parallel-sharding-strategy optim_grads_params`` does.

    Args:
        config: Of Megatron-Core.
        module: The model.
        units: Classes of FSDP units; by default a transformer layer.
        settings: Of DistributedDataParallelConfig, beside the usual ones.
    """
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    config_of_shards = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        # As get_model of Megatron-LM's megatron/training/training.py has it.
        bucket_size=max(40_000_000, 1_000_000 * ranks),
        **settings,
    )
    # It asks whether the module is to lie on this device, by its number.
    with patch.object(torch.cuda, "current_device", lambda: 0):
        return Wrapper(config, config_of_shards, module, units, device=torch.device("cpu"))


def persistent_tensors(wrapped: Wrapper) -> Iterator[tuple[Tensor, ByteKind]]:
    """Yield shards of weights, gradients and fp32 weights."""
    for group in wrapped.param_and_grad_buffer.parameter_groups:
        yield group.model_weight_buffer.data, ByteKind.PARAMETERS
        yield group.main_grad_buffer.data, ByteKind.GRADIENTS
        yield group.main_weight_buffer.data, ByteKind.OPTIMIZER
