"""Kernels that training stacks fuse, as operators: each allocates what the fused kernel does.

PyTorch's eager operators would keep or allocate more than the kernels that stand behind these
in Megatron-Core, Transformer Engine, FlashAttention or code from torch.compile.  The
implementations are written for correctness; memory and FLOPs are those of the kernel.
"""

from meshwright.validate.program.fused_attention import FlashAttention
from meshwright.validate.program.fused_gradients import accumulate_weight_gradient
from meshwright.validate.program.fused_norms import RmsNorm
from meshwright.validate.program.fused_residual import BiasDropoutAdd
from meshwright.validate.program.fused_rotary import Rotary
from meshwright.validate.program.fused_softmax import CausalSoftmax
from meshwright.validate.program.fused_swiglu import PackedSwiglu, Swiglu

__all__ = [
    "BiasDropoutAdd",
    "CausalSoftmax",
    "FlashAttention",
    "PackedSwiglu",
    "RmsNorm",
    "Rotary",
    "Swiglu",
    "accumulate_weight_gradient",
]
