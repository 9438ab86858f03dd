"""Gradients of FSDP's units that stay whole, and are summed so, until the last microbatch.

Their sums have the format of the wire (`FSDPParam` of PyTorch 2.13,
`to_accumulated_grad_if_needed`).  The last backward pass reduces them unit by unit, the root last.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.hwprofiles import Offload, Units
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.memory import PassPeak, VirtualStageMemory
from meshwright.simulator.replication import is_tied
from meshwright.simulator.units.bytes import ParameterBytes, UnitBytes
from meshwright.simulator.units.passes import StagePass


@dataclass(frozen=True, kw_only=True, slots=True)
class SumBytes:
    """Bytes of a stage's gradients and of their sums.

    Args:
        apart: Whether sums have another format than the gradients of a pass.
        scale: Bytes of a sum for each of a gradient as a pass makes it.
        layer_shard: What this rank keeps of a layer's gradients once they are reduced.
        head_shard: The same of the head's unit.
        shard: What it keeps of all gradients then.
        copying: The last units' gradients and their first copies as sums, at most, while they are
            copied one by one.
        positions: Gradient of a table of positions, as a pass makes it.
        waits: What of the output matrix's gradient is not added to a sum before the embedding's
            is there.
    """

    apart: bool
    scale: int
    layer_shard: int
    head_shard: int
    shard: int
    copying: int
    positions: int
    waits: int

    @classmethod
    def of(cls, shape: BlockShape, stage_pass: StagePass, parameter: ParameterBytes) -> "SumBytes":
        """Return the bytes of *stage_pass* from those of a parameter."""
        (state, wire_bytes), (_, stage, replication, units), model = (
            parameter,
            stage_pass,
            shape.model,
        )
        made_bytes, tied = state.gathered_parameter, is_tied(shape, stage)
        positions = model.max_positions * model.hidden_size if model.positions == "learned" else 0
        ranks, kept_bytes = replication.span.num_ranks, state.gradient
        on_device = replication.offload is not Offload.PARAMETERS
        apart = made_bytes != wire_bytes

        def shard(wire: int) -> int:
            return -(-wire // wire_bytes // ranks) * kept_bytes * on_device

        return cls(
            apart=apart,
            scale=wire_bytes // made_bytes,
            layer_shard=shard(units.layer.wire),
            head_shard=shard(units.head.wire),
            shard=shard(units.gradients),
            copying=_copying(shape, units, wire_bytes, made_bytes),
            positions=positions * made_bytes,
            waits=units.head_gradient * (apart or tied),
        )


def _copying(shape: BlockShape, units: UnitBytes, wire_bytes: int, made_bytes: int) -> int:
    """Return the last units' gradients and their first copies, at most."""
    surplus = units.surplus // wire_bytes
    sizes = [unit.weights // made_bytes for unit in units.last]
    if shape.stack.units is not Units.ROOT:
        sizes[-1] += surplus
        return max(
            sum(sizes[index:]) * made_bytes + sum(sizes[: index + 1]) * wire_bytes
            for index in range(len(sizes))
        )
    # Of one unit, the table is copied first, and last the matrix of the head if it is another.
    root, matrix = sizes[0] + surplus, shape.local_vocab_size * shape.model.hidden_size
    last = units.last[0].last // made_bytes
    first_copied = root * made_bytes + (matrix + surplus) * wire_bytes
    return max(first_copied, last * made_bytes + root * wire_bytes)


def with_sums(
    virtual_stage: VirtualStageMemory, stage_pass: StagePass, sums: SumBytes
) -> VirtualStageMemory:
    """Return *virtual_stage*, a whole model, with backward passes that keep and reduce *sums*."""
    first, later, last = (
        _SummingPass(stage_pass, sums, is_first, is_last).fullest_moment()
        for is_first, is_last in ((True, False), (False, False), (False, True))
    )
    return replace(
        virtual_stage,
        first_backward=first,
        backward_workspace_bytes=later.total_bytes,
        last_backward=last,
        reduced_gradients_bytes=stage_pass.late_bytes - sums.shard,
    )


class _SummingPass(NamedTuple):
    """A backward pass: whether it makes the step's first gradients, and reduces the sums."""

    stage_pass: StagePass
    sums: SumBytes
    is_first: bool
    is_last: bool

    @property
    def adds(self) -> bool:
        """Whether it adds each gradient to a sum at once."""
        return not (self.is_first or self.sums.apart)

    def fullest_moment(self) -> PassPeak:
        """Return its fullest moment, beside all that the forward pass kept."""
        moments = (*self._head_moments(), *self._layer_moments(), *self._root_moments())
        return max(moments, key=lambda moment: moment.total_bytes)

    def _absent(self, done: int) -> int:
        """Return the sums that are not there, or no more, when head and *done* layers have run."""
        units, sums = self.stage_pass.units, self.sums
        if self.is_first:
            return self._late - units.head.wire - done * units.layer.wire
        if not self.is_last:
            return 0
        # Once a unit is reduced its whole sum has gone, but for this rank's shard.
        head = units.head.wire - sums.head_shard if units.head.weights else 0
        return head + done * (units.layer.wire - sums.layer_shard)

    @property
    def _late(self) -> int:
        """Sums that are not there when the pass begins."""
        return self.stage_pass.late_bytes if self.is_first else 0

    def _head_moments(self) -> Iterator[PassPeak]:
        passes, _, _, units = self.stage_pass
        head, stay = units.head, self.stage_pass.stays(whole=False)
        yield PassPeak(0, self._late)
        yield PassPeak(passes.head[1] + units.root + head.weights + stay, self._late)
        here = units.root + (stay or units.buffer)
        yield PassPeak(here + head.weights + passes.products[1], self._late)
        here += passes.message - self.stage_pass.freed_head
        if self.is_last:
            last = head.last * self.sums.scale
            yield PassPeak(here + head.wire, 0)
            yield PassPeak(here + head.wire + last + head.share, head.wire)
        elif self.is_first and self.sums.apart:
            yield PassPeak(here + head.weights, self._absent(0))

    def _layer_moments(self) -> Iterator[PassPeak]:
        passes, stage, replication, units = self.stage_pass
        work = passes.adding if self.adds else passes.layer[1]
        others = units.root + (self.sums.waits if self.adds else units.head_gradient)
        others += (not replication.reshards) * units.table.weights - self.stage_pass.freed_head
        for done in range(stage.num_layers):
            wire = (units.layer.wire if done else units.head.wire) * self.is_last
            here = work + self.stage_pass.gathered_layers(done, whole=False)
            if replication.reshards and (done or not units.kept_layer):
                # Before the layer runs: its gathered buffer, and the weights copied out of it.
                here = max(here, passes.message + units.layer.weights + units.buffer)
            yield PassPeak(others + wire + here - done * passes.saved_layer, self._absent(done))

    def _root_moments(self) -> Iterator[PassPeak]:
        """Yield the fullest moments after the layers: the table's gradient, then the last units'.

        A reduction holds all sums and the buffer of the wire; then that and its share, while the
        loop that filled it (`foreach_reduce` of PyTorch 2.13) still has the last gradient.
        """
        passes, stage, _, units = self.stage_pass
        sums, absent = self.sums, self._absent(stage.num_layers)
        freed = stage.num_layers * passes.saved_layer + self.stage_pass.freed_head
        made = sums.waits if self.adds else units.head_gradient + sums.positions
        wire = units.layer.wire if self.is_last else 0
        weights = units.root + units.table.weights
        yield PassPeak(passes.table + made + wire + weights - freed, absent)
        for unit in units.last if self.is_last else ():
            weights -= unit.weights
            here = weights + unit.wire - freed
            yield PassPeak(here, absent)
            absent += unit.wire + (units.surplus if unit is units.last[-1] else 0)
            yield PassPeak(here + unit.last * sums.scale + unit.share, absent)
        if self.is_first and sums.apart:
            yield PassPeak(sums.copying - freed, absent)
