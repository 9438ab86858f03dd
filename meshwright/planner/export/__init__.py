"""Plans as the configurations of frameworks that train."""

from meshwright.planner.export.bridge_overrides import bridge_recipe
from meshwright.planner.export.megatron_core import CODECS as MEGATRON_CODECS
from meshwright.planner.export.recipes import load_recipes
from meshwright.planner.export.registry import FRAMEWORKS, export, export_plan, get_framework

__all__ = [
    "FRAMEWORKS",
    "MEGATRON_CODECS",
    "bridge_recipe",
    "export",
    "export_plan",
    "get_framework",
    "load_recipes",
]
