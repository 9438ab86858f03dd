"""Shared experts whose outputs a gate weighs: a product with one output, a sigmoid."""

from torch import Tensor, nn


class GatedShared(nn.Module):
    """Shared experts and the gate that weighs what they make, whose weight comes first.

    `SharedExpertMLP` of megatron/core/transformer/moe/shared_experts.py, core 0.16.

    Args:
        shared_gate: The product.
        experts: What all tokens go through.
    """

    def __init__(self, shared_gate: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.shared_gate, self.experts = shared_gate, experts

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what shared experts make of *inputs*, weighed."""
        out: Tensor = self.experts(inputs)
        logits = self.shared_gate(inputs)
        share: Tensor = logits.sigmoid()
        return out * share
