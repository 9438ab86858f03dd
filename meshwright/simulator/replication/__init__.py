"""What data parallelism adds to a step: shards, buckets, reductions, gathers, updates."""

from meshwright.simulator.replication.buckets import (
    StagePart,
    bucket_limit,
    bucket_parts,
    part_gathers,
    reduced_parts,
    unit_shards,
    used_map_bytes,
)
from meshwright.simulator.replication.cast_memory import bucket_cast_bytes
from meshwright.simulator.replication.closing_sums import (
    leaves_sums,
    sums_first,
    tensor_sums,
    tensor_sums_cost,
    tied_table_bytes,
)
from meshwright.simulator.replication.data_parallel import (
    FP32_UPDATE_TRAFFIC_BYTES,
    NORM_BYTES,
    Replication,
    WireBytes,
    buffer_copies,
    gather_cost,
    norm_cost,
    reduce_cost,
    spread,
    stage_parameters,
    sum_layers,
    sum_parameters,
    update_cost,
)

__all__ = [
    "FP32_UPDATE_TRAFFIC_BYTES",
    "NORM_BYTES",
    "Replication",
    "StagePart",
    "WireBytes",
    "bucket_cast_bytes",
    "bucket_limit",
    "bucket_parts",
    "buffer_copies",
    "gather_cost",
    "leaves_sums",
    "norm_cost",
    "part_gathers",
    "reduce_cost",
    "reduced_parts",
    "spread",
    "stage_parameters",
    "sum_layers",
    "sum_parameters",
    "sums_first",
    "tensor_sums",
    "tensor_sums_cost",
    "tied_table_bytes",
    "unit_shards",
    "update_cost",
    "used_map_bytes",
]
