"""Multi-head latent attention: keys and values of all heads are made of a narrow latent."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from meshwright.hwprofiles import OffloadModule, RecomputeModule
from meshwright.simulator.graph import (
    PARTIAL,
    PLAIN,
    Block,
    Dim,
    Gradient,
    Placement,
    Rotary,
    RotaryFormula,
    Tensor,
    columns,
    copy,
    cut,
    norm,
    place,
    replicated,
    rotary,
    row,
    whole_product,
)
from meshwright.simulator.layout import Axis
from meshwright.simulator.model import LatentAttention

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class LatentCore(NamedTuple):
    """What latent attention is around.

    Args:
        attend: Writes attention of queries, keys and values, of this rank's tokens or of all.
        turned: How heads turn by their positions.
    """

    attend: Attend
    turned: RotaryFormula


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
    core: LatentCore,
) -> Tensor:
    """Return latent attention of normalised tokens.

    Heads have their positions in parts of queries and keys of their own; all keys have one such
    part (DeepSeek-V2, arXiv 2405.04434, 2.1.3).  Of tokens that tensor ranks share each makes the
    latents of its own, and gathers these, which are narrower (`TELinear` with ``parallel_mode``
    duplicated, and the gather of ``k_pos_emb``, in megatron/core of core 0.16).

    Args:
        block: Where it is written down.
        x: Tokens.
        latent: Its widths.
        num_heads: Heads.
        outside: Where tokens lie outside of tensor-parallel regions.
        core: What attends, and how heads turn.
    """
    dims, hidden = LatentDims.of(latent, num_heads), x.dims[-1]
    spells_out = block.lowering.is_eager and block.lowering.spells_out
    with block.module(x):
        if spells_out:
            query, key, value, held = _spelled_out(block, x, latent, dims, core.turned)
        elif core.turned is RotaryFormula.INDEXED_COMPLEX:
            query, key, value, held = _turned_together(block, x, latent, dims)
        else:
            with block.part(OffloadModule.QKV_LINEAR):
                query, key, value, held = _projected(block, x, latent, dims)
        context = core.attend(query, key, value)
        if spells_out:  # heads come before tokens in what attends, and out of it
            context = copy(block, context, "attention by tokens", copies_back=False)
        for each in (query, key, value):
            block.discard(RecomputeModule.MLA_UP_PROJ, each)
        with block.part(OffloadModule.ATTN_PROJ):
            y = row(block, context, hidden, "attention output", outside)
        block.hold(*held, query, key, value, context)
        return y


def _projected(
    block: Block, x: Tensor, latent: LatentAttention, dims: LatentDims
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return queries, keys and values, and what else has names until attention returns.

    Megatron-Core makes both latents first, in a function that forgets what lies between
    (get_query_key_value_tensors of megatron/core/transformer/multi_latent_attention.py, core 0.16),
    and lays values out for Transformer Engine; others make the keys' once there are queries.
    """
    width = Dim("latent and shared key", latent.kv_rank + latent.rotary_head_dim)
    source, both = _query_latent(block, x, latent), None
    if block.lowering.copies_operands:
        both = _key_latent(block, x, width, dims)
    with block.part(RecomputeModule.MLA_UP_PROJ):
        (given,) = columns(block, source, dims.queries)
        plain, turned = cut(block, given, dims.plain_queries, dims.rotary_queries)
        (turned,) = rotary(block, turned)
        query = _joined(block, plain, turned, dims.queries)
    narrow, shared = both or _key_latent(block, x, width, dims)
    with block.part(RecomputeModule.MLA_UP_PROJ):
        (shared,) = rotary(block, shared)
        (pairs,) = columns(block, narrow, dims.pairs)
        plain, value = cut(block, pairs, dims.plain_keys, dims.values)
        key = _joined(block, plain, shared, dims.queries)
        if both:
            value = copy(block, value, "values apart", copies_back=False)
            block.hold(given, turned, shared, pairs)
    return query, key, value, () if both else (given, turned, shared)


