"""Element-wise operators: views, norms, dropout, activations, residual additions."""

from collections.abc import Sequence
from enum import StrEnum

from meshwright.simulator.graph.block import Block
from meshwright.simulator.graph.operators import Gradient, Traffic, Work
from meshwright.simulator.graph.tensors import PARTIAL, Dim, Placement, Tensor

STATISTIC_BYTES = 4  # norm statistics and log-sum-exp are fp32
NUMBER_BYTES = 8  # PyTorch indexes with int64


class Reads(StrEnum):
    """Saved tensors of an element-wise kernel."""

    INPUTS = "inputs"
    OUTPUT = "output"
    NOTHING = "nothing"


def last_dim(x: Tensor, name: str, last: Dim) -> Tensor:
    """Return a new tensor like *x* with last dim *last*, split as the old one."""
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
    """Return the output of one element-wise kernel.

    Args:
        block: Block to add the operator to.
        name: Name of the output.
        inputs: Tensors of one shape.
        reads: Saved tensors.
        last: Last dim of the output, if it differs.
        in_place: It overwrites the first of *inputs*.
        beside: Inputs of other shapes, which backward reads, too.
    """
    first = inputs[0]
    out = first.like(name, base=first.storage if in_place else None)
    if last is not None:
        out = last_dim(first, name, last)
    by_reads = {Reads.INPUTS: inputs, Reads.OUTPUT: (out,), Reads.NOTHING: ()}[reads]
    read = (*by_reads, *beside)
    backward = block.traffic(*inputs, out, *read)
    gradients = [Gradient(x, read, (backward,) if x is first else ()) for x in inputs]
    return block.add([*inputs, *beside], [out], gradients, block.traffic(*inputs, *beside, out))


def pass_through(block: Block, parts: Sequence[Tensor], out: Tensor, *work: Work) -> Tensor:
    """Return *out*, the sum or concatenation of *parts*: each gets a view of its gradient."""
    return block.add(parts, [out], [Gradient(each, passes_through=True) for each in parts], *work)


def view(block: Block, x: Tensor, *dims: Dim, renamed: tuple[Dim, Dim] | None = None) -> Tensor:
    """Return a view of *x* with *dims*; a split along *renamed*'s first dim moves to its second."""
    old, new = renamed or (None, None)
    at = {axis: new if new is not None and dim is old else dim for axis, dim in x.at.items()}
    out = x.like(x.name, dims=dims, at=at, base=x.storage)
    return block.add([x], [out], [Gradient(x, passes_through=True, at=x.at)])


def counted(block: Block, x: Tensor, forward: int, backward: int) -> Tensor:
    """Return *x* itself, with traffic of *forward* and *backward* times its size."""
    moved = [Traffic(block.traffic(x).nbytes * each) for each in (forward, backward)]
    out = x.like(x.name, base=x.storage)
    return block.add([x], [out], [Gradient(x, (), (moved[1],), passes_through=True)], moved[0])


def copy(
    block: Block,
    x: Tensor,
    name: str,
    *,
    like: Tensor | None = None,
    width: int | None = None,
    copies_back: bool = True,
) -> Tensor:
    """Return a copy of *x*, with the dims of *like* if given; backward may copy, too.

    Its traffic is included in that of other kernels.
    """
    source = x if like is None else like
    out = x.like(name, dims=source.dims, at=source.at, width=width)
    return block.add([x], [out], [Gradient(x, at=x.at, passes_through=not copies_back)])


class NormFormula(StrEnum):
    """RMS norm of Hugging Face transformers, with ``u = x / rms(x)`` in fp32.

    LLAMA is ``w u`` with u cast back first, OLMO2 casts the product back, GEMMA is ``(1 + w) u``.
    LLAMA4 is as LLAMA, but no variable refers to an fp32 tensor by then.
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
        block: Block to add the operator to.
        x: Tokens.
        name: Name of the output.
        centers: Layer norm, with a mean and a bias; else RMS norm.
        formula: RMS norm of transformers' code.
        weighted: Whether it has weights.
    """
    if block.lowering.is_eager and block.lowering.uses_transformers_ops and not centers:
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
    # torch.compile recomputes the residual sum from its addends.
    read = (*block.recompute_inputs.get(x, (x,)), *statistics)
    slope = Gradient(x, read, (block.traffic(*[x] * 5),))
    of_weights = [Gradient(each, read, at=summed) for each in weights]
    outputs = [x.like(name), *statistics]
    return block.add([x, *weights], outputs, [slope, *of_weights], block.traffic(x, x))


