"""Casts around linear layers of 8 bits: their traffic, their kernels and the copies they leave.

A cast reads an element of bf16 and writes it twice, as it stands and transposed: on Hopper an
fp8 product takes both its operands along the inner dimension only, so the products for the
gradients need each operand the other way round.  That is ``2 + 1 + 1`` bytes an element
(Transformer Engine 1.x, ``fp8_cast_transpose_fused`` in pytorch/module/linear.py; torchao counts
the same, float8/roofline_utils.py).  Delayed scaling finds the maximum in the same pass, and a
compiled torchao cast is fused with the kernel before it, so neither reads the tensor once more.
On Blackwell a product takes operands of fp8 either way round, but a scale for every 32 elements
along the inner dim belongs to one direction: MXFP8 is cast along both (``MXFP8Quantizer`` of
Transformer Engine 2, pytorch/tensor/mxfp8_tensor.py), as much traffic but for the scales.

Cast are the inputs of the four linear layers in forward, the gradients of their outputs in
backward, and the weights as often as the stack does.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

from meshwright.hwprofiles import Precision, RecomputeModule, WeightCast
from meshwright.simulator.blocks.operators import Gemm, KernelLaunches, MemoryBound, Operator
from meshwright.simulator.blocks.shape import BlockShape, narrows_head
from meshwright.simulator.blocks.spelling import layer_table_bytes
from meshwright.simulator.layout import repeated_modules
from meshwright.simulator.model import (
    ENDS,
    HEAD,
    BlockKind,
    BlockRun,
    linear_shapes,
    linear_weights,
)

CAST_BYTES = 4
# Forward the inputs of an expert's two products are cast, backward the gradients of their outputs.
CASTS_OF_PASS = 2


def forward_casts(shape: BlockShape, linears: Sequence[Gemm]) -> tuple[Operator, ...]:
    """Return the casts of one layer's forward pass, or of what it repeats; none in 16 bits.

    Args:
        shape: Sizes and recipe.
        linears: Its products ``[tokens, k] x [k, n]``.
    """
    if shape.recipe is None:
        return ()
    # A grouped product that opens what it makes hands it on cast.
    cast = _without_fused(shape, linears, 1)
    inputs = sum(linear.m * linear.k * linear.batch for linear in cast)
    recipe = shape.recipe
    are_cast = recipe.weight_casts is WeightCast.STEP or recipe.gathers_parameters
    return _casts(shape, "forward", cast, inputs, () if are_cast else linears)


def backward_casts(shape: BlockShape, linears: Sequence[Gemm]) -> tuple[Operator, ...]:
    """Return the casts of one layer's backward pass, none in 16 bits.

    Args:
        shape: Sizes and recipe.
        linears: The layer's products ``[tokens, k] x [k, n]`` of the forward pass.
    """
    if shape.recipe is None:
        return ()
    cast = _without_fused(shape, linears, 0)
    gradients = sum(linear.m * linear.n * linear.batch for linear in cast)
    recipe = shape.recipe
    is_twice = recipe.weight_casts is WeightCast.FORWARD_BACKWARD and not recipe.gathers_parameters
    operators = _casts(shape, "backward", cast, gradients, linears if is_twice else ())
    if RecomputeModule.MOE_ACT not in repeated_modules(shape.recompute, shape.modules):
        return operators
    # An activation that is made again is cast once more, by a kernel for each expert.
    again = [linear.batch for linear in linears if linear.rows][1:2]
    kernels = sum(again) * max(recipe.casts_of_expert, 1)
    return (*operators, KernelLaunches("fp8 casts again", kernels))


def expert_casts(shape: BlockShape, backward: int) -> int:
    """Return the kernels of a pass that cast rows of one expert by themselves.

    An activation that is made again is cast in backward, too.
    """
    if shape.recipe is None:
        return 0
    again = backward and RecomputeModule.MOE_ACT in repeated_modules(shape.recompute, shape.modules)
    return (CASTS_OF_PASS + again) * shape.recipe.casts_of_expert


def _without_fused(shape: BlockShape, linears: Sequence[Gemm], number: int) -> list[Gemm]:
    """Return *linears* but that of the two products of experts whose kernel casts by itself."""
    grouped = [linear for linear in linears if linear.rows]
    fuses = shape.recipe is not None and shape.recipe.fuses_experts
    fused = grouped[number : number + 1] if fuses else []
    return [linear for linear in linears if linear not in fused]


def _casts(
    shape: BlockShape, phase: str, cast: Sequence[Gemm], num_elements: int, weights: Sequence[Gemm]
) -> tuple[Operator, ...]:
    num_elements += sum(linear.k * linear.n * linear.batch for linear in weights)
    # Each expert's rows by themselves where one kernel does not cast those of all.
    by_one = shape.recipe.casts_of_expert if shape.recipe else 0
    kernels = sum(linear.batch * by_one if linear.rows and by_one else 1 for linear in cast)
    return (
        MemoryBound(f"fp8 casts {phase}", CAST_BYTES * num_elements),
        KernelLaunches(f"fp8 casts {phase}", kernels + len(weights)),
    )


def step_cast_bytes(shape: BlockShape, blocks: Iterable[BlockRun]) -> int:
    """Return the traffic of casting the weights of *blocks* once a step, if it is so."""
    if shape.recipe is None or shape.recipe.weight_casts is not WeightCast.STEP:
        return 0
    weights = num_linear_weights(shape)
    return CAST_BYTES * sum(count * weights[kind] for kind, count in blocks)


def weight_copy_bytes(shape: BlockShape, blocks: Iterable[BlockRun]) -> int:
    """Return the bytes of narrow copies that *blocks* keep beside their weights.

    Copies that are the weights count as these do.
    """
    if shape.recipe is None:
        return 0
    copies, scaled = shape.recipe.weight_copy_bytes, shape.recipe.scaled_elements
    held = shape.recipe.holds_parameters * Precision.BF16.num_bytes
    counts, total = num_linear_weights(shape), 0
    for kind, count in blocks:
        weights = counts[kind]
        scales = copies * weights // scaled if scaled else 0
        total += count * ((copies - held) * weights + scales)
    return total


def beside_weights_bytes(shape: BlockShape, blocks: Iterable[BlockRun]) -> int:
    """Return what *blocks* hold beside their weights: copies of 8 bits, tables of angles."""
    runs = list(blocks)
    num_layers = sum(count for kind, count in runs if kind not in ENDS)
    return weight_copy_bytes(shape, runs) + layer_table_bytes(shape) * num_layers


def num_linear_weights(shape: BlockShape) -> Counter[BlockKind]:
    """Return the weights of linear layers of a block of each kind, on one rank.

    Those of a head where its output matrix is one of them.
    """
    counts = linear_weights(shape.trained, shape.tp, shape.ep, shape.etp)
    if narrows_head(shape):
        degrees, multiple = (shape.tp, shape.ep, shape.etp), shape.stack.vocabulary_multiple
        matrices = linear_shapes(shape.trained, multiple, *degrees)[HEAD]
        counts[HEAD] += sum(prod(each) for each in matrices)
    return counts