def _spelled_out(
    block: Block, x: Tensor, latent: LatentAttention, dims: LatentDims, turned: RotaryFormula
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the same as transformers writes it, whose latents are both there before heads turn.

    `DeepseekV3Attention` and `DeepseekV2Attention` of transformers 5.23.
    """
    width = Dim("latent and shared key", latent.kv_rank + latent.rotary_head_dim)
    with block.module():  # the latent of queries has no name
        (given,) = columns(block, _query_latent(block, x, latent), dims.queries)
    plain, query = cut(block, given, dims.plain_queries, dims.rotary_queries)
    both = whole_product(block, x, width, "kv down", PLAIN)
    narrow, shared = cut(block, both, dims.latent, dims.shared_key)
    narrow = norm(block, narrow, "kv latent norm", centers=False)
    query, shared = rotary(block, query, shared, how=Rotary(formula=turned))
    held = given, both, narrow, query, shared
    query = _joined(block, plain, query, dims.queries)
    (pairs,) = columns(block, narrow, dims.pairs)
    plain, value = cut(block, pairs, dims.plain_keys, dims.values)
    return query, _filled(block, plain, shared, dims), value, held


def _turned_together(
    block: Block, x: Tensor, latent: LatentAttention, dims: LatentDims
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the same as torchtitan 0.3 writes it, whose layers look angles up for both at once.

    `Attention` of torchtitan/models/deepseek_v3/model.py.
    """
    width = Dim("latent and shared key", latent.kv_rank + latent.rotary_head_dim)
    (given,) = columns(block, _query_latent(block, x, latent), dims.queries)
    plain, query = cut(block, given, dims.plain_queries, dims.rotary_queries)
    narrow, shared = cut(
        block, whole_product(block, x, width, "kv down", PLAIN), dims.latent, dims.shared_key
    )
    query, shared = rotary(block, query, shared, how=Rotary(formula=RotaryFormula.INDEXED_COMPLEX))
    held = given, query, shared
    query = _joined(block, plain, query, dims.queries)
    (pairs,) = columns(block, norm(block, narrow, "kv latent norm", centers=False), dims.pairs)
    plain, value = cut(block, pairs, dims.plain_keys, dims.values)
    return query, _joined(block, plain, shared, dims.queries), value, held


def _filled(block: Block, plain: Tensor, shared: Tensor, dims: LatentDims) -> Tensor:
    """Return keys whose parts are copied into a tensor that was empty.

    Backward of each copy first copies all of the gradient, and the part (`CopySlices` of PyTorch,
    csrc/autograd/functions/tensor.cpp).
    """
    empty = plain.like("keys joined", dims=(*plain.dims[:-1], dims.queries))
    whole = block.add(
        [plain],
        [empty],
        [Gradient(plain, at=plain.at)],
        block.traffic(plain, plain),
        scratch=((), (empty.like("copied gradient"),)),
    )
    of_heads = shared.like("shared keys of heads", dims=(*plain.dims[:-1], dims.rotary_queries))
    spread = of_heads.like(of_heads.name, base=shared.storage)
    block.add([shared], [spread], [Gradient(shared)])
    full = whole.like("keys", base=whole.storage)
    gradients = [Gradient(whole), Gradient(spread)]
    moved = block.traffic(spread, spread)
    zeros = of_heads.like("zeros of a part")
    return block.add([whole, spread], [full], gradients, moved, scratch=((), (zeros,)))


def _query_latent(block: Block, x: Tensor, latent: LatentAttention) -> Tensor:
    """Return what queries are made of: a latent of their own, normalised, if there is one."""
    if not latent.query_rank:
        return x
    x = whole_product(block, x, Dim("query latent", latent.query_rank), "query down", PLAIN)
    return norm(block, x, "query latent norm", centers=False)


def _key_latent(block: Block, x: Tensor, width: Dim, dims: LatentDims) -> tuple[Tensor, Tensor]:
    """Return the normalised latent of keys and values, and the part that all keys have."""
    both = whole_product(block, x, width, "kv down", PLAIN)
    narrow, shared = cut(block, both, dims.latent, dims.shared_key)
    if Axis.TP in x.at:
        shared = place(block, shared, replicated(x.at, Axis.TP))
    return norm(block, narrow, "kv latent norm", centers=False), shared


def _joined(block: Block, plain: Tensor, turned: Tensor, out: Dim) -> Tensor:
    """Return both parts of queries or keys side by side; one turned part may serve all heads."""
    at = {axis: out if dim is plain.dims[-1] else dim for axis, dim in plain.at.items()}
    made = plain.like(f"{out.name} joined", dims=(*plain.dims[:-1], out), at=at)
    serves_all = turned.dims[-1].size == turned.dims[-1].grain
    # Of a part that serves all heads a rank has the gradients of its own heads.
    of_heads = {axis: PARTIAL for axis, dim in plain.at.items() if dim is plain.dims[-1]}
    gradients = [
        Gradient(plain, passes_through=True, at=plain.at),
        Gradient(turned, passes_through=not serves_all, at=of_heads if serves_all else turned.at),
    ]
    return block.add([plain, turned], [made], gradients, block.traffic(made, made))
