"""Multi-head latent attention (MLA): keys and values are projected from a compressed latent."""

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
    """Core attention and RoPE of latent attention.

    Args:
        attend: Function that adds core attention of queries, keys and values.
        rope: RoPE formula.
    """

    attend: Attend
    rope: RotaryFormula


class LatentDims(NamedTuple):
    """Dims of heads: RoPE and no-RoPE parts of queries and keys, and values."""

    queries: Dim
    plain_queries: Dim
    rotary_queries: Dim
    keys_values: Dim
    plain_keys: Dim
    values: Dim
    shared_key: Dim
    latent: Dim

    @classmethod
    def of(cls, latent: LatentAttention, num_heads: int) -> "LatentDims":
        """Return the dims of *num_heads* heads."""

        def heads(name: str, width: int) -> Dim:
            return Dim(name, num_heads * width, width)

        plain, rope = latent.plain_head_dim, latent.rotary_head_dim
        return cls(
            queries=heads("queries", latent.query_head_dim),
            plain_queries=heads("plain queries", plain),
            rotary_queries=heads("rotary queries", rope),
            keys_values=heads("keys and values", plain + latent.value_head_dim),
            plain_keys=heads("plain keys", plain),
            values=heads("values", latent.value_head_dim),
            shared_key=Dim("shared key", rope, rope),
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

    RoPE applies to a part of each query head and to one key part shared by all heads (decoupled
    RoPE, DeepSeek-V2, arXiv 2405.04434, 2.1.3).  With sequence parallelism a rank projects its own
    tokens to latents, and gathers these, which are narrower (`TELinear` with ``parallel_mode``
    duplicated, and the gather of ``k_pos_emb``, in megatron/core of core 0.16).

    Args:
        block: Block to add the operators to.
        x: Normalised tokens.
        latent: Ranks and head dims.
        num_heads: Heads.
        outside: Placement of tokens outside of tensor-parallel regions.
        core: Core attention and RoPE.
    """
    dims, hidden = LatentDims.of(latent, num_heads), x.dims[-1]
    uses_transformers_ops = block.lowering.is_eager and block.lowering.uses_transformers_ops
    with block.module(x):
        if uses_transformers_ops:
            query, key, value, named_tensors = _transformers_projected(
                block, x, latent, dims, core.rope
            )
        elif core.rope is RotaryFormula.INDEXED_COMPLEX:
            query, key, value, named_tensors = _torchtitan_projected(block, x, latent, dims)
        else:
            with block.part(OffloadModule.QKV_LINEAR):
                query, key, value, named_tensors = _projected(block, x, latent, dims)
        context = core.attend(query, key, value)
        if uses_transformers_ops:  # attention's input and output have heads first
            context = copy(block, context, "attention by tokens", copies_back=False)
        for each in (query, key, value):
            block.discard(RecomputeModule.MLA_UP_PROJ, each)
        with block.part(OffloadModule.ATTN_PROJ):
            y = row(block, context, hidden, "attention output", outside)
        block.hold(*named_tensors, query, key, value, context)
        return y


def _projected(
    block: Block, x: Tensor, latent: LatentAttention, dims: LatentDims
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return queries, keys and values, and tensors in local variables until attention returns.

    Megatron-Core makes both latents first, in a function whose locals are freed on return
    (get_query_key_value_tensors of megatron/core/transformer/multi_latent_attention.py, core 0.16),
    and makes values contiguous for Transformer Engine; others make the keys' latent after queries.
    """
    width = Dim("latent and shared key", latent.kv_rank + latent.rotary_head_dim)
    source, both = _query_latent(block, x, latent), None
    if block.lowering.copies_operands:
        both = _key_latent(block, x, width, dims)
    with block.part(RecomputeModule.MLA_UP_PROJ):
        (up_projected,) = columns(block, source, dims.queries)
        plain, rotated = cut(block, up_projected, dims.plain_queries, dims.rotary_queries)
        (rotated,) = rotary(block, rotated)
        query = _concatenated(block, plain, rotated, dims.queries)
    narrow, shared = both or _key_latent(block, x, width, dims)
    with block.part(RecomputeModule.MLA_UP_PROJ):
        (shared,) = rotary(block, shared)
        (keys_values,) = columns(block, narrow, dims.keys_values)
        plain, value = cut(block, keys_values, dims.plain_keys, dims.values)
        key = _concatenated(block, plain, shared, dims.queries)
        if both:
            value = copy(block, value, "values apart", copies_back=False)
            block.hold(up_projected, rotated, shared, keys_values)
    return query, key, value, () if both else (up_projected, rotated, shared)


def _transformers_projected(
    block: Block, x: Tensor, latent: LatentAttention, dims: LatentDims, rope_formula: RotaryFormula
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the same by transformers, which makes both latents before RoPE.

    `DeepseekV3Attention` and `DeepseekV2Attention` of transformers 5.23.
    """
    width = Dim("latent and shared key", latent.kv_rank + latent.rotary_head_dim)
    with block.module():  # no variable keeps the queries' latent
        (up_projected,) = columns(block, _query_latent(block, x, latent), dims.queries)
    plain, query = cut(block, up_projected, dims.plain_queries, dims.rotary_queries)
    both = whole_product(block, x, width, "kv down", PLAIN)
    narrow, shared = cut(block, both, dims.latent, dims.shared_key)
    narrow = norm(block, narrow, "kv latent norm", centers=False)
    query, shared = rotary(block, query, shared, how=Rotary(formula=rope_formula))
    named_tensors = up_projected, both, narrow, query, shared
    query = _concatenated(block, plain, query, dims.queries)
    (keys_values,) = columns(block, narrow, dims.keys_values)
    plain, value = cut(block, keys_values, dims.plain_keys, dims.values)
    return query, _keys_by_assignment(block, plain, shared, dims), value, named_tensors


def _torchtitan_projected(
    block: Block, x: Tensor, latent: LatentAttention, dims: LatentDims
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the same by torchtitan 0.3, which applies RoPE to queries and the shared key at once.

    `Attention` of torchtitan/models/deepseek_v3/model.py.
    """
    width = Dim("latent and shared key", latent.kv_rank + latent.rotary_head_dim)
    (up_projected,) = columns(block, _query_latent(block, x, latent), dims.queries)
    plain, query = cut(block, up_projected, dims.plain_queries, dims.rotary_queries)
    narrow, shared = cut(
        block, whole_product(block, x, width, "kv down", PLAIN), dims.latent, dims.shared_key
    )
    query, shared = rotary(block, query, shared, how=Rotary(formula=RotaryFormula.INDEXED_COMPLEX))
    named_tensors = up_projected, query, shared
    query = _concatenated(block, plain, query, dims.queries)
    (keys_values,) = columns(
        block, norm(block, narrow, "kv latent norm", centers=False), dims.keys_values
    )
    plain, value = cut(block, keys_values, dims.plain_keys, dims.values)
    return query, _concatenated(block, plain, shared, dims.queries), value, named_tensors


def _keys_by_assignment(block: Block, plain: Tensor, shared: Tensor, dims: LatentDims) -> Tensor:
    """Return keys whose parts are copied into an empty tensor.

    Backward of each slice assignment first copies the whole gradient, then the part (`CopySlices`
    of PyTorch, csrc/autograd/functions/tensor.cpp).
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
    """Return the input of the queries' up projection: their normalised latent, if there is one."""
    if not latent.query_rank:
        return x
    x = whole_product(block, x, Dim("query latent", latent.query_rank), "query down", PLAIN)
    return norm(block, x, "query latent norm", centers=False)


def _key_latent(block: Block, x: Tensor, width: Dim, dims: LatentDims) -> tuple[Tensor, Tensor]:
    """Return the normalised latent of keys and values, and the key's shared RoPE part."""
    both = whole_product(block, x, width, "kv down", PLAIN)
    narrow, shared = cut(block, both, dims.latent, dims.shared_key)
    # All heads read the shared key, so every rank gathers all of its tokens.
    if Axis.TP in x.at:
        shared = place(block, shared, replicated(x.at, Axis.TP))
    return norm(block, narrow, "kv latent norm", centers=False), shared


def _concatenated(block: Block, plain: Tensor, rotated: Tensor, out: Dim) -> Tensor:
    """Return both parts of queries or keys concatenated; the RoPE part may serve all heads."""
    at = {axis: out if dim is plain.dims[-1] else dim for axis, dim in plain.at.items()}
    made = plain.like(f"{out.name} joined", dims=(*plain.dims[:-1], out), at=at)
    is_shared = rotated.dims[-1].size == rotated.dims[-1].grain
    # A shared part's gradient is a partial sum over the ranks' heads.
    of_heads = {axis: PARTIAL for axis, dim in plain.at.items() if dim is plain.dims[-1]}
    gradients = [
        Gradient(plain, passes_through=True, at=plain.at),
        Gradient(rotated, passes_through=not is_shared, at=of_heads if is_shared else rotated.at),
    ]
    return block.add([plain, rotated], [made], gradients, block.traffic(made, made))
