"""Ledger of a step: each collective once, with when it may start and which work waits for it."""

from meshwright.simulator.ledger.closing import (
    NORM_BYTES,
    deferred_sums,
    gradient_norm,
    sums_first,
    tied_embedding_sums,
)
from meshwright.simulator.ledger.collectives import LedgerEntry, StepCollective, StepPoint, price
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
    "StepCollective",
    "StepPoint",
    "StepSetting",
    "bucket_exchanges",
    "closing_entries",
    "deferred_sums",
    "gradient_norm",
    "gradient_reductions",
    "message_collectives",
    "parameter_gathers",
    "pass_entries",
    "price",
    "rank_ledger",
    "stage_entries",
    "sums_first",
    "tied_embedding_sums",
]
