"""The memory of states that are gathered unit by unit, as fully_shard does."""

from meshwright.simulator.units.bytes import PassBytes
from meshwright.simulator.units.memory import holds_units, unit_rank_memory

__all__ = [
    "PassBytes",
    "holds_units",
    "unit_rank_memory",
]
