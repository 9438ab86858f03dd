"""Child processes: their module path, and their end with their parent."""

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
