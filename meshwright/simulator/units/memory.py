"""Memory of a rank whose states are FSDP units (`meshwright.simulator.units.passes`)."""

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
from meshwright.simulator.replication import Replication, parameters_by_group
from meshwright.simulator.units.bytes import PassBytes, UnitBytes
from meshwright.simulator.units.passes import StagePass, larger_peak
from meshwright.simulator.units.sharding import ParameterBytes, Sharding
from meshwright.simulator.units.sums import SumBytes, SummingPeaks
from meshwright.simulator.units.weights import Padding, StageWeights


def holds_units(shape: BlockShape, replication: Replication) -> bool:
    """Return True if states are units of fully_shard, also on a mesh of one rank."""
    return shape.stack.is_fully_sharded and replication.offload is not Offload.OPTIMIZER


class StageUnits(NamedTuple):
    """Bytes of a virtual stage whose states are FSDP units.

    Args:
        memory: Saved activations and workspaces of its passes.
        surplus: Gradients beyond those that `unit_states` counts.
        copied: Rows of an embedding's gradient that are copied out of it for the update.
        buffers: P2p buffers of a microbatch that live throughout the step.
    """

    memory: VirtualStageMemory
    surplus: Size
    copied: Size
    buffers: Size

    @classmethod
    def of(
        cls, shape: BlockShape, stage_pass: StagePass, weights: StageWeights, *, is_alone: bool
    ) -> "StageUnits":
        """Return the bytes of a virtual stage.

        Args:
            shape: Shape of its blocks, or of blocks with the same structure.
            stage_pass: Its sizes.
            weights: Sizes of its weights.
            is_alone: Whether its rank has no other virtual stage.
        """
        passes, stage, sharding, units = stage_pass
        # Each pass saves these beside its layers.
        ends: Size = passes.saved_embedding * stage.has_embedding
        ends = ends + passes.saved_head * stage.has_head
        sent, gathered = passes.messages(stage), stage_pass.gathered_bytes
        # Root and head are not resharded between forward and backward.
        always_gathered = units.root + units.head.weights
        always_gathered = always_gathered + stage_pass.held.at(-1).weights * units.keeps_last
        forward, first, later = stage_pass.moments(whole=False)
        memory = VirtualStageMemory(
            saved_bytes=stage_pass.saved_layers() + ends + kept_output_bytes(shape, sent),
            forward_workspace_bytes=forward.total_bytes,
            backward_workspace_bytes=later.total_bytes,
            reallocated_gradients_bytes=stage_pass.late_bytes,
            first_backward=first,
            after_forward_bytes=always_gathered if sharding.reshards else gathered,
            after_backward_bytes=gathered if sharding.keeps_units else 0,
            sent=SentBytes._make(sent),
        )
        copied: Size = 0
        if sharding.is_plain or sharding.sums:
            sums = SumBytes.of(shape, stage_pass, weights)
            memory = _summing(memory, stage_pass, sums)
        if sharding.is_plain:
            copied = units.cut_table // (weights.tp + 1) * (units.surplus > 0)
        elif sharding.keeps_units:
            kept = _kept_units(memory, stage_pass, is_alone=is_alone)
            memory = replace(memory, kept_units=kept)
        return cls(memory, units.surplus, copied, message_buffer_bytes(shape, sent))


def _summing(
    memory: VirtualStageMemory, stage_pass: StagePass, sums: SumBytes
) -> VirtualStageMemory:
    """Return the *memory* of passes that accumulate whole gradients.

    Those of a whole model reduce them. Without units, gradients are accumulated as they are made,
    and passes that find units find the same.
    """
    sharding, (first, later, last) = stage_pass.sharding, SummingPeaks.of(stage_pass, sums)
    memory = replace(memory, backward_workspace_bytes=later.total_bytes, first_backward=first)
    if sharding.sums:
        reduced = memory.reallocated_gradients_bytes - sums.shard
        return replace(memory, last_backward=last, reduced_gradients_bytes=reduced)
    if not sharding.keeps_units:
        return memory
    forward = PassPeak(memory.forward_workspace_bytes, 0)
    passes = PassPeaks(forward, first, PassPeak(later.total_bytes, 0))
    kept = KeptUnits(whole=passes, ahead=passes, ahead_bytes=0, reduction=PassPeak(0, 0))
    return replace(memory, kept_units=kept)


