"""What a block's description leaves open: how a software stack runs its operators."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from meshwright.hwprofiles import Kernels, LossKernel


class WeightGradients(StrEnum):
    """What becomes of a weight's gradient: part of its product, added as it comes, or kept."""

    FUSED = "fused"
    ADDED = "added"
    KEPT = "kept"


class EightBits(NamedTuple):
    """How linear layers multiply in 8 bits.

    Args:
        keeps_copy: A linear layer keeps the narrow copy of its input, not the input.
        keeps_weights: Narrow copies of weights are always there.
        gathers: Operands of linear layers are cast before they are gathered.
        scaled: Elements that share a scale of one byte; 0 where a tensor has one.
        pads_experts: Rows of experts are copied ahead of their products, and back behind them.
        opens_experts: The products of experts open what they make by themselves.
        given_up: Parts of a block whose outputs are given up and made again: linear layers keep
            these as they are, in the place of narrow copies.
    """

    keeps_copy: bool
    keeps_weights: bool
    gathers: bool
    scaled: int = 0
    pads_experts: bool = False
    opens_experts: bool = False
    given_up: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """How operators become kernels and autograd nodes.

    Args:
        kernels: How element-wise work runs.
        spells_out: Eager layers are those of transformers, which write RMS norm and GELU in
            PyTorch's operators and have rotary positions by halves.
        looks_up: Eager layers look angles up by the positions of their tokens, and keep these.
        fuses_products: Queries, keys and values are one product, cut apart afterwards.
        fuses_gate: A gated MLP's two inputs are one product.
        fuses_places: A change of place is part of the product beside it: one node, which keeps
            what it got and gathers again in backward, and sums in place (Megatron); else a node
            of its own (DTensor), where tokens are the second dim, so that their gather or
            scatter copies all of them.
        places_apart: Each product places its input itself, also where others read the same one.
        fuses_norms: A norm whose output a single product reads is part of that product.
        fuses_residual: Bias, dropout and addition are one kernel.
        saves_first: Operators keep their inputs before they run (PyTorch's own operators).
        weight_gradients: What becomes of them.
        loss: How it is made.
        casts: Products cast fp32 inputs and weights (autocast).
        caches_casts: A weight's cast lives as long as the forward pass.
        copies_operands: Attention copies keys and values that do not lie as it knows.
        eight_bits: How linear layers multiply in 8 bits, if they do.
        groups_experts: One kernel runs the products of all experts of a rank.
        pads_rows: Rows of experts are filled up to whole lines of a grouped product, behind a
            router in the layers' format.
    """

    kernels: Kernels = Kernels.FUSED
    spells_out: bool = False
    looks_up: bool = False
    fuses_products: bool
    fuses_gate: bool
    fuses_places: bool
    places_apart: bool = False
    fuses_norms: bool = False
    fuses_residual: bool
    saves_first: bool
    weight_gradients: WeightGradients
    loss: LossKernel
    casts: bool = False
    caches_casts: bool = True
    copies_operands: bool = False
    eight_bits: EightBits | None = None
    groups_experts: bool = True
    pads_rows: bool = True

    @property
    def scaled(self) -> int:
        """Elements of 8 bits that share a scale of one byte; 0 where a tensor has one."""
        return self.eight_bits.scaled if self.eight_bits else 0

    @property
    def is_eager(self) -> bool:
        """Whether each operator is a kernel."""
        return self.kernels is Kernels.EAGER

    @property
    def is_compiled(self) -> bool:
        """Whether what backward reads is chosen by torch.compile's partitioner."""
        return self.kernels is Kernels.COMPILED

    @property
    def is_local(self) -> bool:
        """Whether layers are those of Megatron-Core's local spec: no kernels of its own."""
        return self.is_eager and self.fuses_places
