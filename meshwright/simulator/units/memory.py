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


def holds_units(shape: BlockShape, replication: Replication) -> bool:
    """Return whether passes hold the units of fully_shard, also on a mesh of one rank."""
    return shape.stack.is_fully_sharded and replication.offload is not Offload.OPTIMIZER


class StageUnits(NamedTuple):
    """Bytes of a virtual stage whose states are units.

    Args:
        memory: What its passes keep and need.
        surplus: Gradients beyond those that `unit_states` counts.
        copied: Rows of a table's gradient that are copied out of it for the update.
        buffers: Buffers of a microbatch's messages that live throughout the step.
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
        forward, first, later = stage_pass.moments(whole=False)
        memory = VirtualStageMemory(
            saved_bytes=stage_pass.saved_layers() + ends + kept_output_bytes(shape, sent),
            forward_workspace_bytes=forward.total_bytes,
            backward_workspace_bytes=later.total_bytes,
            late_gradients_bytes=stage_pass.late_bytes,
            first_backward=first,
            after_forward_bytes=stays if sharding.reshards else gathered,
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
    """Return the *memory* of passes that keep sums of gradients.

    Those of a whole model reduce them.  Where no units are, gradients are added to sums as they
    are made, and whatever finds units finds the same.
    """
    sharding, (first, later, last) = stage_pass.sharding, SummingPeaks.of(stage_pass, sums)
    memory = replace(memory, backward_workspace_bytes=later.total_bytes, first_backward=first)
    if sharding.sums:
        reduced = memory.late_gradients_bytes - sums.shard
        return replace(memory, last_backward=last, reduced_gradients_bytes=reduced)
    if not sharding.keeps_units:
        return memory
    forward = PassPeak(memory.forward_workspace_bytes, 0)
    passes = PassPeaks(forward, first, PassPeak(later.total_bytes, 0))
    kept = KeptUnits(whole=passes, ahead=passes, ahead_bytes=0, reduction=PassPeak(0, 0))
    return replace(memory, kept_units=kept)


def _kept_units(memory: VirtualStageMemory, stage_pass: StagePass, *, is_alone: bool) -> KeptUnits:
    """Return the units that a pipeline's runtime keeps between passes."""
    units, is_sharded = stage_pass.units, several(stage_pass.sharding.num_ranks)
    layers = [layer.whole for layer in units.layers] if stage_pass.stage.num_layers else []
    whole = stage_pass.moments(whole=True)
    # Before a pass saves or makes anything, units are copied out of their buffers, one by one:
    # the buffers of all, and the weights of the largest.
    copied = largest(unit.weights for unit in (*units.last, *layers, units.head))
    fetch: Size = stage_pass.gathered_bytes + copied * is_sharded
    moments: PassPeaks[Size] = PassPeaks(
        PassPeak(fetch - memory.saved_bytes, 0),
        PassPeak(fetch, memory.late_gradients_bytes),
        PassPeak(fetch, 0),
    )
    return KeptUnits(
        whole=whole,
        ahead=PassPeaks(*map(fuller, whole, moments)),
        ahead_bytes=stage_pass.gathered_bytes * is_sharded,
        reduction=reduction(stage_pass, is_alone=is_alone),
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
    known, paddings = {}, {}
    for stage in dict.fromkeys(stages):
        ranks = sharding.num_ranks, sharding.num_expert_ranks
        weights = StageWeights.of(shape, stage, *map(int, ranks))
        paddings[stage] = weights.padding
        units = UnitBytes.of(shape, stage, weights, sharding)
        stage_pass = StagePass(passes, stage, sharding, units)
        known[stage] = StageUnits.of(shape, stage_pass, weights, is_alone=len(stages) == 1)
    padding = Padding(*(sum(paddings[stage][own] for stage in stages) for own in range(2)))
    states = unit_states(*held_parameters(shape, stages), padding, sharding)
    gradients, updating = states.gradients_bytes, states.update_temporary_bytes
    states = replace(
        states,
        gradients_bytes=gradients + sum(known[stage].surplus for stage in stages),
        update_temporary_bytes=updating + sum(known[stage].copied for stage in stages),
    )
    memory = rank_memory(states, tuple(known[stage].memory for stage in stages))
    batch = batch_bytes(shape.num_tokens, shape.cp) * shape.keeps_outputs
    buffers = batch + sum(known[stage].buffers for stage in stages)
    return replace(memory, buffers_bytes=int(buffers))