def _rms_norm(
    block: Block, x: Tensor, name: str, formula: NormFormula, *, weighted: bool
) -> Tensor:
    """Return an RMS norm in PyTorch's operators, in fp32 except where *formula* says otherwise."""
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
        weight = block.add([weight], [shifted], [Gradient(weight, passes_through=True)])
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
    vectors = ((number.like("shifted mean"),), tuple(number.like("slope") for _ in range(2)))
    deviation = number.like(f"{name} deviation")
    root = Gradient(mean, (deviation,), at=mean.at)
    block.add([mean], [deviation], [root], scratch=vectors)
    slopes = [
        Gradient(wide, (deviation,), (one,), at=wide.at),
        Gradient(deviation, (wide,), (two, one), at=deviation.at),
    ]
    inputs, scratch = [wide, deviation], ((), (wide.like("product"),))
    return block.add(inputs, [wide.like(f"{name} unit")], slopes, one, scratch=scratch), mean


def _weighted(block: Block, x: Tensor, weight: Tensor, name: str) -> Tensor:
    """Return *x* times a vector, in the wider dtype of both."""
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
    """Return *x* plus a bias, in a kernel of its own."""
    last = x.dims[-1]
    split = {axis: dim for axis, dim in x.at.items() if dim is last}
    vector = block.weight(f"{name}.bias", last, at=split)
    summed = {axis: dim if dim is last else PARTIAL for axis, dim in x.at.items()}
    gradients = [
        Gradient(x, passes_through=True),
        Gradient(vector, (), (block.traffic(x),), at=summed),
    ]
    return block.add([x, vector], [x.like(f"{name} biased")], gradients, block.traffic(x, x))


class Activation(StrEnum):
    """Activation of an MLP: USUAL is SwiGLU with a gate, else GELU; SQUARED_RELU is two kernels."""

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
    """Return the activation of an up projection, or of gate and up (SwiGLU).

    Eager, ``silu(gate)`` is a tensor of its own, and Megatron-Core adds an offset of 0 to up.

    Args:
        block: Block to add the operators to.
        inner: One tensor for each of *parts*, or one with all of them.
        parts: Last dims of gate and up, or of up alone.
        last: Last dim of the output.
        kind: Activation without a gate.
    """
    lowering = block.lowering
    if not lowering.is_eager or len(parts) == 1:
        return _ungated_activation(block, inner, last, kind)
    gate, up = inner if len(inner) == len(parts) else cut(block, inner[0], *parts)
    opened = pointwise(block, "opened gate", gate)
    if lowering.is_local:
        up = pass_through(block, [up], up.like(f"{up.name} shifted"), block.traffic(up, up))
    return pointwise(block, "activation", opened, up, last=last)


def _ungated_activation(
    block: Block, inner: tuple[Tensor, ...], last: Dim, kind: Activation
) -> Tensor:
    """Return an activation without a gate, or a fused SwiGLU."""
    is_eager = block.lowering.is_eager
    if is_eager and block.lowering.uses_transformers_ops and kind is Activation.USUAL:
        return _gelu(block, inner[0], last)
    if is_eager and kind is Activation.SQUARED_RELU:
        return _squared_relu(block, *inner, last=last)
    return pointwise(block, "activation", *inner, last=last)


def _squared_relu(block: Block, *inner: Tensor, last: Dim) -> Tensor:
    """Return the square of ReLU (ReLUSquaredActivation); autocast runs pow in fp32."""
    positive = pointwise(block, "relu", *inner, reads=Reads.OUTPUT)
    wide = cast(block, positive, "base", STATISTIC_BYTES) if block.lowering.casts else positive
    power = ((), (wide.like("power"), wide.like("scaled power")))
    moved, out = block.traffic(wide, wide), last_dim(wide, "activation", last)
    slope = Gradient(wide, (wide,), (moved, moved, block.traffic(*[wide] * 3)), at=wide.at)
    return block.add([wide], [out], [slope], moved, scratch=power)


