"""Routed experts: routing, dispatch, and the MLPs of experts."""

from meshwright.validate.programs.experts.activations import (
    WeighedQuickGeglu,
    clamp_gate,
    ungated,
)
from meshwright.validate.programs.experts.balance import RoutingBias, update_routing_biases
from meshwright.validate.programs.experts.group import (
    Dispatch,
    ExpertGroup,
    exchanged,
    gathered,
    summed,
)
from meshwright.validate.programs.experts.plain import PlainExperts
from meshwright.validate.programs.experts.products import (
    GroupedProduct,
    WeighedSwiglu,
)
from meshwright.validate.programs.experts.routing import (
    GatheredScores,
    choose_experts,
    refuse_routing,
)
from meshwright.validate.programs.experts.rows import (
    Reordered,
    SortedRows,
    SortedWeights,
    UnpermutedRows,
    row_map,
)
from meshwright.validate.programs.experts.shared import GatedShared
from meshwright.validate.programs.experts.titan import GroupedExperts, RoutedGroup, TitanExperts
from meshwright.validate.programs.experts.transformers import (
    TransformersExperts,
    TransformersGroupedExperts,
)

__all__ = [
    "Dispatch",
    "ExpertGroup",
    "GatedShared",
    "GatheredScores",
    "GroupedExperts",
    "GroupedProduct",
    "PlainExperts",
    "Reordered",
    "RoutedGroup",
    "RoutingBias",
    "SortedRows",
    "SortedWeights",
    "TitanExperts",
    "TransformersExperts",
    "TransformersGroupedExperts",
    "UnpermutedRows",
    "WeighedQuickGeglu",
    "WeighedSwiglu",
    "choose_experts",
    "clamp_gate",
    "exchanged",
    "gathered",
    "refuse_routing",
    "row_map",
    "summed",
    "ungated",
    "update_routing_biases",
]
