"""How large a sequence, a microbatch or a batch may be, of one plan or of a space of layouts."""

from typing import TYPE_CHECKING

from meshwright.faces import late_name
from meshwright.simulator.layout import Quantity

if TYPE_CHECKING:
    from meshwright.planner.largest.layouts import find_largest
    from meshwright.planner.largest.one_plan import find_largest_of_plan
    from meshwright.planner.largest.quantity import Largest

__all__ = ["Largest", "Quantity", "find_largest", "find_largest_of_plan"]


def __getattr__(name: str) -> object:
    """Return what a search without a largest value needs not, imported when first asked for."""
    return late_name(__name__, ("quantity", "one_plan", "layouts"), name)
