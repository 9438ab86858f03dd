"""What lives for a moment in the backward pass of products with weights, step by step.

Each step allocates, then runs, then frees.  Autograd runs a cast's backward once the product's is
done and has let go of what it kept: under autocast the 16-bit gradient of a weight meets its fp32
one, but not the operands of its product.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwright.hwprofiles import Precision
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.liveness.tensor_bytes import TensorBytes


class Step(NamedTuple):
    """Bytes that a step allocates before it runs, and frees after.

    ``gradient`` are those of a weight's gradient that is there with the end of the step, and lives
    until it has been added to what is kept of it; None where none is.
    """

    name: str
    allocates: int
    frees: int
    gradient: int | None = None


def highest(steps: Iterable[Step], live: int = 0) -> int:
    """Return the most bytes that live at one time; *live* before the first step.

    >>> highest([Step("product", 6, 4), Step("sum", 3, 5)], live=1)
    7
    """
    most = live
    for step in steps:
        most = max(most, live + step.allocates)
        live += step.allocates - step.frees
    return most


def fullest_arrival(steps: Iterable[Step]) -> int:
    """Return the most bytes that live when a weight's gradient has come; one must be among them.

    >>> fullest_arrival([Step("cast", 9, 0), Step("product", 6, 10, gradient=3), Step("sum", 3, 5)])
    8
    """
    live = 0
    levels = []
    for step in steps:
        live += step.allocates - step.frees
        if step.gradient is not None:
            levels.append(live + step.gradient)
    return max(levels)


class Product(NamedTuple):
    """A product with one weight, or several with the same inputs, in the order of their backward.

    ``gradient_bytes`` are those of the outputs' gradient, ``inputs`` and ``outputs`` the width of
    the weights on this rank.
    """

    name: str
    gradient_bytes: int
    inputs: int
    outputs: Sequence[int]


def weight_gradient_bytes(shape: BlockShape, num_weights: int) -> int:
    """Return a gradient before it is added to its buffer; 0 where that is one with the product."""
    fused = shape.stack.fused_gradient_accumulation
    return 0 if fused else num_weights * shape.element_bytes


def column_steps(
    shape: BlockShape, product: Product, kept_input: int, *, operands: int, stays: bool = False
) -> tuple[Step, ...]:
    """Return the backward of a column-parallel layer: the input again, and its gradient.

    Separate products of one input each make its gradient; the second is added to the first.
    """
    if shape.casts_weights:
        return cast_column_steps(shape, product, shape.num_tokens, stays=stays)
    sizes = TensorBytes.of(shape)
    outputs = sum(product.outputs) if stays else max(product.outputs)
    weight = weight_gradient_bytes(shape, outputs * product.inputs)
    # Beside the running sum one more input gradient at most: each is added as it comes.
    copies = min(2, len(product.outputs))
    allocated = operands + copies * sizes.whole + sizes.scattered + weight
    arrived = 0 if stays else weight
    leaves = allocated - weight + arrived - sizes.local
    frees = leaves + product.gradient_bytes + kept_input
    return (Step(product.name, allocated, frees, gradient=arrived),)


def cast_row_steps(
    shape: BlockShape, product: Product, *, inputs_bytes: int, freed: int, stays: bool
) -> tuple[Step, ...]:
    """Return the backward of a product in 16 bit, and of the cast of its weight.

    Args:
        shape: Sizes of the layer.
        product: Its gradient goes once the product is done.
        inputs_bytes: The gradient of its inputs.
        freed: What it has kept.
        stays: Whether the weight's gradient stays.
    """
    num_weights = product.inputs * sum(product.outputs)
    half_bytes = num_weights * shape.element_bytes
    return (
        Step(product.name, inputs_bytes + half_bytes, product.gradient_bytes + freed),
        _cast_weight_step(shape, product, num_weights, stays=stays),
    )


def cast_column_steps(
    shape: BlockShape, product: Product, num_tokens: int, *, stays: bool
) -> tuple[Step, ...]:
    """Return the backward of products in 16 bit of one input, and of the casts before them.

    Each has a 16-bit copy of the input and of its weight.  The inputs' gradients are added up in
    fp32, in place.

    Args:
        shape: Sizes of the layer.
        product: Its gradient goes product by product.
        num_tokens: Rows of the input.
        stays: Whether the weights' gradients stay.
    """
    half_bytes = num_tokens * product.inputs * shape.element_bytes
    full_bytes = num_tokens * product.inputs * Precision.FP32.num_bytes
    steps: list[Step] = []
    for index, outputs in enumerate(product.outputs):
        num_weights = outputs * product.inputs
        copy = num_weights * shape.element_bytes
        gradient = product.gradient_bytes * outputs // sum(product.outputs)
        steps += [
            Step(product.name, half_bytes + copy, gradient + half_bytes + copy),
            Step(f"{product.name} inputs", full_bytes, half_bytes + (full_bytes if index else 0)),
            _cast_weight_step(shape, product, num_weights, stays=stays),
        ]
    return tuple(steps)


def _cast_weight_step(
    shape: BlockShape, product: Product, num_weights: int, *, stays: bool
) -> Step:
    """Return the backward of a weight's cast: its gradient in fp32, from that in 16 bit."""
    half_bytes, full_bytes = (
        num_weights * shape.element_bytes,
        num_weights * Precision.FP32.num_bytes,
    )
    arrived = 0 if stays else full_bytes
    return Step(f"{product.name} weights", full_bytes, half_bytes + arrived, gradient=arrived)
