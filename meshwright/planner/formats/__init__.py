"""Configurations of frameworks that are only read: what their tables cannot say."""

from meshwright.planner.export import MEGATRON_CODECS
from meshwright.planner.formats import llm_foundry, maxtext, nanotron, nemo
from meshwright.planner.formats.references import resolved

CODECS = {
    **MEGATRON_CODECS,
    **nanotron.CODECS,
    **llm_foundry.CODECS,
    **maxtext.CODECS,
    **nemo.CODECS,
}

__all__ = ["CODECS", "resolved"]
