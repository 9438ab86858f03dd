"""Processes that this one starts: where they find modules, and that none of them outlives it."""

from meshwright.validate.processes.children import (
    MODULES,
    STARTER_VARIABLE,
    end_without,
    module_path,
    starter,
)

__all__ = [
    "MODULES",
    "STARTER_VARIABLE",
    "end_without",
    "module_path",
    "starter",
]
