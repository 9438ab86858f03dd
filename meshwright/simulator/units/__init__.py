"""Memory of FSDP units: parameters that fully_shard gathers, and gradients it reduces, by unit."""

from meshwright.simulator.units.bytes import ENDINGS, PassBytes, UnitBytes
from meshwright.simulator.units.memory import (
    StageUnits,
    holds_units,
    unit_rank_memory,
    unit_states,
)
from meshwright.simulator.units.passes import StagePass
from meshwright.simulator.units.sharding import ParameterBytes, Sharding
from meshwright.simulator.units.weights import Padding, StageWeights

__all__ = [
    "ENDINGS",
    "Padding",
    "ParameterBytes",
    "PassBytes",
    "Sharding",
    "StagePass",
    "StageUnits",
    "StageWeights",
    "UnitBytes",
    "holds_units",
    "unit_rank_memory",
    "unit_states",
]
