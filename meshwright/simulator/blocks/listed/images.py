"""Residual networks for images: stem, bottleneck blocks and classifier.

ResNet-50 v1.5 (He et al. 2015, arXiv 1512.03385; stride in the 3 x 3 convolution). Tensors are
``[images, channels, rows, columns]``; the order in memory changes no bytes.
"""

from meshwright.simulator.graph import (
    NUMBER_BYTES,
    OUTSIDE,
    PARTIAL,
    STATISTIC_BYTES,
    Block,
    Convolution,
    Dim,
    Gradient,
    Kind,
    Reads,
    Size,
    Tensor,
    Traffic,
    cast_operands,
    pointwise,
    whole_product,
)
from meshwright.simulator.model import Bottleneck, ImageModel

IMAGE_BYTES = 4  # of a channel of a pixel: data loaders yield fp32, which autocast casts


def stem(block: Block, model: ImageModel, num_images: Size) -> Tensor:
    """Add the stem before the first bottleneck; return the images, in fp32."""
    images = _image_batch(block, num_images, model.channels, model.image_size, width=IMAGE_BYTES)
    width = Dim("channels", model.stem_channels)
    with block.module(images):
        size = model.stem_kernel, model.stem_stride
        x = convolution(block, images, width, *size, has_gradient=False)
        max_pool(block, _relu(block, batch_norm(block, x)), model.pool_stride)
    return images


def bottleneck(block: Block, kind: Bottleneck, num_images: Size) -> Tensor:
    """Add a bottleneck block; return its input.

    Its three convolutions are added to the input, or to its projection where the shape changes.
    """
    block_input = x = _image_batch(block, num_images, kind.in_channels, kind.side)
    inner, outputs = Dim("inner", kind.inner_channels), Dim("channels", kind.out_channels)
    with block.part("layer"), block.module(x):
        y = _relu(block, batch_norm(block, convolution(block, x, inner, 1)))
        y = _relu(block, batch_norm(block, convolution(block, y, inner, kind.kernel, kind.stride)))
        y = batch_norm(block, convolution(block, y, outputs, 1))
        if kind.projects:
            x = batch_norm(block, convolution(block, x, outputs, 1, kind.stride))
        _relu(block, _added(block, y, x, block_input))
    return block_input


def classifier(block: Block, model: ImageModel, num_images: Size) -> Tensor:
    """Add global average pooling and logits; return their input."""
    last = model.layers[-1]
    x = _image_batch(block, num_images, last.out_channels, last.out_side)
    with block.module(x):
        classes = Dim("classes", model.num_classes)
        whole_product(block, mean(block, x), classes, "logits", OUTSIDE._replace(bias=True))
    return x


def _image_batch(
    block: Block, num_images: Size, channels: int, side: int, *, width: int | None = None
) -> Tensor:
    """Return a batch of square images ``[images, channels, rows, columns]``."""
    plane = Dim("rows", side), Dim("columns", side)
    dims = (Dim("images", num_images), Dim("channels", channels), *plane)
    return block.tensor("images", *dims, width=width or block.width)


def convolution(
    block: Block, x: Tensor, out: Dim, kernel: int, stride: int = 1, *, has_gradient: bool = True
) -> Tensor:
    """Return a convolution with "same" padding.

    One autograd node makes both gradients, each an implicit GEMM of as many operations; wgrad, a
    long sum over pixels, is split over multiprocessors as the others are.
    """
    images, channels, *plane = x.dims
    window = [Dim("window", kernel) for _ in plane]
    weight = block.weight("weight", out, Dim("inputs", channels.size), *window)
    x, weight = cast_operands(block, x, weight)
    y = x.like("convolved", dims=(images, out, *(_strided_dim(dim, stride) for dim in plane)))
    work = Convolution(
        pixels=y.numel // out.size,
        inputs=channels.size,
        outputs=out.size,
        taps=kernel**2,
        moved=block.count(x, weight, y),
    )
    read = (x, weight)  # autograd saves both, whichever gradient is needed
    of_weight = Gradient(weight, read, (work,), at=dict.fromkeys(x.at, PARTIAL))
    of_input = [Gradient(x, read, (work,), at=x.at)] if has_gradient else []
    return block.add([x, weight], [y], [*of_input, of_weight], work, kind=Kind.PRODUCT)


def _strided_dim(dim: Dim, stride: int) -> Dim:
    return Dim(dim.name, -(-dim.size // stride))


def batch_norm(block: Block, x: Tensor) -> Tensor:
    """Return the batch norm of *x*; backward reads *x*, mean and deviation of each channel.

    Each pass reads it twice, for the statistics and to normalise. Under autocast it keeps the dtype
    of *x*, and its weights stay in fp32.
    """
    channels = x.dims[1]
    weights = [block.weight(name, channels) for name in ("weight", "bias")]
    statistics = [
        x.like(name, dims=(channels,), at={}, width=STATISTIC_BYTES)
        for name in ("mean", "deviation")
    ]
    read, summed = (x, *statistics), dict.fromkeys(x.at, PARTIAL)
    of_weights = [Gradient(each, read, at=summed) for each in weights]
    slope = Gradient(x, read, (block.traffic(*[x] * 5),))
    outputs = [x.like("normal"), *statistics]
    return block.add([x, *weights], outputs, [slope, *of_weights], block.traffic(*[x] * 3))


def _relu(block: Block, x: Tensor) -> Tensor:
    """Return ReLU of *x*, in place."""
    return pointwise(block, "relu", x, reads=Reads.OUTPUT, in_place=True)


def _added(block: Block, x: Tensor, other: Tensor, block_input: Tensor) -> Tensor:
    """Return *x* plus *other*, in place; both get the gradient of the sum.

    The traffic of accumulating both gradients of the block's input *block_input* is counted here.
    """
    out = x.like("added", base=x.storage)
    summed = block.traffic(block_input, block_input, block_input)
    gradients = [
        Gradient(x, passes_through=True),
        Gradient(other, (), (summed,), passes_through=True),
    ]
    return block.add([x, other], [out], gradients, block.traffic(x, other, out))


def max_pool(block: Block, x: Tensor, stride: int) -> Tensor:
    """Return max pooling; backward reads the indices, and the input for its shape."""
    out = x.like("pooled", dims=(*x.dims[:2], *(_strided_dim(dim, stride) for dim in x.dims[2:])))
    indices = out.like("places", width=NUMBER_BYTES)
    moved = Traffic(block.traffic(x, out).nbytes + indices.nbytes)
    return block.add([x], [out, indices], [Gradient(x, (x, indices), (moved,))], moved)


def mean(block: Block, x: Tensor) -> Tensor:
    """Return global average pooling."""
    out = x.like("mean", dims=x.dims[:2])
    moved = block.traffic(x, out)
    return block.add([x], [out], [Gradient(x, (), (moved,))], moved)
