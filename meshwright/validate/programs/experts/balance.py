"""Routing biases: load balancing without an auxiliary loss."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

# moe_router_bias_update_rate of Megatron-Core 0.16, load_balance_coeff of torchtitan 0.2.2.
UPDATE_RATE = 1e-3


class RoutingBias(nn.Module):
    """Routing bias of each expert of a layer, and the tokens that a step sent to it.

    It chooses experts and weighs nothing (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
    """

    bias: Tensor
    tokens: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        for name in ("bias", "tokens"):
            self.register_buffer(name, torch.zeros(num_experts, dtype=torch.float32))

    def forward(self, scores: Tensor) -> Tensor:
        """Return the scores that experts are chosen by."""
        return scores.detach() + self.bias

    def count(self, tokens: Tensor) -> None:
        """Count the *tokens* of each expert, unless the pass runs again in backward."""
        if torch.is_grad_enabled():
            self.tokens += tokens


def update_routing_biases(modules: Iterable[nn.Module], group: dist.ProcessGroup | None) -> None:
    """Update all biases of a rank by the tokens of a step, summed over *group*.

    torchtitan takes the mean off what moves (`_update_expert_bias` of 0.2.2,
    components/optimizer.py), by which the same experts are chosen.
    """
    biases = [
        each for module in modules for each in module.modules() if isinstance(each, RoutingBias)
    ]
    if not biases:
        return
    tokens = torch.stack([each.tokens for each in biases])
    if group is not None:
        dist.all_reduce(tokens, group=group)
    # An expert with fewer tokens than the mean gets a larger bias.
    offsets = tokens.mean(dim=-1, keepdim=True) - tokens
    for each, offset in zip(biases, offsets, strict=True):
        each.bias += UPDATE_RATE * offset.sign()
        each.tokens.zero_()
