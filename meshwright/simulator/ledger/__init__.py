"""The ledger: every collective of a step once, when it may start and what waits for it."""

from meshwright.simulator.ledger.closing import (
    NORM_BYTES,
    gradient_norm,
    left_sums,
    sums_first,
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
    bucket_exchanges,
    gradient_reductions,
    parameter_gathers,
)
from meshwright.simulator.ledger.setting import StepSetting

__all__ = [
    "NORM_BYTES",
    "LedgerEntry",
    "Moment",
    "StepCollective",
    "StepSetting",
    "bucket_exchanges",
    "closing_entries",
    "gradient_norm",
    "gradient_reductions",
    "left_sums",
    "message_collectives",
    "parameter_gathers",
    "pass_entries",
    "price",
    "rank_ledger",
    "stage_entries",
    "sums_first",
    "tied_table",
]
