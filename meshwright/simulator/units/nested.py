"""Memory peaks around experts that are an FSDP unit of their own within their layer's.

PyTorch's fully_shard (torch/distributed/fsdp/_fully_shard of 2.13). In forward, a unit's all-gather
buffer stays until the next unit's weights are copied out; in backward it is freed at once. Each
unit prefetches the next when it begins backward: the layer its experts, these the layer before.
torchtitan prefetches both units of the next layer as a layer begins, forward and backward, as a
host synchronisation would delay it (`apply_fsdp` of 0.2.2, models/llama4/infra/parallelize.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.simulator.graph import NestedMemory, Size, chosen
from meshwright.simulator.units.bytes import LayerUnit, Unit, UnitBytes


class NestedUnit(NamedTuple):
    """Experts within a layer's unit, and the units that are prefetched.

    Args:
        nested: Workspaces of passes around them.
        layer: Units of the layer.
        units: Units of the stage.
        stays: Whether they stay gathered from forward to backward (no reshard_after_forward).
    """

    nested: NestedMemory
    layer: LayerUnit
    units: UnitBytes
    stays: bool

    def forward(self, behind: Size, *, is_first: bool) -> Iterator[Size]:
        """Yield the live bytes of forward, beside saved activations and other layers' weights.

        Args:
            behind: All-gather buffer of the units behind the layer.
            is_first: Whether it was not prefetched.
        """
        nested, layer, units, _ = self
        dense, experts = layer.dense.weights, layer.experts.weights
        ahead = behind if units.prefetches else 0
        own = layer.dense_buffer + ahead
        # Prefetched with the layer: its experts' buffer is filled while attention runs.
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
        """Yield the live bytes of backward, until the experts have run.

        Args:
            message: Gradient of the layer's output.
            left: Input of the last reduce-scatter.
            behind: All-gather buffer of the units behind the layer.
            is_first: Whether its experts were not prefetched.
        """
        nested, layer, units, stays = self
        dense: Size = layer.dense.weights
        experts: Size = layer.experts.weights
        # Experts that run again are gathered as they are forward, and stay; the buffer goes as they
        # return, as the outermost unit that runs then (`_post_forward` of FSDPState).
        is_recomputed = nested.is_repeated == 1
        buffer: Size = 0 if stays else layer.expert_buffer
        prefetched: Size = behind if units.prefetches else 0
        expert_buffer: Size = 0 if units.prefetches and is_first else buffer
        prefetched_experts: Size = expert_buffer if units.prefetches else 0
        beside: Size = left + dense + stays * experts
        yield message + (not stays) * layer.dense_buffer + prefetched_experts + beside
        beside = beside + prefetched
        yield chosen(is_recomputed, nested.again_before + expert_buffer + beside, 0)
        whole: Size = beside + (not stays) * experts
        yield chosen(is_recomputed, nested.again + whole + buffer, 0)
        yield chosen(is_recomputed, nested.again_behind + whole, 0)
        yield nested.back_behind + chosen(is_recomputed, whole, beside + expert_buffer)
        shuffled: Size = (not stays) * units.cuts_experts * experts
        # From here on experts run backward, with the next layer's gather under way.
        yield nested.back_entry + whole + shuffled + buffer
        yield nested.back_inside + experts + dense + behind + left

    def reducing(self, behind: Size, *, kept: Size) -> Iterator[Size]:
        """Yield the live bytes from the end of the experts until the layer's others are reduced.

        Args:
            behind: All-gather buffer of the units behind the layer.
            kept: Kept bytes of the experts' reduced gradients.
        """
        nested, layer, units, _ = self
        experts = layer.experts
        beside: Size = layer.dense.weights + behind
        yield from reduced(nested.back_done + beside, experts, cuts=units.cuts_experts)
        yield nested.back_before - experts.made + kept + beside + experts.wire

    def reducing_sums(self, behind: Size, *, shard: Size, made: Size, scale: int) -> Iterator[Size]:
        """Yield the same of a pass that reduces accumulated gradients, beside all the layer's.

        Args:
            behind: All-gather buffer of the units behind the layer.
            shard: Bytes that this rank keeps of the experts' accumulated gradients.
            made: Their gradients of this pass that are not added to the sums as they are made.
            scale: Bytes of a sum for each of a gradient as a pass makes it.
        """
        nested, layer, units, _ = self
        experts = layer.experts
        beside: Size = layer.dense.weights + behind - made
        sums = experts._replace(made=experts.kept, last=experts.last * scale)
        yield from reduced(nested.back_done + beside, sums, cuts=units.cuts_experts)
        yield nested.back_before + beside + shard + experts.wire - experts.kept


def reduced(live: Size, unit: Unit, *, cuts: Size) -> Iterator[Size]:
    """Yield the live bytes while the gradients of a *unit*, which are *here*, are reduced.

    Experts sharded along their widths are first copied to another order, and gathered weights are
    such copies (`foreach_all_gather_copy_out`). A single rank divides them into a tensor that it
    copies to the output (`foreach_reduce`).
    """
    yield live + unit.wire + cuts * unit.last
    yield live - unit.made + unit.last + unit.wire + unit.share
    yield live - unit.made + unit.wire + 2 * unit.divided


def is_apart(units: UnitBytes, *, first: bool) -> bool:
    """Tell whether the all-reduced gradient is not the kept one, as a *first* uncast one is."""
    return units.casts_shares or not first
