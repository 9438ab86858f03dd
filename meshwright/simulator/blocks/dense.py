"""The dense transformer layer; parts that most layers lack are imported late."""
# ruff: noqa: PLC0415

from meshwright.hwprofiles import Attention, OffloadModule, RecomputeModule
from meshwright.simulator.blocks.dims import LayerDims
from meshwright.simulator.blocks.parts import Chunks, Shared, Widths, chunk_tokens, feed_forward
from meshwright.simulator.blocks.shape import BlockShape, norm_part
from meshwright.simulator.blocks.spelling import heads_apart, latent_rotary, layer_code_of
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
    norm,
    pass_through,
    residual,
    rotary,
    row,
    scored,
    view,
)
from meshwright.simulator.model import EXPERT_LAYERS, TRANSFORMER_LAYER, BlockKind

# Traffic of unfused attention's transposes and bias additions, in widths of the queries.
LAYOUT_WIDTHS = (8, 14)
# Part of a norm fused into the linear layer behind it, which is not recomputed
# (LayerNormLinear, in megatron/core/models/gpt/gpt_layer_specs.py, core 0.12 to 0.19).
FUSED_NORM = "norm of a product"

CONCATENATED_ROPE = {
    RotaryFormula.NEOX,
    RotaryFormula.PHI3,
    RotaryFormula.GLM4,
    RotaryFormula.HALVES,
}


def layer(
    block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, kind: BlockKind = TRANSFORMER_LAYER
) -> Tensor:
    """Return the output of a transformer layer, with routed experts or an MLP."""
    model, layer_input = shape.model, x
    write_attention = _attention if model.latent is None else _latent
    write_feed_forward = _experts if kind in EXPERT_LAYERS else _mlp
    if model.parallel_mlp != "no":
        return _side_by_side(block, x, shape, dims, kind)
    module = RecomputeModule.MOE if kind in EXPERT_LAYERS else RecomputeModule.MLP
    norm_parts = [
        FUSED_NORM if block.lowering.fuses_norms and has_one_reader else RecomputeModule.LAYERNORM
        for has_one_reader in (model.latent is None, kind not in EXPERT_LAYERS)
    ]
    with block.part("layer"):
        with block.part(norm_part(shape, kind, OffloadModule.ATTN_NORM)):
            attended = _normed(block, x, "attention norm", shape, norm_parts[0])
        y = write_attention(block, attended, shape, dims, kind)
        block.discard(norm_parts[0], attended)
        y = _normed(block, y, "attention output norm", shape)
        named = (y,) if layer_code_of(shape).names_attention else ()
        x = residual(block, y, x, bias=model.output_bias, drops=model.dropout)
        with block.part(norm_part(shape, kind, OffloadModule.MLP_NORM)):
            mlp_input = _normed(block, x, "mlp norm", shape, norm_parts[1])
        with block.part(module):
            y = write_feed_forward(block, mlp_input, shape, dims)
        block.discard(norm_parts[1], mlp_input)
        y = _normed(block, y, "mlp out norm", shape)
        out = residual(block, y, x, bias=model.mlp_bias, drops=model.dropout)
        # The layer's local variables: its input, the residual stream, and attention's output if
        # named.
        block.hold(layer_input, x, *named)
        return out


def _normed(block: Block, x: Tensor, name: str, shape: BlockShape, part: str = "") -> Tensor:
    """Return *x* normalised where the model has a norm: before a *part*, or after one."""
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
    """Return *x* after the model's norm; a norm without weights is always an RMS norm."""
    # Only RMS norms come without weights (Llama 4's QK norm).
    centers, formula = shape.model.norm == "layernorm" and weighted, layer_code_of(shape).norm
    return norm(block, x, name, centers=centers, formula=formula, weighted=weighted)


