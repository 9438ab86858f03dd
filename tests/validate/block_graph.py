"""What `meshwright.simulator.graph` derives of the blocks that `block_witness` measures."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from block_modules import BATCH, GROUPS, HEAD, HEADS, TOKENS, WIDE, WIDTH, WORDS
from block_witness import Measured

from meshwright.hwprofiles import CollectiveOp, LossKernel
from meshwright.simulator.blocks.kinds import BorderGradients, walk
from meshwright.simulator.blocks.losses import loss_of
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.graph import (
    Backward,
    Block,
    BlockMemory,
    Convolution,
    Dim,
    Exchange,
    FusedAttention,
    Heads,
    Linear,
    Lowering,
    Phase,
    Product,
    Reads,
    Tape,
    Tensor,
    Transfer,
    WeightGradients,
    cut,
    dropout,
    flash,
    norm,
    pointwise,
    residual,
    scored,
    take,
    whole_product,
)
from meshwright.validate.ranks import CollectiveCount

Build = Callable[[Block], Sequence[Tensor]]  # writes a block down, and returns its inputs

PYTORCH = Lowering(
    fuses_products=False,
    fuses_gate=False,
    fuses_redistribute=False,
    fuses_residual=False,
    saves_first=True,
    weight_gradients=WeightGradients.KEPT,
    loss=LossKernel.EAGER,
)
ADDED = replace(PYTORCH, weight_gradients=WeightGradients.ADDED)
CAST = replace(PYTORCH, casts=True)
CAST_ADDED = replace(ADDED, casts=True)
MEGATRON = replace(PYTORCH, fuses_redistribute=True, fuses_residual=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCase:
    """A block, and how it runs."""

    build: Build
    width: int = 2
    lowering: Lowering = PYTORCH

    def derive(self) -> Measured:
        """Return what the graph says."""
        block = Block({}, self.lowering, self.width)
        inputs = self.build(block)
        tape = Tape(block)
        tape.run_forward(*inputs)
        backward = Backward(tape, self.lowering.weight_gradients)
        backward.run()
        return as_measured(backward)


def derive_block(shape: BlockShape, kind: str) -> Measured:
    """Return what the graph says of a layer or an end of a stack: see `BLOCKS`."""
    keeps = not (
        shape.stack.megatron_layers or shape.stack.autocast
    )  # FSDP does, until its unit is done
    ending = BorderGradients(keeps_gradients=keeps)
    return as_measured(walk(shape, kind, ending=ending))


def as_measured(backward: Backward) -> Measured:
    """Return a walk's results as the witness gives them."""
    memory, tape = BlockMemory.of(backward), backward.tape
    again = {Phase.RECOMPUTE, Phase.BACKWARD}
    return Measured(
        saved_bytes=memory.saved,
        forward_peak_bytes=memory.saved + memory.forward,
        backward_peak_bytes=memory.saved + memory.backward,
        left_bytes=memory.left,
        forward_flops=_flops(tape, {Phase.FORWARD}),
        backward_flops=_flops(tape, again),
        forward_calls=_calls(tape, {Phase.FORWARD}),
        backward_calls=_calls(tape, again),
    )


def _flops(tape: Tape, phases: set[Phase]) -> int:
    work = [each.work for each in tape.steps if each.phase in phases]
    return sum(
        each.flops for each in work if isinstance(each, Product | Convolution | FusedAttention)
    )


def _calls(tape: Tape, phases: set[Phase]) -> tuple[CollectiveCount, ...]:
    mesh, calls = tape.block.mesh, Counter[tuple[str, str, int, int]]()
    for each in (step.work for step in tape.steps if step.phase in phases):
        if isinstance(each, Transfer):
            calls[str(each.axis), str(each.op), mesh[each.axis], each.nbytes] += 1
        if isinstance(each, Exchange) and each.op is CollectiveOp.P2P and each.steps:
            for way in ("send", "recv"):  # to the next rank, and from the one before
                calls[str(each.axis), way, 2, each.nbytes] += each.steps
    return tuple(sorted(CollectiveCount(*call, num_calls=n) for call, n in calls.items()))


