"""Routed experts as transformers 5.23 writes them: integrations/moe.py, all experts on a rank.

Where other ranks have other experts rows go there and come back, each expert's once more in order
(`AllToAllEP` of distributed/expert_parallel.py).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshwright.simulator.model import Experts
from meshwright.validate.programs.experts.activations import ClampedSwiglu
from meshwright.validate.programs.experts.group import exchanged
from meshwright.validate.programs.experts.products import GroupedWeights
from meshwright.validate.programs.experts.routing import (
    GatheredScores,
    choose_experts,
    outside_expert_groups,
)
from meshwright.validate.programs.experts.titan import ROUTE_SCALE, RoutedGroup
from meshwright.validate.programs.fused import PackedSwiglu


class TransformersGroupedExperts(nn.Module):
    """Experts of a rank as grouped GEMMs; gate and value are one weight.

    Args:
        experts: Of a layer.
        hidden_size: Width of tokens.
        routed: Ranks with the other experts, and the routing of tokens.
    """

    def __init__(self, experts: Experts, hidden_size: int, routed: RoutedGroup) -> None:
        super().__init__()
        group, routing = routed.ranks, routed.routing
        num, inner = experts.num_experts // group.num_ep, experts.hidden_size
        self.group, self.routing = group, routing
        self.is_clamped = experts.activation == "clamped"
        self.experts_in = nn.Parameter(torch.empty(num, 2 * inner, hidden_size))
        self.experts_out = nn.Parameter(torch.empty(num, hidden_size, inner))
        self.experts_in_bias = self.experts_out_bias = None
        if experts.bias:
            self.experts_in_bias = nn.Parameter(torch.empty(num, 2 * inner))
            self.experts_out_bias = nn.Parameter(torch.empty(num, hidden_size))

    def forward(self, tokens: Tensor, expert_indices: Tensor, shares: Tensor) -> Tensor:
        """Return the sums of expert outputs for *tokens*, each times its routing weight.

        Args:
            tokens: ``[tokens, width]``.
            expert_indices: Experts of each, ``[tokens, k]``.
            shares: Of the same shape.
        """
        if self.group.ep is None:
            return self._computed(tokens, expert_indices, shares).to(tokens.dtype)
        return self._exchanged(tokens, expert_indices, shares).to(tokens.dtype)

    def _exchanged(self, tokens: Tensor, expert_indices: Tensor, shares: Tensor) -> Tensor:
        order, sent, got, given, own = self._dispatched(tokens, expert_indices)
        ones = torch.ones_like(own, dtype=given.dtype)
        made = self._computed(given, own, ones)
        back = exchanged(made, got, sent, self.group)
        unsorted = torch.empty_like(back)
        unsorted[order] = back
        rows = unsorted.unflatten(0, shares.shape)
        return (rows * shares.unsqueeze(-1)).sum(dim=1)

    def _dispatched(
        self, tokens: Tensor, expert_indices: Tensor
    ) -> tuple[Tensor, list[int], list[int], Tensor, Tensor]:
        """Return the order of rows, counts sent and received, received rows and their experts."""
        num_ranks, num = self.group.num_ep, len(self.experts_in)
        flat = expert_indices.flatten()
        order = flat.argsort()
        # Slot i is of token i // k.
        rows = tokens[order // expert_indices.shape[1]]
        counts = flat.new_zeros(num_ranks * num).scatter_add_(0, flat, torch.ones_like(flat))
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group.ep)
        if self.routing.is_balanced:
            sent = got = [len(rows) // num_ranks] * num_ranks
        else:
            sent, got = (
                each.view(num_ranks, num).sum(dim=1).tolist() for each in (counts, received)
            )
        given = exchanged(rows, sent, got, self.group)
        own = torch.arange(num, device=flat.device).repeat(num_ranks)
        own = own.repeat_interleave(received, output_size=sum(got)).unsqueeze(-1)
        return order, sent, got, given, own

    def _computed(self, tokens: Tensor, expert_indices: Tensor, shares: Tensor) -> Tensor:
        """Return the same where all experts are local.

        Where ranks divide them a mask clears rows of others, of which there are none by then.
        """
        chosen, num_tokens, num = expert_indices.shape[1], len(tokens), len(self.experts_in)
        numbers, order = expert_indices.flatten().sort()
        rows = tokens[order // chosen]
        weights = shares.flatten()[order]
        counted = numbers.int()
        sizes = counted.new_zeros(num)
        if not self.routing.is_balanced:
            sizes = counted.bincount(minlength=num).int()
        starts = sizes.cumsum(0, dtype=torch.int32)
        each = [len(rows) // num] * num if self.routing.is_balanced else sizes.tolist()
        mask = (numbers >= num).unsqueeze(-1) if self.group.ep is not None else None
        first = _of_rows(self.experts_in_bias, numbers)
        if mask is not None:
            rows.masked_fill_(mask, 0.0)
        made = _cleared(_multiplied(rows, self.experts_in, first, each), mask)
        made = (ClampedSwiglu if self.is_clamped else PackedSwiglu).apply(made)
        first = _of_rows(self.experts_out_bias, numbers)
        made = _cleared(_multiplied(made, self.experts_out, first, each), mask)
        wide = made * weights.unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        wide = wide[inverse]
        total = wide.view(num_tokens, chosen, -1).sum(dim=1).to(tokens.dtype)
        del numbers, counted, starts  # named until here, as there
        return total


def _of_rows(biases: Tensor | None, numbers: Tensor) -> Tensor | None:
    """Return the bias of each row's expert, if experts have some."""
    return None if biases is None else biases[numbers]


