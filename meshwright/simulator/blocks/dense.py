"""The dense transformer layer, written once; parts that most layers have not are imported late."""
# ruff: noqa: PLC0415

from meshwright.hwprofiles import Attention, OffloadModule, RecomputeModule
from meshwright.simulator.blocks.dims import LayerDims
from meshwright.simulator.blocks.parts import Chunks, Shared, Widths, chunk_tokens, feed_forward
from meshwright.simulator.blocks.shape import BlockShape, norm_part
from meshwright.simulator.blocks.spelling import heads_apart, latent_rotary, spelling_of
from meshwright.simulator.graph import (
    Activation,
    Block,
    Dim,
    Heads,
    Linear,
    Rotary,
    RotaryFormula,
    Tensor,
    cast,
    columns,
    copy,
    counted,
    flash,
    handed_on,
    norm,
    residual,
    rotary,
    row,
    scored,
    view,
)
from meshwright.simulator.model import EXPERT_LAYERS, TRANSFORMER_LAYER, BlockKind

# Widths of the queries that unfused attention moves in transposing and adding biases.
LAYOUT_WIDTHS = (8, 14)
# The part of a norm that is inside of the product that alone reads it, and does not run again
# (LayerNormLinear, in megatron/core/models/gpt/gpt_layer_specs.py, core 0.12 to 0.19).
INSIDE = "norm of a product"

PUT_TOGETHER = {RotaryFormula.NEOX, RotaryFormula.PHI3, RotaryFormula.GLM4, RotaryFormula.HALVES}


def layer(
    block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, kind: BlockKind = TRANSFORMER_LAYER
) -> Tensor:
    """Return the tokens after a layer of one kind, with routed experts or an MLP."""
    model, entered = shape.model, x
    first = _attention if model.latent is None else _latent
    last = _experts if kind in EXPERT_LAYERS else _mlp
    if model.parallel_mlp != "no":
        return _side_by_side(block, x, shape, dims, kind)
    module = RecomputeModule.MOE if kind in EXPERT_LAYERS else RecomputeModule.MLP
    ahead = [
        INSIDE if block.lowering.fuses_norms and has_one_reader else RecomputeModule.LAYERNORM
        for has_one_reader in (model.latent is None, kind not in EXPERT_LAYERS)
    ]
    with block.part("layer"):
        with block.part(norm_part(shape, kind, OffloadModule.ATTN_NORM)):
            attended = _normed(block, x, "attention norm", shape, ahead[0])
        y = first(block, attended, shape, dims, kind)
        block.discard(ahead[0], attended)
        y = _normed(block, y, "attention output norm", shape)
        held = (y,) if spelling_of(shape).names_attention else ()
        x = residual(block, y, x, bias=model.output_bias, drops=model.dropout)
        with block.part(norm_part(shape, kind, OffloadModule.MLP_NORM)):
            given = _normed(block, x, "mlp norm", shape, ahead[1])
        with block.part(module):
            y = last(block, given, shape, dims)
        block.discard(ahead[1], given)
        y = _normed(block, y, "mlp out norm", shape)
        out = residual(block, y, x, bias=model.mlp_bias, drops=model.dropout)
        block.hold(entered, x, *held)
        return out


def _normed(block: Block, x: Tensor, name: str, shape: BlockShape, part: str = "") -> Tensor:
    """Return *x* normalised, where the model has a norm: ahead of a *part*, or behind one."""
    if shape.model.norm_places not in {"before" if part else "after", "both"}:
        return x
    if part:
        with block.part(f"{part}:{name}"):
            return normed(block, x, name, shape)
    with block.module(x):
        return normed(block, x, name, shape)


def normed(
    block: Block, x: Tensor, name: str, shape: BlockShape, *, weighted: bool = True
) -> Tensor:
    """Return *x* normalised as a model does it; a norm without weights is an RMS norm anyway."""
    centers, formula = shape.model.norm == "layernorm" and weighted, spelling_of(shape).norm
    return norm(block, x, name, centers=centers, formula=formula, weighted=weighted)


