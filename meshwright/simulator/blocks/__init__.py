"""Blocks of a model (embedding, layers, head): operators and activation memory of a microbatch."""

from meshwright.simulator.blocks.ends import SHIFTED_BYTES
from meshwright.simulator.blocks.fp8_casts import (
    beside_weights_bytes,
    num_linear_weights,
    step_cast_bytes,
    weight_copy_bytes,
)
from meshwright.simulator.blocks.kinds import ADDED, OUTPUT, Ending, makes_gradients, walk
from meshwright.simulator.blocks.losses import LOGITS
from meshwright.simulator.blocks.model_flops import CONVENTION, hardware_flops, model_flops
from meshwright.simulator.blocks.operators import (
    BlockOperators,
    Collective,
    ExpertOperators,
    FlashAttention,
    Gemm,
    HostPasses,
    ImplicitGemm,
    KernelLaunches,
    MemoryBound,
    Operator,
    RingMessages,
    is_exchange,
    sum_flops,
)
from meshwright.simulator.blocks.shape import BlockShape, fuses_qkv, plan_parameters
from meshwright.simulator.blocks.spelling import (
    angle_table_bytes,
    layer_table_bytes,
    num_angle_tables,
    spelling_of,
)
from meshwright.simulator.blocks.table import BlockTable, NamedBytes

__all__ = [
    "ADDED",
    "CONVENTION",
    "LOGITS",
    "OUTPUT",
    "SHIFTED_BYTES",
    "BlockOperators",
    "BlockShape",
    "BlockTable",
    "Collective",
    "Ending",
    "ExpertOperators",
    "FlashAttention",
    "Gemm",
    "HostPasses",
    "ImplicitGemm",
    "KernelLaunches",
    "MemoryBound",
    "NamedBytes",
    "Operator",
    "RingMessages",
    "angle_table_bytes",
    "beside_weights_bytes",
    "fuses_qkv",
    "hardware_flops",
    "is_exchange",
    "layer_table_bytes",
    "makes_gradients",
    "model_flops",
    "num_angle_tables",
    "num_linear_weights",
    "plan_parameters",
    "spelling_of",
    "step_cast_bytes",
    "sum_flops",
    "walk",
    "weight_copy_bytes",
]
