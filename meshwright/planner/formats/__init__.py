"""Frameworks whose configurations are only read: codecs of what their tables cannot say."""

from collections.abc import Mapping

from meshwright.planner.formats import hugging_face, llm_foundry, maxtext, nanotron, nemo
from meshwright.planner.formats.references import resolved
from meshwright.planner.tables import Program

PROGRAMS: Mapping[str, Program] = {
    **hugging_face.PROGRAMS,
    "nanotron": nanotron.PROGRAM,
    "llm-foundry": llm_foundry.PROGRAM,
    "maxtext": maxtext.PROGRAM,
    "nemo": nemo.PROGRAM,
}

__all__ = ["PROGRAMS", "resolved"]
