"""What each rank, device or process of a plan is to do, and what one was seen to do."""

from meshwright.validate.ranks.groups import (
    MESH_DIMS,
    batch_ranks,
    different_parts,
    mesh_shape,
    plan_groups,
    table_ranks,
)
from meshwright.validate.ranks.measurement import (
    RESULT_FILE,
    Backend,
    ByteKind,
    CollectiveCount,
    Count,
    RankMeasurement,
    Seconds,
    read_measurement,
    read_record,
    write_measurement,
)
from meshwright.validate.ranks.members import (
    SERVERS,
    is_asynchronous,
    member_kind,
    num_members,
    predict_members,
    predicted_rounds,
    usual_members,
)
from meshwright.validate.ranks.prediction import (
    SEND,
    RankPrediction,
    capped,
    default_ranks,
    pipeline_rank,
    without_dropout,
)
from meshwright.validate.ranks.server_layout import ServerLayout, num_processes

__all__ = [
    "MESH_DIMS",
    "RESULT_FILE",
    "SEND",
    "SERVERS",
    "Backend",
    "ByteKind",
    "CollectiveCount",
    "Count",
    "RankMeasurement",
    "RankPrediction",
    "Seconds",
    "ServerLayout",
    "batch_ranks",
    "capped",
    "default_ranks",
    "different_parts",
    "is_asynchronous",
    "member_kind",
    "mesh_shape",
    "num_members",
    "num_processes",
    "pipeline_rank",
    "plan_groups",
    "predict_members",
    "predicted_rounds",
    "read_measurement",
    "read_record",
    "table_ranks",
    "usual_members",
    "without_dropout",
    "write_measurement",
]