def _multiplied(rows: Tensor, weights: Tensor, biases: Tensor | None, sizes: list[int]) -> Tensor:
    made: Tensor = GroupedWeights.apply(rows, weights, sizes)
    return made if biases is None else made.add_(biases)


def _cleared(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows if mask is None else rows.masked_fill(mask, 0.0)


class TransformersExperts(nn.Module):
    """Routed experts of one rank.

    Args:
        experts: Of a layer.
        hidden_size: Width of tokens.
        routed: Ranks with the other experts, and the routing of tokens.
        shared: Shared experts, if there are any; a gate may weigh them.
    """

    def __init__(
        self, experts: Experts, hidden_size: int, routed: RoutedGroup, shared: nn.Module | None
    ) -> None:
        super().__init__()
        self.facts, self.routing = experts, routed.routing
        self.router = nn.Linear(hidden_size, experts.num_experts, bias=experts.bias)
        self.experts = TransformersGroupedExperts(experts, hidden_size, routed)
        self.shared = shared
        self.shared_gate = nn.Linear(hidden_size, 1, bias=False) if experts.shared_gate else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of experts for ``[batch, tokens, width]``, gated shared ones first."""
        flat = inputs.flatten(0, 1)
        shared_output: Tensor | None = None
        if self.shared is not None and self.shared_gate is not None:
            shared_output = self.shared(flat)
        in_full = self.facts.routed_in_full
        logits = self._wide_logits(flat) if in_full else self.router(flat)
        shares, expert_indices = self._scaled_shares(logits) if in_full else self._shares(logits)
        out: Tensor = self.experts(flat, expert_indices, shares)
        if shared_output is not None and self.shared_gate is not None:
            shared_output = self.shared_gate(flat).sigmoid() * shared_output
            out = out + shared_output
        elif self.shared is not None:
            out = out.view_as(inputs)
            out = out + self.shared(inputs)
        return out.view_as(inputs)

    def _wide_logits(self, flat: Tensor) -> Tensor:
        """Return logits in fp32 (`DeepseekV3TopkRouter` of transformers)."""
        return F.linear(flat.float(), self.router.weight.float())

    def _scaled_shares(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return routing weights as DeepSeek's routers scale them, and a token's experts.

        The second one clears the scores of other groups, the third divides shares by their sum.
        """
        experts, routing = self.facts, self.routing
        scores = logits.softmax(dim=-1) if experts.leaves_shares else logits.sigmoid()
        if experts.leaves_shares and experts.num_groups > 1:
            scores = scores.masked_fill(outside_expert_groups(scores, experts, routing), 0.0)
        expert_indices = choose_experts(scores, experts, routing)
        shares = GatheredScores.apply(scores, expert_indices)
        if not experts.leaves_shares:
            shares /= shares.sum(dim=-1, keepdim=True)
        return shares * ROUTE_SCALE, expert_indices

    def _shares(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the routing weights of each token, and its experts."""
        if self.facts.scores == "softmax of chosen":
            scores = logits if self.routing.is_balanced else logits.softmax(dim=-1)
            expert_indices = choose_experts(scores, self.facts, self.routing)
            return GatheredScores.apply(logits, expert_indices).softmax(dim=-1), expert_indices
        scores = logits.float().softmax(dim=-1)
        expert_indices = choose_experts(scores, self.facts, self.routing)
        shares = GatheredScores.apply(scores, expert_indices)
        shares /= shares.sum(dim=-1, keepdim=True)
        return shares.to(logits.dtype) if self.facts.casts_shares else shares, expert_indices