class Dims:
    """New dims of the modules' sizes."""

    def __init__(self) -> None:
        self.batch, self.tokens = Dim("batch", BATCH), Dim("tokens", TOKENS)
        self.hidden, self.wide = Dim("hidden", WIDTH, HEAD), Dim("wide", WIDE)
        self.heads, self.words = Dim("heads", HEADS), Dim("words", WORDS)


Write = Callable[[Block, Tensor, Dims], object]


def one(write: Write, *, width: int = 0) -> Build:
    """Return how a module with one input is written, whose elements have *width* bytes."""

    def build(block: Block) -> Sequence[Tensor]:
        dims = Dims()
        x = block.tensor("x", dims.tokens, dims.batch, dims.hidden, width=width)
        with block.module(x):
            write(block, x, dims)
        return (x,)

    return build


def two(write: Callable[[Block, Tensor, Tensor], object], *, width: int = 0) -> Build:
    """Return how a module with two inputs is written; elements of the second have *width*."""

    def build(block: Block) -> Sequence[Tensor]:
        dims = Dims()
        x = block.tensor("x", dims.tokens, dims.batch, dims.hidden)
        y = block.tensor("y", dims.tokens, dims.batch, dims.hidden, width=width)
        with block.module(x, y):
            write(block, x, y)
        return x, y

    return build


def added(*, bias: bool = False, drops: bool = False, width: int = 0) -> Build:
    """Return how a residual addition is written."""
    return two(lambda block, x, y: residual(block, x, y, bias=bias, drops=drops), width=width)


def attended(
    *, unfused: bool = False, groups: int = HEADS, drops: bool = False, sequences: int = BATCH
) -> Build:
    """Return how attention is written."""

    def build(block: Block) -> Sequence[Tensor]:
        dims = Dims()
        widths = (dims.hidden, Dim("keys", groups * HEAD, HEAD), Dim("values", groups * HEAD, HEAD))
        batch = Dim("batch", sequences)
        inputs = [block.tensor(each.name, dims.tokens, batch, each) for each in widths]
        query, key, value = inputs
        heads = Heads(dims.heads, dims.tokens, int(dims.tokens.size), causal=True, drops=drops)
        with block.module(*inputs):
            (scored if unfused else flash)(block, query, key, value, heads)
        return inputs

    return build


def linear(*, bias: bool = False) -> Write:
    """Return how a linear layer is written."""
    return lambda block, x, dims: whole_product(block, x, dims.wide, "out", Linear(bias=bias))


def chain(count: int, *, bias: bool = False) -> Write:
    """Return how linear layers are written, each a module."""

    def write(block: Block, x: Tensor, _dims: Dims) -> None:
        for number in range(count):
            with block.module(x):
                name = f"layer {number}"
                x = whole_product(block, x, Dim(name, WIDTH), name, Linear(bias=bias))

    return write


def looked_up(block: Block) -> Sequence[Tensor]:
    """Write an embedding: its numbers come in, and are kept."""
    dims = Dims()
    table = block.weight("table", dims.words, dims.hidden)
    take(block, table, "looked up", (dims.tokens, dims.batch, dims.hidden))
    return ()


def loss(*, width: int) -> Build:
    """Return how the loss of logits is written."""

    def build(block: Block) -> Sequence[Tensor]:
        dims = Dims()
        logits = block.tensor("x", dims.tokens, dims.batch, dims.words, width=width)
        loss_of(block, logits)
        return (logits,)

    return build


