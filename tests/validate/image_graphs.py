"""What the graph derives of convolutions and what is made of them: see `block_graph`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from block_graph import ADDED, CAST_ADDED, PYTORCH, GraphCase
from block_modules import BATCH, CHANNELS, SIDE

from meshwright.simulator.blocks.listed import (
    batch_norm,
    bottleneck,
    classifier,
    convolution,
    max_pool,
    mean,
    stem,
)
from meshwright.simulator.graph import (
    Block,
    Dim,
    Lowering,
    Tensor,
)
from meshwright.simulator.model import Bottleneck, BottleneckRun, ImageModel

SMALL = ImageModel(
    name="small",
    kind="images",
    image_size=32,
    channels=CHANNELS,
    stem_channels=16,
    num_classes=10,
    blocks=(
        BottleneckRun(count=2, inner_channels=8, out_channels=32),
        BottleneckRun(count=1, inner_channels=16, out_channels=64, stride=2),
    ),
)


def on_images(write: Callable[[Block, Tensor], object]) -> Callable[[Block], Sequence[Tensor]]:
    """Return how a module with images as its input is written."""

    def build(block: Block) -> Sequence[Tensor]:
        plane = Dim("rows", SIDE), Dim("columns", SIDE)
        x = block.tensor("x", Dim("images", BATCH), Dim("channels", CHANNELS), *plane)
        with block.module(x):
            write(block, x)
        return (x,)

    return build


def bottlenecks(outputs: int, stride: int) -> Callable[[Block], Sequence[Tensor]]:
    """Return how a bottleneck is written."""
    inner = 16 if outputs == 64 else 8
    kind = Bottleneck(SIDE, CHANNELS, inner, outputs, stride)
    return lambda block: (bottleneck(block, kind, BATCH),)


def convolved(kernel: int, stride: int) -> Callable[[Block], Sequence[Tensor]]:
    """Return how a convolution is written."""
    return on_images(lambda block, x: convolution(block, x, Dim("out", 20), kernel, stride))


IMAGE_GRAPHS: dict[str, GraphCase] = {
    **{
        f"convolution {kernel} x {kernel}, stride {stride}": GraphCase(
            build=convolved(kernel, stride), width=4
        )
        for kernel, stride in ((1, 1), (3, 1), (3, 2), (1, 2), (7, 2))
    },
    "batch norm": GraphCase(build=on_images(batch_norm), width=4),
    "max pool": GraphCase(build=on_images(lambda block, x: max_pool(block, x, 2)), width=4),
    "mean over pixels": GraphCase(build=on_images(mean), width=4),
    "bottleneck": GraphCase(build=bottlenecks(CHANNELS, 1), width=4),
    "bottleneck, stride 2": GraphCase(build=bottlenecks(32, 2), width=4),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """How a network runs: in which format, and whether its gradients stay."""

    width: int = 4
    lowering: Lowering = PYTORCH


RUNS = {
    "fp32": Run(),
    "fp32, gradients added": Run(lowering=ADDED),
    "cast, gradients added": Run(width=2, lowering=CAST_ADDED),
}
PARTS: dict[str, Callable[[Block], Sequence[Tensor]]] = {
    "stem": lambda block: (stem(block, SMALL, BATCH),),
    "bottleneck": lambda block: (bottleneck(block, SMALL.layers[0], BATCH),),
    "bottleneck without projection": lambda block: (bottleneck(block, SMALL.layers[1], BATCH),),
    "bottleneck, stride 2": lambda block: (bottleneck(block, SMALL.layers[2], BATCH),),
    "classifier": lambda block: (classifier(block, SMALL, BATCH),),
}