def _side_by_side(
    block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, kind: BlockKind
) -> Tensor:
    """Return the output of a parallel layer (GPT-J): attention and MLP read the same tokens."""
    model, spelling = shape.model, layer_code_of(shape)
    with block.part("layer"):
        attention_input = mlp_input = normed(block, x, "attention norm", shape)
        if model.parallel_mlp == "two norms" and spelling.norms_first:
            mlp_input = normed(block, x, "mlp norm", shape)
        attended = _attention(block, attention_input, shape, dims, kind)
        if model.parallel_mlp == "two norms" and not spelling.norms_first:
            mlp_input = normed(block, x, "mlp norm", shape)
        y = _mlp(block, mlp_input, shape, dims)
        if spelling.norms_first:
            both = y.like("both", base=y.storage)
            # Falcon adds attention's output to the MLP's in place.
            pass_through(block, [y, attended], both, block.traffic(y, y, attended))
        else:
            both = residual(block, attended, y, bias=False, drops=False)
        out = residual(block, both, x, bias=False, drops=False)
        named = (attention_input, mlp_input) if spelling.norms_first else ()
        block.hold(x, attended, y, *named)
        return out


def _chunks(shape: BlockShape, dims: LayerDims, kind: BlockKind) -> Chunks | None:
    """Return the chunks of a layer's chunked attention, if sequences have several."""
    size, length = chunk_tokens(shape.model, kind, shape.seq_len), shape.seq_len
    return Chunks.of(dims.tokens, dims.batch, size, fills_up=length % size > 0) if size else None


def _attention(
    block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, kind: BlockKind
) -> Tensor:
    """Return self-attention of normalised tokens, with its projections."""
    model, spelling = shape.model, layer_code_of(shape)
    has_positions, chunks = model.has_positions(kind), _chunks(shape, dims, kind)
    is_unfused = shape.attention is Attention.UNFUSED
    with block.module(x):
        with block.part(OffloadModule.QKV_LINEAR):
            query, key, value = _projected(block, x, shape, dims)
        if chunks is not None:
            query, key, value = (chunks.cut(block, each) for each in (query, key, value))
        if has_positions:
            query, key = _apply_rope(block, query, key, _rotary(shape))
            if model.qk_norm == "unweighted" and not block.lowering.fuses_redistribute:
                query, key = _normed_heads(block, query, key, shape, dims)
        keys_values = key, value
        is_strided = not has_positions and model.num_kv_heads < model.num_heads
        if is_strided and block.lowering.copies_operands and not block.lowering.is_local:
            # Keys and values are slices of the fused qkv output in a layout no kernel has:
            # Transformer Engine copies them (get_qkv_layout of its dot_product_attention/utils.py,
            # 0.12 to 2.x). With RoPE it would copy the values, but measured peaks are those of the
            # whole fused output (docs/accuracy.md).
            key, value = (copy(block, each, f"{each.name} apart") for each in keys_values)
        context = _attended(block, (query, key, value), shape, dims, kind)
        if chunks is not None:
            context = chunks.joined(block, context)
        # Concatenating rotated heads leaves tensors heads first, and so is attention's output.
        if has_positions and spelling.rotary in CONCATENATED_ROPE:
            context = copy(block, context, "attention by tokens", copies_back=False)
        if is_unfused:
            context = counted(block, context, *LAYOUT_WIDTHS)
        block.hold(query, key, value, *keys_values)
        bias = Linear(bias=model.output_bias)
        with block.part(OffloadModule.ATTN_PROJ):
            y = row(block, context, dims.hidden, "attention output", dims.outside, bias)
        block.hold(context)
        return y


def _attended(
    block: Block,
    queries_keys_values: tuple[Tensor, ...],
    shape: BlockShape,
    dims: LayerDims,
    kind: BlockKind,
) -> Tensor:
    """Return core attention: fused, unfused or context-parallel."""
    model, chunks = shape.model, _chunks(shape, dims, kind)
    seen, tokens = model.seen_tokens(kind, shape.seq_len), chunks.size if chunks else dims.tokens
    sinks = dims.heads if model.attention_sinks else None
    heads = Heads(dims.heads, tokens, seen, model.causal, model.dropout, sinks)
    query, key, value = queries_keys_values
    with block.part(RecomputeModule.CORE_ATTN):
        if shape.cp_type is not None:
            from meshwright.simulator.blocks.parts import context_parallel

            window = seen if seen < shape.seq_len else 0
            over = heads._replace(ranks=dims.cp, inner=shape.cp_inner, window=window)
            return context_parallel(block, query, key, value, over, shape.cp_type)
        attend = scored if shape.attention is Attention.UNFUSED else flash
        return attend(block, query, key, value, heads)


