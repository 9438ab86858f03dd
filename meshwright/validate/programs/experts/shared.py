"""Shared experts whose outputs a gate weighs: a product with one output, a sigmoid."""

from torch import Tensor, nn


class GatedShared(nn.Module):
    """Shared experts, and the gate that weighs their output; its weight comes first.

    `SharedExpertMLP` of megatron/core/transformer/moe/shared_experts.py, core 0.16.

    Args:
        shared_gate: Linear layer with one output.
        experts: MLP that all tokens go through.
    """

    def __init__(self, shared_gate: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.shared_gate, self.experts = shared_gate, experts

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the weighed output of shared experts for *inputs*."""
        out: Tensor = self.experts(inputs)
        logits = self.shared_gate(inputs)
        share: Tensor = logits.sigmoid()
        return out * share
