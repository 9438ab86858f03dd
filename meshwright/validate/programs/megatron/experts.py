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
    GroupedProduct,
    PutBack,
    Reordered,
    RoutingBias,
    SortedRows,
    SortedWeights,
    Taken,
    WeighedQuickGeglu,
    WeighedSwiglu,
    bounded,
    chosen_places,
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
        sink: Where weight gradients go.
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
        group: Who has the other experts, and other parts of these.
        routing: How tokens are sent to them.
        sinks: Where the router's and the experts' weight gradients go.
        shared: What all tokens go through, if there is something.
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
        """Return what experts make of this rank's ``[tokens, batch, width]``."""
        beside = None if self.shared is None else self.shared(inputs)
        logits = self.router(inputs).flatten(0, 1)
        shares, places = self._shares(logits)
        del logits
        dispatch = self._told(places)
        numbers = row_map(places, self.facts.num_experts)
        del places
        out = self._dispatched(inputs.flatten(0, 1), shares, numbers, dispatch).view(inputs.shape)
        return out if beside is None else out + beside

    def _shares(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares of all experts, of which most are 0, and each token's experts.

        `topk_routing_with_score_function` of moe/moe_utils.py, core 0.16.
        """
        dtype = logits.dtype
        if self.facts.scores == "sigmoid":
            scores = logits.float().sigmoid().to(dtype)
            places = chosen_places(scores, self.facts, self.routing, self.balance)
            shares = Taken.apply(scores, places)
            if not self.facts.weighs_inputs:  # of one expert a token there is nothing to divide by
                shares = shares / shares.sum(dim=-1, keepdim=True) * ROUTE_SCALE
        else:
            scores = logits if self.routing.is_balanced else logits.softmax(dim=-1)
            places = chosen_places(scores, self.facts, self.routing)
            shares = Taken.apply(logits, places).float().softmax(dim=-1).to(dtype)
        return torch.zeros_like(logits).scatter_(1, places, shares), places

    def _told(self, places: Tensor) -> Dispatch:
        """Return which rows come and go, after all ranks have told each other."""
        num_experts = self.facts.num_experts
        balanced = places.numel() // num_experts if self.routing.is_balanced else None
        if balanced is None:
            own = places.flatten().bincount(minlength=num_experts)
        else:
            own = places.new_full((num_experts,), balanced)
        if self.balance is not None:
            self.balance.count(own)
        return Dispatch.of(self.group.told(own, balanced=balanced), self.group)

    def _dispatched(
        self, flat: Tensor, shares: Tensor, numbers: Tensor, dispatch: Dispatch
    ) -> Tensor:
        """Return the sums of what experts make of each token.

        What went to them and what arrived have names until it is back.
        """
        chosen, group = self.facts.experts_per_token, self.group
        given = SortedRows.apply(flat, numbers, chosen)
        weights = SortedWeights.apply(shares, numbers, chosen)
        ways = dispatch.sent, dispatch.arrived
        arrived, weights = (exchanged(each, *ways, group) for each in (given, weights))
        rows, weights = (
            self._sorted(gathered(each, dispatch.gathered, group), dispatch)
            for each in (arrived, weights)
        )
        outputs = self._computed(rows, weights, dispatch.by_expert)
        del weights
        back = self._sorted(outputs, dispatch, back=True)
        back = summed(back, dispatch.gathered, group)
        del outputs, rows
        back = exchanged(back, dispatch.arrived, dispatch.sent, group)
        del given, arrived
        out: Tensor = PutBack.apply(back, numbers, chosen)
        return out

    def _computed(self, rows: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
        """Return what this rank's experts make of their *rows*, so many of each."""
        if self.facts.weighs_inputs:
            rows = weights.unsqueeze(-1) * rows
            weights = torch.ones_like(weights)
        opened = self._opened(self.grouped_in(rows, sizes), weights)
        outputs = self.grouped_out(opened, sizes)
        del opened
        if not self.facts.bias:
            return outputs
        shares = weights.unsqueeze(-1).split(sizes)
        parts = zip(outputs.split(sizes), self.grouped_out.biases, shares, strict=True)
        return torch.cat([own + bias * share for own, bias, share in parts])

    def _opened(self, inner: Tensor, weights: Tensor) -> Tensor:
        """Return activations times their rows' weights."""
        kind = self.facts.activation
        if kind == "silu":
            out: Tensor = WeighedSwiglu.apply(inner, weights)
        elif kind == "clamped":
            out = WeighedQuickGeglu.apply(torch.cat(bounded(inner), dim=-1), weights)
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
