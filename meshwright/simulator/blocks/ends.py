"""Embedding, LM head and MTP (multi-token prediction) blocks of a language model."""

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.blocks.dense import layer, normed
from meshwright.simulator.blocks.dims import LayerDims
from meshwright.simulator.blocks.losses import loss_of
from meshwright.simulator.blocks.shape import BlockShape, narrows_head
from meshwright.simulator.graph import (
    NUMBER_BYTES,
    OUTSIDE,
    PARTIAL,
    Block,
    Dim,
    Exchange,
    Gradient,
    Linear,
    Reads,
    Tensor,
    Traffic,
    Transfer,
    columns,
    copy,
    dropout,
    place,
    pointwise,
    several,
    view,
    whole_product,
)
from meshwright.simulator.layout import Axis

TABLE_TRAFFIC = 8  # bytes an element: a dense fp32 gradient is zeroed and written
DROPPED_BYTES = 3  # a value and a mask byte
NEXT_SENTENCE_CLASSES = 2
POSITIONS = "positions"
MASK_BYTES = 4  # of a token in the mask of the loss
SHIFTED_BYTES = NUMBER_BYTES, MASK_BYTES  # of a token that roll_tensor sends to another rank


def embedding(
    block: Block, shape: BlockShape, dims: LayerDims, ids: Tensor | None = None
) -> Tensor:
    """Return embedded tokens: vocabulary-parallel, so each rank has a partial sum.

    With learned positions Megatron-LM all-reduces and then takes its shard of the tokens.
    With *ids* (MTP) the embedding weight belongs to another block.
    """
    model, stack = shape.model, shape.stack
    stream = dims.stream(block, shape)
    x = _word_embedding(block, shape, dims, ids)
    if model.scaled_embeddings:
        x = pointwise(block, "scaled embedding", x, reads=Reads.NOTHING)
    if model.positions == "learned":
        # Positions are added before tokens are scattered, unless the stack scatters first.
        x = place(block, x, dims.outside if stack.scatters_positions else {})
        x = _add_embedding(block, x, POSITIONS, model.max_positions, stream)
    x = place(block, x, dims.outside)
    if model.token_types:
        x = _add_embedding(block, x, "token types", model.token_types, stream)
    if model.embedding_norm:
        x = normed(block, x, "embedding norm", shape)
    if model.dropout:
        moved = Traffic(DROPPED_BYTES * stream.numel)
        x = dropout(block, x, "embedding dropout", (moved, moved))
    return x


def _word_embedding(block: Block, shape: BlockShape, dims: LayerDims, ids: Tensor | None) -> Tensor:
    """Return rows of the word embedding; backward writes a dense gradient of the whole weight.

    DTensor's embedding gives every tensor rank a gradient of all rows, of which it keeps a shard.
    """
    rows = dims.vocabulary
    name, shared = "word_embedding.weight", ids is not None
    table = block.weight(name, rows, dims.hidden, at={Axis.TP: rows}, shared=shared)
    if ids is None:
        # In PyTorch's pipelines ids are a view of the batch, which is counted elsewhere.
        width = 0 if shape.keeps_outputs else NUMBER_BYTES
        ids = block.tensor("ids", dims.tokens, dims.batch, width=width)
    stream = dims.stream(block, shape)
    x = stream.like("looked up", at=block.placed({Axis.TP: PARTIAL}))
    traffic = block.traffic(stream, stream)
    makes = None
    if shape.stack.whole_table_gradient:
        is_padded = shape.stack.vocabulary_multiple > 1
        gradient_rows = rows if is_padded else Dim("all rows", shape.model.vocab_size)
        # DTensor's replicated gradient is sliced afterwards, so the whole exists for a moment.
        makes = table.like("table gradient", dims=(gradient_rows, dims.hidden), at={})
    work = (traffic, Traffic(TABLE_TRAFFIC * table.numel))
    gradient = Gradient(table, (ids,), work, makes=makes)
    return block.add([ids, table], [x], [gradient], traffic)


def _add_embedding(block: Block, x: Tensor, name: str, num_rows: int, stream: Tensor) -> Tensor:
    """Return *x* plus rows of an embedding that is replicated on every rank."""
    rows = block.weight(f"{name.replace(' ', '_')}.weight", Dim(name, num_rows), x.dims[-1])
    traffic = block.traffic(stream, stream)
    summed = dict.fromkeys(x.at, PARTIAL)
    # Position ids are the same for all sequences: one lookup is broadcast.
    is_broadcast = name == POSITIONS
    lookup = x.like(f"{name} looked up", dims=(x.dims[0], x.dims[-1]) if is_broadcast else x.dims)
    ids_of_tokens = x.like(f"{name} numbers", dims=x.dims[:-1], at={}, width=NUMBER_BYTES)
    kept = [] if is_broadcast else [ids_of_tokens]
    gradients = [
        Gradient(x, (), (traffic,), passes_through=True),
        Gradient(rows, tuple(kept), at=summed),
    ]
    outputs = [x.like(f"{name} added"), *kept]
    return block.add([x, rows], outputs, gradients, traffic, scratch=([lookup], []))


