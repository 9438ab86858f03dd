"""How large a sequence, a microbatch or a batch may be, of one plan or of a space of layouts."""

from meshwright.planner.largest.layouts import find_largest
from meshwright.planner.largest.one_plan import find_largest_of_plan
from meshwright.planner.largest.quantity import Largest
from meshwright.simulator.layout import Quantity

__all__ = ["Largest", "Quantity", "find_largest", "find_largest_of_plan"]
