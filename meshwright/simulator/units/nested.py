"""The fullest moments around experts that are a unit of their own within that of their layer.

PyTorch's fully_shard (torch/distributed/fsdp/_fully_shard of 2.13).  Forward, the buffer that a
unit was gathered in stays until the next unit's weights are copied out; backward it goes at once.
Each unit has the next gathered when it begins backward: the layer its experts, these the layer
before.  torchtitan has both of the next layer gathered as a layer begins, forward and backward, as
what waits for the host would delay it (`apply_fsdp` of 0.2.2, models/llama4/infra/parallelize.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.simulator.graph import NestedMemory, Size, chosen
from meshwright.simulator.units.bytes import LayerUnit, Unit, UnitBytes


class NestedUnit(NamedTuple):
    """Experts within a layer's unit, and what is gathered ahead.

    Args:
        nested: What passes need around them.
        layer: Units of the layer.
        units: Of the stage.
        stays: Whether they stay from forward to backward, which gathers nothing then.
    """

    nested: NestedMemory
    layer: LayerUnit
    units: UnitBytes
    stays: bool

    def forward(self, behind: Size, *, is_first: bool) -> Iterator[Size]:
        """Yield what lives forward, beside what is kept and other layers' weights.

        Args:
            behind: Buffer of what is gathered behind the layer.
            is_first: Nothing was gathered ahead of it.
        """
        nested, layer, units, _ = self
        dense, experts = layer.dense.weights, layer.experts.weights
        ahead = behind if units.prefetches else 0
        own = layer.dense_buffer + ahead
        if units.prefetches and not is_first:
            own = own + layer.expert_buffer
        yield nested.before + dense + own
        whole = dense + experts + layer.expert_buffer + ahead
        # Until they are copied out `wait_for_unshard` has a name for the buffer before theirs.
        yield nested.entry + whole + layer.dense_buffer + units.cuts_experts * experts
        yield nested.inside + whole
        yield nested.behind + dense + layer.expert_buffer + ahead

    def backward(
        self, message: Size, left: Size, behind: Size, *, is_first: bool
    ) -> Iterator[Size]:
        """Yield the same backward, until the experts have run.

        Args:
            message: Gradient of the layer's output.
            left: Input of the last reduction.
            behind: Buffer of what is gathered behind the layer.
            is_first: Nothing was gathered ahead of its experts.
        """
        nested, layer, units, stays = self
        dense: Size = layer.dense.weights
        experts: Size = layer.experts.weights
        # Experts that run again are gathered as they are forward, and stay; the buffer goes as they
        # return, as the outermost unit that runs then (`_post_forward` of FSDPState).
        is_again = nested.is_repeated == 1
        buffer: Size = 0 if stays else layer.expert_buffer
        early: Size = behind if units.prefetches else 0
        waits: Size = 0 if units.prefetches and is_first else buffer
        ready: Size = waits if units.prefetches else 0
        beside: Size = left + dense + stays * experts
        yield message + (not stays) * layer.dense_buffer + ready + beside
        beside = beside + early
        yield chosen(is_again, nested.again_before + waits + beside, 0)
        whole: Size = beside + (not stays) * experts
        yield chosen(is_again, nested.again + whole + buffer, 0)
        yield chosen(is_again, nested.again_behind + whole, 0)
        yield nested.back_behind + chosen(is_again, whole, beside + waits)
        shuffled: Size = (not stays) * units.cuts_experts * experts
        yield nested.back_entry + whole + shuffled + buffer
        yield nested.back_inside + experts + dense + behind + left

    def reducing(self, behind: Size, *, kept: Size) -> Iterator[Size]:
        """Yield what lives from when experts have run until the layer's others are reduced.

        Args:
            behind: Buffer of what is gathered behind the layer.
            kept: What stays of the experts' reduced gradients.
        """
        nested, layer, units, _ = self
        experts = layer.experts
        beside: Size = layer.dense.weights + behind
        yield from reduced(nested.back_done + beside, experts, cuts=units.cuts_experts)
        yield nested.back_before - experts.made + kept + beside + experts.wire

    def reducing_sums(self, behind: Size, *, shard: Size, made: Size, scale: int) -> Iterator[Size]:
        """Yield the same of a pass that reduces sums, beside those of all the layer.

        Args:
            behind: Buffer of what is gathered behind the layer.
            shard: What this rank keeps of the experts' sums.
            made: Their gradients of this pass that are not added to the sums as they are made.
            scale: Bytes of a sum for each of a gradient as a pass makes it.
        """
        nested, layer, units, _ = self
        experts = layer.experts
        beside: Size = layer.dense.weights + behind - made
        sums = experts._replace(made=experts.kept, last=experts.last * scale)
        yield from reduced(nested.back_done + beside, sums, cuts=units.cuts_experts)
        yield nested.back_before + beside + shard + experts.wire - experts.kept


def reduced(here: Size, unit: Unit, *, cuts: Size) -> Iterator[Size]:
    """Yield what lives while the gradients of a *unit*, which are *here*, are reduced.

    Where it is cut along its widths each is first replaced by a copy in another order, and gathered
    weights are such copies (`foreach_all_gather_copy_out`).  One rank alone divides them into a
    tensor that it copies to what comes out (`foreach_reduce`).
    """
    yield here + unit.wire + cuts * unit.last
    yield here - unit.made + unit.last + unit.wire + unit.share
    yield here - unit.made + unit.wire + 2 * unit.divided


def is_apart(units: UnitBytes, *, first: bool) -> bool:
    """Tell whether what replicas summed is not what is kept, as a *first* one without a cast is."""
    return units.casts_shares or not first
