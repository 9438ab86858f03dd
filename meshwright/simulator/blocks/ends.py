"""The ends of a language model: from token ids to activations, and from these to a loss."""

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

TABLE_TRAFFIC = 8  # bytes an element: a gradient in fp32 is zeroed and written
DROPPED_BYTES = 3  # a value and a mask byte
NEXT_SENTENCE_CLASSES = 2
POSITIONS = "positions"
MASK_BYTES = 4  # of a token in the mask of the loss
SHIFTED_BYTES = NUMBER_BYTES, MASK_BYTES  # of a token where these go to another rank


def embedding(
    block: Block, shape: BlockShape, dims: LayerDims, ids: Tensor | None = None
) -> Tensor:
    """Return looked-up tokens: each rank has some of the rows, and a part of the sum.

    Where a learned position is added to all tokens, Megatron-LM sums all and then keeps its own.
    The table is a parameter of another block where *ids* are from within this one.
    """
    model, stack = shape.model, shape.stack
    stream = dims.stream(block, shape)
    x = _looked_up(block, shape, dims, ids)
    if model.scaled_embeddings:
        x = pointwise(block, "scaled embedding", x, reads=Reads.NOTHING)
    if model.positions == "learned":
        x = place(block, x, dims.outside if stack.scatters_positions else {})
        x = _with_rows(block, x, POSITIONS, model.max_positions, stream)
    x = place(block, x, dims.outside)
    if model.token_types:
        x = _with_rows(block, x, "token types", model.token_types, stream)
    if model.embedding_norm:
        x = normed(block, x, "embedding norm", shape)
    if model.dropout:
        moved = Traffic(DROPPED_BYTES * stream.numel)
        x = dropout(block, x, "embedding dropout", (moved, moved))
    return x


def _looked_up(block: Block, shape: BlockShape, dims: LayerDims, ids: Tensor | None) -> Tensor:
    """Return the rows of the table; backward writes a dense gradient of all of it.

    DTensor's look-up gives every tensor rank a gradient of all rows, of which it keeps its own.
    """
    rows = dims.vocabulary
    name, shared = "word_embedding.weight", ids is not None
    table = block.weight(name, rows, dims.hidden, at={Axis.TP: rows}, shared=shared)
    if ids is None:
        # In PyTorch's pipelines they are a view of the batch, which counts as such.
        width = 0 if shape.keeps_outputs else NUMBER_BYTES
        ids = block.tensor("ids", dims.tokens, dims.batch, width=width)
    stream = dims.stream(block, shape)
    x = stream.like("looked up", at=block.placed({Axis.TP: PARTIAL}))
    traffic = block.traffic(stream, stream)
    makes = None
    if shape.stack.whole_table_gradient:
        is_padded = shape.stack.vocabulary_multiple > 1
        every = rows if is_padded else Dim("all rows", shape.model.vocab_size)
        makes = table.like("table gradient", dims=(every, dims.hidden), at={})
    work = (traffic, Traffic(TABLE_TRAFFIC * table.numel))
    gradient = Gradient(table, (ids,), work, makes=makes)
    return block.add([ids, table], [x], [gradient], traffic)


def _with_rows(block: Block, x: Tensor, name: str, num_rows: int, stream: Tensor) -> Tensor:
    """Return *x* with rows of a table added that every rank holds."""
    rows = block.weight(f"{name.replace(' ', '_')}.weight", Dim(name, num_rows), x.dims[-1])
    traffic = block.traffic(stream, stream)
    summed = dict.fromkeys(x.at, PARTIAL)
    # Learned positions are the same for all sequences: they are looked up once.
    is_alike = name == POSITIONS
    found = x.like(f"{name} looked up", dims=(x.dims[0], x.dims[-1]) if is_alike else x.dims)
    numbers = x.like(f"{name} numbers", dims=x.dims[:-1], at={}, width=NUMBER_BYTES)
    kept = [] if is_alike else [numbers]
    gradients = [
        Gradient(x, (), (traffic,), passes_through=True),
        Gradient(rows, tuple(kept), at=summed),
    ]
    outputs = [x.like(f"{name} added"), *kept]
    return block.add([x, rows], outputs, gradients, traffic, scratch=([found], []))


