"""Lazy imports of the public names of packages."""

import sys
from collections.abc import Sequence
from importlib import import_module


def lazy_name(package: str, modules: Sequence[str], name: str) -> object:
    """Return a public name of *package*, imported when first asked for.

    Args:
        package: Whose face has it in ``__all__`` and calls this from its ``__getattr__``.
        modules: Of the package, where it is looked for, those that import least first.
        name: As it is asked for.

    Raises:
        AttributeError: If it is no public name.
    """
    face = sys.modules[package]
    if name in face.__all__:
        for each in modules:
            module = import_module(f"{package}.{each}")
            if name in getattr(module, "__all__", vars(module)):
                # Kept in the module, so that `__getattr__` is asked once for a name.
                vars(face)[name] = getattr(module, name)
                return vars(face)[name]
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
