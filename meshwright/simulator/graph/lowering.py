"""What a block's description leaves open: how a software stack runs its operators."""

from dataclasses import dataclass
from enum import StrEnum

from meshwright.hwprofiles import LossKernel


class WeightGradients(StrEnum):
    """What becomes of a weight's gradient: part of its product, added as it comes, or kept."""

    FUSED = "fused"
    ADDED = "added"
    KEPT = "kept"


@dataclass(frozen=True, kw_only=True, slots=True)
class EightBits:
    """How linear layers multiply in fp8.

    Args:
        keeps_copy: A linear layer keeps the fp8 copy of its input, not the input.
        keeps_weights: fp8 copies of weights are always there.
        gathers: Operands of linear layers are cast before they are gathered.
    """

    keeps_copy: bool
    keeps_weights: bool
    gathers: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """How operators become kernels and autograd nodes.

    Args:
        fuses_products: Products of one input are one product, cut apart afterwards.
        fuses_places: A change of place is part of the product beside it: one node, which keeps
            what it got and gathers again in backward, and sums in place (Megatron); else a node
            of its own (DTensor), where tokens are the second dim, so that their gather or
            scatter copies all of them.
        fuses_residual: Bias, dropout and addition are one kernel.
        saves_first: Operators keep their inputs before they run (PyTorch's own operators).
        weight_gradients: What becomes of them.
        loss: How it is made.
        casts: Products cast fp32 inputs and weights (autocast).
        caches_casts: A weight's cast lives as long as the forward pass.
        eight_bits: How linear layers multiply in fp8, if they do.
    """

    fuses_products: bool
    fuses_places: bool
    fuses_residual: bool
    saves_first: bool
    weight_gradients: WeightGradients
    loss: LossKernel
    casts: bool = False
    caches_casts: bool = True
    eight_bits: EightBits | None = None
