"""Tensor parallelism by DTensor, as torchtitan lays it out: inputs gathered once, shared.

A layer communicates four times in forward and backward: queries, keys and values share one
input, and so do gate and value.  Each of these is a Replicate input whose gradient is a sum over
the ranks: an all-reduce, or with sequence parallelism a gather forward and a scatter backward.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from meshwright.validate.programs.layers import TransformerLayer, VirtualStage


class SplitPositions(ParallelStyle):
    """Whole position embedding of which each rank looks up the rows of its own tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(_module: nn.Module, inputs: tuple[Tensor, ...]) -> DTensor:
            whole = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            return whole.redistribute(placements=[Shard(0)])

        def local(_module: nn.Module, _inputs: tuple[Tensor, ...], rows: DTensor) -> Tensor:
            return rows.to_local()

        for name, parameter in module.named_parameters(recurse=False):
            whole = DTensor.from_local(parameter.data, device_mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(whole))
        module.register_forward_pre_hook(split)
        module.register_forward_hook(local)
        return module


def split_over_tensor_ranks(
    stage: VirtualStage, mesh: DeviceMesh, *, sequence_parallel: bool
) -> None:
    """Split *stage* in place; communicates nothing, each rank keeps its part of its weights.

    Args:
        stage: Made of `PlainParts`.
        mesh: One-dimensional, of the tensor-parallel ranks.
        sequence_parallel: Split tokens between the tensor-parallel regions.
    """
    outside: Placement = Shard(1) if sequence_parallel else Replicate()
    for layer in stage.layers.values():
        assert isinstance(layer, TransformerLayer)
        _parallelize(layer, mesh, _layer_styles(layer, outside))
    if stage.embedding is not None:
        _parallelize(stage.embedding, mesh, _embedding_styles(stage.embedding, outside))
    if stage.head is not None:
        _parallelize(stage.head, mesh, _head_styles(outside))


def _parallelize(module: nn.Module, mesh: DeviceMesh, styles: dict[str, ParallelStyle]) -> None:
    # None: all ranks have the same weights, so that nothing is broadcast.
    parallelize_module(module, mesh, styles, src_data_rank=None)


def _layer_styles(layer: TransformerLayer, outside: Placement) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {}
    for block, column, row in (
        ("attention", ("qkv", "query", "key", "value"), "output"),
        ("mlp", ("gate", "expand"), "contract"),
    ):
        styles[block] = PrepareModuleInput(
            input_layouts=(outside,), desired_input_layouts=(Replicate(),)
        )
        inside = dict(getattr(layer, block).named_children())
        styles |= {f"{block}.{name}": ColwiseParallel() for name in column if name in inside}
        styles[f"{block}.{row}"] = RowwiseParallel(output_layouts=outside)
        if outside.is_shard():
            styles[f"{block}_norm"] = SequenceParallel()
    return styles


def _embedding_styles(embedding: nn.Module, outside: Placement) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
    }
    if outside.is_shard() and getattr(embedding, "positions", None) is not None:
        styles["positions"] = SplitPositions()
    return styles


def _head_styles(outside: Placement) -> dict[str, ParallelStyle]:
    # Logits stay a DTensor, which loss_parallel needs.
    output = ColwiseParallel(input_layouts=outside, use_local_output=False)
    styles: dict[str, ParallelStyle] = {"output": output}
    if outside.is_shard():
        styles["norm"] = SequenceParallel()
    return styles
