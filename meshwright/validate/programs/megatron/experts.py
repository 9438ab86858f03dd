"""Routed experts as Megatron-Core dispatches them by all-to-all, in Transformer Engine's kernels.

`MoEAlltoAllTokenDispatcher` of megatron/core/transformer/moe/token_dispatcher.py and
`TEGroupedMLP` of moe/experts.py, core 0.16.
"""

import torch
from torch import Tensor, nn

from meshwright.simulator.model import Experts
from meshwright.validate.programs.contract import Routing
from meshwright.validate.programs.experts import (
    Dispatch,
    ExpertGroup,
    GatheredScores,
    GroupedProduct,
    Reordered,
    RoutingBias,
    SortedRows,
    SortedWeights,
    UnpermutedRows,
    WeighedQuickGeglu,
    WeighedSwiglu,
    choose_experts,
    clamp_gate,
    exchanged,
    gathered,
    row_map,
    summed,
    ungated,
)
from meshwright.validate.programs.fused import GradientSink
from meshwright.validate.programs.megatron.tensor_parallel import ALONE, ColumnLinear

ROUTE_SCALE = 1.0  # of sigmoid scores: a kernel, whatever the number


class GroupedLinear(nn.Module):
    """Linear layers of a rank's experts: each has its weight, and perhaps a bias behind it.

    Args:
        num_experts: Of the rank.
        inputs: Width of rows.
        outputs: Width of what is made of them.
        sink: Accumulator of weight gradients.
        bias: Whether there are biases.
        adds: Whether they are added here.
    """

    def __init__(
        self,
        num_experts: int,
        inputs: int,
        outputs: int,
        sink: GradientSink,
        *,
        bias: bool,
        adds: bool = True,
    ) -> None:
        super().__init__()
        self.num_experts, self.has_biases, self.adds, self.sink = num_experts, bias, adds, sink
        for index in range(num_experts):
            self.register_parameter(f"weight{index}", nn.Parameter(torch.empty(outputs, inputs)))
            if bias:
                self.register_parameter(f"bias{index}", nn.Parameter(torch.empty(outputs)))

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """Return the outputs of rows in the order of experts, so many of each."""
        added = self.biases if self.adds else []
        out: Tensor = GroupedProduct.apply(rows, sizes, self.sink, *self._all("weight"), *added)
        return out

    @property
    def biases(self) -> list[nn.Parameter]:
        """Those of all experts, if these have some."""
        return self._all("bias") if self.has_biases else []

    def _all(self, name: str) -> list[nn.Parameter]:
        return [self.get_parameter(f"{name}{index}") for index in range(self.num_experts)]