def _gelu(block: Block, x: Tensor, last: Dim) -> Tensor:
    """Return ``x / 2 (1 + tanh(c (x + d x^3)))`` (transformers, NewGELUActivation).

    CUDA autocast runs pow in fp32, and promotes everything after it.
    """
    half = pointwise(block, "half", x, reads=Reads.NOTHING)
    wide = cast(block, x, "base", STATISTIC_BYTES) if block.lowering.casts else x
    one, two = block.traffic(wide, wide), block.traffic(wide, wide, wide)
    power = ((), (wide.like("square"), wide.like("square scaled")))
    slope = Gradient(wide, (wide,), (two, one))
    cube = block.add([wide], [wide.like("cube")], [slope], one, scratch=power)
    scaled = pointwise(block, "cube scaled", cube, reads=Reads.NOTHING)
    both = [Gradient(x, passes_through=_same_width(x, wide)), Gradient(scaled, passes_through=True)]
    summed = block.add([x, scaled], [wide.like("sum")], both, two)
    scaled = pointwise(block, "sum scaled", summed, reads=Reads.NOTHING)
    tanh = pointwise(block, "tanh", scaled, reads=Reads.OUTPUT)
    share = pass_through(block, [tanh], tanh.like("share"), one)
    wider = None if _same_width(x, wide) else wide.like("slope")
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
    """Return *x* after dropout; backward reads a mask of one byte an element.

    Args:
        block: Block to add the operator to.
        x: Input.
        name: Name of the output.
        work: Traffic forward and backward; by default 2 values and a mask byte each way.
    """
    out, mask = x.like(name), x.like(f"{name} mask", width=1)
    usual = Traffic(block.traffic(x, x).nbytes + x.numel)
    forward, backward = work or (usual, usual)
    return block.add([x], [out, mask], [Gradient(x, (mask,), (backward,))], forward)


def residual(block: Block, update: Tensor, stream: Tensor, *, bias: bool, drops: bool) -> Tensor:
    """Return the residual *stream* plus *update*, after its bias and dropout."""
    with block.module(update):
        name, lowering = update.name, block.lowering
        fuses = lowering.fuses_residual and not lowering.is_eager
        # Where it is a kernel of its own, PyTorch still fuses dropout's traffic with the addition
        # in what stacks are fitted on: it counts as a byte forward, 2 values and a byte backward.
        masked = Traffic(block.traffic(update, update).nbytes + update.numel)
        addend = update  # dropout's mask is kept, too
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
            update,
            tuple(mask),
            (masked,) * len(mask),
            passes_through=not mask and _same_width(update, stream),
        )
        moved = block.traffic(update, stream, stream)
        added = Gradient(stream, (), (moved,), passes_through=True)
        forward = Traffic(moved.nbytes + block.count(*mask))
        outputs = [stream.like(f"{name} added"), *mask]
        # Of the addend and the sum the partitioner saves the narrower one, and adds again.
        if lowering.is_compiled and addend.width < stream.width:
            block.recompute_inputs[outputs[0]] = (stream, addend)
        return block.add([update, stream, *vector], outputs, [branch, *of_bias, added], forward)


def _same_width(one: Tensor, other: Tensor) -> bool:
    return one.width == other.width


def cut(block: Block, x: Tensor, *parts: Dim, by_slices: bool = False) -> list[Tensor]:
    """Return views of *x* split in its last dim (``torch.split``); backward concatenates.

    *by_slices* (``x[..., a:b]``) the gradient of each is as large as *x*, and they are summed.
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
    """Return rows of *x* by index (``gather``), in other *dims*; backward reads the indices."""
    out = x.like(name, dims=dims, at=x.at if at is None else at)
    index_dims = dims[:-1] if x.dims[-1] is dims[-1] else dims  # numbers of rows, or of elements
    indices = out.like(f"{name} numbers", dims=index_dims, width=NUMBER_BYTES)
    moved = block.traffic(x, out)
    gradient = Gradient(x, (indices,), (moved,), at=x.at)
    return block.add([x], [out, indices], [gradient], moved)
