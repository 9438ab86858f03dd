"""Expert-parallel ranks, and the rows of tokens that they exchange.

Balanced routing makes equally many rows for each expert, which is known before they are; of other
routing all ranks tell each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.validate.programs.context import all_gather, reduce_scatter
from meshwright.validate.programs.fused import AutogradFunction, Context

Counts = list[list[list[int]]]  # rows of each rank of ep, of each rank of etp, for each expert


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroup:
    """Ranks that share experts with a rank; a group is None where there is only one.

    Args:
        ep: Ranks with other experts.
        etp: Ranks with other parts of the same ones.
        everyone: Both, neighbours first.
        ep_rank: Index of this rank in *ep*.
        etp_rank: Index of this rank in *etp*.
        num_ep: Number of ranks with different experts.
        num_etp: Number of ranks that split an expert.
    """

    ep: dist.ProcessGroup | None = None
    etp: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None
    ep_rank: int = 0
    etp_rank: int = 0
    num_ep: int = 1
    num_etp: int = 1

    def own(self, num_experts: int) -> range:
        """Return the experts of this rank.

        >>> ExpertGroup(ep_rank=1, num_ep=4).own(8)
        range(2, 4)
        """
        num = num_experts // self.num_ep
        return range(self.ep_rank * num, (self.ep_rank + 1) * num)

    def exchange_counts(self, own: Tensor, *, balanced: int | None) -> Counts:
        """Return the rows of all ranks for each expert, from this rank's *own*.

        Args:
            own: Rows of this rank for each expert.
            balanced: Rows of each rank for each, if it is known; all tell each other still.
        """
        num_ranks, num_experts = self.num_ep * self.num_etp, len(own)
        whole = own
        if num_ranks > 1:
            whole = all_gather(own.new_empty(num_ranks * num_experts), own, self.everyone)
        if balanced is not None:
            return [[[balanced] * num_experts] * self.num_etp] * self.num_ep
        counts: Counts = whole.view(self.num_ep, self.num_etp, num_experts).tolist()
        return counts


class Dispatch(NamedTuple):
    """Rows that a rank sends and receives.

    Args:
        sent: To each rank of ep.
        arrived: From each of them.
        gathered: Of each rank of etp.
        sizes: Of stretches that arrive, by rank of etp, of ep, and own expert.
        order: The same by own expert.
        by_expert: Rows of each own expert.
    """

    sent: list[int]
    arrived: list[int]
    gathered: list[int]
    sizes: list[int]
    order: list[int]
    by_expert: list[int]

    @classmethod
    def of(cls, counts: Counts, group: ExpertGroup) -> "Dispatch":
        """Return the rows of a rank of *group*.

        >>> pair = ExpertGroup(ep_rank=1, num_ep=2)
        >>> Dispatch.of([[[1, 2, 3, 4]], [[5, 6, 7, 8]]], pair)
        Dispatch(sent=[11, 15], arrived=[7, 15], gathered=[22], sizes=[3, 4, 7, 8], \
order=[0, 2, 1, 3], by_expert=[10, 12])
        """
        eps, etps = range(group.num_ep), range(group.num_etp)
        mine = counts[group.ep_rank][group.etp_rank]
        own, num = group.own(len(mine)), len(mine) // group.num_ep
        stretches = [(etp, ep, expert) for etp in etps for ep in eps for expert in own]
        order = sorted(range(len(stretches)), key=lambda index: stretches[index][2])
        return cls(
            sent=[sum(mine[rank * num : (rank + 1) * num]) for rank in eps],
            arrived=[sum(counts[ep][group.etp_rank][expert] for expert in own) for ep in eps],
            gathered=[sum(counts[ep][etp][e] for ep in eps for e in own) for etp in etps],
            sizes=[counts[ep][etp][expert] for etp, ep, expert in stretches],
            order=order,
            by_expert=[sum(counts[ep][etp][e] for etp in etps for ep in eps) for e in own],
        )

    @property
    def back(self) -> tuple[list[int], list[int]]:
        """Sizes and order of stretches by own expert, as they go back to who sent them."""
        places = sorted(range(len(self.order)), key=self.order.__getitem__)
        return [self.sizes[index] for index in self.order], places


class _Exchanged(AutogradFunction):
    """All-to-all of rows to the ranks of their experts, or back; so do their gradients."""

    @staticmethod
    def forward(
        ctx: Context,
        rows: Tensor,
        sent: Sequence[int],
        arrived: Sequence[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.sent, ctx.arrived, ctx.group = sent, arrived, group
        return _all_to_all(rows, sent, arrived, group)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient, ctx.arrived, ctx.sent, ctx.group), None, None, None


def _all_to_all(
    rows: Tensor, sent: Sequence[int], arrived: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    output = rows.new_empty((sum(arrived), *rows.shape[1:]))
    dist.all_to_all_single(output, rows.contiguous(), list(arrived), list(sent), group=group)
    return output


def exchanged(
    rows: Tensor, sent: Sequence[int], arrived: Sequence[int], group: ExpertGroup
) -> Tensor:
    """Return the rows that *arrived* from ranks with other experts, of those *sent* to them."""
    if group.ep is None:
        return rows
    output: Tensor = _Exchanged.apply(rows, sent, arrived, group.ep)
    return output


class _Gathered(AutogradFunction):
    """All-gather of rows over the ranks of an expert; backward sums a rank's own."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, sizes: Sequence[int], group: ExpertGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _all_rows(rows, sizes, group)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own_sum(gradient, ctx.sizes, ctx.group), None, None


class _Summed(AutogradFunction):
    """Sum of rows over the ranks of an expert, a rank's own part; backward gathers."""

    @staticmethod
    def forward(ctx: Context, parts: Tensor, sizes: Sequence[int], group: ExpertGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _own_sum(parts, sizes, group)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_rows(gradient, ctx.sizes, ctx.group), None, None


def gathered(rows: Tensor, sizes: Sequence[int], group: ExpertGroup) -> Tensor:
    """Return the rows of all ranks of an expert, so many of each."""
    output: Tensor = rows if group.etp is None else _Gathered.apply(rows, sizes, group)
    return output


def summed(parts: Tensor, sizes: Sequence[int], group: ExpertGroup) -> Tensor:
    """Return this rank's rows of the sum over the ranks of an expert."""
    output: Tensor = parts if group.etp is None else _Summed.apply(parts, sizes, group)
    return output


def _all_rows(rows: Tensor, sizes: Sequence[int], group: ExpertGroup) -> Tensor:
    """Return all ranks' rows, by all-to-all where they are unequally many for an all-gather."""
    output = rows.new_empty((sum(sizes), *rows.shape[1:]))
    if len(set(sizes)) == 1:
        return all_gather(output, rows.contiguous(), group.etp)
    own = sizes[group.etp_rank]
    given = torch.cat([rows] * group.num_etp)
    dist.all_to_all_single(output, given, list(sizes), [own] * group.num_etp, group=group.etp)
    return output


def _own_sum(parts: Tensor, sizes: Sequence[int], group: ExpertGroup) -> Tensor:
    own = sizes[group.etp_rank]
    if len(set(sizes)) == 1:
        return reduce_scatter(parts.new_empty((own, *parts.shape[1:])), parts, group.etp)
    output = parts.new_empty((group.num_etp * own, *parts.shape[1:]))
    dist.all_to_all_single(output, parts, [own] * group.num_etp, list(sizes), group=group.etp)
    return output.unflatten(0, (group.num_etp, own)).sum(dim=0)
