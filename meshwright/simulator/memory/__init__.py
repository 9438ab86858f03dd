"""Memory of a pipeline rank: what always lives, what each pass adds, and the peak."""

from meshwright.simulator.memory.block_bytes import (
    BlockBytes,
    block_bytes,
    pass_workspace_bytes,
)
from meshwright.simulator.memory.pass_states import kept_levels, pass_states
from meshwright.simulator.memory.rank import (
    KeptUnits,
    PassPeak,
    PassPeaks,
    RankMemory,
    Shards,
    StateBytes,
    VirtualStageMemory,
    device_bytes,
    fuller_peak,
    rank_memory,
    rank_parameters,
    reserved_bytes,
    sharded_workspace_bytes,
    usable_bytes,
    virtual_stage_memory,
    with_copies,
    with_workspace,
)
from meshwright.simulator.memory.sent_messages import SentBytes
from meshwright.simulator.memory.timeline import (
    MemoryEvent,
    memory_peak,
    memory_timeline,
    pass_levels,
    update_level,
)

__all__ = [
    "BlockBytes",
    "KeptUnits",
    "MemoryEvent",
    "PassPeak",
    "PassPeaks",
    "RankMemory",
    "SentBytes",
    "Shards",
    "StateBytes",
    "VirtualStageMemory",
    "block_bytes",
    "device_bytes",
    "fuller_peak",
    "kept_levels",
    "memory_peak",
    "memory_timeline",
    "pass_levels",
    "pass_states",
    "pass_workspace_bytes",
    "rank_memory",
    "rank_parameters",
    "reserved_bytes",
    "sharded_workspace_bytes",
    "update_level",
    "usable_bytes",
    "virtual_stage_memory",
    "with_copies",
    "with_workspace",
]
