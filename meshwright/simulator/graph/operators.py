"""What an operator is: its work forward, and what each part of its backward reads and makes."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.graph.tensors import (
    Dim,
    Placement,
    Size,
    Tensor,
    gradient_place,
    larger,
    product_of,
    product_place,
    with_scales,
)
from meshwright.simulator.layout import MeshAxis

FP8_BYTES = 1


class Kind(StrEnum):
    """What an operator does, where a walk or a price tells one from another."""

    PLACE = "place"
    PRODUCT = "product"
    GROUPED = "grouped"
    ATTENTION = "attention"
    NARROWED = "narrowed"
    OTHER = "other"


class Product(NamedTuple):
    """A batched matrix product."""

    m: Size
    n: Size
    k: Size
    batch: Size = 1

    @property
    def flops(self) -> Size:
        """Operations, a multiply-add counting two."""
        return 2 * self.m * self.n * self.k * self.batch


class Convolution(NamedTuple):
    """A convolution as an implicit product: no window is laid out in memory.

    Args:
        pixels: Outputs of a channel, over all images.
        inputs: Channels in.
        outputs: Channels out.
        taps: Pixels of a window.
        moved: Elements of its three tensors.
    """

    pixels: Size
    inputs: Size
    outputs: Size
    taps: Size
    moved: Size

    @property
    def flops(self) -> Size:
        """Operations, a multiply-add counting two."""
        return 2 * self.pixels * self.inputs * self.outputs * self.taps


class FusedAttention(NamedTuple):
    """A fused attention call: products of the whole square of scores, *widths* those of all.

    In a ring it runs in as many steps as there are context-parallel *ranks*, each of which has
    that part of the rows.
    """

    scores: Size
    widths: Size
    ranks: Size = 1

    @property
    def flops(self) -> Size:
        """Operations with nothing masked."""
        return 2 * self.scores * self.widths


class Traffic(NamedTuple):
    """A kernel whose time is its traffic.

    PyTorch's kernels over slices, or over numbers that are repeated, make their *strided* elements
    one by one; what decides there may be how many these are.
    """

    nbytes: Size
    strided: "Size | None" = None


class Transfer(NamedTuple):
    """A collective; the larger of a rank's buffers."""

    op: CollectiveOp
    axis: MeshAxis
    nbytes: Size


class Exchange(NamedTuple):
    """Messages to the next rank of a ring, and as many from the one before, while attention runs.

    Args:
        op: What carries them.
        axis: Whose ring.
        nbytes: Of a message.
        steps: How often one is sent, each beside a step of the operator's attention.
        beside: Bytes of another message that goes at the same time, 0 for none.
        waits: Nothing runs at the same time.
    """

    op: CollectiveOp
    axis: MeshAxis
    nbytes: Size
    steps: Size
    beside: Size = 0
    waits: bool = False


Work: TypeAlias = Product | Convolution | FusedAttention | Traffic | Transfer | Exchange


@dataclass(frozen=True, eq=False, slots=True)
class Gradient:
    """How the gradient of one input comes out of that of the outputs.

    Args:
        of: The input.
        reads: Tensors of the forward pass.
        work: Its kernels.
        at: Where it lies; None where the gradient of the output lies.
        hands_on: It is the gradient of the output itself, or a view of it.
        is_part: It is a view of a part of that, which lives on with the others.
        overwrites: A tensor of the forward pass in whose storage it is made.
        makes: What backward makes of a weight's gradient where it is more than this rank's part,
            or of an input's before it is converted.
    """

    of: Tensor
    reads: tuple[Tensor, ...] = ()
    work: tuple[Work, ...] = ()
    at: Placement | None = None
    hands_on: bool = False
    is_part: bool = False
    overwrites: Tensor | None = None
    makes: Tensor | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Operator:
    """One kernel or collective of a block.

    Args:
        kind: What it is.
        inputs: Tensors that it reads, weights too.
        outputs: Tensors that it makes; the first is what other operators read.
        work: What it runs.
        gradients: In the order in which backward makes them.
        node: Operators of one number are one autograd node.
        price: Products of one number are priced as one.
        region: The parts of the block that it is in, from the outside in.
        saves_first: Keeps its inputs before it runs, as PyTorch's own operators do: repetition
            that stops early does not run the last one.
        eight_bits: It is of a linear layer that multiplies in fp8, or gathers for one.
        scratch: Tensors that live while it runs.
        backward_scratch: Tensors that live while its backward runs.
    """

    kind: Kind
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    work: tuple[Work, ...]
    gradients: tuple[Gradient, ...]
    node: int
    price: int
    region: tuple[str, ...] = ()
    saves_first: bool = False
    eight_bits: bool = False
    scratch: tuple[Tensor, ...] = ()
    backward_scratch: tuple[Tensor, ...] = ()

    @property
    def name(self) -> str:
        """The name of what it makes."""
        return self.outputs[0].name

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """What backward reads of the forward pass, weights left out."""
        read = dict.fromkeys(each for item in self.gradients for each in item.reads)
        return tuple(each for each in read if not each.is_weight)


def place_work(
    found: Iterable[tuple[CollectiveOp, MeshAxis]],
    one: Tensor,
    other: Tensor,
    *,
    cast_from: int | None = None,
    scaled: int = 0,
    copies: int = 1,
) -> tuple[Transfer, ...]:
    """Return the collectives that move a tensor between two places, as *one* and as *other*.

    Args:
        found: What they are.
        one: Its part here.
        other: Its part there.
        cast_from: Bytes of an element that is cast to fp8 before it is gathered, if it is.
        scaled: Elements that share a scale there; 0 where a tensor has one.
        copies: That are cast and gathered.
    """
    count = larger(one.numel, other.numel)
    width = max(one.width, other.width) if cast_from is None else cast_from
    wide = count * width
    gathered = wide if cast_from is None else copies * with_scales(count, FP8_BYTES, scaled)
    return tuple(
        Transfer(op, axis, gathered if op is CollectiveOp.ALL_GATHER else wide)
        for op, axis in found
    )


def product_work(left: Tensor, right: Tensor, out: tuple[Dim, ...]) -> Product:
    """Return the matrix product behind an einsum: its dims fall into batch, rows, columns, sum."""
    sizes = {**right.sizes, **left.sizes}
    left_dims, right_dims = set(left.dims), set(right.dims)

    def count(dims: Iterable[Dim]) -> Size:
        return product_of(sizes[dim] for dim in dims)

    return Product(
        m=count(dim for dim in out if dim not in right_dims),
        n=count(dim for dim in out if dim not in left_dims),
        k=count(dim for dim in sizes if dim not in out),
        batch=count(dim for dim in out if dim in left_dims and dim in right_dims),
    )


def product_gradients(left: Tensor, right: Tensor, out: Tensor) -> tuple[Gradient, ...]:
    """Return both gradients of ``out = left x right``: products of the same dims."""
    gradient = out.like(f"{out.name} gradient", at=gradient_place(out.at))
    return tuple(
        Gradient(
            of=one,
            reads=(other,),
            work=(product_work(gradient, other, one.dims),),
            at=product_place(gradient.at, other.at, one.dims),
        )
        for one, other in ((left, right), (right, left))
    )
