"""Routed experts: who is sent which rows of tokens, and what experts make of them."""

from meshwright.validate.programs.experts.activations import (
    WeighedQuickGeglu,
    bounded,
    ungated,
)
from meshwright.validate.programs.experts.balance import RoutingBias, move_biases
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
from meshwright.validate.programs.experts.routing import Taken, chosen_places, refuse_routing
from meshwright.validate.programs.experts.rows import (
    PutBack,
    Reordered,
    SortedRows,
    SortedWeights,
    row_map,
)
from meshwright.validate.programs.experts.shared import GatedShared
from meshwright.validate.programs.experts.titan import GroupedExperts, RoutedGroup, TitanExperts
from meshwright.validate.programs.experts.transformers import OwnExperts, TransformersExperts

__all__ = [
    "Dispatch",
    "ExpertGroup",
    "GatedShared",
    "GroupedExperts",
    "GroupedProduct",
    "OwnExperts",
    "PlainExperts",
    "PutBack",
    "Reordered",
    "RoutedGroup",
    "RoutingBias",
    "SortedRows",
    "SortedWeights",
    "Taken",
    "TitanExperts",
    "TransformersExperts",
    "WeighedQuickGeglu",
    "WeighedSwiglu",
    "bounded",
    "chosen_places",
    "exchanged",
    "gathered",
    "move_biases",
    "refuse_routing",
    "row_map",
    "summed",
    "ungated",
]
