"""What one microbatch runs in a layer and at the ends of a model: shapes, FLOPs, bytes."""

from meshwright.simulator.blocks.fp8_casts import (
    num_linear_weights,
    step_cast_bytes,
    weight_copy_bytes,
)
from meshwright.simulator.blocks.layer import layer_operators
from meshwright.simulator.blocks.model_flops import CONVENTION, hardware_flops, model_flops
from meshwright.simulator.blocks.old_ends import embedding_operators, head_operators
from meshwright.simulator.blocks.operators import (
    BlockOperators,
    Collective,
    FlashAttention,
    Gemm,
    HostPasses,
    KernelLaunches,
    MemoryBound,
    Operator,
    sum_flops,
)
from meshwright.simulator.blocks.recompute_policy import layer_products
from meshwright.simulator.blocks.shape import BlockParameters, BlockShape

__all__ = [
    "CONVENTION",
    "BlockOperators",
    "BlockParameters",
    "BlockShape",
    "Collective",
    "FlashAttention",
    "Gemm",
    "HostPasses",
    "KernelLaunches",
    "MemoryBound",
    "Operator",
    "embedding_operators",
    "hardware_flops",
    "head_operators",
    "layer_operators",
    "layer_products",
    "model_flops",
    "num_linear_weights",
    "step_cast_bytes",
    "sum_flops",
    "weight_copy_bytes",
]
