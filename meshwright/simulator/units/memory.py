"""The memory of a rank whose states are units of FSDP (`meshwright.simulator.units.passes`)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from meshwright.hwprofiles import Offload
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.graph import Size, larger, largest, several
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import (
    KeptUnits,
    PassPeak,
    PassPeaks,
    RankMemory,
    RankStates,
    SentBytes,
    VirtualStageMemory,
    batch_bytes,
    kept_output_bytes,
    message_buffer_bytes,
    rank_memory,
)
from meshwright.simulator.replication import Replication, held_parameters
from meshwright.simulator.units.bytes import PassBytes, UnitBytes
from meshwright.simulator.units.passes import StagePass, fuller
from meshwright.simulator.units.sharding import ParameterBytes, Sharding
from meshwright.simulator.units.sums import SumBytes, SummingPeaks
from meshwright.simulator.units.weights import Padding, StageWeights

NO_PEAK: PassPeak[Size] = PassPeak(0, 0)
NO_PEAKS: PassPeaks[Size] = PassPeaks(NO_PEAK, NO_PEAK, NO_PEAK)


def holds_units(shape: BlockShape, replication: Replication) -> bool:
    """Return whether passes hold the units of fully_shard, also on a mesh of one rank."""
    return shape.stack.is_fully_sharded and replication.offload is not Offload.OPTIMIZER


class StageUnits(NamedTuple):
    """Bytes of a virtual stage whose states are units; see `VirtualStageMemory` and `KeptUnits`.

    Args:
        surplus: Gradients beyond those that `unit_states` counts.
        copied: Rows of a table's gradient that are copied out of it for the update.
        buffers: Buffers of a microbatch's messages that live throughout the step.
        saved: Kept by a pass.
        late: Gradients that its first backward pass makes.
        after_forward: Gathered weights that stay.
        after_backward: The same.
        reduction: What reducing the gradients needs after the last pass of a pipeline.
        reduced: Gradients that go when they are reduced after the last microbatch.
        fetched: Buffers of units that are gathered ahead.
        sent: Output and gradient of a microbatch.
        apart: Passes that gather the units themselves.
        whole: Passes that find all of them.
        ahead: Passes that find the buffers.
        last: A backward pass that reduces sums.
    """

    surplus: Size
    copied: Size
    buffers: Size
    saved: Size
    late: Size
    after_forward: Size
    after_backward: Size
    reduction: Size
    reduced: Size
    fetched: Size
    sent: tuple[Size, Size]
    apart: PassPeaks[Size]
    whole: PassPeaks[Size] = NO_PEAKS
    ahead: PassPeaks[Size] = NO_PEAKS
    last: PassPeak[Size] = NO_PEAK

    @classmethod
    def of(
        cls, shape: BlockShape, stage_pass: StagePass, weights: StageWeights, *, is_alone: bool
    ) -> "StageUnits":
        """Return the bytes of a virtual stage.

        Args:
            shape: Of its blocks, or of blocks with the same structure.
            stage_pass: Its sizes.
            weights: Those of its weights.
            is_alone: Whether its rank has no other.
        """
        passes, stage, sharding, units = stage_pass
        ends: Size = passes.saved_embedding * stage.has_embedding
        ends = ends + passes.saved_head * stage.has_head
        sent, gathered = passes.messages(stage), stage_pass.gathered_bytes
        stays = units.root + units.head.weights
        stays = stays + stage_pass.held.at(-1).weights * units.keeps_last
        found = cls(
            surplus=units.surplus,
            copied=0,
            buffers=message_buffer_bytes(shape, sent),
            saved=stage_pass.saved_layers() + ends + kept_output_bytes(shape, sent),
            late=stage_pass.late_bytes,
            after_forward=stays if sharding.reshards else gathered,
            after_backward=gathered if sharding.keeps_units else 0,
            reduction=0,
            reduced=0,
            fetched=0,
            sent=sent,
            apart=stage_pass.moments(whole=False),
        )
        if sharding.is_plain:
            return found.plain(shape, stage_pass, weights)
        if sharding.keeps_units:
            return found.kept(stage_pass, is_alone=is_alone)
        return found.summed(shape, stage_pass, weights) if sharding.sums else found

    def kept(self, stage_pass: StagePass, *, is_alone: bool) -> "StageUnits":
        """Return the bytes where a pipeline's runtime keeps units between passes."""
        units, is_sharded = stage_pass.units, several(stage_pass.sharding.num_ranks)
        layers = [layer.whole for layer in units.layers] if stage_pass.stage.num_layers else []
        whole = stage_pass.moments(whole=True)
        # Before a pass saves or makes anything, units are copied out of their buffers, one by one:
        # the buffers of all, and the weights of the largest.
        copied = largest(unit.weights for unit in (*units.last, *layers, units.head))
        fetch: Size = stage_pass.gathered_bytes + copied * is_sharded
        moments: PassPeaks[Size] = PassPeaks(
            PassPeak(fetch - self.saved, 0), PassPeak(fetch, self.late), PassPeak(fetch, 0)
        )
        buffers, reduced = reduction(stage_pass, is_alone=is_alone)
        return self._replace(
            reduction=buffers,
            reduced=reduced,
            fetched=stage_pass.gathered_bytes * is_sharded,
            whole=whole,
            ahead=PassPeaks(*map(fuller, whole, moments)),
        )

    def plain(
        self, shape: BlockShape, stage_pass: StagePass, weights: StageWeights
    ) -> "StageUnits":
        """Return the bytes where no units are: gradients are added to sums as they are made."""
        sums = SumBytes.of(shape, stage_pass, weights)
        first, later, _ = SummingPeaks.of(stage_pass, sums)
        passes = PassPeaks(self.apart.forward, first, PassPeak(later.total_bytes, 0))
        units = stage_pass.units
        copied = units.cut_table // (weights.tp + 1) * (units.surplus > 0)
        return self._replace(apart=passes, whole=passes, ahead=passes, copied=copied)

    def summed(
        self, shape: BlockShape, stage_pass: StagePass, weights: StageWeights
    ) -> "StageUnits":
        """Return the bytes of a whole model with passes that keep and reduce sums."""
        sums = SumBytes.of(shape, stage_pass, weights)
        first, later, last = SummingPeaks.of(stage_pass, sums)
        return self._replace(
            reduced=self.late - sums.shard,
            apart=PassPeaks(self.apart.forward, first, PassPeak(later.total_bytes, 0)),
            last=last,
        )

    def virtual_stage(self, *, keeps_units: bool, sums: bool) -> VirtualStageMemory:
        """Return these sizes as those of a rank's passes."""
        forward, first, later = self.apart
        kept = KeptUnits(
            whole=self.whole,
            ahead=self.ahead,
            ahead_bytes=self.fetched,
            reduction=PassPeak(self.reduction, self.reduced),
        )
        return VirtualStageMemory(
            saved_bytes=self.saved,
            forward_workspace_bytes=forward.total_bytes,
            backward_workspace_bytes=later.total_bytes,
            late_gradients_bytes=self.late,
            first_backward=first,
            last_backward=self.last if sums else None,
            reduced_gradients_bytes=self.reduced if sums else 0,
            after_forward_bytes=self.after_forward,
            after_backward_bytes=self.after_backward,
            kept_units=kept if keeps_units else None,
            sent=SentBytes._make(self.sent),
        )


