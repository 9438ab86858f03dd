"""Selective activation checkpointing of torchtitan: the operators whose outputs are kept.

``selective_ac_option = "op"``, ``_save_list`` in torchtitan/parallelisms/parallelize_llama.py,
commit 6b03ffa of 2024-12-26.  The list was without the reduce-scatter from 2025-03-20 to
2025-04-21 (pull requests 965 and 1031).
"""

from collections import Counter

import torch
import torch.distributed._functional_collectives  # registers an operator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from meshwright.validate.programs.fused import flash_attention

PRODUCT = torch.ops.aten.mm.default
# Of the list, what programs here call: `flash_attention` stands for those of PyTorch.
KEPT = {
    PRODUCT,
    flash_attention._opoverload,  # noqa: SLF001
    torch.ops._c10d_functional.reduce_scatter_tensor.default,  # noqa: SLF001
}


def operator_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the modes of a layer's forward and recompute: every other product is kept."""
    products: Counter[bool] = Counter()

    def policy(
        context: SelectiveCheckpointContext,
        operator: torch._ops.OpOverload,
        *_: object,
        **__: object,
    ) -> CheckpointPolicy:
        if operator == PRODUCT:
            products[context.is_recompute] += 1
        is_second = operator == PRODUCT and products[context.is_recompute] % 2 == 0
        is_kept = operator in KEPT and not is_second
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    forward, recompute = create_selective_checkpoint_contexts(policy)
    return forward, recompute
