"""Configurations of frameworks that are only read: what their tables cannot say."""

from meshwright.planner.formats import llm_foundry, maxtext, nanotron
from meshwright.planner.formats.references import resolved

CODECS = {**nanotron.CODECS, **llm_foundry.CODECS, **maxtext.CODECS}

__all__ = ["CODECS", "resolved"]
