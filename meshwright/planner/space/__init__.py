"""The space of layouts as columns: what divides, what is ruled out, what is alike."""

from meshwright.planner.space.roles import (
    PERIODS,
    PeakCandidate,
    Role,
    fullest_moments,
    pipeline_roles,
    representative_microbatches,
)
from meshwright.planner.space.rules import RULES, Candidates, apply_rules
from meshwright.planner.space.shapes import ShapeTable, ShapeTimes, block_counts
from meshwright.planner.space.space import (
    COLUMNS,
    Column,
    Space,
    SpaceLimits,
    enumerate_space,
)

__all__ = [
    "COLUMNS",
    "PERIODS",
    "RULES",
    "Candidates",
    "Column",
    "PeakCandidate",
    "Role",
    "ShapeTable",
    "ShapeTimes",
    "Space",
    "SpaceLimits",
    "apply_rules",
    "block_counts",
    "enumerate_space",
    "fullest_moments",
    "pipeline_roles",
    "representative_microbatches",
]