def quarters(block: Block, x: Tensor, *, by_slices: bool = False) -> Tensor:
    """Write down SwiGLU of SwiGLUs of the quarters of a product, cut one way or the other."""
    parts = (Dim(f"quarter {number}", WIDTH // 4) for number in range(4))
    first, second, third, fourth = cut(block, x, *parts, by_slices=by_slices)
    one_side = pointwise(block, "swiglu", first, second)
    return pointwise(block, "swiglu", one_side, pointwise(block, "other side", third, fourth))


GRAPHS: dict[str, GraphCase] = {
    "linear": GraphCase(build=one(linear())),
    "linear with bias": GraphCase(build=one(linear(bias=True))),
    "linear, gradients added": GraphCase(build=one(linear(bias=True)), lowering=ADDED),
    "linear cast": GraphCase(build=one(linear(), width=4), lowering=CAST),
    "linear with bias, cast, gradients added": GraphCase(
        build=one(linear(bias=True), width=4), lowering=CAST_ADDED
    ),
    "layer norm": GraphCase(build=one(lambda block, x, _: norm(block, x, "norm", centers=True))),
    "layer norm in fp32": GraphCase(
        build=one(lambda block, x, _: norm(block, x, "norm", centers=True)), width=4
    ),
    "rms norm": GraphCase(build=one(lambda block, x, _: norm(block, x, "norm", centers=False))),
    "dropout": GraphCase(build=one(lambda block, x, _: dropout(block, x, "dropped"))),
    "residual with dropout": GraphCase(build=added(drops=True)),
    "residual": GraphCase(build=added()),
    "residual of two widths": GraphCase(build=added(width=4)),
    "fused residual with bias and dropout": GraphCase(
        build=added(bias=True, drops=True), lowering=MEGATRON
    ),
    "fused residual with bias": GraphCase(build=added(bias=True), lowering=MEGATRON),
    "fused residual with dropout": GraphCase(build=added(drops=True), lowering=MEGATRON),
    "gelu": GraphCase(build=one(lambda block, x, _: pointwise(block, "gelu", x))),
    "swiglu": GraphCase(build=two(lambda block, x, y: pointwise(block, "swiglu", x, y))),
    "packed swiglu": GraphCase(
        build=one(lambda block, x, _: pointwise(block, "swiglu", x, last=Dim("half", WIDTH // 2)))
    ),
    "a product cut into views": GraphCase(build=one(lambda block, x, _: quarters(block, x))),
    "a product cut by slices": GraphCase(
        build=one(lambda block, x, _: quarters(block, x, by_slices=True))
    ),
    "rotary": GraphCase(
        build=one(lambda block, x, _: pointwise(block, "rotary", x, reads=Reads.NOTHING))
    ),
    "flash": GraphCase(build=attended()),
    "flash of groups": GraphCase(build=attended(groups=GROUPS)),
    "flash of PyTorch": GraphCase(build=attended()),
    "flash of PyTorch of groups": GraphCase(build=attended(groups=GROUPS)),
    "unfused attention": GraphCase(build=attended(unfused=True), lowering=MEGATRON),
    "unfused attention with dropout": GraphCase(
        build=attended(unfused=True, drops=True), lowering=MEGATRON
    ),
    "unfused attention of groups": GraphCase(
        build=attended(unfused=True, groups=GROUPS), lowering=MEGATRON
    ),
    "unfused attention, batch first, one sequence": GraphCase(
        build=attended(unfused=True, sequences=1)
    ),
    "unfused attention, batch first": GraphCase(build=attended(unfused=True)),
    "unfused attention of groups, batch first": GraphCase(
        build=attended(unfused=True, groups=GROUPS)
    ),
    "embedding": GraphCase(build=looked_up),
    "loss": GraphCase(build=loss(width=2)),
    "loss in fp32": GraphCase(build=loss(width=4), width=4),
    "relu": GraphCase(
        build=one(lambda block, x, _: pointwise(block, "relu", x, reads=Reads.OUTPUT))
    ),
    "relu in place": GraphCase(
        build=one(
            lambda block, x, _: pointwise(block, "relu", x, reads=Reads.OUTPUT, in_place=True)
        )
    ),
    "chain of linears": GraphCase(build=one(chain(4))),
    "chain of linears with biases, gradients added": GraphCase(
        build=one(chain(4, bias=True)), lowering=ADDED
    ),
    "chain of linears cast": GraphCase(build=one(chain(4), width=4), lowering=CAST_ADDED),
}
