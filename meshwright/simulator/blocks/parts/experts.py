"""Routed experts (MoE), by the code of the stack."""

from meshwright.simulator.blocks.parts.feed_forward import Shared
from meshwright.simulator.blocks.parts.megatron_experts import megatron
from meshwright.simulator.blocks.parts.routed_dims import ExpertMesh, RoutedDims
from meshwright.simulator.blocks.parts.titan_experts import padded_torchtitan, torchtitan
from meshwright.simulator.blocks.parts.transformers_experts import transformers
from meshwright.simulator.graph import Block, Placement, Tensor, place, replicated
from meshwright.simulator.layout import Axis
from meshwright.simulator.model import Experts


def routed(
    block: Block,
    x: Tensor,
    experts: Experts,
    mesh: ExpertMesh,
    outside: Placement,
    shared: Shared | None,
) -> Tensor:
    """Return the output of routed and shared experts.

    Args:
        block: Block to add the operators to.
        x: Normalised tokens.
        experts: Sizes of the experts.
        mesh: Expert-parallel layout.
        outside: Placement of tokens outside of tensor-parallel regions.
        shared: The shared experts, if there are any.
    """
    dims = RoutedDims.of(x, experts, mesh)
    with block.module(x):
        if block.lowering.fuses_redistribute:
            return megatron(block, x, experts, dims, shared)
        x = place(block, x, replicated(x.at, Axis.TP))
        if block.lowering.uses_transformers_ops:
            return place(block, transformers(block, x, dims, experts, shared), outside)
        if block.lowering.pads_rows:
            return padded_torchtitan(block, x, experts, dims, outside, shared)
        return torchtitan(block, x, dims, outside, shared)
