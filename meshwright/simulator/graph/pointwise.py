"""Operators that are no products: changes of shape, norms, dropout, activations, additions."""

from collections.abc import Sequence
from enum import StrEnum

from meshwright.simulator.graph.block import Block
from meshwright.simulator.graph.operators import Gradient, Traffic, Work
from meshwright.simulator.graph.tensors import PARTIAL, Dim, Placement, Tensor

STATISTIC_BYTES = 4  # norm statistics and log-sum-exp are fp32
NUMBER_BYTES = 8  # PyTorch indexes with int64


class Reads(StrEnum):
    """What the backward of a pointwise kernel reads."""

    INPUTS = "inputs"
    OUTPUT = "output"
    NOTHING = "nothing"


def last_dim(x: Tensor, name: str, last: Dim) -> Tensor:
    """Return a new tensor like *x* whose last dim is *last*, split as the old one was."""
    at = {axis: last if dim is x.dims[-1] else dim for axis, dim in x.at.items()}
    return x.like(name, dims=(*x.dims[:-1], last), at=at)


def pointwise(
    block: Block,
    name: str,
    *inputs: Tensor,
    reads: Reads = Reads.INPUTS,
    last: Dim | None = None,
    in_place: bool = False,
    beside: Sequence[Tensor] = (),
) -> Tensor:
    """Return what one kernel makes of *inputs*.

    Args:
        block: Where it is written down.
        name: What it makes.
        inputs: Of one shape.
        reads: What its backward reads.
        last: The last dim of what it makes, if it is another one.
        in_place: It overwrites the first of *inputs*.
        beside: What it, and its backward, read of other shapes.
    """
    first = inputs[0]
    out = first.like(name, base=first.storage if in_place else None)
    if last is not None:
        out = last_dim(first, name, last)
    own = {Reads.INPUTS: inputs, Reads.OUTPUT: (out,), Reads.NOTHING: ()}[reads]
    read = (*own, *beside)
    backward = block.traffic(*inputs, out, *read)
    gradients = [Gradient(x, read, (backward,) if x is first else ()) for x in inputs]
    return block.add([*inputs, *beside], [out], gradients, block.traffic(*inputs, *beside, out))


def handed_on(block: Block, parts: Sequence[Tensor], out: Tensor, *work: Work) -> Tensor:
    """Return *out*, the sum of *parts* or all they hold: its gradient goes on to each as it is."""
    return block.add(parts, [out], [Gradient(each, hands_on=True) for each in parts], *work)


def view(block: Block, x: Tensor, *dims: Dim, renamed: tuple[Dim, Dim] | None = None) -> Tensor:
    """Return *x* with other *dims*; what is split along the first of *renamed* is by the second."""
    old, new = renamed or (None, None)
    at = {axis: new if new is not None and dim is old else dim for axis, dim in x.at.items()}
    out = x.like(x.name, dims=dims, at=at, base=x.storage)
    return block.add([x], [out], [Gradient(x, hands_on=True, at=x.at)])


def counted(block: Block, x: Tensor, forward: int, backward: int) -> Tensor:
    """Return *x* as it is, with traffic of so many times its size counted here."""
    moved = [Traffic(block.traffic(x).nbytes * each) for each in (forward, backward)]
    out = x.like(x.name, base=x.storage)
    return block.add([x], [out], [Gradient(x, (), (moved[1],), hands_on=True)], moved[0])


def copy(
    block: Block,
    x: Tensor,
    name: str,
    *,
    like: Tensor | None = None,
    width: int | None = None,
    copies_back: bool = True,
) -> Tensor:
    """Return a copy of *x*, perhaps with the dims of another; backward copies, too, or hands on.

    Its traffic is part of what other kernels are counted for.
    """
    source = x if like is None else like
    out = x.like(name, dims=source.dims, at=source.at, width=width)
    return block.add([x], [out], [Gradient(x, at=x.at, hands_on=not copies_back)])


class NormFormula(StrEnum):
    """How transformers spells RMS norm out; *u* are tokens over their mean square's root, in fp32.

    LLAMA is ``w u`` with u cast back first, OLMO2 casts the product back, GEMMA ``(1 + w) u``.
    LLAMA4 is as LLAMA, but nothing in fp32 has a name by then.
    """

    LLAMA = "llama"
    LLAMA4 = "llama4"
    OLMO2 = "olmo2"
    GEMMA = "gemma"