def head(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the loss of the logits, or the losses of all streams of what predicts further."""
    if shape.model.prediction_layers:
        return _losses(block, x, shape, dims)
    logits = output(block, x, shape, dims)
    others = [_pooled(block, x)] if shape.model.mlm_head else []
    return loss_of(block, logits, *others)


def output(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the logits; only scored positions reach them."""
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
    return _capped(block, logits) if model.logit_softcap else logits


def final_norm(block: Block, x: Tensor, shape: BlockShape) -> Tensor:
    """Return what is ahead of a head that predicts further tokens."""
    return normed(block, x, "final norm", shape)


def predictions(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return all streams of tokens behind each other: that of a norm, and of each layer behind it.

    So a head has them, and a stage sends them to it (MultiTokenPredictionBlock of
    megatron/core/transformer/multi_token_prediction.py, core 0.16).
    """
    streams = [x]
    for index in range(shape.model.prediction_layers):
        streams.append(_prediction_layer(block, streams[-1], shape, dims, f"layer:{index}"))
    slopes = [Gradient(each, passes_through=True, is_slice=True) for each in streams]
    made = streams_like(x, shape)
    return block.add(streams, [made], slopes, block.traffic(made, made))


def streams_like(x: Tensor, shape: BlockShape) -> Tensor:
    """Return as many streams as *x* is one of: its own, and one a layer that predicts further."""
    number = Dim("streams", 1 + shape.model.prediction_layers)
    return x.like("streams", dims=(number, *x.dims))


def _losses(block: Block, streams: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the losses of the next token and of those that further layers predict.

    Streams are cut apart again, and the logits are made of the further ones first
    (GPTModel._postprocess of core 0.16).  With sequence parallelism tokens are gathered for them
    into a buffer that stays (`get_global_memory_buffer` in tensor_parallel/layers.py).
    """
    main, *further = _unstacked(block, streams)
    vocabulary, named = dims.vocabulary, list[Tensor]()
    linear = OUTSIDE._replace(buffered=True, in_layer=narrows_head(shape))
    for each in further:
        _rolled(block, main, shape, dims)  # the labels
        _rolled(block, main, shape, dims, MASK_BYTES)
        (logits,) = columns(block, each, vocabulary, linear=linear._replace(shared=True))
        block.hold(*named)  # a local name has the logits before until now
        named = [logits]
        loss = loss_of(block, logits)
        slopes = [Gradient(main, passes_through=True), Gradient(loss, at=loss.at)]
        main = block.add([main, loss], [main.like(main.name, base=main.storage)], slopes)
    with block.module(main):
        (logits,) = columns(block, main, vocabulary, linear=linear)
    loss = loss_of(block, logits)
    block.hold(*named)
    return loss


def _prediction_layer(
    block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, part: str
) -> Tensor:
    """Return what predicts one token further than *x* does; *part* may run again by itself."""
    ids = _rolled(block, x, shape, dims)
    _rolled(block, x, shape, dims)  # positions
    given = embedding(block, shape, dims, ids)
    with block.part(part):
        parts = [_contiguous_back(block, normed(block, given, "enorm", shape))]
        parts.append(_contiguous_back(block, normed(block, x, "hnorm", shape)))
        twice = Dim("embedding and hidden", 2 * shape.model.hidden_size)
        both = parts[0].like(twice.name, dims=(*x.dims[:-1], twice))
        slopes = [Gradient(each, passes_through=True) for each in parts]
        both = block.add(parts, [both], slopes, block.traffic(both, both))
        (y,) = columns(block, both, Dim("eh_proj", shape.model.hidden_size))
        y = _gathered(block, y, x)
        y = layer(block, y, shape, dims, shape.model.layer_runs[-1].kind)
        return normed(block, y, "prediction norm", shape)


def _contiguous_back(block: Block, x: Tensor) -> Tensor:
    """Return *x*, whose gradient, a part of another one, a norm copies before it reads it."""
    return block.add([x], [x.like(x.name, base=x.storage)], [Gradient(x, at=x.at)])


def _gathered(block: Block, y: Tensor, like: Tensor) -> Tensor:
    """Return columns of all tensor ranks side by side, of the tokens of a rank.

    Gathered rank by rank they are put side by side in a copy, of which a rank keeps its tokens as
    a view (gather_from_tensor_model_parallel_region and scatter_to_sequence_parallel_region of
    megatron/core/tensor_parallel/mappings.py, core 0.16).
    """
    if Axis.TP not in block.mesh:
        return view(block, y, *like.dims)
    whole = like.like("columns of all", at={})
    gathers = Transfer(CollectiveOp.ALL_GATHER, Axis.TP, whole.nbytes)
    scratch = ([whole.like("columns by rank")], ())
    y = block.add([y], [whole], [Gradient(y, at=y.at)], gathers, scratch=scratch)
    if not like.at:
        return y
    own = like.like("layer input", base=y.storage)
    return block.add([y], [own], [Gradient(y, (), (gathers,), at={})])


def _unstacked(block: Block, streams: Tensor) -> list[Tensor]:
    """Return views of all *streams*, each behind the one before."""
    number, *dims = streams.dims
    views = [
        streams.like(f"stream {index}", dims=tuple(dims), base=streams.storage)
        for index in range(int(number.size))
    ]
    moved = (block.traffic(streams, streams),)
    block.add([streams], views, [Gradient(streams, (), moved, at=streams.at)])
    return views


def _rolled(
    block: Block, x: Tensor, shape: BlockShape, dims: LayerDims, width: int = NUMBER_BYTES
) -> Tensor:
    """Return a number of each token of *x*, shifted by one.

    A context-parallel rank has two stretches of a sequence; what is shifted out of one goes to the
    rank before, out of the other to the rank behind: first and last rank, which have only one of
    these, send a message less (`roll_tensor` of
    megatron/core/transformer/multi_token_prediction.py, core 0.16).
    """
    tokens, batch = x.dims[:2]
    numbers = x.like("shifted numbers", dims=(tokens, batch), at={}, width=width)
    sent: tuple[Exchange, ...] = ()
    if shape.cp > 1:
        size = width * batch.size
        num_messages = 1 + several(dims.cp - 1)
        sent = (Exchange(CollectiveOp.P2P, Axis.CP, size, num_messages, waits=True),)
    return block.add([x], [numbers], [], *sent)


def _capped(block: Block, logits: Tensor) -> Tensor:
    """Return ``c tanh(logits / c)``."""
    scaled = pointwise(block, "logits scaled", logits, reads=Reads.NOTHING)
    bent = pointwise(block, "tanh", scaled, reads=Reads.OUTPUT)
    return pointwise(block, "capped logits", bent, reads=Reads.NOTHING)


def _pooled(block: Block, stream: Tensor) -> Tensor:
    """Return what BERT's pooler and classifier say of first tokens; each tensor rank does all.

    They have so few rows that reading the matrix, and writing the gradient, is their time.
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
