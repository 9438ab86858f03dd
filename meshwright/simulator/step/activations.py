"""Offloaded activations: bytes on the host link, copy points in passes, and host memory."""

from collections.abc import Iterator, Mapping, Sequence

from meshwright.hwprofiles import Cluster
from meshwright.simulator.costs import CostModel
from meshwright.simulator.engine import CopyPoint
from meshwright.simulator.layout import ResolvedPlan, Stage
from meshwright.simulator.memory import BlockMemory
from meshwright.simulator.model import BlockKind
from meshwright.simulator.step.offload import NO_HOST, copy_cost

Blocks = Mapping[BlockKind, BlockMemory[int]]


def activation_refusal(plan: ResolvedPlan, cluster: Cluster) -> str | None:
    """Return the reason why hosts of *cluster* cannot take activations of *plan*, or None."""
    modules = ",".join(plan.offload_modules)
    option = f"offload_modules={modules}" if modules else f"offload_layers={plan.offload_layers}"
    requested = modules or plan.offload_layers
    return NO_HOST.format(option, cluster.name) if requested and cluster.host_link is None else None


def copied_bytes(blocks: Blocks, stage: Stage) -> list[int]:
    """Return the bytes that each layer of *stage* offloads, and reloads, in a microbatch."""
    kinds = (kind for kind, count in stage.offload.passes(stage.layers) for _ in range(count))
    return [blocks[kind].copied for kind in kinds]


def activation_host_bytes(blocks: Blocks, stages: Sequence[Stage]) -> int:
    """Return the host bytes of offloaded activations, of one microbatch in flight.

    Buffers of several microbatches are the same ones (`OffloadTensorPool` of Megatron-Core 0.16;
    PyTorch's allocator of pinned memory).
    """
    # Without a pipeline one microbatch is in flight, which is all that offloading supports.
    return sum(sum(copied_bytes(blocks, stage)) for stage in stages if stage.offload.number)


def forward_points(
    costs: CostModel, stage: Stage, copied: Sequence[int], layers_ps: Sequence[int]
) -> Iterator[CopyPoint]:
    """Yield the copy and wait points of a forward pass.

    A layer's copy starts when it has run.  Transformer Engine has a layer wait for the copy of that
    `LayerOffload.depth` before it (`release_activation_forward_gpu_memory` of pytorch/
    cpu_offload.py); Megatron-Core waits for none.

    Args:
        costs: Cost model of the copies.
        stage: A whole model.
        copied: Bytes that each layer offloads.
        layers_ps: Compute time before each layer, and before the blocks behind all of them.
    """
    offload = stage.offload
    for layer, size in enumerate(copied):
        if offload.waits and 0 <= layer - offload.depth < offload.number:
            yield CopyPoint(layers_ps[layer], layer - offload.depth)
        if size:
            # The copy starts once the layer has made all its activations.
            yield CopyPoint(layers_ps[layer + 1], layer, copy_cost(costs, size).time_ps)


def backward_points(
    costs: CostModel, stage: Stage, copied: Sequence[int], layers_ps: Sequence[int]
) -> Iterator[CopyPoint]:
    """Yield the copy and wait points of a backward pass.

    When the backward of a layer begins, the reload of the layer ``depth - 1`` before it starts, and
    it waits for its own; the last layers' starts with the backward of the head.

    Args:
        costs: Cost model of the copies.
        stage: A whole model.
        copied: Bytes that each layer reloads.
        layers_ps: Compute time before each layer.
    """
    last, ahead = len(copied) - 1, stage.offload.depth - 1
    # No earlier layer's backward could start these reloads.
    for layer in range(last, last - ahead, -1):
        if layer >= 0 and copied[layer]:
            yield CopyPoint(0, layer, copy_cost(costs, copied[layer]).time_ps)
    for layer in range(last, -1, -1):
        reloaded = layer - ahead
        if reloaded >= 0 and copied[reloaded]:
            yield CopyPoint(layers_ps[layer], reloaded, copy_cost(costs, copied[reloaded]).time_ps)
        if copied[layer]:
            yield CopyPoint(layers_ps[layer], layer)
