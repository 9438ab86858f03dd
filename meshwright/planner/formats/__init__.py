"""Configurations of frameworks that are only read: what their tables cannot say."""

from meshwright.planner.formats import llm_foundry, maxtext, nanotron, nemo
from meshwright.planner.formats.references import resolved

PROGRAMS = {
    "nanotron": nanotron.PROGRAM,
    "llm-foundry": llm_foundry.PROGRAM,
    "maxtext": maxtext.PROGRAM,
    "nemo": nemo.PROGRAM,
}

__all__ = ["PROGRAMS", "resolved"]