def norm(
    block: Block,
    x: Tensor,
    name: str,
    *,
    centers: bool,
    formula: NormFormula = NormFormula.LLAMA,
    weighted: bool = True,
) -> Tensor:
    """Return normalised tokens; backward reads the input and its statistics.

    Args:
        block: Where it is written down.
        x: Tokens.
        name: What it makes.
        centers: Layer norm, with a mean and a bias; else RMS norm.
        formula: Of an RMS norm that is spelled out.
        weighted: It has weights.
    """
    if block.lowering.is_eager and block.lowering.spells_out and not centers:
        return _rms_norm(block, x, name, formula, weighted=weighted)
    width = x.dims[-1]
    parts = ("weight", *(["bias"] if centers else [])) if weighted else ()
    weights = [block.weight(f"{name}.{part}", width) for part in parts]
    kinds = ("mean", "deviation") if centers else ("deviation",)
    tokens = {axis: dim for axis, dim in x.at.items() if dim is not width}
    statistics = [
        x.like(f"{name} {each}", dims=x.dims[:-1], at=tokens, width=STATISTIC_BYTES)
        for each in kinds
    ]
    summed = dict.fromkeys(x.at, PARTIAL)
    read = (*block.remade.get(x, (x,)), *statistics)
    slope = Gradient(x, read, (block.traffic(*[x] * 5),))
    of_weights = [Gradient(each, read, at=summed) for each in weights]
    outputs = [x.like(name), *statistics]
    return block.add([x, *weights], outputs, [slope, *of_weights], block.traffic(x, x))


def _rms_norm(
    block: Block, x: Tensor, name: str, formula: NormFormula, *, weighted: bool
) -> Tensor:
    """Return RMS norm in PyTorch's operators, in fp32 but for what its *formula* says."""
    wide = cast(block, x, f"{name} in fp32", STATISTIC_BYTES)
    unit, mean = _unit(block, wide, name)
    if formula in {NormFormula.LLAMA, NormFormula.LLAMA4}:
        narrow = cast(block, unit, f"{name} unit cast", x.width)
        if not weighted:
            return narrow
        out = _weighted(block, narrow, block.weight(f"{name}.weight", x.dims[-1]), name)
        block.hold(*((mean, unit) if formula is NormFormula.LLAMA else ()))
        return out
    weight = block.weight(f"{name}.weight", x.dims[-1])
    if formula is NormFormula.GEMMA:
        weight = cast(block, weight, f"{name} weight in fp32", STATISTIC_BYTES)
        shifted = weight.like(f"{name} weight and one")
        weight = block.add([weight], [shifted], [Gradient(weight, hands_on=True)])
    whole = _weighted(block, unit, weight, name)
    out = cast(block, whole, name, x.width)
    block.hold(whole, *(() if formula is NormFormula.GEMMA else (mean, unit)))
    return out


