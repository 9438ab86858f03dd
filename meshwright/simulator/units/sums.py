"""Gradients of FSDP's units that stay whole, and are summed so, until the last microbatch.

Their sums have the format of the wire (`FSDPParam` of PyTorch 2.13,
`to_accumulated_grad_if_needed`).  The last backward pass reduces them unit by unit, the root last.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.hwprofiles import Offload
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.memory import PassPeak, VirtualStageMemory
from meshwright.simulator.model import TRANSFORMER_LAYER
from meshwright.simulator.units.bytes import ParameterBytes, is_tied
from meshwright.simulator.units.passes import StagePass


@dataclass(frozen=True, kw_only=True, slots=True)
class SumBytes:
    """Bytes of a stage's gradients and of their sums; the root is embedding, final norm and head.

    Args:
        apart: Whether sums have another format than the gradients of a pass.
        layer_shard: What this rank keeps of a layer's gradients once they are reduced.
        shard: What it keeps of all gradients then.
        root: Sums of the root.
        last: Of these, that of the last weight.
        copying: The root's gradients and their first copies as sums, at most, while they are
            copied one by one.
        positions: Gradient of a table of positions, as a pass makes it.
        waits: What of the output matrix's gradient is not added to a sum before the embedding's
            is there.
    """

    apart: bool
    layer_shard: int
    shard: int
    root: int
    last: int
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
        matrix = shape.local_vocab_size * model.hidden_size
        positions = model.max_positions * model.hidden_size if model.positions == "learned" else 0
        ranks, kept_bytes = replication.span.num_ranks, state.gradient
        on_device = replication.offload is not Offload.PARAMETERS
        root, surplus = units.root_wire // wire_bytes, units.surplus // wire_bytes
        last = 0 if tied else matrix  # those of a norm do not count
        apart = made_bytes != wire_bytes
        first_copied = (root + surplus) * made_bytes + (matrix + surplus) * wire_bytes
        last_copied = last * made_bytes + (root + surplus) * wire_bytes
        return cls(
            apart=apart,
            layer_shard=-(-shape.parameters[TRANSFORMER_LAYER] // ranks) * kept_bytes * on_device,
            shard=-(-units.gradients // wire_bytes // ranks) * kept_bytes * on_device,
            root=(root + surplus) * wire_bytes,
            last=last * wire_bytes,
            copying=max(first_copied, last_copied),
            positions=positions * made_bytes,
            waits=units.head_gradient * (apart or tied),
        )


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
        """Return the sums that are not there, or no more, when *done* layers have run."""
        units = self.stage_pass.units
        if self.is_first:
            return self.stage_pass.late_bytes - done * units.layer_wire
        # Once a layer is reduced its whole sum has gone, but for this rank's shard.
        return done * (units.layer_wire - self.sums.layer_shard) if self.is_last else 0

    def _head_moments(self) -> Iterator[PassPeak]:
        passes, stage, replication, units = self.stage_pass
        stay = 0 if replication.reshards else stage.num_layers * units.layer
        yield PassPeak(0, self._absent(0))
        yield PassPeak(passes.head[1] + units.root + stay, self._absent(0))

    def _layer_moments(self) -> Iterator[PassPeak]:
        passes, stage, replication, units = self.stage_pass
        work = passes.adding if self.adds else passes.layer[1]
        others = units.root + (self.sums.waits if self.adds else units.head_gradient)
        others -= self.stage_pass.freed_head
        for done in range(stage.num_layers):
            wire = units.layer_wire if done and self.is_last else 0
            here = work + self.stage_pass.gathered_layers(done, whole=False)
            if replication.reshards:
                # Before the layer runs: its gathered buffer, and the weights copied out of it.
                here = max(here, passes.message + units.layer + units.buffer)
            yield PassPeak(others + wire + here - done * passes.saved_layer, self._absent(done))

    def _root_moments(self) -> Iterator[PassPeak]:
        """Yield the fullest moments after the layers: the table's gradient, then all the root's.

        A reduction holds all sums and the buffer of the wire; then that and its share, while the
        loop that filled it (`foreach_reduce` of PyTorch 2.13) still has the last gradient.
        """
        passes, stage, _, units = self.stage_pass
        sums, absent = self.sums, self._absent(stage.num_layers)
        freed = stage.num_layers * passes.saved_layer + self.stage_pass.freed_head
        made = sums.waits if self.adds else units.head_gradient + sums.positions
        wire = units.layer_wire if self.is_last else 0
        yield PassPeak(passes.table + made + wire + units.root - freed, absent)
        if self.is_last:
            yield PassPeak(units.root_wire - freed, absent)
            yield PassPeak(
                units.root_wire + sums.last + units.root_reduced - freed, absent + sums.root
            )
        elif self.is_first and sums.apart:
            yield PassPeak(sums.copying - freed, absent)
