"""Kernels that training stacks fuse, as operators: each allocates what the fused kernel does.

PyTorch's eager operators would keep or allocate more than the kernels that stand behind these
in Megatron-Core, Transformer Engine, FlashAttention or code from torch.compile.  The
implementations are written for correctness; memory and FLOPs are those of the kernel.
"""

from meshwright.validate.programs.fused.attention import (
    FusedAttention,
    Scores,
    flash_attention,
    flash_attention_backward,
)
from meshwright.validate.programs.fused.autograd_function import AutogradFunction, Context
from meshwright.validate.programs.fused.norms import RmsNorm, UnweightedRmsNorm
from meshwright.validate.programs.fused.residual import BiasDropoutAdd
from meshwright.validate.programs.fused.rotary import (
    ANGLE_FACTOR,
    CachedRotary,
    Rotary,
    apply_rope_unfused,
    positions,
    rope_cache,
)
from meshwright.validate.programs.fused.softmax import CausalSoftmax
from meshwright.validate.programs.fused.swiglu import FusedSquaredRelu, PackedSwiglu, Swiglu
from meshwright.validate.programs.fused.weight_gradients import (
    GradientSink,
    accumulate_weight_gradient,
)

__all__ = [
    "ANGLE_FACTOR",
    "AutogradFunction",
    "BiasDropoutAdd",
    "CachedRotary",
    "CausalSoftmax",
    "Context",
    "FusedAttention",
    "FusedSquaredRelu",
    "GradientSink",
    "PackedSwiglu",
    "RmsNorm",
    "Rotary",
    "Scores",
    "Swiglu",
    "UnweightedRmsNorm",
    "accumulate_weight_gradient",
    "apply_rope_unfused",
    "flash_attention",
    "flash_attention_backward",
    "positions",
    "rope_cache",
]
