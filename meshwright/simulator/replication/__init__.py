"""Data parallelism of a step: shards, gradient buckets, reductions, gathers and updates."""

from meshwright.simulator.replication.buckets import (
    bucket_limit,
    bucket_parts,
    used_map_bytes,
)
from meshwright.simulator.replication.cast_memory import bucket_cast_peak
from meshwright.simulator.replication.data_parallel import (
    EIGHT_BIT_BYTES,
    FP32_UPDATE_TRAFFIC_BYTES,
    ParametersByGroup,
    Replication,
    WireBytes,
    blocks_of,
    parameters_by_group,
    replication_of,
    spread,
    stage_parameters,
    sum_parameters,
    update_cost,
)
from meshwright.simulator.replication.flat_memory import (
    flat_pass_bytes,
    narrow_shard_bytes,
    scale_bytes,
    updated_cast_bytes,
)
from meshwright.simulator.replication.flat_units import shard_counts, shards_of
from meshwright.simulator.replication.parts import StagePart, buffer_copies, part_gathers
from meshwright.simulator.replication.reductions import reduced_parts, unit_matrices, wire_bytes
from meshwright.simulator.replication.unit_parts import (
    EndUnits,
    Rows,
    filled_parameters,
    fills_rows,
    is_tied,
    keeps_last_layer,
    num_weights,
    padding,
    shard_padding,
    unit_shards,
)

__all__ = [
    "EIGHT_BIT_BYTES",
    "FP32_UPDATE_TRAFFIC_BYTES",
    "EndUnits",
    "ParametersByGroup",
    "Replication",
    "Rows",
    "StagePart",
    "WireBytes",
    "blocks_of",
    "bucket_cast_peak",
    "bucket_limit",
    "bucket_parts",
    "buffer_copies",
    "filled_parameters",
    "fills_rows",
    "flat_pass_bytes",
    "is_tied",
    "keeps_last_layer",
    "narrow_shard_bytes",
    "num_weights",
    "padding",
    "parameters_by_group",
    "part_gathers",
    "reduced_parts",
    "replication_of",
    "scale_bytes",
    "shard_counts",
    "shard_padding",
    "shards_of",
    "spread",
    "stage_parameters",
    "sum_parameters",
    "unit_matrices",
    "unit_shards",
    "update_cost",
    "updated_cast_bytes",
    "used_map_bytes",
    "wire_bytes",
]
