"""Experts of one process, one after the other, in PyTorch's own operators."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshwright.simulator.model import Experts
from meshwright.validate.programs.contract import Routing
from meshwright.validate.programs.experts.activations import clamp_gate, gated_output, ungated
from meshwright.validate.programs.experts.balance import RoutingBias
from meshwright.validate.programs.experts.routing import choose_experts


class PlainExperts(nn.Module):
    """Routed experts, all on one rank, and shared ones.

    Args:
        experts: Their sizes.
        hidden_size: Width of tokens.
        routing: Routing of tokens to the experts.
        shared: Shared experts, which get all tokens, if there are any.
        of_transformers: Routing biases are not updated, and shares stay as they are where it leaves
            them so.
    """

    def __init__(
        self,
        experts: Experts,
        hidden_size: int,
        routing: Routing,
        shared: nn.Module | None,
        *,
        of_transformers: bool = False,
    ) -> None:
        super().__init__()
        num, inner = experts.num_experts, experts.hidden_size
        self.facts, self.routing = experts, routing
        self.router = nn.Linear(hidden_size, num, bias=experts.bias)
        outputs = experts.num_parts * inner
        self.experts_in = nn.Parameter(torch.empty(num, outputs, hidden_size))
        self.experts_out = nn.Parameter(torch.empty(num, hidden_size, inner))
        if experts.bias:
            self.experts_in_bias = nn.Parameter(torch.empty(num, outputs))
            self.experts_out_bias = nn.Parameter(torch.empty(num, hidden_size))
        self.shared = shared
        moves_bias = experts.routing_bias and not of_transformers
        self.bias = RoutingBias(num) if moves_bias else None
        self.leaves_shares = of_transformers and experts.leaves_shares

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the sum of routed and shared experts for ``[batch, tokens, width]``."""
        flat = inputs.flatten(0, 1)
        shares, expert_indices = self._shares(flat)
        out = torch.zeros_like(flat)
        for number in range(self.facts.num_experts):
            tokens, slots = torch.where(expert_indices == number)
            share = shares[tokens, slots].unsqueeze(-1)
            if self.facts.weighs_inputs:
                output = self._expert_output(flat[tokens] * share, number)
            else:
                output = self._expert_output(flat[tokens], number) * share
            out = out.index_add(0, tokens, output.to(out.dtype))
        out = out.view_as(inputs)
        return out if self.shared is None else out + self.shared(inputs)

    def _expert_output(self, rows: Tensor, number: int) -> Tensor:
        """Return the output of an expert for its *rows*."""
        first, last = (
            self.experts_in_bias[number] if self.facts.bias else None,
            self.experts_out_bias[number] if self.facts.bias else None,
        )
        inner = F.linear(rows, self.experts_in[number], first)
        return F.linear(self._activated(inner), self.experts_out[number], last)

    def _activated(self, inner: Tensor) -> Tensor:
        if not self.facts.gated:
            return ungated(self.facts.activation, inner)
        if self.facts.activation == "clamped":
            return gated_output(*clamp_gate(inner))
        gate, value = inner.chunk(2, dim=-1)
        return F.silu(gate) * value

    def _shares(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the routing weights of each token, and its experts.

        They add up to 1, but for that of one expert that weighs what it reads, and DeepSeek-V2's.
        """
        logits = self.router(flat).float()
        is_sigmoid = self.facts.scores == "sigmoid"
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(dim=-1)
        expert_indices = choose_experts(scores, self.facts, self.routing, self.bias)
        if self.bias is not None:
            self.bias.count(expert_indices.flatten().bincount(minlength=self.facts.num_experts))
        chosen = scores.gather(1, expert_indices)
        if self.facts.weighs_inputs or self.leaves_shares:
            return chosen, expert_indices
        return chosen / chosen.sum(dim=-1, keepdim=True), expert_indices
