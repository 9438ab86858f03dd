"""What data parallelism adds to a step: shards, buckets, reductions, gathers, updates."""

from meshwright.simulator.replication.buckets import (
    EndUnits,
    bucket_limit,
    bucket_parts,
    is_tied,
    keeps_last_layer,
    stage_bucket_limit,
    unit_shards,
    used_map_bytes,
)
from meshwright.simulator.replication.cast_memory import bucket_cast_peak
from meshwright.simulator.replication.data_parallel import (
    FP32_UPDATE_TRAFFIC_BYTES,
    HeldParameters,
    Replication,
    WireBytes,
    blocks_of,
    held_parameters,
    replication_of,
    spread,
    stage_parameters,
    sum_parameters,
    update_cost,
)
from meshwright.simulator.replication.flat_memory import flat_pass_bytes
from meshwright.simulator.replication.parts import StagePart, buffer_copies, part_gathers
from meshwright.simulator.replication.reductions import reduced_parts, unit_matrices, wire_bytes

__all__ = [
    "FP32_UPDATE_TRAFFIC_BYTES",
    "EndUnits",
    "HeldParameters",
    "Replication",
    "StagePart",
    "WireBytes",
    "blocks_of",
    "bucket_cast_peak",
    "bucket_limit",
    "bucket_parts",
    "buffer_copies",
    "flat_pass_bytes",
    "held_parameters",
    "is_tied",
    "keeps_last_layer",
    "part_gathers",
    "reduced_parts",
    "replication_of",
    "spread",
    "stage_bucket_limit",
    "stage_parameters",
    "sum_parameters",
    "unit_matrices",
    "unit_shards",
    "update_cost",
    "used_map_bytes",
    "wire_bytes",
]
