"""Memory of a pipeline rank: what always lives, what each pass adds, and the peak."""

from meshwright.simulator.memory.beside import pair_bytes
from meshwright.simulator.memory.block_bytes import (
    BlockBytes,
    block_bytes,
    pass_workspace_bytes,
    stage_messages,
)
from meshwright.simulator.memory.held_messages import (
    HeldSpans,
    PipelinePlace,
    held_between_steps,
    held_spans,
    most_messages,
)
from meshwright.simulator.memory.late_gradients import LateGradients
from meshwright.simulator.memory.overheads import (
    SYMMETRIC,
    Overheads,
    num_communicators,
    symmetric_bytes,
    usable_bytes,
    workspace_bytes,
)
from meshwright.simulator.memory.pass_states import pass_states
from meshwright.simulator.memory.rank import (
    FULLNESS,
    KeptUnits,
    PassPeak,
    PassPeaks,
    RankMemory,
    Shards,
    StateBytes,
    VirtualStageMemory,
    rank_memory,
    sharded_workspace_bytes,
    virtual_stage_memory,
    with_copies,
    with_states,
    with_workspace,
)
from meshwright.simulator.memory.sent_messages import SentBytes
from meshwright.simulator.memory.stage_outputs import (
    batch_bytes,
    kept_logits_bytes,
    kept_output_bytes,
    message_buffer_bytes,
)
from meshwright.simulator.memory.stand_ins import stand_in_bytes
from meshwright.simulator.memory.timeline import (
    MemoryEvent,
    MemoryPeak,
    fullest_moments,
    memory_peak,
    memory_timeline,
    most_bytes,
    pass_levels,
)

__all__ = [
    "FULLNESS",
    "SYMMETRIC",
    "BlockBytes",
    "HeldSpans",
    "KeptUnits",
    "LateGradients",
    "MemoryEvent",
    "MemoryPeak",
    "Overheads",
    "PassPeak",
    "PassPeaks",
    "PipelinePlace",
    "RankMemory",
    "SentBytes",
    "Shards",
    "StateBytes",
    "VirtualStageMemory",
    "batch_bytes",
    "block_bytes",
    "fullest_moments",
    "held_between_steps",
    "held_spans",
    "kept_logits_bytes",
    "kept_output_bytes",
    "memory_peak",
    "memory_timeline",
    "message_buffer_bytes",
    "most_bytes",
    "most_messages",
    "num_communicators",
    "pair_bytes",
    "pass_levels",
    "pass_states",
    "pass_workspace_bytes",
    "rank_memory",
    "sharded_workspace_bytes",
    "stage_messages",
    "stand_in_bytes",
    "symmetric_bytes",
    "usable_bytes",
    "virtual_stage_memory",
    "with_copies",
    "with_states",
    "with_workspace",
    "workspace_bytes",
]
