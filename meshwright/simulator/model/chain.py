"""Chain models: consecutive linear layers, listed with their shapes."""

from typing import ClassVar, Literal, NamedTuple

from meshwright.records import Field, model_validator
from meshwright.simulator.model.described import (
    MAX_LAYERS,
    MAX_WIDTH,
    Fields,
    ListedModel,
    ParameterTensor,
    ProductSize,
)
from meshwright.simulator.model.kinds import BlockKind


class LinearRun(Fields):
    """Linear layers of one shape: ``rows x inputs`` times ``inputs x outputs``."""

    inputs: int = Field(ge=1, le=MAX_WIDTH)
    outputs: int = Field(ge=1, le=MAX_WIDTH)
    count: int = Field(default=1, ge=1, le=MAX_LAYERS)
    bias: bool = False
    activation: bool = False


class LinearLayer(NamedTuple):
    """A linear layer, with or without a bias, and with or without ReLU behind it.

    ``split`` alternates between column- and row-parallel, as in Megatron-LM's MLP, so that only
    pairs communicate; the last of an odd number of layers is replicated.
    """

    inputs: int
    outputs: int
    bias: bool
    activation: bool
    split: Literal["columns", "rows", "none"]

    @property
    def name(self) -> BlockKind:
        """Kind of block of the layer."""
        bias, activation = " + bias" * self.bias, ", relu" * self.activation
        return f"linear {self.inputs} x {self.outputs}{bias}{activation} ({self.split})"

    @property
    def tensors(self) -> tuple[ParameterTensor, ...]:
        """Its weight and bias, as ``nn.Linear`` stores them."""
        shape = (self.outputs, self.inputs)
        split = {"columns": 0, "rows": 1, "none": None}[self.split]
        weight = ParameterTensor("weight", shape, self.name, split)
        # A row-parallel layer adds its bias after the all-reduce, on each rank in full.
        bias_dim = 0 if self.split == "columns" else None
        bias = ParameterTensor("bias", shape[:1], self.name, bias_dim)
        return (weight, bias) if self.bias else (weight,)


class ChainModel(ListedModel[LinearLayer]):
    """A chain of linear layers; a sample is a row of the first one's input.

    The loss is not part of it: backward begins with the gradient of the last layer's output.

    >>> layers = [LinearRun(inputs=5, outputs=8), LinearRun(inputs=8, outputs=3)]
    >>> ChainModel(name="textbook", kind="chain", linear=layers).num_layers
    2
    """

    sample: ClassVar[str] = "rows"

    name: str = Field(min_length=1, max_length=200)
    kind: Literal["chain"]
    title: str = Field(default="", min_length=1, max_length=200)
    linear: tuple[LinearRun, ...] = Field(min_length=1, strict=False)  # arrays of TOML are lists
    source: str = "not given"

    @property
    def layers(self) -> tuple[LinearLayer, ...]:
        """All layers in model order."""
        flat = [run for run in self.linear for _ in range(run.count)]
        num_paired = len(flat) // 2 * 2
        return tuple(
            LinearLayer(
                run.inputs,
                run.outputs,
                run.bias,
                run.activation,
                "none" if index >= num_paired else ("rows" if index % 2 else "columns"),
            )
            for index, run in enumerate(flat)
        )

    @property
    def tensors(self) -> tuple[ParameterTensor, ...]:
        """Weights of one layer of each kind."""
        return tuple(each for kind in dict.fromkeys(self.layers) for each in kind.tensors)

    @property
    def num_outputs(self) -> int:
        """Width of the last layer's output."""
        return self.layers[-1].outputs

    @property
    def num_layers(self) -> int:
        """Number of linear layers."""
        return sum(run.count for run in self.linear)

    def split_refusal(self, tp: int) -> str | None:
        """Return the reason *tp* ranks cannot split its tensors, or None where they can."""
        for index, layer in enumerate(self.layers):
            if layer.split != "rows" and layer.outputs % tp:
                return f"layer {index} has {layer.outputs} outputs, which tp={tp} does not divide"
        return None

    def product_sizes(self, tp: int) -> tuple[ProductSize, ...]:
        """Return the GEMM sizes on one of *tp* ranks, which tensor cores want aligned."""
        widths = dict.fromkeys(
            size // (tp if each.split == split else 1)
            for each in self.layers
            for size, split in ((each.inputs, "rows"), (each.outputs, "columns"))
        )
        return tuple(ProductSize("width of a layer", size) for size in widths)

    @model_validator(mode="after")
    def _check_shapes(self) -> None:
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"linear lists {self.num_layers} layers; allowed: {MAX_LAYERS}")
        for index, run in enumerate(self.linear):
            if run.count > 1 and run.inputs != run.outputs:
                raise ValueError(
                    f"linear.{index}.count={run.count} repeats {run.inputs} x {run.outputs}; "
                    "allowed: 1, or outputs that equal inputs"
                )
            wanted = self.linear[index - 1].outputs if index else run.inputs
            if run.inputs != wanted:
                raise ValueError(
                    f"linear.{index}.inputs={run.inputs} does not follow the outputs of the layer "
                    f"before; allowed: {wanted}"
                )
