"""Lowering of a block: kernels and autograd nodes of a software stack."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from meshwright.hwprofiles import Kernels, LossKernel


class WeightGradients(StrEnum):
    """Weight gradient: fused into wgrad's GEMM (main_grad), accumulated, or kept to the end."""

    FUSED = "fused"
    ADDED = "added"
    KEPT = "kept"


class EightBits(NamedTuple):
    """Linear layers in 8 bits (fp8, MXFP8).

    Args:
        keeps_copy: A linear layer saves the fp8 copy of its input for backward, not the input.
        keeps_weights: Fp8 copies of weights persist over the step.
        gathers: Tensor-parallel all-gathers move fp8.
        scaled: Elements of a block that share a one-byte scale (MXFP8: 32); 0 for per-tensor
            scales.
        pads_experts: Rows of experts are padded by a copy before the grouped GEMM, and unpadded
            after.
        fuses_expert_activation: The grouped GEMM of experts has a fused activation epilogue.
        discarded: Parts whose outputs are discarded and recomputed: linear layers save these
            unquantized.
    """

    keeps_copy: bool
    keeps_weights: bool
    gathers: bool
    scaled: int = 0
    pads_experts: bool = False
    fuses_expert_activation: bool = False
    discarded: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """Kernels and autograd nodes of operators, by software stack.

    Args:
        kernels: Element-wise kernels: eager, compiled or fused by hand.
        uses_transformers_ops: Eager layers are those of Hugging Face transformers, which write
            RMS norm, GELU and RoPE (rotate_half) in PyTorch's operators.
        indexes_rope_cache: Eager layers index the RoPE cache by position ids, and save the result.
        fuses_products: Queries, keys and values are one GEMM, split afterwards.
        fuses_gate: Gate and up projection of an MLP are one GEMM.
        fuses_redistribute: A tp collective is part of its linear layer's autograd node, which
            saves the shard, gathers again in backward, and reduces in place (Megatron); else a node
            of its own (DTensor), where tokens are the second dim, so that gather and scatter copy.
        redistributes_each_input: Each linear layer redistributes its input itself, also where
            others read it.
        fuses_norms: A norm that one linear layer reads is part of it (LayerNormLinear).
        fuses_residual: Bias, dropout and addition are one kernel.
        saves_first: Operators save their inputs before they run (PyTorch's own operators).
        weight_gradients: Fused, accumulated or kept.
        loss: Kernel of the cross entropy.
        casts: GEMMs cast fp32 inputs and weights (autocast).
        caches_casts: A weight's cast lives as long as the forward pass.
        copies_operands: Attention makes keys and values contiguous in layouts its kernel lacks.
        eight_bits: Fp8 recipe of linear layers, if any.
        groups_experts: One grouped GEMM runs all experts of a rank.
        pads_rows: Rows of experts are padded to the grouped GEMM's alignment; the router runs in
            the layers' dtype.
    """

    kernels: Kernels = Kernels.FUSED
    uses_transformers_ops: bool = False
    indexes_rope_cache: bool = False
    fuses_products: bool
    fuses_gate: bool
    fuses_redistribute: bool
    redistributes_each_input: bool = False
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
        """Elements of a block that share a one-byte scale; 0 for per-tensor scales."""
        return self.eight_bits.scaled if self.eight_bits else 0

    @property
    def is_eager(self) -> bool:
        """True where each operator is a kernel of its own."""
        return self.kernels is Kernels.EAGER

    @property
    def is_compiled(self) -> bool:
        """True where torch.compile's partitioner chooses the saved tensors."""
        return self.kernels is Kernels.COMPILED

    @property
    def is_local(self) -> bool:
        """True for Megatron-Core's local spec: no Transformer Engine kernels."""
        return self.is_eager and self.fuses_redistribute
