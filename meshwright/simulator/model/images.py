"""Residual networks for images (ResNet): stem, runs of bottleneck blocks, and classifier."""

from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from meshwright.records import Field, model_validator
from meshwright.simulator.model.described import (
    MAX_LAYERS,
    MAX_WIDTH,
    Fields,
    ListedModel,
    ParameterTensor,
    ProductSize,
)
from meshwright.simulator.model.kinds import EMBEDDING, HEAD, BlockKind

MAX_SIDE = 65_536

Weight: TypeAlias = tuple[str, tuple[int, ...]]


class BottleneckRun(Fields):
    """Consecutive blocks of one width; the first has the stride, in its 3 x 3 convolution.

    ``inner_channels`` are those of the 3 x 3 convolution.
    """

    count: int = Field(ge=1, le=MAX_LAYERS)
    inner_channels: int = Field(ge=1, le=MAX_WIDTH)
    out_channels: int = Field(ge=1, le=MAX_WIDTH)
    stride: int = Field(default=1, ge=1, le=16)


class Bottleneck(NamedTuple):
    """A bottleneck block on images of *side* x *side* pixels."""

    side: int
    in_channels: int
    inner_channels: int
    out_channels: int
    stride: int

    @property
    def name(self) -> BlockKind:
        """Kind of block of the layer."""
        channels = f"{self.in_channels}-{self.inner_channels}-{self.out_channels}"
        return f"bottleneck {channels} of {self.side} x {self.side} to {self.out_side}"

    @property
    def kernel(self) -> int:
        """Kernel size of the convolution in the middle."""
        return 3

    @property
    def out_side(self) -> int:
        """Rows and columns of the output."""
        return -(-self.side // self.stride)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Names and shapes of its weights."""
        inner, outputs = self.inner_channels, self.out_channels
        projection = _normalised("projection ", outputs, self.in_channels, 1)
        return (
            *_normalised("first ", inner, self.in_channels, 1),
            *_normalised("middle ", inner, inner, self.kernel),
            *_normalised("last ", outputs, inner, 1),
            *(projection if self.projects else ()),
        )

    @property
    def projects(self) -> bool:
        """Whether the shortcut is a projection, as input and output differ in shape."""
        return self.stride != 1 or self.in_channels != self.out_channels


class ImageModel(ListedModel[Bottleneck]):
    """A residual network such as ResNet-50 v1.5 (He et al. 2015, arXiv 1512.03385).

    The stem is a 7 x 7 convolution with stride 2 and pooling with stride 2, the classifier
    average pooling and a linear layer.

    >>> run = BottleneckRun(count=2, inner_channels=8, out_channels=32, stride=2)
    >>> stem = {"image_size": 32, "stem_channels": 16}
    >>> tiny = ImageModel(name="tiny", kind="images", **stem, blocks=[run], num_classes=10)
    >>> [tuple(each) for each in tiny.layers]
    [(8, 16, 8, 32, 2), (4, 32, 8, 32, 1)]
    """

    sample: ClassVar[str] = "images"
    stem_kernel: ClassVar[int] = 7
    stem_stride: ClassVar[int] = 2
    pool_stride: ClassVar[int] = 2

    name: str = Field(min_length=1, max_length=200)
    kind: Literal["images"]
    title: str = Field(default="", min_length=1, max_length=200)
    image_size: int = Field(ge=1, le=MAX_SIDE)
    channels: int = Field(default=3, ge=1, le=MAX_WIDTH)
    stem_channels: int = Field(ge=1, le=MAX_WIDTH)
    num_classes: int = Field(ge=1, le=MAX_WIDTH)
    # Not strict, as arrays of TOML are lists.
    blocks: tuple[BottleneckRun, ...] = Field(min_length=1, strict=False)
    source: str = "not given"

    @property
    def stem_side(self) -> int:
        """Rows and columns after the first convolution."""
        # Convolutions are padded, so that sizes are rounded up.
        return -(-self.image_size // self.stem_stride)

    @property
    def layers(self) -> tuple[Bottleneck, ...]:
        """All blocks in model order."""
        return tuple(self._layers())

    def _layers(self) -> Iterator[Bottleneck]:
        side, channels = -(-self.stem_side // self.pool_stride), self.stem_channels
        for run in self.blocks:
            for index in range(run.count):
                # Only the first block of a stage of ResNet downsamples.
                stride = 1 if index else run.stride
                kind = Bottleneck(side, channels, run.inner_channels, run.out_channels, stride)
                yield kind
                side, channels = kind.out_side, kind.out_channels

    @property
    def tensors(self) -> tuple[ParameterTensor, ...]:
        """Weights of the stem, of one block of each kind, and of the classifier."""
        shape = (self.num_classes, self.layers[-1].out_channels)
        weights = {
            EMBEDDING: _normalised("", self.stem_channels, self.channels, self.stem_kernel),
            **{kind.name: kind.weights for kind in self.layers},
            HEAD: (("logits.weight", shape), ("logits.bias", shape[:1])),
        }
        return tuple(
            ParameterTensor(name, shape, kind, None)
            for kind, named in weights.items()
            for name, shape in named
        )

    @property
    def num_outputs(self) -> int:
        """Logits of an image."""
        return self.num_classes

    @property
    def num_layers(self) -> int:
        """Bottleneck blocks."""
        return sum(run.count for run in self.blocks)

    def split_refusal(self, tp: int) -> str | None:
        """Return the reason *tp* ranks cannot split its tensors, or None where they can."""
        return f"tp={tp} does not go with {self.name}: convolutions are whole" if tp > 1 else None

    def product_sizes(self, tp: int) -> tuple[ProductSize, ...]:  # noqa: ARG002
        """Return no sizes, as libraries pad the channels of convolutions."""
        return ()

    @model_validator(mode="after")
    def _check_blocks(self) -> None:
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"blocks hold {self.num_layers} in all; allowed: {MAX_LAYERS}")


def _normalised(name: str, outputs: int, inputs: int, kernel: int) -> tuple[Weight, ...]:
    """Return the weights of a convolution and of the batch norm after it."""
    return (
        # No bias: the batch norm behind it has one.
        (f"{name}convolution.weight", (outputs, inputs, kernel, kernel)),
        (f"{name}norm.weight", (outputs,)),
        (f"{name}norm.bias", (outputs,)),
    )
