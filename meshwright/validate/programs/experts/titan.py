"""Routed experts as torchtitan writes them: `MoE` of torchtitan/models/moe/moe.py, 0.2.2.

Rows go to the ranks of their experts by all-to-all (`ExpertParallel` of distributed/
expert_parallel.py), and are copied behind each other in whole lines of a grouped product.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.simulator.model import Experts
from meshwright.validate.programs.contract import Routing
from meshwright.validate.programs.experts.balance import RoutingBias
from meshwright.validate.programs.experts.group import Dispatch, ExpertGroup, exchanged
from meshwright.validate.programs.experts.products import GroupedWeights
from meshwright.validate.programs.experts.routing import GatheredScores, choose_experts
from meshwright.validate.programs.experts.rows import PutRows, TakenRows, WeighedSum, sorted_slots
from meshwright.validate.programs.fused import Swiglu

ALIGNED_ROWS = 8  # TOKEN_GROUP_ALIGN_SIZE_M of torchtitan 0.2.2 in 16 bits
ROUTE_SCALE = 1.0  # a kernel, whatever the number


class RoutedGroup(NamedTuple):
    """Ranks that share experts, and the routing of tokens to them.

    Args:
        ranks: With which this one shares experts.
        routing: Of tokens.
        of_transformers: A layer's experts are those of transformers, else torchtitan's.
    """

    ranks: ExpertGroup
    routing: Routing
    of_transformers: bool = False


class GroupedExperts(nn.Module):
    """A rank's experts, in grouped products; gate and value are products of their own.

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
        self.gate = nn.Parameter(torch.empty(num, inner, hidden_size))
        self.up = nn.Parameter(torch.empty(num, inner, hidden_size))
        self.out = nn.Parameter(torch.empty(num, hidden_size, inner))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the output of experts for *rows*, sorted by expert, *counts* of each."""
        group, is_divided = self.group, self.group.ep is not None
        dispatch = self._exchange_counts(counts, len(rows))
        given = exchanged(rows, dispatch.sent, dispatch.arrived, group)
        # Lines of padding read this row of zeros.
        more = torch.vstack((given, given.new_zeros((1, given.shape[-1]))))
        places = _places(dispatch, more)
        lines = TakenRows.apply(more, places)
        num_lines = len(more)
        del given, more
        made = self._expert_outputs(lines, dispatch.by_expert)
        del lines
        # The last row belongs to the lines of padding.
        back = PutRows.apply(made, places, num_lines)[:-1]
        if is_divided:
            back = exchanged(back, dispatch.arrived, dispatch.sent, group)
        return back

    def _expert_outputs(self, lines: Tensor, sizes: list[int]) -> Tensor:
        gate = GroupedWeights.apply(lines, self.gate, sizes)
        up = GroupedWeights.apply(lines, self.up, sizes)
        inner = Swiglu.apply(gate, up)
        made: Tensor = GroupedWeights.apply(inner, self.out, sizes)
        return made

    def _exchange_counts(self, counts: Tensor, num_rows: int) -> Dispatch:
        """Return the dispatch of rows, after the ranks have exchanged their counts."""
        ranks, num = self.group.num_ep, len(counts) // self.group.num_ep
        received = counts
        if self.group.ep is not None:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts, group=self.group.ep)
        if self.routing.is_balanced:
            # Known without reading the counts, which fake tensors do not have.
            each = num_rows // len(counts)
            sent, got = [each] * len(counts), [each] * len(counts)
        else:
            sent, got = counts.tolist(), received.tolist()
        stretches = [range(rank * num, (rank + 1) * num) for rank in range(ranks)]
        return Dispatch(
            sent=[sum(sent[index] for index in each) for each in stretches],
            arrived=[sum(got[index] for index in each) for each in stretches],
            gathered=[],
            sizes=got,
            order=[rank * num + expert for expert in range(num) for rank in range(ranks)],
            by_expert=[sum(got[expert::num]) for expert in range(num)],
        )


def _places(dispatch: Dispatch, more: Tensor) -> Tensor:
    """Return the row of each line; lines of padding have the empty last one."""
    num_rows, num = len(more) - 1, len(dispatch.by_expert)
    # torchtitan's bound: each expert may need one tile more than its rows fill.
    num_lines = -(-(num_rows + ALIGNED_ROWS * num) // ALIGNED_ROWS) * ALIGNED_ROWS
    starts = [0]
    for size in dispatch.sizes:
        starts.append(starts[-1] + size)
    ranges = [range(starts[index], starts[index + 1]) for index in dispatch.order]
    places = torch.full((num_lines,), num_rows, dtype=torch.int32, device=more.device)
    if num == len(dispatch.sizes):  # all of one rank: they lie in order
        return torch.arange(num_lines, dtype=torch.int32, device=more.device).clamp_(max=num_rows)
    own = [row for each in ranges for row in each]
    places[: len(own)] = torch.tensor(own, dtype=torch.int32, device=more.device)
    return places


class TitanExperts(nn.Module):
    """Routed experts of one rank, and shared ones, which run behind them.

    Args:
        experts: Of a layer.
        hidden_size: Width of tokens.
        routed: Ranks with the other experts, and the routing of tokens.
        shared: Shared experts, which get all tokens, if there are any.
    """

    def __init__(
        self,
        experts: Experts,
        hidden_size: int,
        routed: RoutedGroup,
        shared: nn.Module | None,
    ) -> None:
        super().__init__()
        self.facts, self.routing = experts, routed.routing
        self.router = nn.Linear(hidden_size, experts.num_experts, bias=False)
        self.experts = GroupedExperts(experts, hidden_size, routed)
        self.shared = shared
        self.bias = RoutingBias(experts.num_experts) if experts.routing_bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of experts for ``[batch, tokens, width]``."""
        flat, chosen = inputs.flatten(0, 1), self.facts.experts_per_token
        shares, places = self._shares(flat)
        slots = sorted_slots(places)
        # Slot i is of token i // k.
        rows = TakenRows.apply(flat, slots // chosen)
        sorted_shares = shares.detach().flatten()[slots]
        counts = self._counts(places)
        if self.bias is not None:
            self.bias.count(counts)
        back = self.experts(rows, counts)
        shared_output = None if self.shared is None else self.shared(inputs)
        unsorted = PutRows.apply(back, slots, len(slots))
        wide = unsorted.unflatten(0, (len(flat), chosen)).float()
        result = WeighedSum.apply(shares, wide).to(inputs.dtype).view(inputs.shape)
        # torchtitan's forward pass has names for these until here.
        del rows, back, unsorted, sorted_shares, counts
        return result if shared_output is None else shared_output + result

    def _shares(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the routing weights of each token in fp32, and its experts."""
        logits = self.router(flat).float()
        is_sigmoid = self.facts.scores == "sigmoid"
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(dim=-1)
        places = choose_experts(scores, self.facts, self.routing, self.bias)
        shares = GatheredScores.apply(scores, places)
        return shares / shares.sum(dim=-1, keepdim=True) * ROUTE_SCALE, places

    def _counts(self, places: Tensor) -> Tensor:
        num_experts = self.facts.num_experts
        if self.routing.is_balanced:
            return places.new_full((num_experts,), places.numel() // num_experts)
        return places.flatten().bincount(minlength=num_experts)