def _side_by_side(
    block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, kind: BlockKind
) -> Tensor:
    """Return the tokens after a layer whose attention and MLP read the same ones."""
    model, spelling = shape.model, spelling_of(shape)
    with block.part("layer"):
        first = second = normed(block, x, "attention norm", shape)
        if model.parallel_mlp == "two norms" and spelling.norms_first:
            second = normed(block, x, "mlp norm", shape)
        attended = _attention(block, first, shape, dims, kind)
        if model.parallel_mlp == "two norms" and not spelling.norms_first:
            second = normed(block, x, "mlp norm", shape)
        y = _mlp(block, second, shape, dims)
        if spelling.norms_first:
            both = y.like("both", base=y.storage)
            handed_on(block, [y, attended], both, block.traffic(y, y, attended))
        else:
            both = residual(block, attended, y, bias=False, drops=False)
        out = residual(block, both, x, bias=False, drops=False)
        named = (first, second) if spelling.norms_first else ()
        block.hold(x, attended, y, *named)
        return out


def _chunks(shape: BlockShape, dims: LayerDims, kind: BlockKind) -> Chunks | None:
    """Return the chunks that attention of a kind of layer is within, if sequences have several."""
    size, length = chunk_tokens(shape.model, kind, shape.seq_len), shape.seq_len
    return Chunks.of(dims.tokens, dims.batch, size, fills_up=length % size > 0) if size else None


def _attention(
    block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, kind: BlockKind
) -> Tensor:
    """Return self-attention of normalised tokens in a layer of a kind."""
    model, spelling = shape.model, spelling_of(shape)
    has_positions, chunks = model.has_positions(kind), _chunks(shape, dims, kind)
    is_unfused = shape.attention is Attention.UNFUSED
    with block.module(x):
        with block.part(OffloadModule.QKV_LINEAR):
            query, key, value = _projected(block, x, shape, dims)
        if chunks is not None:
            query, key, value = (chunks.cut(block, each) for each in (query, key, value))
        if has_positions:
            query, key = _turned(block, query, key, _rotary(shape))
            if model.qk_norm == "unweighted" and not block.lowering.fuses_places:
                query, key = _normed_heads(block, query, key, shape, dims)
        given = key, value
        leaves_gaps = not has_positions and model.num_kv_heads < model.num_heads
        if leaves_gaps and block.lowering.copies_operands and not block.lowering.is_local:
            # Keys and values are parts of a product that lie as no kernel knows: Transformer Engine
            # copies such (get_qkv_layout of its dot_product_attention/utils.py, 0.12 to 2.x).  Of
            # rotated ones it would copy the values, but runs of real size hold as much as with the
            # whole product (docs/accuracy.md).
            key, value = (copy(block, each, f"{each.name} apart") for each in given)
        context = _attended(block, (query, key, value), shape, dims, kind)
        if chunks is not None:
            context = chunks.joined(block, context)
        # What puts a head together lays all out head by head, and so does attention.
        if has_positions and spelling.rotary in PUT_TOGETHER:
            context = copy(block, context, "attention by tokens", copies_back=False)
        if is_unfused:
            context = counted(block, context, *LAYOUT_WIDTHS)
        block.hold(query, key, value, *given)
        bias = Linear(bias=model.output_bias)
        with block.part(OffloadModule.ATTN_PROJ):
            y = row(block, context, dims.hidden, "attention output", dims.outside, bias)
        block.hold(context)
        return y


def _attended(
    block: Block,
    given: tuple[Tensor, ...],
    shape: BlockShape,
    dims: LayerDims,
    kind: BlockKind,
) -> Tensor:
    """Return attention of queries to keys and values in a layer of a kind."""
    model, chunks = shape.model, _chunks(shape, dims, kind)
    seen, tokens = model.seen_tokens(kind, shape.seq_len), chunks.size if chunks else dims.tokens
    sinks = dims.heads if model.attention_sinks else None
    heads = Heads(dims.heads, tokens, seen, model.causal, model.dropout, sinks)
    query, key, value = given
    with block.part(RecomputeModule.CORE_ATTN):
        if shape.cp_type is not None:
            from meshwright.simulator.blocks.parts import context_parallel

            window = seen if seen < shape.seq_len else 0
            over = heads._replace(ranks=dims.cp, inner=shape.cp_inner, window=window)
            return context_parallel(block, query, key, value, over, shape.cp_type)
        attend = scored if shape.attention is Attention.UNFUSED else flash
        return attend(block, query, key, value, heads)