def reduction(stage_pass: StagePass, *, is_alone: bool) -> PassPeak[Size]:
    """Return what the reduction after the last backward pass needs, and the gradients it takes.

    Units are freed and reduced one by one, the roots first and the head last: of several layers the
    first needs most.  The wire's buffer lies beside all sums of a unit, its shard beside the last
    of them alone, which the loop that filled the buffer still has (`foreach_reduce` of PyTorch
    2.13).  The runtimes of ranks with one virtual stage hold the last output still.
    """
    passes, stage, sharding, units = stage_pass
    scale = sharding.parameter[1] // sharding.parameter[0].gathered_parameter
    output = passes.saved_head - passes.freed_head if stage.has_head and is_alone else 0
    experts, own, held = sharding.of_experts, sharding, stage_pass.held
    runs = [(unit, own, 1) for unit in units.last]
    for family, layers in groupby(held.families):
        layer, count = units.layers[family], len([*layers])
        if sharding.divides_experts:
            runs += [(layer.dense, own, 1), (layer.experts, experts, 1)]
            runs += [(layer.dense, own, count - 1), (layer.experts, experts, count - 1)]
        else:
            runs.append((layer.whole, own, count))
    most, gone = -output, 0 * output
    for unit, shared, count in (*runs, (units.head, own, 1)):
        shard = unit.wire // shared.num_ranks
        if count:
            divided = unit.divided if shared is experts else 0
            beside = largest((unit.kept, unit.last * scale + shard, shard + divided))
            most = larger(most, beside + unit.wire - unit.kept - unit.weights - gone)
        gone = gone + count * (unit.weights + unit.kept - shard)
    return PassPeak(output + most, stage_pass.late_bytes - units.shard)


