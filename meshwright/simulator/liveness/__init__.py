"""Which tensors a block keeps, and what lives for a moment in its passes."""

from meshwright.simulator.liveness.activations import (
    SavedTensor,
    cached_layer_bytes,
    kept_logits_bytes,
    layer_tensors,
    logits_tensor,
    saved_embedding_bytes,
    saved_head_bytes,
    saved_layer_bytes,
    saved_tensors,
)
from meshwright.simulator.liveness.ends import (
    embedding_backward_steps,
    head_backward_steps,
    head_forward_steps,
    head_workspace_bytes,
    logits_backward_steps,
    waiting_table_bytes,
)
from meshwright.simulator.liveness.layer import (
    layer_backward_bytes,
    layer_workspace_bytes,
    whole_backward_steps,
)
from meshwright.simulator.liveness.products import Step, fullest_arrival, highest

__all__ = [
    "SavedTensor",
    "Step",
    "cached_layer_bytes",
    "embedding_backward_steps",
    "fullest_arrival",
    "head_backward_steps",
    "head_forward_steps",
    "head_workspace_bytes",
    "highest",
    "kept_logits_bytes",
    "layer_backward_bytes",
    "layer_tensors",
    "layer_workspace_bytes",
    "logits_backward_steps",
    "logits_tensor",
    "saved_embedding_bytes",
    "saved_head_bytes",
    "saved_layer_bytes",
    "saved_tensors",
    "waiting_table_bytes",
    "whole_backward_steps",
]
