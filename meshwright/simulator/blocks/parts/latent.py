"""Multi-head latent attention: keys and values of all heads are made of a narrow latent."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from meshwright.hwprofiles import RecomputeModule
from meshwright.simulator.graph import (
    PLAIN,
    Block,
    Dim,
    Gradient,
    Placement,
    Tensor,
    columns,
    cut,
    norm,
    place,
    rotary,
    row,
    whole_product,
)
from meshwright.simulator.layout import Axis
from meshwright.simulator.model import LatentAttention

Attend: TypeAlias = Callable[[Block, Tensor, Tensor, Tensor], Tensor]


class LatentDims(NamedTuple):
    """Dims of heads: what has positions of queries and keys, what has none, and values."""

    queries: Dim
    plain_queries: Dim
    rotary_queries: Dim
    pairs: Dim
    plain_keys: Dim
    values: Dim
    shared_key: Dim
    latent: Dim

    @classmethod
    def of(cls, latent: LatentAttention, num_heads: int) -> "LatentDims":
        """Return the dims of *num_heads* heads."""

        def heads(name: str, width: int) -> Dim:
            return Dim(name, num_heads * width, width)

        plain, turned = latent.plain_head_dim, latent.rotary_head_dim
        return cls(
            queries=heads("queries", latent.query_head_dim),
            plain_queries=heads("plain queries", plain),
            rotary_queries=heads("rotary queries", turned),
            pairs=heads("keys and values", plain + latent.value_head_dim),
            plain_keys=heads("plain keys", plain),
            values=heads("values", latent.value_head_dim),
            shared_key=Dim("shared key", turned, turned),
            latent=Dim("latent", latent.kv_rank),
        )


def latent_attention(
    block: Block,
    x: Tensor,
    latent: LatentAttention,
    num_heads: int,
    outside: Placement,
    attend: Attend,
) -> Tensor:
    """Return latent attention of normalised tokens.

    Heads have their positions in parts of queries and keys of their own; all keys have one such
    part (DeepSeek-V2, arXiv 2405.04434, 2.1.3).

    Args:
        block: Where it is written down.
        x: Tokens.
        latent: Its widths.
        num_heads: Heads.
        outside: Where tokens lie outside of tensor-parallel regions.
        attend: Writes attention of queries, keys and values.
    """
    dims, hidden = LatentDims.of(latent, num_heads), x.dims[-1]
    with block.module(x):
        whole: Placement = {axis: dim for axis, dim in x.at.items() if axis is not Axis.TP}
        x = place(block, x, whole)
        given = _queries(block, x, latent, dims)
        plain, turned = cut(block, given, dims.plain_queries, dims.rotary_queries)
        (turned,) = rotary(block, turned)
        query = _joined(block, plain, turned, dims.queries)
        width = Dim("latent and shared key", latent.kv_rank + latent.rotary_head_dim)
        both = whole_product(block, x, width, "kv down", PLAIN)
        narrow, shared = cut(block, both, dims.latent, dims.shared_key)
        (shared,) = rotary(block, shared)
        narrow = norm(block, narrow, "kv latent norm", centers=False)
        (pairs,) = columns(block, narrow, dims.pairs)
        plain, value = cut(block, pairs, dims.plain_keys, dims.values)
        key = _joined(block, plain, shared, dims.queries)
        with block.part(RecomputeModule.CORE_ATTN):
            context = attend(block, query, key, value)
        y = row(block, context, hidden, "attention output", outside)
        block.hold(given, turned, shared, query, key, value, context)
        return y


def _queries(block: Block, x: Tensor, latent: LatentAttention, dims: LatentDims) -> Tensor:
    """Return queries, of a latent of their own if there is one."""
    if latent.query_rank:
        x = whole_product(block, x, Dim("query latent", latent.query_rank), "query down", PLAIN)
        x = norm(block, x, "query latent norm", centers=False)
    (queries,) = columns(block, x, dims.queries)
    return queries


def _joined(block: Block, plain: Tensor, turned: Tensor, out: Dim) -> Tensor:
    """Return both parts of queries or keys side by side; one turned part may serve all heads."""
    at = {axis: out if dim is plain.dims[-1] else dim for axis, dim in plain.at.items()}
    made = plain.like(f"{out.name} joined", dims=(*plain.dims[:-1], out), at=at)
    serves_all = turned.dims[-1].size == turned.dims[-1].grain
    gradients = [
        Gradient(plain, hands_on=True, at=plain.at),
        Gradient(turned, hands_on=not serves_all, at=turned.at),
    ]
    return block.add([plain, turned], [made], gradients, block.traffic(made, made))
