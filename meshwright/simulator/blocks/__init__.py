"""Blocks of a model (embedding, layers, head): operators and activation memory of a microbatch."""

from meshwright.simulator.blocks.ends import SHIFTED_BYTES
from meshwright.simulator.blocks.fp8_casts import (
    extra_weight_bytes,
    num_linear_weights,
    step_cast_bytes,
    weight_copy_bytes,
)
from meshwright.simulator.blocks.kinds import (
    ADDED,
    OUTPUT,
    BorderGradients,
    materializes_weight_gradients,
    walk,
)
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
    is_expert_all_to_all,
    sum_flops,
)
from meshwright.simulator.blocks.shape import BlockShape, fuses_qkv, plan_parameters
from meshwright.simulator.blocks.spelling import (
    layer_code_of,
    layer_rope_cache_bytes,
    num_rope_caches,
    rope_cache_bytes,
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
    "BorderGradients",
    "Collective",
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
    "extra_weight_bytes",
    "fuses_qkv",
    "hardware_flops",
    "is_expert_all_to_all",
    "layer_code_of",
    "layer_rope_cache_bytes",
    "materializes_weight_gradients",
    "model_flops",
    "num_linear_weights",
    "num_rope_caches",
    "plan_parameters",
    "rope_cache_bytes",
    "step_cast_bytes",
    "sum_flops",
    "walk",
    "weight_copy_bytes",
]
