"""The largest sequence, microbatch, batch or depth that fits, of one plan or of a whole space."""

from typing import TYPE_CHECKING

from meshwright.faces import lazy_name
from meshwright.simulator.layout import Quantity

if TYPE_CHECKING:
    from meshwright.planner.largest.layouts import find_largest
    from meshwright.planner.largest.one_plan import find_largest_of_plan
    from meshwright.planner.largest.quantity import Largest

__all__ = ["Largest", "Quantity", "find_largest", "find_largest_of_plan"]


def __getattr__(name: str) -> object:
    """Return a name of a late module, imported when first asked for."""
    return lazy_name(__name__, ("quantity", "one_plan", "layouts"), name)
