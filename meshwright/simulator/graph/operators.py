"""Operators of a block: forward work, and gradients with the tensors that backward reads."""

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
    gradient_placement,
    larger,
    product_of,
    product_placement,
    with_scales,
)
from meshwright.simulator.layout import MeshAxis

FP8_BYTES = 1


class Kind(StrEnum):
    """Kind of an operator, where the walk or its price depends on it."""

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
    """A convolution as an implicit GEMM: no im2col in memory.

    Args:
        pixels: Output pixels of a channel, over all images.
        inputs: Input channels.
        outputs: Output channels.
        taps: Pixels of the kernel's window.
        moved: Elements of input, weight and output.
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
    """A fused attention call: GEMMs over all *scores*, with *widths* the sum of their head dims.

    Ring attention runs it in as many steps as there are context-parallel *ranks*.
    """

    scores: Size
    widths: Size
    ranks: Size = 1

    @property
    def flops(self) -> Size:
        """Operations of the full square, without a mask."""
        return 2 * self.scores * self.widths


class Traffic(NamedTuple):
    """A memory-bound kernel: bytes read and written.

    PyTorch's kernels over slices or expanded tensors handle their *strided* elements one by one,
    which may take longer than the bytes.
    """

    nbytes: Size
    strided: "Size | None" = None


class Transfer(NamedTuple):
    """A collective over an axis, with the bytes of the larger of a rank's buffers."""

    op: CollectiveOp
    axis: MeshAxis
    nbytes: Size


class Exchange(NamedTuple):
    """Sends and receives between neighbours of a ring, overlapped with attention.

    Args:
        op: Collective or p2p that carries a message.
        axis: Axis of the ring.
        nbytes: Bytes of a message.
        steps: Number of messages, each overlapped with a step of the operator's attention.
        beside: Bytes of a second message at the same time, 0 for none.
        waits: Nothing overlaps it.
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
    """Gradient of one input, from that of the outputs.

    Args:
        of: The input.
        reads: Saved tensors of the forward pass.
        work: Kernels and collectives.
        at: Placement; None for that of the output's gradient.
        passes_through: It is the output's gradient itself, or a view of it.
        is_slice: It is a slice of that, which keeps the whole storage alive.
        overwrites: Tensor of the forward pass whose storage it reuses.
        makes: Tensor made first: a weight's gradient beyond this rank's shard, or an input's
            before its dtype is converted.
    """

    of: Tensor
    reads: tuple[Tensor, ...] = ()
    work: tuple[Work, ...] = ()
    at: Placement | None = None
    passes_through: bool = False
    is_slice: bool = False
    overwrites: Tensor | None = None
    makes: Tensor | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Operator:
    """One kernel or collective of a block.

    Args:
        kind: Kind of operator.
        inputs: Tensors that it reads, weights included.
        outputs: Tensors that it makes; the first is what other operators read.
        work: Kernels and collectives.
        gradients: In the order in which backward makes them.
        node: Operators of one number are one autograd node.
        price: GEMMs of one number are priced as one.
        region: The parts of the block that it is in, from the outside in.
        saves_first: Saves its inputs before it runs, as PyTorch's own operators do: a checkpoint
            with early stop does not run the last one.
        eight_bits: It belongs to an fp8 linear layer, or gathers for one.
        scratch: Temporary tensors of forward.
        backward_scratch: Temporary tensors of backward.
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
        """Name of the first output."""
        return self.outputs[0].name

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """Saved tensors: those of the forward pass that backward reads, without weights."""
        read = dict.fromkeys(each for item in self.gradients for each in item.reads)
        return tuple(each for each in read if not each.is_weight)


def redistribute_work(
    collectives: Iterable[tuple[CollectiveOp, MeshAxis]],
    one: Tensor,
    other: Tensor,
    *,
    cast_from: int | None = None,
    scaled: int = 0,
    copies: int = 1,
) -> tuple[Transfer, ...]:
    """Return the collectives that redistribute a tensor between two placements.

    Args:
        collectives: Operations and axes.
        one: The tensor before.
        other: The tensor after.
        cast_from: Bytes of an element that is cast to fp8 before the all-gather, if any.
        scaled: Elements of a block that share a scale; 0 for per-tensor scales.
        copies: Number of fp8 copies that are gathered.
    """
    count = larger(one.numel, other.numel)
    width = max(one.width, other.width) if cast_from is None else cast_from
    # Only all-gathers move fp8: sums are reduced in the wider dtype.
    wide_bytes = count * width
    gathered_bytes = (
        wide_bytes if cast_from is None else copies * with_scales(count, FP8_BYTES, scaled)
    )
    return tuple(
        Transfer(op, axis, gathered_bytes if op is CollectiveOp.ALL_GATHER else wide_bytes)
        for op, axis in collectives
    )


def product_work(left: Tensor, right: Tensor, out: tuple[Dim, ...]) -> Product:
    """Return the GEMM behind an einsum: its dims fall into batch, m, n and k."""
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
    """Return dgrad and wgrad of ``out = left x right``: GEMMs of the same dims."""
    # Each summand of a partial output has the whole gradient of the sum.
    gradient = out.like(f"{out.name} gradient", at=gradient_placement(out.at))
    return tuple(
        Gradient(
            of=one,
            reads=(other,),
            work=(product_work(gradient, other, one.dims),),
            at=product_placement(gradient.at, other.at, one.dims),
        )
        for one, other in ((left, right), (right, left))
    )
