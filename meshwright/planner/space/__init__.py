"""Space of layouts as columns: divisibility, rules that take layouts out, pipelines, shapes."""

from meshwright.planner.space.choices import PASSES
from meshwright.planner.space.columns import (
    Column,
    distinct,
    is_constant,
    row_slices,
)
from meshwright.planner.space.limits import (
    COLUMNS,
    LONG_SEQUENCE,
    Launcher,
    SpaceLimits,
    is_searched,
    launcher_of,
)
from meshwright.planner.space.nodes import OF_SHAPES, Nodes, NodeShapes
from meshwright.planner.space.partial import (
    Cells,
    PartialLayouts,
    PartialSpace,
    enumerate_space,
)
from meshwright.planner.space.pipelines import (
    Pipeline,
    Role,
    are_equal,
    block_counts,
    lays_out_unequal,
)
from meshwright.planner.space.prices import Prices
from meshwright.planner.space.rules import (
    LACKS_MEMORY,
    RULES,
    Candidates,
    Mask,
    apply_rules,
    cannot_be_expressed,
    lacks,
)
from meshwright.planner.space.shapes import ShapeTable, ShapeTimes
from meshwright.planner.space.space import Space
from meshwright.planner.space.switches import (
    ACTIVATIONS,
    SWITCHES,
    askable_values,
    divisors,
)
from meshwright.planner.space.waste import undivided_splits, waste_hints

__all__ = [
    "ACTIVATIONS",
    "COLUMNS",
    "LACKS_MEMORY",
    "LONG_SEQUENCE",
    "OF_SHAPES",
    "PASSES",
    "RULES",
    "SWITCHES",
    "Candidates",
    "Cells",
    "Column",
    "Launcher",
    "Mask",
    "NodeShapes",
    "Nodes",
    "PartialLayouts",
    "PartialSpace",
    "Pipeline",
    "Prices",
    "Role",
    "ShapeTable",
    "ShapeTimes",
    "Space",
    "SpaceLimits",
    "apply_rules",
    "are_equal",
    "askable_values",
    "block_counts",
    "cannot_be_expressed",
    "distinct",
    "divisors",
    "enumerate_space",
    "is_constant",
    "is_searched",
    "lacks",
    "launcher_of",
    "lays_out_unequal",
    "row_slices",
    "undivided_splits",
    "waste_hints",
]
