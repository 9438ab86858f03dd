"""What one microbatch runs in a layer and at the ends of a model: shapes, FLOPs, bytes."""

from meshwright.simulator.blocks.ends import embedding_operators, head_operators
from meshwright.simulator.blocks.fp8_casts import (
    num_linear_weights,
    step_cast_bytes,
    weight_copy_bytes,
)
from meshwright.simulator.blocks.kinds import (
    KINDS,
    KnownBlock,
    block_operators,
    received_bytes,
    sent_bytes,
)
from meshwright.simulator.blocks.layer import layer_operators
from meshwright.simulator.blocks.model_flops import CONVENTION, hardware_flops, model_flops
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
from meshwright.simulator.blocks.shape import BlockShape

__all__ = [
    "CONVENTION",
    "KINDS",
    "BlockOperators",
    "BlockShape",
    "Collective",
    "FlashAttention",
    "Gemm",
    "HostPasses",
    "KernelLaunches",
    "KnownBlock",
    "MemoryBound",
    "Operator",
    "block_operators",
    "embedding_operators",
    "hardware_flops",
    "head_operators",
    "layer_operators",
    "layer_products",
    "model_flops",
    "num_linear_weights",
    "received_bytes",
    "sent_bytes",
    "step_cast_bytes",
    "sum_flops",
    "weight_copy_bytes",
]
