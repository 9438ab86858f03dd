"""Attention of ranks that hold parts of the same sequences."""

from meshwright.validate.programs.context.group import ContextGroup
from meshwright.validate.programs.context.ring import RingCore
from meshwright.validate.programs.context.swap import SwappedCore

__all__ = ["ContextGroup", "RingCore", "SwappedCore"]
