"""Attention of ranks that hold parts of the same sequences."""

from meshwright.validate.programs.context.gathered import GatheredCore
from meshwright.validate.programs.context.group import ContextGroup, all_gather, reduce_scatter
from meshwright.validate.programs.context.ring import RingCore
from meshwright.validate.programs.context.shift import shifted
from meshwright.validate.programs.context.swap import SwappedCore

__all__ = [
    "ContextGroup",
    "GatheredCore",
    "RingCore",
    "SwappedCore",
    "all_gather",
    "reduce_scatter",
    "shifted",
]
