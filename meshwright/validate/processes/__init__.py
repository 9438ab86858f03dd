"""Processes that this one starts: where they find modules, and that none of them outlives it."""

from meshwright.validate.processes.children import MODULES, end_without, module_path

__all__ = [
    "MODULES",
    "end_without",
    "module_path",
]
