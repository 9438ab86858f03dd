"""The ledger: every collective of a step once, when it may start and what waits for it."""

from meshwright.simulator.ledger.closing import (
    NORM_BYTES,
    gradient_norm,
    left_sums,
    sums_first,
    tensor_sums,
    tied_table,
)
from meshwright.simulator.ledger.collectives import LedgerEntry, Moment, StepCollective, price
from meshwright.simulator.ledger.messages import message_collectives
from meshwright.simulator.ledger.rank import (
    closing_entries,
    pass_entries,
    rank_ledger,
    stage_entries,
)
from meshwright.simulator.ledger.replicas import (
    Exchange,
    bucket_exchanges,
    gradient_reductions,
    held_exchanges,
    parameter_gathers,
    replica_sums,
)
from meshwright.simulator.ledger.setting import StepSetting

__all__ = [
    "NORM_BYTES",
    "Exchange",
    "LedgerEntry",
    "Moment",
    "StepCollective",
    "StepSetting",
    "bucket_exchanges",
    "closing_entries",
    "gradient_norm",
    "gradient_reductions",
    "held_exchanges",
    "left_sums",
    "message_collectives",
    "parameter_gathers",
    "pass_entries",
    "price",
    "rank_ledger",
    "replica_sums",
    "stage_entries",
    "sums_first",
    "tensor_sums",
    "tied_table",
]