def _latent(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, kind: BlockKind) -> Tensor:
    """Return latent attention of normalised tokens."""
    from meshwright.simulator.blocks.parts import LatentCore, latent_attention

    model = shape.model
    assert model.latent is not None

    def core(*given: Tensor) -> Tensor:
        return _attended(block, given, shape, dims, kind)

    turns = LatentCore(core, latent_rotary(shape))
    return latent_attention(block, x, model.latent, model.num_heads, dims.outside, turns)


def _projected(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> list[Tensor]:
    """Return queries, keys and values, the first two perhaps normalised."""
    model, spelling = shape.model, spelling_of(shape)
    parts = dims.queries, dims.keys, dims.values
    counts_bias = shape.attention is not Attention.UNFUSED
    bias = Linear(bias=model.attention_bias, counts_bias=counts_bias, fuses=spelling.fuses_qkv)
    found = columns(block, x, *parts, linear=bias, packed=spelling.fuses_qkv)
    if spelling.fuses_qkv:
        found = heads_apart(block, found[0], spelling.packing, *parts)
    query, key, value = found
    is_view = block.lowering.fuses_products and not spelling.fuses_qkv
    # Of several groups they are not one stretch (get_query_key_value_tensors of core 0.16).
    if is_view and shape.has_groups:
        query = copy(block, query, "queries apart")
    # Megatron-Core has norms without weights where it has others; transformers turns heads first.
    if model.qk_norm in {"head", "width"} or (
        model.qk_norm == "unweighted" and block.lowering.fuses_places
    ):
        query, key = _normed_heads(block, query, key, shape, dims)
    return [query, key, value]


def _rotary(shape: BlockShape) -> Rotary:
    """Return how positions turn heads.

    Transformer Engine's kernel turns by angles alone, not times a number: such are turned by
    PyTorch's operators (apply_rotary_pos_emb of core 0.15 to 0.19, models/common/embeddings).
    """
    model = shape.model
    is_apart = model.scaled_angles and shape.stack.transformer_engine
    return Rotary(model.rotary_dim, spelling_of(shape).rotary, is_apart)


def _turned(block: Block, query: Tensor, key: Tensor, how: Rotary) -> tuple[Tensor, Tensor]:
    """Return queries and keys turned by their positions, in the block's format."""
    given = query, key
    query, key = rotary(block, *given, how=how)
    if block.lowering.is_eager:  # they have names until it returns
        block.argument(*(given if block.lowering.is_local else ()), query, key)
    key, query = (cast(block, x, f"{x.name} cast", block.width) for x in (key, query))
    return query, key


def _normed_heads(
    block: Block, query: Tensor, key: Tensor, shape: BlockShape, dims: LayerDims
) -> tuple[Tensor, Tensor]:
    """Return queries and keys normalised, each head of them or all heads together."""
    found = []
    for x, name, heads in ((query, "query norm", dims.heads), (key, "key norm", dims.groups)):
        width = x.dims[-1]
        with block.module(x):
            if shape.model.qk_norm != "width":
                by_heads = view(block, x, *x.dims[:-1], heads, dims.head, renamed=(width, heads))
                weighted = shape.model.qk_norm == "head"
                y = normed(block, by_heads, name, shape, weighted=weighted)
                y = view(block, y, *x.dims, renamed=(heads, width))
            else:
                y = normed(block, x, name, shape)
        found.append(y)
    return found[0], found[1]


def _mlp(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the MLP of normalised tokens."""
    model = shape.model
    bias = Linear(bias=model.mlp_bias, fuses=spelling_of(shape).fuses_mlp)
    parts = (dims.gate, dims.ffn) if model.gated_mlp else (dims.ffn,)
    widths = Widths(parts, dims.inner, dims.hidden, Activation(model.activation))
    return feed_forward(block, x, widths, dims.outside, bias)


def _experts(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return what routed and shared experts make of normalised tokens."""
    from meshwright.simulator.blocks.parts import routed

    experts = shape.model.experts
    assert experts is not None
    width = experts.shared_hidden_size
    parts = (Dim("shared gate", width), Dim("shared up", width))[-experts.num_parts :]
    kind = Activation(shape.model.activation)

    def write(block: Block, x: Tensor) -> Tensor:
        widths = Widths(parts, Dim("shared inner", width), dims.hidden, kind)
        return feed_forward(block, x, widths, dims.outside, Linear(), name="shared out")

    shared = Shared(write, experts.shared_gate) if width else None
    return routed(block, x, experts, dims.experts, dims.outside, shared)