class MegatronExperts(nn.Module):
    """Routed experts of one rank, and shared ones, which run first.

    Args:
        experts: Of a layer.
        hidden_size: Width of tokens.
        group: Ranks with the other experts, and with other parts of these.
        routing: Routing of tokens to the experts.
        sinks: Accumulators of the router's and of the experts' weight gradients.
        shared: Shared experts, which get all tokens, if there are any.
    """

    bias = None  # nothing is added with the residual

    def __init__(
        self,
        experts: Experts,
        hidden_size: int,
        *,
        group: ExpertGroup,
        routing: Routing,
        sinks: tuple[GradientSink, GradientSink],
        shared: nn.Module | None,
    ) -> None:
        super().__init__()
        self.facts, self.group, self.routing = experts, group, routing
        num, inner = experts.num_experts // group.num_ep, experts.hidden_size // group.num_etp
        sink, own = sinks
        bias, first = experts.bias, experts.num_parts * inner
        self.router = ColumnLinear(hidden_size, experts.num_experts, ALONE, sink, bias=bias)
        self.grouped_in = GroupedLinear(num, hidden_size, first, own, bias=bias)
        self.grouped_out = GroupedLinear(num, inner, hidden_size, own, bias=bias, adds=False)
        self.shared = shared
        self.balance = RoutingBias(experts.num_experts) if experts.routing_bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of experts for this rank's ``[tokens, batch, width]``."""
        shared_output = None if self.shared is None else self.shared(inputs)
        logits = self.router(inputs).flatten(0, 1)
        shares, expert_indices = self._shares(logits)
        del logits
        dispatch = self._exchange_counts(expert_indices)
        numbers = row_map(expert_indices, self.facts.num_experts)
        del expert_indices
        out = self._dispatched(inputs.flatten(0, 1), shares, numbers, dispatch).view(inputs.shape)
        return out if shared_output is None else out + shared_output

    def _shares(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return routing weights of all experts, most of which are 0, and each token's experts.

        `topk_routing_with_score_function` of moe/moe_utils.py, core 0.16.
        """
        dtype = logits.dtype
        if self.facts.scores == "sigmoid":
            scores = logits.float().sigmoid().to(dtype)
            expert_indices = choose_experts(scores, self.facts, self.routing, self.balance)
            shares = GatheredScores.apply(scores, expert_indices)
            if not self.facts.weighs_inputs:  # of one expert a token there is nothing to divide by
                shares = shares / shares.sum(dim=-1, keepdim=True) * ROUTE_SCALE
        else:
            scores = logits if self.routing.is_balanced else logits.softmax(dim=-1)
            expert_indices = choose_experts(scores, self.facts, self.routing)
            shares = GatheredScores.apply(logits, expert_indices).float().softmax(dim=-1).to(dtype)
        return torch.zeros_like(logits).scatter_(1, expert_indices, shares), expert_indices

    def _exchange_counts(self, expert_indices: Tensor) -> Dispatch:
        """Return the dispatch of rows, after all ranks have exchanged their counts."""
        num_experts = self.facts.num_experts
        balanced = expert_indices.numel() // num_experts if self.routing.is_balanced else None
        if balanced is None:
            own = expert_indices.flatten().bincount(minlength=num_experts)
        else:
            own = expert_indices.new_full((num_experts,), balanced)
        if self.balance is not None:
            self.balance.count(own)
        return Dispatch.of(self.group.exchange_counts(own, balanced=balanced), self.group)

    def _dispatched(
        self, flat: Tensor, shares: Tensor, numbers: Tensor, dispatch: Dispatch
    ) -> Tensor:
        """Return the sums of expert outputs of each token.

        Rows that were sent and received stay alive until the outputs are back.
        """
        chosen, group = self.facts.experts_per_token, self.group
        given = SortedRows.apply(flat, numbers, chosen)
        weights = SortedWeights.apply(shares, numbers, chosen)
        counts = dispatch.sent, dispatch.arrived
        arrived, weights = (exchanged(each, *counts, group) for each in (given, weights))
        rows, weights = (
            self._sorted(gathered(each, dispatch.gathered, group), dispatch)
            for each in (arrived, weights)
        )
        outputs = self._expert_outputs(rows, weights, dispatch.by_expert)
        del weights
        back = self._sorted(outputs, dispatch, back=True)
        back = summed(back, dispatch.gathered, group)
        del outputs, rows
        back = exchanged(back, dispatch.arrived, dispatch.sent, group)
        del given, arrived
        out: Tensor = UnpermutedRows.apply(back, numbers, chosen)
        return out

    def _expert_outputs(self, rows: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
        """Return the outputs of this rank's experts for their *rows*, *sizes* of each."""
        if self.facts.weighs_inputs:
            rows = weights.unsqueeze(-1) * rows
            # They are in the rows already: outputs are not weighed again.
            weights = torch.ones_like(weights)
        activated = self._activated(self.grouped_in(rows, sizes), weights)
        outputs = self.grouped_out(activated, sizes)
        del activated
        if not self.facts.bias:
            return outputs
        shares = weights.unsqueeze(-1).split(sizes)
        parts = zip(outputs.split(sizes), self.grouped_out.biases, shares, strict=True)
        return torch.cat([own + bias * share for own, bias, share in parts])

    def _activated(self, inner: Tensor, weights: Tensor) -> Tensor:
        """Return activations times their rows' weights."""
        kind = self.facts.activation
        if kind == "silu":
            out: Tensor = WeighedSwiglu.apply(inner, weights)
        elif kind == "clamped":
            out = WeighedQuickGeglu.apply(torch.cat(clamp_gate(inner), dim=-1), weights)
        else:
            out = ungated(kind, inner) * weights.unsqueeze(-1)
        return out

    def _sorted(self, rows: Tensor, dispatch: Dispatch, *, back: bool = False) -> Tensor:
        """Return rows by own expert, or *back* as they came; of one expert they are so."""
        if len(dispatch.by_expert) == 1:
            return rows
        sizes, order = dispatch.back if back else (dispatch.sizes, dispatch.order)
        out: Tensor = Reordered.apply(rows, sizes, order)
        return out
