"""The space of layouts as columns: what divides, what is ruled out, what is alike."""

from meshwright.planner.space.roles import (
    PERIODS,
    Moment,
    Role,
    fullest_moments,
    pipeline_roles,
    telling_microbatches,
)
from meshwright.planner.space.rules import RULES, Candidates, apply_rules
from meshwright.planner.space.shapes import ShapeBytes, ShapeTable, ShapeTimes
from meshwright.planner.space.space import (
    COLUMNS,
    Column,
    Space,
    SpaceLimits,
    enumerate_space,
    tp_divides,
)

__all__ = [
    "COLUMNS",
    "PERIODS",
    "RULES",
    "Candidates",
    "Column",
    "Moment",
    "Role",
    "ShapeBytes",
    "ShapeTable",
    "ShapeTimes",
    "Space",
    "SpaceLimits",
    "apply_rules",
    "enumerate_space",
    "fullest_moments",
    "pipeline_roles",
    "telling_microbatches",
    "tp_divides",
]
