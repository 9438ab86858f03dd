"""Parts of a transformer's layer in the place of the usual ones: a file a part."""

from meshwright.simulator.blocks.parts.chunks import Chunks, chunk_tokens
from meshwright.simulator.blocks.parts.context import context_parallel
from meshwright.simulator.blocks.parts.experts import routed
from meshwright.simulator.blocks.parts.feed_forward import Shared, Widths, feed_forward
from meshwright.simulator.blocks.parts.latent import LatentCore, latent_attention
from meshwright.simulator.blocks.parts.routed_dims import ExpertMesh, hottest_share
from meshwright.simulator.blocks.parts.routing import EXPERTS

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
