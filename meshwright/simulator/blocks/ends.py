"""The ends of a language model: from token ids to activations, and from these to a loss."""

from meshwright.simulator.blocks.dense import LayerDims, normed
from meshwright.simulator.blocks.losses import loss_of
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.graph import (
    NUMBER_BYTES,
    OUTSIDE,
    PARTIAL,
    Block,
    Dim,
    Gradient,
    Linear,
    Reads,
    Tensor,
    Traffic,
    columns,
    copy,
    dropout,
    place,
    pointwise,
    whole_product,
)
from meshwright.simulator.layout import Axis

TABLE_TRAFFIC = 8  # bytes an element: a gradient in fp32 is zeroed and written
DROPPED_BYTES = 3  # a value and a mask byte
NEXT_SENTENCE_CLASSES = 2
POSITIONS = "positions"


def embedding(block: Block, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return looked-up tokens: each rank has some of the rows, and a part of the sum.

    Where a learned position is added to all tokens, Megatron-LM sums all and then keeps its own.
    """
    model, stack = shape.model, shape.stack
    stream = dims.stream(block, shape)
    x = _looked_up(block, shape, dims)
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


def _looked_up(block: Block, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the rows of the table; backward writes a dense gradient of all of it.

    DTensor's look-up gives every tensor rank a gradient of all rows, of which it keeps its own.
    """
    rows = dims.vocabulary
    table = block.weight("word_embedding.weight", rows, dims.hidden, at={Axis.TP: rows})
    ids = block.tensor("ids", dims.tokens, dims.batch, width=NUMBER_BYTES)
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
        Gradient(x, (), (traffic,), hands_on=True),
        Gradient(rows, tuple(kept), at=summed),
    ]
    outputs = [x.like(f"{name} added"), *kept]
    return block.add([x, rows], outputs, gradients, traffic, scratch=([found], []))


def head(block: Block, x: Tensor, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Return the loss of the logits."""
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
    linear = Linear(bias=model.mlm_head, in_layer=False, shared=model.tied_embeddings)
    with block.module(x):
        (logits,) = columns(block, x, dims.vocabulary, linear=linear)
    return _capped(block, logits) if model.logit_softcap else logits


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