def _unit(block: Block, wide: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return ``x / sqrt(mean(x^2))`` and the mean."""
    width = wide.dims[-1]
    tokens = {axis: dim for axis, dim in wide.at.items() if dim is not width}
    number = wide.like(f"{name} mean", dims=wide.dims[:-1], at=tokens)
    one, two = Traffic(2 * wide.nbytes), Traffic(3 * wide.nbytes)
    power = ((), (wide.like("power"), wide.like("scaled power")))
    slope = Gradient(wide, (wide,), (one, one, two), at=wide.at)
    square = block.add([wide], [wide.like("square")], [slope], one, scratch=power)
    mean = block.add([square], [number], [Gradient(square, (), (one,), at=wide.at)], one)
    numbers = ((number.like("shifted mean"),), tuple(number.like("slope") for _ in range(2)))
    deviation = number.like(f"{name} deviation")
    root = Gradient(mean, (deviation,), at=mean.at)
    block.add([mean], [deviation], [root], scratch=numbers)
    slopes = [
        Gradient(wide, (deviation,), (one,), at=wide.at),
        Gradient(deviation, (wide,), (two, one), at=deviation.at),
    ]
    inputs, scratch = [wide, deviation], ((), (wide.like("product"),))
    return block.add(inputs, [wide.like(f"{name} unit")], slopes, one, scratch=scratch), mean


def _weighted(block: Block, x: Tensor, weight: Tensor, name: str) -> Tensor:
    """Return *x* times a vector, in the wider format of both."""
    out = x.like(name, width=max(x.width, weight.width))
    moved = block.traffic(x, x)
    summed = dict.fromkeys(x.at, PARTIAL)
    slopes = [
        Gradient(x, () if weight.is_weight else (weight,), (moved,), at=x.at),
        Gradient(weight, (x,), (block.traffic(x, x, x), moved), at=summed),
    ]
    product = ((), (out.like("product"),))
    return block.add([x, weight], [out], slopes, moved, scratch=product)


def biased(block: Block, x: Tensor, name: str) -> Tensor:
    """Return *x* with a vector added, in a kernel of its own."""
    last = x.dims[-1]
    split = {axis: dim for axis, dim in x.at.items() if dim is last}
    vector = block.weight(f"{name}.bias", last, at=split)
    summed = {axis: dim if dim is last else PARTIAL for axis, dim in x.at.items()}
    gradients = [
        Gradient(x, hands_on=True),
        Gradient(vector, (), (block.traffic(x),), at=summed),
    ]
    return block.add([x, vector], [x.like(f"{name} biased")], gradients, block.traffic(x, x))


class Activation(StrEnum):
    """Of an MLP: as usual SiLU of a gate, else GELU that transformers spells out; or another one.

    GELU is one kernel, SQUARED_RELU two.
    """

    USUAL = "usual"
    GELU = "gelu"
    SQUARED_RELU = "squared relu"


def activation(
    block: Block,
    *inner: Tensor,
    parts: tuple[Dim, ...],
    last: Dim,
    kind: Activation = Activation.USUAL,
) -> Tensor:
    """Return the activation of a product, or of a gate and what it opens (SwiGLU).

    Eager, the opened gate is a tensor of its own, and Megatron-Core adds an offset of 0 to the
    other part.

    Args:
        block: Where it is written down.
        inner: One tensor for each of *parts*, or one with all of them.
        parts: Their last dims.
        last: The last dim of what it makes.
        kind: Without a gate, which one.
    """
    lowering = block.lowering
    if not lowering.is_eager or len(parts) == 1:
        return _plain_activation(block, inner, last, kind)
    gate, up = inner if len(inner) == len(parts) else cut(block, inner[0], *parts)
    opened = pointwise(block, "opened gate", gate)
    if lowering.is_local:
        up = handed_on(block, [up], up.like(f"{up.name} shifted"), block.traffic(up, up))
    return pointwise(block, "activation", opened, up, last=last)


def _plain_activation(
    block: Block, inner: tuple[Tensor, ...], last: Dim, kind: Activation
) -> Tensor:
    """Return the activation of what is not opened in a kernel of its own."""
    is_eager = block.lowering.is_eager
    if is_eager and block.lowering.spells_out and kind is Activation.USUAL:
        return _gelu(block, inner[0], last)
    if is_eager and kind is Activation.SQUARED_RELU:
        return _squared_relu(block, *inner, last=last)
    return pointwise(block, "activation", *inner, last=last)


def _squared_relu(block: Block, *inner: Tensor, last: Dim) -> Tensor:
    """Return the square of ReLU (ReLUSquaredActivation); autocast makes powers in fp32."""
    positive = pointwise(block, "relu", *inner, reads=Reads.OUTPUT)
    wide = cast(block, positive, "base", STATISTIC_BYTES) if block.lowering.casts else positive
    power = ((), (wide.like("power"), wide.like("scaled power")))
    moved, out = block.traffic(wide, wide), last_dim(wide, "activation", last)
    slope = Gradient(wide, (wide,), (moved, moved, block.traffic(*[wide] * 3)), at=wide.at)
    return block.add([wide], [out], [slope], moved, scratch=power)


def _gelu(block: Block, x: Tensor, last: Dim) -> Tensor:
    """Return ``x / 2 (1 + tanh(c (x + d x^3)))`` (transformers, NewGELUActivation).

    A GPU's autocast makes powers in fp32, and so all that comes of one.
    """
    half = pointwise(block, "half", x, reads=Reads.NOTHING)
    wide = cast(block, x, "base", STATISTIC_BYTES) if block.lowering.casts else x
    one, two = block.traffic(wide, wide), block.traffic(wide, wide, wide)
    power = ((), (wide.like("square"), wide.like("square scaled")))
    slope = Gradient(wide, (wide,), (two, one))
    cube = block.add([wide], [wide.like("cube")], [slope], one, scratch=power)
    scaled = pointwise(block, "cube scaled", cube, reads=Reads.NOTHING)
    both = [Gradient(x, hands_on=_same(x, wide)), Gradient(scaled, hands_on=True)]
    summed = block.add([x, scaled], [wide.like("sum")], both, two)
    scaled = pointwise(block, "sum scaled", summed, reads=Reads.NOTHING)
    bent = pointwise(block, "tanh", scaled, reads=Reads.OUTPUT)
    share = handed_on(block, [bent], bent.like("share"), one)
    wider = None if _same(x, wide) else wide.like("slope")
    slopes = [
        Gradient(half, (share,), (block.traffic(half, share, half, half),), makes=wider),
        Gradient(share, (half,)),
    ]
    out = last_dim(wide, "activation", last)
    return block.add([half, share], [out], slopes, block.traffic(half, share, out))


def cast(block: Block, x: Tensor, name: str, width: int) -> Tensor:
    """Return *x* with elements of *width* bytes; itself if it has them."""
    if x.width == width:
        return x
    out = x.like(name, width=width)
    moved = Traffic(x.nbytes + out.nbytes)
    return block.add([x], [out], [Gradient(x, (), (moved,), at=x.at)], moved)


def dropout(block: Block, x: Tensor, name: str, work: Sequence[Traffic] = ()) -> Tensor:
    """Return what dropout leaves; backward reads a mask of one byte an element.

    Args:
        block: Where it is written down.
        x: What is dropped.
        name: What it makes.
        work: Its traffic forward and backward; by default 2 values and a byte each way.
    """
    out, mask = x.like(name), x.like(f"{name} mask", width=1)
    usual = Traffic(block.traffic(x, x).nbytes + x.numel)
    forward, backward = work or (usual, usual)
    return block.add([x], [out, mask], [Gradient(x, (mask,), (backward,))], forward)


def residual(block: Block, update: Tensor, stream: Tensor, *, bias: bool, drops: bool) -> Tensor:
    """Return *stream* with *update* added, after its bias and dropout."""
    with block.module(update):
        name, lowering = update.name, block.lowering
        fuses = lowering.fuses_residual and not lowering.is_eager
        # Where it is a kernel of its own, PyTorch still fuses dropout's traffic with the addition
        # in what stacks are fitted on: it counts as a byte forward, 2 values and a byte backward.
        masked = Traffic(block.traffic(update, update).nbytes + update.numel)
        given = update  # dropout's mask is kept, too
        vector = [block.weight(f"{name}.bias", update.dims[-1])] if bias and fuses else []
        summed = dict.fromkeys(update.at, PARTIAL)
        of_bias = [Gradient(each, (), (block.traffic(update),), at=summed) for each in vector]
        mask = [update.like(f"{name} mask", width=1)] if drops and fuses else []
        if bias and lowering.is_local:
            update = biased(block, update, name)
            block.argument(update)
        if drops and not fuses:
            work = () if lowering.is_eager else (Traffic(update.numel), masked)
            update = dropout(block, update, name, work)
            if lowering.is_local:
                block.argument(update)
        branch = Gradient(
            update, tuple(mask), (masked,) * len(mask), hands_on=not mask and _same(update, stream)
        )
        moved = block.traffic(update, stream, stream)
        added = Gradient(stream, (), (moved,), hands_on=True)
        forward = Traffic(moved.nbytes + block.count(*mask))
        outputs = [stream.like(f"{name} added"), *mask]
        # Of what is added and the sum the partitioner keeps the narrower one, and adds again.
        if lowering.is_compiled and given.width < stream.width:
            block.remade[outputs[0]] = (stream, given)
        return block.add([update, stream, *vector], outputs, [branch, *of_bias, added], forward)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.width == other.width


def cut(block: Block, x: Tensor, *parts: Dim, by_slices: bool = False) -> list[Tensor]:
    """Return views of *x* cut apart in its last dim; their gradients are packed again.

    Where it is cut *by_slices*, that of each is as large as *x*, and they are summed.
    """
    whole = x.dims[-1]
    views = [
        x.like(
            part.name,
            dims=(*x.dims[:-1], part),
            at={axis: part if dim is whole else dim for axis, dim in x.at.items()},
            base=x.storage,
        )
        for part in parts
    ]
    for each in [[view] for view in views] if by_slices else [views]:
        block.add([x], each, [Gradient(x)])
    return views


def take(
    block: Block, x: Tensor, name: str, dims: tuple[Dim, ...], at: Placement | None = None
) -> Tensor:
    """Return rows of *x* by number, in other *dims*; backward reads the numbers."""
    out = x.like(name, dims=dims, at=x.at if at is None else at)
    told = dims[:-1] if x.dims[-1] is dims[-1] else dims  # numbers of rows, or of elements
    numbers = out.like(f"{name} numbers", dims=told, width=NUMBER_BYTES)
    moved = block.traffic(x, out)
    gradient = Gradient(x, (numbers,), (moved,), at=x.at)
    return block.add([x], [out, numbers], [gradient], moved)