def unit_states(
    num_parameters: Size, num_experts: Size, padding: Padding, sharding: Sharding
) -> RankStates[Size]:
    """Return the states of so many parameters, and of experts of which other ranks hold others."""
    state, of_experts = sharding.parameter.state, sharding.of_experts
    share = sharding.shares(num_parameters + padding.most, num_experts + padding.experts)
    share = share * (1 - sharding.on_host)
    gradients = sharding.kept_bytes(num_parameters, padding.most)
    gradients = gradients + of_experts.kept_bytes(num_experts, padding.experts)
    return RankStates.of_share(
        share, state, parameters_bytes=share * state.sharded_parameter, gradients_bytes=gradients
    )


def unit_rank_memory(
    shape: BlockShape,
    passes: PassBytes,
    stages: Sequence[Stage],
    replication: Replication,
    parameter: ParameterBytes,
) -> RankMemory:
    """Return the memory of a rank whose states are units of fully_shard, for one microbatch.

    Args:
        shape: Sizes of its blocks.
        passes: What passes through them need.
        stages: Its virtual stages.
        replication: How its states are sharded.
        parameter: Bytes of a parameter.
    """
    sharding = Sharding.of(replication, parameter)
    known, virtual_stages, paddings = {}, {}, {}
    for stage in dict.fromkeys(stages):
        ranks = sharding.num_ranks, sharding.num_expert_ranks
        weights = StageWeights.of(shape, stage, *map(int, ranks))
        paddings[stage] = weights.padding
        units = UnitBytes.of(shape, stage, weights, sharding)
        stage_pass = StagePass(passes, stage, sharding, units)
        found = StageUnits.of(shape, stage_pass, weights, is_alone=len(stages) == 1)
        known[stage] = found
        virtual_stages[stage] = found.virtual_stage(
            keeps_units=sharding.keeps_units, sums=sharding.sums
        )
    padding = Padding(*(sum(paddings[stage][own] for stage in stages) for own in range(2)))
    states = unit_states(*held_parameters(shape, stages), padding, sharding)
    gradients, updating = states.gradients_bytes, states.update_temporary_bytes
    states = replace(
        states,
        gradients_bytes=gradients + sum(known[stage].surplus for stage in stages),
        update_temporary_bytes=updating + sum(known[stage].copied for stage in stages),
    )
    memory = rank_memory(states, tuple(virtual_stages[stage] for stage in stages))
    batch = batch_bytes(shape.num_tokens, shape.cp) * shape.keeps_outputs
    buffers = batch + sum(known[stage].buffers for stage in stages)
    return replace(memory, buffers_bytes=int(buffers))
