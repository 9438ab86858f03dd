"""Attention of context-parallel ranks, which hold parts of the same sequences."""

from meshwright.validate.programs.context.gathered import AllGatherAttention
from meshwright.validate.programs.context.group import ContextGroup, all_gather, reduce_scatter
from meshwright.validate.programs.context.ring import RingAttention
from meshwright.validate.programs.context.shift import shifted
from meshwright.validate.programs.context.swap import UlyssesAttention

__all__ = [
    "AllGatherAttention",
    "ContextGroup",
    "RingAttention",
    "UlyssesAttention",
    "all_gather",
    "reduce_scatter",
    "shifted",
]
