"""The memory of a rank whose states are units of FSDP (`meshwright.simulator.units.passes`)."""

from collections.abc import Sequence
from dataclasses import replace

from meshwright.hwprofiles import Offload
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.liveness import kept_output_bytes, message_buffer_bytes
from meshwright.simulator.memory import (
    ChunkMemory,
    KeptUnits,
    Moment,
    PassMoments,
    RankMemory,
    SentBytes,
    StateBytes,
    fuller,
    rank_memory,
)
from meshwright.simulator.replication import Replication, Stage, sum_parameters
from meshwright.simulator.units.bytes import PassBytes, UnitBytes
from meshwright.simulator.units.passes import StagePass
from meshwright.simulator.units.sums import SumBytes, with_sums


def holds_units(shape: BlockShape, to: Replication) -> bool:
    """Return whether passes hold the units of fully_shard, also on a mesh of one rank."""
    return shape.stack.root_unit and to.offload is not Offload.OPTIMIZER


def unit_rank_memory(
    shape: BlockShape,
    passes: PassBytes,
    stages: Sequence[Stage],
    to: Replication,
    sizes: tuple[StateBytes, int],
) -> RankMemory:
    """Return the memory of a rank whose states are units of fully_shard, for one microbatch.

    Args:
        shape: Sizes of its blocks.
        passes: What passes through them need.
        stages: Its virtual stages.
        to: How its states are sharded.
        sizes: Bytes of a parameter's states, and on the wire of a reduction.
    """
    state, reduce_bytes = sizes
    num_parameters = sum_parameters(shape, stages)
    sums = to.keeps_whole_gradients and not to.keeps_units
    # What stays whole is summed in the format of the wire.
    kept = replace(state, gradient=reduce_bytes) if to.keeps_whole_gradients else state
    units = {
        stage: UnitBytes.of(shape, stage, to, kept, reduce_bytes) for stage in dict.fromkeys(stages)
    }
    chunks = {}
    for stage, sizes_of_units in units.items():
        held = StagePass(passes, stage, to, sizes_of_units)
        chunk = _chunk(shape, held, is_alone=len(stages) == 1)
        if sums:
            chunk = with_sums(chunk, held, SumBytes.of(shape, held, sizes))
        chunks[stage] = chunk
    of_stages = tuple(chunks[stage] for stage in stages)
    memory = rank_memory(num_parameters, kept, of_stages, shards=to.shards)
    shards = -(-num_parameters // to.shards.parameters)
    return replace(
        memory,
        parameters_bytes=shards * state.sharded_parameter,
        gradients_bytes=memory.gradients_bytes + sum(units[stage].surplus for stage in stages),
        message_buffers_bytes=sum(
            message_buffer_bytes(shape, has_embedding=stage.has_embedding, has_head=stage.has_head)
            for stage in stages
        ),
    )


def _chunk(shape: BlockShape, held: StagePass, *, is_alone: bool) -> ChunkMemory:
    passes, stage, to, units = held
    saved = stage.num_layers * passes.saved_layer
    saved += stage.has_embedding * passes.saved_embedding + stage.has_head * passes.saved_head
    saved += kept_output_bytes(shape, has_embedding=stage.has_embedding, has_head=stage.has_head)
    apart = held.moments(whole=False)
    return ChunkMemory(
        saved_bytes=saved,
        forward_workspace_bytes=apart.forward.total_bytes,
        backward_workspace_bytes=apart.backward.total_bytes,
        late_gradients_bytes=held.late_bytes,
        first_backward=apart.first_backward,
        after_forward_bytes=units.root if to.reshards else held.gathered_bytes,
        after_backward_bytes=held.gathered_bytes if to.keeps_units else 0,
        kept_units=_kept_units(held, saved, is_alone=is_alone) if to.keeps_units else None,
    )


def _kept_units(held: StagePass, saved_bytes: int, *, is_alone: bool) -> KeptUnits:
    """Return what a pipeline's runtime keeps of a virtual stage between its passes."""
    passes, stage, to, units = held
    is_sharded = to.span.num_ranks > 1
    whole = held.moments(whole=True)
    # Before a pass saves or makes anything, units are copied out of their buffers.
    fetch = held.gathered_bytes + max(units.root, units.layer) * is_sharded
    copied = PassMoments(Moment(fetch - saved_bytes), Moment(fetch, held.late_bytes), Moment(fetch))
    return KeptUnits(
        whole=whole,
        ahead=PassMoments(*map(fuller, whole, copied)),
        ahead_bytes=held.gathered_bytes * is_sharded,
        reduction=held.reduction(is_alone=is_alone),
        sent=SentBytes(
            passes.message * held.sends_output, passes.message * (not stage.has_embedding)
        ),
    )
