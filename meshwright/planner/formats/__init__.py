"""Configurations of frameworks that are only read: what their tables cannot say."""

from collections.abc import Mapping

from meshwright.planner.export import Program
from meshwright.planner.formats import hugging_face, llm_foundry, maxtext, nanotron, nemo
from meshwright.planner.formats.references import resolved

PROGRAMS: Mapping[str, Program] = {
    **hugging_face.PROGRAMS,
    "nanotron": nanotron.PROGRAM,
    "llm-foundry": llm_foundry.PROGRAM,
    "maxtext": maxtext.PROGRAM,
    "nemo": nemo.PROGRAM,
}

__all__ = ["PROGRAMS", "resolved"]
