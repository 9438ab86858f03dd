"""Variants of a layer's parts: context-parallel, chunked, latent attention and routed experts."""

from typing import TYPE_CHECKING

from meshwright.faces import lazy_name
from meshwright.simulator.blocks.parts.chunks import Chunks, chunk_tokens
from meshwright.simulator.blocks.parts.feed_forward import Shared, Widths, feed_forward
from meshwright.simulator.blocks.parts.routed_dims import EXPERTS, ExpertMesh, hottest_share

if TYPE_CHECKING:
    from meshwright.simulator.blocks.parts.context import context_parallel
    from meshwright.simulator.blocks.parts.experts import routed
    from meshwright.simulator.blocks.parts.latent import LatentCore, latent_attention

__all__ = [
    "EXPERTS",
    "Chunks",
    "ExpertMesh",
    "LatentCore",
    "Shared",
    "Widths",
    "chunk_tokens",
    "context_parallel",
    "feed_forward",
    "hottest_share",
    "latent_attention",
    "routed",
]


def __getattr__(name: str) -> object:
    """Return a part that most layers lack, imported when first read."""
    return lazy_name(__name__, ("context", "latent", "experts"), name)
