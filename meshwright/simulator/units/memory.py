"""The memory of a rank whose states are units of FSDP (`meshwright.simulator.units.passes`)."""

from collections.abc import Sequence
from dataclasses import replace

from meshwright.hwprofiles import Offload
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import (
    KeptUnits,
    PassPeak,
    PassPeaks,
    RankMemory,
    VirtualStageMemory,
    fuller_peak,
    kept_output_bytes,
    message_buffer_bytes,
    rank_memory,
)
from meshwright.simulator.replication import Replication, sum_parameters
from meshwright.simulator.units.bytes import ParameterBytes, PassBytes, UnitBytes
from meshwright.simulator.units.passes import StagePass, reduction
from meshwright.simulator.units.sums import SumBytes, with_sums


def holds_units(shape: BlockShape, replication: Replication) -> bool:
    """Return whether passes hold the units of fully_shard, also on a mesh of one rank."""
    return shape.stack.is_fully_sharded and replication.offload is not Offload.OPTIMIZER


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
    state, reduce_bytes = parameter
    num_parameters = sum_parameters(shape, stages)
    sums = replication.keeps_whole_gradients and not replication.keeps_units
    # What stays whole is summed in the format of the wire.
    kept = replace(state, gradient=reduce_bytes) if replication.keeps_whole_gradients else state
    units = {
        stage: UnitBytes.of(shape, stage, replication, ParameterBytes(kept, reduce_bytes))
        for stage in dict.fromkeys(stages)
    }
    virtual_stages = {}
    for stage, sizes_of_units in units.items():
        stage_pass = StagePass(passes, stage, replication, sizes_of_units)
        virtual_stage = _virtual_stage_memory(shape, stage_pass, is_alone=len(stages) == 1)
        if sums:
            virtual_stage = with_sums(
                virtual_stage, stage_pass, SumBytes.of(shape, stage_pass, parameter)
            )
        virtual_stages[stage] = virtual_stage
    of_stages = tuple(virtual_stages[stage] for stage in stages)
    memory = rank_memory(num_parameters, kept, of_stages, shards=replication.shards)
    shards = -(-num_parameters // replication.shards.parameters)
    return replace(
        memory,
        parameters_bytes=shards * state.sharded_parameter,
        gradients_bytes=memory.gradients_bytes + sum(units[stage].surplus for stage in stages),
        message_buffers_bytes=sum(
            message_buffer_bytes(shape, passes.messages(stage)) for stage in stages
        ),
    )


def _virtual_stage_memory(
    shape: BlockShape, stage_pass: StagePass, *, is_alone: bool
) -> VirtualStageMemory:
    passes, stage, replication, units = stage_pass
    saved = stage.num_layers * passes.saved_layer
    saved += stage.has_embedding * passes.saved_embedding + stage.has_head * passes.saved_head
    saved += kept_output_bytes(shape, passes.messages(stage))
    apart = stage_pass.moments(whole=False)
    return VirtualStageMemory(
        saved_bytes=saved,
        forward_workspace_bytes=apart.forward.total_bytes,
        backward_workspace_bytes=apart.backward.total_bytes,
        late_gradients_bytes=stage_pass.late_bytes,
        first_backward=apart.first_backward,
        after_forward_bytes=units.root + units.head.weights + units.kept_layer
        if replication.reshards
        else stage_pass.gathered_bytes,
        after_backward_bytes=stage_pass.gathered_bytes if replication.keeps_units else 0,
        kept_units=_kept_units(stage_pass, saved, is_alone=is_alone)
        if replication.keeps_units
        else None,
        sent=passes.messages(stage),
    )


def _kept_units(stage_pass: StagePass, saved_bytes: int, *, is_alone: bool) -> KeptUnits:
    """Return what a pipeline's runtime keeps of a virtual stage between its passes."""
    _, _, replication, units = stage_pass
    is_sharded = replication.span.num_ranks > 1
    whole = stage_pass.moments(whole=True)
    # Before a pass saves or makes anything, units are copied out of their buffers, one by one: the
    # buffers of all, and the weights of the largest.
    each = (*units.last, units.layer, units.head)
    largest = max(unit.weights for unit in each)
    fetch = stage_pass.gathered_bytes + (largest if is_sharded else 0)
    copied = PassPeaks(
        PassPeak(fetch - saved_bytes), PassPeak(fetch, stage_pass.late_bytes), PassPeak(fetch)
    )
    return KeptUnits(
        whole=whole,
        ahead=PassPeaks(*map(fuller_peak, whole, copied)),
        ahead_bytes=stage_pass.gathered_bytes if is_sharded else 0,
        reduction=reduction(stage_pass, is_alone=is_alone),
    )
