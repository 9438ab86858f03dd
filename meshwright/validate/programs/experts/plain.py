"""Experts of one process, one after the other, in PyTorch's own operators."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshwright.simulator.model import Experts
from meshwright.validate.programs.contract import Routing
from meshwright.validate.programs.experts.balance import RoutingBias
from meshwright.validate.programs.experts.routing import chosen_places


class PlainExperts(nn.Module):
    """Routed experts, all on one rank, with shared ones beside them.

    Args:
        experts: Their sizes.
        hidden_size: Width of tokens.
        routing: How tokens are sent to them.
        shared: What all tokens go through, if there is something.
    """

    def __init__(
        self, experts: Experts, hidden_size: int, routing: Routing, shared: nn.Module | None
    ) -> None:
        super().__init__()
        num, inner = experts.num_experts, experts.hidden_size
        self.facts, self.routing = experts, routing
        self.router = nn.Linear(hidden_size, num, bias=False)
        self.experts_in = nn.Parameter(torch.empty(num, 2 * inner, hidden_size))
        self.experts_out = nn.Parameter(torch.empty(num, hidden_size, inner))
        self.shared = shared
        self.bias = RoutingBias(num) if experts.routing_bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what routed and shared experts make of ``[batch, tokens, width]``."""
        flat = inputs.flatten(0, 1)
        shares, places = self._shares(flat)
        out = torch.zeros_like(flat)
        for number, (first, last) in enumerate(zip(self.experts_in, self.experts_out, strict=True)):
            tokens, slots = torch.where(places == number)
            gate, value = F.linear(flat[tokens], first).chunk(2, dim=-1)
            made = F.linear(F.silu(gate) * value, last)
            weighed = made * shares[tokens, slots].unsqueeze(-1)
            out = out.index_add(0, tokens, weighed.to(out.dtype))
        out = out.view_as(inputs)
        return out if self.shared is None else out + self.shared(inputs)

    def _shares(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token's shares of its experts, which add up to 1, and which these are."""
        logits = self.router(flat).float()
        is_sigmoid = self.facts.scores == "sigmoid"
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(dim=-1)
        places = chosen_places(scores, self.facts, self.routing, self.bias)
        if self.bias is not None:
            self.bias.count(places.flatten().bincount(minlength=self.facts.num_experts))
        chosen = scores.gather(1, places)
        return chosen / chosen.sum(dim=-1, keepdim=True), places
