"""Activations on the host: what of them crosses the link, when, and what the host keeps."""

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
    """Return why activations of *plan* cannot wait on hosts of *cluster*, or None when they can."""
    modules = ",".join(plan.offload_modules)
    said = f"offload_modules={modules}" if modules else f"offload_layers={plan.offload_layers}"
    asked = modules or plan.offload_layers
    return NO_HOST.format(said, cluster.name) if asked and cluster.host_link is None else None


def copied_bytes(blocks: Blocks, stage: Stage) -> list[int]:
    """Return what each layer of *stage* copies to the host, and back, in a microbatch."""
    kinds = (kind for kind, count in stage.offload.passes(stage.layers) for _ in range(count))
    return [blocks[kind].copied for kind in kinds]


def activation_host_bytes(blocks: Blocks, stages: Sequence[Stage]) -> int:
    """Return what the host keeps of a microbatch's activations, the only ones without a pipeline.

    Buffers of several microbatches are the same ones (`OffloadTensorPool` of Megatron-Core 0.16;
    PyTorch's allocator of pinned memory).
    """
    return sum(sum(copied_bytes(blocks, stage)) for stage in stages if stage.offload.number)


def forward_points(
    costs: CostModel, stage: Stage, copied: Sequence[int], layers_ps: Sequence[int]
) -> Iterator[CopyPoint]:
    """Yield where a forward pass copies and waits.

    A layer's copy starts when it has run.  Transformer Engine has a layer wait for the copy of that
    `LayerOffload.depth` before it (`release_activation_forward_gpu_memory` of pytorch/
    cpu_offload.py); Megatron-Core waits for none.

    Args:
        costs: What copies are priced with.
        stage: A whole model.
        copied: Bytes that each layer copies.
        layers_ps: What is computed before each layer, and before what is behind all of them.
    """
    offload = stage.offload
    for layer, size in enumerate(copied):
        if offload.waits and 0 <= layer - offload.depth < offload.number:
            yield CopyPoint(layers_ps[layer], layer - offload.depth)
        if size:
            yield CopyPoint(layers_ps[layer + 1], layer, copy_cost(costs, size).time_ps)


def backward_points(
    costs: CostModel, stage: Stage, copied: Sequence[int], layers_ps: Sequence[int]
) -> Iterator[CopyPoint]:
    """Yield where a backward pass copies and waits.

    When the backward of a layer begins, the tensors of that ``depth - 1`` before it begin to come
    back, and it waits for its own; those of last layers come when that of the head begins.

    Args:
        costs: What copies are priced with.
        stage: A whole model.
        copied: Bytes that each layer copies.
        layers_ps: What is computed before each layer.
    """
    last, ahead = len(copied) - 1, stage.offload.depth - 1
    for layer in range(last, last - ahead, -1):
        if layer >= 0 and copied[layer]:
            yield CopyPoint(0, layer, copy_cost(costs, copied[layer]).time_ps)
    for layer in range(last, -1, -1):
        back = layer - ahead
        if back >= 0 and copied[back]:
            yield CopyPoint(layers_ps[layer], back, copy_cost(costs, copied[back]).time_ps)
        if copied[layer]:
            yield CopyPoint(layers_ps[layer], layer)