def _latent(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, kind: BlockKind) -> Tensor:
    """Return multi-head latent attention (MLA) of normalised tokens."""
    from meshwright.simulator.blocks.parts import LatentCore, latent_attention

    model = shape.model
    assert model.latent is not None

    def core(*queries_keys_values: Tensor) -> Tensor:
        return _attended(block, queries_keys_values, shape, dims, kind)

    latent_core = LatentCore(core, latent_rotary(shape))
    return latent_attention(block, x, model.latent, model.num_heads, dims.outside, latent_core)


def _projected(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> list[Tensor]:
    """Return queries, keys and values, with QK norm if the model has one before RoPE."""
    model, spelling = shape.model, layer_code_of(shape)
    parts = dims.queries, dims.keys, dims.values
    # With unfused attention LAYOUT_WIDTHS has the bias gradient's traffic.
    counts_bias = shape.attention is not Attention.UNFUSED
    bias = Linear(bias=model.attention_bias, counts_bias=counts_bias, fuses=spelling.fuses_qkv)
    projections = columns(block, x, *parts, linear=bias, packed=spelling.fuses_qkv)
    if spelling.fuses_qkv:
        projections = heads_apart(block, projections[0], spelling.packing, *parts)
    query, key, value = projections
    is_view = block.lowering.fuses_products and not spelling.fuses_qkv
    # With several query groups they are not contiguous (get_query_key_value_tensors, core 0.16).
    if is_view and shape.has_groups:
        query = copy(block, query, "queries apart")
    # Megatron-Core applies QK norms without weights before RoPE, transformers after it.
    if model.qk_norm in {"head", "width"} or (
        model.qk_norm == "unweighted" and block.lowering.fuses_redistribute
    ):
        query, key = _normed_heads(block, query, key, shape, dims)
    return [query, key, value]


def _rotary(shape: BlockShape) -> Rotary:
    """Return the RoPE options of a layer.

    Transformer Engine's kernel lacks YaRN's scaled cos and sin (mscale): then PyTorch's operators
    apply RoPE (apply_rotary_pos_emb of core 0.15 to 0.19, models/common/embeddings).
    """
    model = shape.model
    is_apart = model.scaled_angles and shape.stack.transformer_engine
    return Rotary(model.rotary_dim, layer_code_of(shape).rotary, is_apart)


def _apply_rope(block: Block, query: Tensor, key: Tensor, how: Rotary) -> tuple[Tensor, Tensor]:
    """Return queries and keys after RoPE, in the block's dtype."""
    before = query, key
    query, key = rotary(block, *before, how=how)
    if block.lowering.is_eager:  # local variables until the module returns
        block.argument(*(before if block.lowering.is_local else ()), query, key)
    # Under autocast RoPE runs in fp32; the attention kernel takes 16 bits.
    key, query = (cast(block, x, f"{x.name} cast", block.width) for x in (key, query))
    return query, key


def _normed_heads(
    block: Block, query: Tensor, key: Tensor, shape: BlockShape, dims: LayerDims
) -> tuple[Tensor, Tensor]:
    """Return queries and keys after QK norm, over each head or over all heads."""
    normed_heads = []
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
        normed_heads.append(y)
    return normed_heads[0], normed_heads[1]


def _mlp(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the MLP's output of normalised tokens."""
    model = shape.model
    bias = Linear(bias=model.mlp_bias, fuses=layer_code_of(shape).fuses_mlp)
    parts = (dims.gate, dims.ffn) if model.gated_mlp else (dims.ffn,)
    widths = Widths(parts, dims.inner, dims.hidden, Activation(model.activation))
    return feed_forward(block, x, widths, dims.outside, bias)


def _experts(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the output of routed and shared experts (MoE layer)."""
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