def _kept_units(memory: VirtualStageMemory, stage_pass: StagePass, *, is_alone: bool) -> KeptUnits:
    """Return the units that a pipeline's runtime keeps gathered between passes."""
    units, is_sharded = stage_pass.units, several(stage_pass.sharding.num_ranks)
    layers = [layer.whole for layer in units.layers] if stage_pass.stage.num_layers else []
    whole = stage_pass.moments(whole=True)
    # Before a pass saves or makes anything, units are copied out of their buffers, one by one:
    # the buffers of all, and the weights of the largest.
    copied = largest(unit.weights for unit in (*units.last, *layers, units.head))
    fetch: Size = stage_pass.gathered_bytes + copied * is_sharded
    moments: PassPeaks[Size] = PassPeaks(
        PassPeak(fetch - memory.saved_bytes, 0),
        PassPeak(fetch, memory.reallocated_gradients_bytes),
        PassPeak(fetch, 0),
    )
    return KeptUnits(
        whole=whole,
        ahead=PassPeaks(*map(larger_peak, whole, moments)),
        ahead_bytes=stage_pass.gathered_bytes * is_sharded,
        reduction=reduction(stage_pass, is_alone=is_alone),
    )


def reduction(stage_pass: StagePass, *, is_alone: bool) -> PassPeak[Size]:
    """Return the workspace of the reduction after the last backward, and gradients it frees.

    Units are freed and reduced one by one, the roots first and the head last: of several layers the
    first needs most. The reduce-scatter's buffer is live beside all accumulated gradients of a
    unit, its shard beside the last of them alone, which the loop that filled the buffer still
    references (`foreach_reduce` of PyTorch 2.13). The runtimes of ranks with one virtual stage
    still hold the last output.
    """
    passes, stage, sharding, units = stage_pass
    scale = sharding.parameter[1] // sharding.parameter[0].gathered_parameter
    output = passes.saved_head - passes.freed_head if stage.has_head and is_alone else 0
    experts, own, held = sharding.of_experts, sharding, stage_pass.held
    units_in_order = [(unit, own, 1) for unit in units.last]
    for family, layers in groupby(held.families):
        layer, count = units.layers[family], len([*layers])
        if sharding.divides_experts:
            # The first layer alone, then the others: only the first can be the peak.
            units_in_order += [(layer.dense, own, 1), (layer.experts, experts, 1)]
            units_in_order += [(layer.dense, own, count - 1), (layer.experts, experts, count - 1)]
        else:
            units_in_order.append((layer.whole, own, count))
    peak, freed = -output, 0 * output
    for unit, shared, count in (*units_in_order, (units.head, own, 1)):
        shard = unit.wire // shared.num_ranks
        if count:
            divided = unit.divided if shared is experts else 0
            live = largest((unit.kept, unit.last * scale + shard, shard + divided))
            peak = larger(peak, live + unit.wire - unit.kept - unit.weights - freed)
        freed = freed + count * (unit.weights + unit.kept - shard)
    return PassPeak(output + peak, stage_pass.late_bytes - units.shard)


def unit_states(
    num_parameters: Size, num_experts: Size, padding: Padding, sharding: Sharding
) -> RankStates[Size]:
    """Return the states of so many parameters, and of experts with a shard group of their own."""
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
        passes: Bytes of passes through them.
        stages: Its virtual stages.
        replication: Sharding of its states.
        parameter: Bytes of a parameter.
    """
    sharding = Sharding.of(replication, parameter)
    by_stage, paddings = {}, {}
    for stage in dict.fromkeys(stages):
        ranks = sharding.num_ranks, sharding.num_expert_ranks
        weights = StageWeights.of(shape, stage, *map(int, ranks))
        paddings[stage] = weights.padding
        units = UnitBytes.of(shape, stage, weights, sharding)
        stage_pass = StagePass(passes, stage, sharding, units)
        by_stage[stage] = StageUnits.of(shape, stage_pass, weights, is_alone=len(stages) == 1)
    padding = Padding(*(sum(paddings[stage][own] for stage in stages) for own in range(2)))
    states = unit_states(*parameters_by_group(shape, stages), padding, sharding)
    gradients, temporaries = states.gradients_bytes, states.update_temporary_bytes
    states = replace(
        states,
        gradients_bytes=gradients + sum(by_stage[stage].surplus for stage in stages),
        update_temporary_bytes=temporaries + sum(by_stage[stage].copied for stage in stages),
    )
    memory = rank_memory(states, tuple(by_stage[stage].memory for stage in stages))
    # Pipeline schedules of PyTorch hold the whole batch.
    batch = batch_bytes(shape.num_tokens, shape.cp) * shape.keeps_outputs
    buffers = batch + sum(by_stage[stage].buffers for stage in stages)
    return replace(memory, buffers_bytes=int(buffers))