def head(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the loss of the LM head, with the MTP losses if the model has MTP layers."""
    if shape.model.prediction_layers:
        return _losses(block, x, shape, dims)
    logits = output(block, x, shape, dims)
    others = [_next_sentence_logits(block, x)] if shape.model.mlm_head else []
    return loss_of(block, logits, *others)


def output(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the logits, of scored positions alone (BERT's masked tokens)."""
    model = shape.model
    if model.scored_fraction < 1:
        x = copy(block, x, "scored", like=x.like("scored", dims=(dims.scored, x.dims[-1]), at={}))
    if model.mlm_head:
        width, affine = Dim("mlm dense", model.hidden_size), OUTSIDE._replace(bias=True)
        x = whole_product(block, x, width, "mlm dense", affine)
        x = pointwise(block, "mlm activation", x)
    name = "mlm norm" if model.mlm_head else "final norm"
    x = normed(block, x, name, shape)
    linear = Linear(bias=model.mlm_head, in_layer=narrows_head(shape), shared=model.tied_embeddings)
    with block.module(x):
        (logits,) = columns(block, x, dims.vocabulary, linear=linear)
    return _softcap(block, logits) if model.logit_softcap else logits


def final_norm(block: Block, x: Tensor, shape: BlockShape) -> Tensor:
    """Return the final norm, a block of its own before MTP layers."""
    return normed(block, x, "final norm", shape)


def predictions(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the hidden states of the main model and of each MTP layer, concatenated.

    The head reads them, and a stage sends them to it (MultiTokenPredictionBlock of
    megatron/core/transformer/multi_token_prediction.py, core 0.16).
    """
    streams = [x]
    for index in range(shape.model.prediction_layers):
        streams.append(_prediction_layer(block, streams[-1], shape, dims, f"layer:{index}"))
    # Backward of the concatenation yields slices of one gradient, which lives until all are used.
    slopes = [Gradient(each, passes_through=True, is_slice=True) for each in streams]
    made = streams_like(x, shape)
    return block.add(streams, [made], slopes, block.traffic(made, made))


def streams_like(x: Tensor, shape: BlockShape) -> Tensor:
    """Return a tensor like *x* for the concatenated hidden states of main model and MTP layers."""
    number = Dim("streams", 1 + shape.model.prediction_layers)
    return x.like("streams", dims=(number, *x.dims))


def _losses(block: Block, streams: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the losses of the next token and of MTP.

    Hidden states are chunked again, and the MTP logits come first (GPTModel._postprocess of
    core 0.16).  With sequence parallelism tokens are gathered into a global buffer
    (`get_global_memory_buffer` in tensor_parallel/layers.py).
    """
    main, *mtp_streams = _chunk_streams(block, streams)
    vocabulary, previous_logits = dims.vocabulary, list[Tensor]()
    linear = OUTSIDE._replace(buffered=True, in_layer=narrows_head(shape))
    for each in mtp_streams:
        _roll_tensor(block, main, shape, dims)  # the labels
        _roll_tensor(block, main, shape, dims, MASK_BYTES)
        (logits,) = columns(block, each, vocabulary, linear=linear._replace(shared=True))
        block.hold(*previous_logits)  # a local variable keeps the previous logits until now
        previous_logits = [logits]
        loss = loss_of(block, logits)
        slopes = [Gradient(main, passes_through=True), Gradient(loss, at=loss.at)]
        # MTPLossAutoScaler hangs each MTP loss on the hidden states, which pass through.
        main = block.add([main, loss], [main.like(main.name, base=main.storage)], slopes)
    with block.module(main):
        (logits,) = columns(block, main, vocabulary, linear=linear)
    loss = loss_of(block, logits)
    block.hold(*previous_logits)
    return loss


def _prediction_layer(
    block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, part: str
) -> Tensor:
    """Return the hidden states of one MTP layer; *part* may be recomputed by itself."""
    ids = _roll_tensor(block, x, shape, dims)
    _roll_tensor(block, x, shape, dims)  # positions
    embedded = embedding(block, shape, dims, ids)
    with block.part(part):
        parts = [_contiguous_gradient(block, normed(block, embedded, "enorm", shape))]
        parts.append(_contiguous_gradient(block, normed(block, x, "hnorm", shape)))
        twice = Dim("embedding and hidden", 2 * shape.model.hidden_size)
        both = parts[0].like(twice.name, dims=(*x.dims[:-1], twice))
        slopes = [Gradient(each, passes_through=True) for each in parts]
        both = block.add(parts, [both], slopes, block.traffic(both, both))
        (y,) = columns(block, both, Dim("eh_proj", shape.model.hidden_size))
        y = _gather_columns(block, y, x)
        y = layer(block, y, shape, dims, shape.model.layer_runs[-1].kind)
        return normed(block, y, "prediction norm", shape)


def _contiguous_gradient(block: Block, x: Tensor) -> Tensor:
    """Return *x*; the norm's backward makes its gradient, a slice of another, contiguous."""
    return block.add([x], [x.like(x.name, base=x.storage)], [Gradient(x, at=x.at)])


def _gather_columns(block: Block, y: Tensor, like: Tensor) -> Tensor:
    """Return *y* gathered over tp in its last dim, sliced to the tokens of a rank.

    The all-gather stacks ranks in dim 0; a copy concatenates them in the last dim, of which a rank
    keeps its tokens as a view (gather_from_tensor_model_parallel_region and
    scatter_to_sequence_parallel_region of megatron/core/tensor_parallel/mappings.py, core 0.16).
    """
    if Axis.TP not in block.mesh:
        return view(block, y, *like.dims)
    whole = like.like("columns of all", at={})
    gathers = Transfer(CollectiveOp.ALL_GATHER, Axis.TP, whole.nbytes)
    scratch = ([whole.like("columns by rank")], ())
    y = block.add([y], [whole], [Gradient(y, at=y.at)], gathers, scratch=scratch)
    if not like.at:
        return y
    local_tokens = like.like("layer input", base=y.storage)
    return block.add([y], [local_tokens], [Gradient(y, (), (gathers,), at={})])


def _chunk_streams(block: Block, streams: Tensor) -> list[Tensor]:
    """Return views of the concatenated *streams* (``torch.chunk``)."""
    number, *dims = streams.dims
    views = [
        streams.like(f"stream {index}", dims=tuple(dims), base=streams.storage)
        for index in range(int(number.size))
    ]
    moved = (block.traffic(streams, streams),)
    block.add([streams], views, [Gradient(streams, (), moved, at=streams.at)])
    return views


def _roll_tensor(
    block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, width: int = NUMBER_BYTES
) -> Tensor:
    """Return ids, labels or positions of the tokens of *x*, rolled by one.

    A context-parallel rank has two chunks of a sequence; the token rolled out of one goes to the
    previous rank, that of the other to the next: first and last rank send a message less
    (`roll_tensor` of megatron/core/transformer/multi_token_prediction.py, core 0.16).
    """
    tokens, batch = x.dims[:2]
    ids_of_tokens = x.like("shifted numbers", dims=(tokens, batch), at={}, width=width)
    sent: tuple[Exchange, ...] = ()
    if shape.cp > 1:
        size = width * batch.size
        num_messages = 1 + several(dims.cp - 1)
        sent = (Exchange(CollectiveOp.P2P, Axis.CP, size, num_messages, waits=True),)
    return block.add([x], [ids_of_tokens], [], *sent)


def _softcap(block: Block, logits: Tensor) -> Tensor:
    """Return soft-capped logits, ``c tanh(logits / c)``."""
    scaled = pointwise(block, "logits scaled", logits, reads=Reads.NOTHING)
    tanh = pointwise(block, "tanh", scaled, reads=Reads.OUTPUT)
    return pointwise(block, "capped logits", tanh, reads=Reads.NOTHING)


def _next_sentence_logits(block: Block, stream: Tensor) -> Tensor:
    """Return BERT's next-sentence logits (pooler and classifier), replicated on tensor ranks.

    With so few rows their time is the traffic of weight and gradient.
    """
    width = stream.dims[-1]
    pooled, classes = Dim("pooled", width.size), Dim("classes", NEXT_SENTENCE_CLASSES)
    weights = [
        block.weight("pooler.weight", pooled, width),
        block.weight("pooler.bias", pooled),
        block.weight("next_sentence.weight", classes, pooled),
        block.weight("next_sentence.bias", classes),
    ]
    moved = block.traffic(weights[0])
    summed = dict.fromkeys(stream.at, PARTIAL)
    first = Gradient(weights[0], (), (moved, moved), at=summed)
    gradients = [first, *(Gradient(each, at=summed) for each in weights[1:])]
    out = stream.like("pooled", dims=(classes,), at={})
    return block.add([stream, *weights], [out], gradients, moved)
