"""Configurations of frameworks that are only read: what their tables cannot say."""

from collections.abc import Mapping

from meshwright.planner.export import Program
from meshwright.planner.formats import hugging_face

PROGRAMS: Mapping[str, Program] = {**hugging_face.PROGRAMS}

__all__ = ["PROGRAMS"]
