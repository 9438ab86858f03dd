"""Fp8 casts of linear layers: traffic, kernels and copies of weights.

A cast reads a bf16 element and writes it twice, as it stands and transposed: Hopper's fp8 GEMMs
take both operands K-major (TN) only, so dgrad and wgrad need each operand transposed.  That is
``2 + 1 + 1`` bytes an element
(Transformer Engine 1.x, ``fp8_cast_transpose_fused`` in pytorch/module/linear.py; torchao counts
the same, float8/roofline_utils.py).  Delayed scaling finds the maximum in the same pass, and a
compiled torchao cast is fused with the kernel before it, so neither reads the tensor once more.
Blackwell's GEMMs take fp8 operands in either layout, but MXFP8's scale of 32 elements along the
inner dim belongs to one direction: MXFP8 is cast row-wise and column-wise (``MXFP8Quantizer`` of
Transformer Engine 2, pytorch/tensor/mxfp8_tensor.py), as much traffic but for the scales.

Cast are the inputs of the linear layers in forward, the gradients of their outputs in backward,
and the weights as often as the stack casts them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

from meshwright.hwprofiles import Precision, RecomputeModule, WeightCast
from meshwright.simulator.blocks.operators import Gemm, KernelLaunches, MemoryBound, Operator
from meshwright.simulator.blocks.shape import BlockShape, narrows_head
from meshwright.simulator.blocks.spelling import layer_rope_cache_bytes
from meshwright.simulator.layout import recomputed_modules
from meshwright.simulator.model import (
    ENDS,
    HEAD,
    BlockKind,
    BlockRun,
    linear_shapes,
    linear_weights,
)

CAST_BYTES = 4
# Forward casts the inputs of an expert's two linear layers, backward their outputs' gradients.
CASTS_OF_PASS = 2


def forward_casts(shape: BlockShape, linears: Sequence[Gemm]) -> tuple[Operator, ...]:
    """Return the fp8 casts of a layer's forward pass or recomputation; none in 16 bits.

    Args:
        shape: Sizes and recipe.
        linears: GEMMs ``[tokens, k] x [k, n]`` of its linear layers.
    """
    if shape.recipe is None:
        return ()
    # A grouped GEMM with a fused activation outputs fp8: its successor's input needs no cast.
    cast = _unfused_gemms(shape, linears, 1)
    inputs = sum(linear.m * linear.k * linear.batch for linear in cast)
    recipe = shape.recipe
    # Cast once a step, or gathered in fp8: either way no pass casts weights.
    weights_are_cast = recipe.weight_casts is WeightCast.STEP or recipe.gathers_parameters
    return _casts(shape, "forward", cast, inputs, () if weights_are_cast else linears)


def backward_casts(shape: BlockShape, linears: Sequence[Gemm]) -> tuple[Operator, ...]:
    """Return the fp8 casts of a layer's backward pass; none in 16 bits.

    Args:
        shape: Sizes and recipe.
        linears: GEMMs ``[tokens, k] x [k, n]`` of its forward pass.
    """
    if shape.recipe is None:
        return ()
    cast = _unfused_gemms(shape, linears, 0)
    gradients = sum(linear.m * linear.n * linear.batch for linear in cast)
    recipe = shape.recipe
    casts_in_backward = (
        recipe.weight_casts is WeightCast.FORWARD_BACKWARD and not recipe.gathers_parameters
    )
    operators = _casts(shape, "backward", cast, gradients, linears if casts_in_backward else ())
    if RecomputeModule.MOE_ACT not in recomputed_modules(shape.recompute, shape.modules):
        return operators
    # A recomputed activation is cast once more, by a kernel for each expert.
    again = [linear.batch for linear in linears if linear.rows][1:2]
    kernels = sum(again) * max(recipe.casts_of_expert, 1)
    return (*operators, KernelLaunches("fp8 casts again", kernels))


def expert_casts(shape: BlockShape, backward: int) -> int:
    """Return the number of cast kernels of one expert in a pass.

    A recomputed activation is cast in backward, too.
    """
    if shape.recipe is None:
        return 0
    again = backward and RecomputeModule.MOE_ACT in recomputed_modules(
        shape.recompute, shape.modules
    )
    return (CASTS_OF_PASS + again) * shape.recipe.casts_of_expert


def _unfused_gemms(shape: BlockShape, linears: Sequence[Gemm], number: int) -> list[Gemm]:
    """Return *linears* without the experts' GEMM whose kernel casts by itself."""
    grouped = [linear for linear in linears if linear.rows]
    fuses = shape.recipe is not None and shape.recipe.fuses_experts
    fused = grouped[number : number + 1] if fuses else []
    return [linear for linear in linears if linear not in fused]


def _casts(
    shape: BlockShape, phase: str, cast: Sequence[Gemm], num_elements: int, weights: Sequence[Gemm]
) -> tuple[Operator, ...]:
    num_elements += sum(linear.k * linear.n * linear.batch for linear in weights)
    # One cast kernel for each expert, unless one kernel casts the rows of all.
    expert_cast_kernels = shape.recipe.casts_of_expert if shape.recipe else 0
    kernels = sum(
        linear.batch * expert_cast_kernels if linear.rows and expert_cast_kernels else 1
        for linear in cast
    )
    return (
        MemoryBound(f"fp8 casts {phase}", CAST_BYTES * num_elements),
        KernelLaunches(f"fp8 casts {phase}", kernels + len(weights)),
    )


def step_cast_bytes(shape: BlockShape, blocks: Iterable[BlockRun]) -> int:
    """Return the bytes of casting the weights of *blocks* once a step, if the recipe does."""
    if shape.recipe is None or shape.recipe.weight_casts is not WeightCast.STEP:
        return 0
    weights = num_linear_weights(shape)
    return CAST_BYTES * sum(count * weights[kind] for kind, count in blocks)


def weight_copy_bytes(shape: BlockShape, blocks: Iterable[BlockRun]) -> int:
    """Return the bytes of persistent fp8 copies of the weights of *blocks*.

    Fp8 primary weights (fp8_param) replace the bf16 weights, so these are subtracted.
    """
    if shape.recipe is None:
        return 0
    copies, scaled = shape.recipe.weight_copy_bytes, shape.recipe.scaled_elements
    primary_bytes = shape.recipe.holds_parameters * Precision.BF16.num_bytes
    counts, total = num_linear_weights(shape), 0
    for kind, count in blocks:
        weights = counts[kind]
        scales = copies * weights // scaled if scaled else 0
        total += count * ((copies - primary_bytes) * weights + scales)
    return total


def extra_weight_bytes(shape: BlockShape, blocks: Iterable[BlockRun]) -> int:
    """Return the bytes *blocks* hold beside their weights: fp8 copies and RoPE caches."""
    runs = list(blocks)
    num_layers = sum(count for kind, count in runs if kind not in ENDS)
    return weight_copy_bytes(shape, runs) + layer_rope_cache_bytes(shape) * num_layers


def num_linear_weights(shape: BlockShape) -> Counter[BlockKind]:
    """Return the number of linear weights of a block of each kind, on one rank.

    The LM head's count if it runs in fp8.
    """
    counts = linear_weights(shape.trained, shape.tp, shape.ep, shape.etp)
    if narrows_head(shape):
        degrees, multiple = (shape.tp, shape.ep, shape.etp), shape.stack.vocabulary_multiple
        matrices = linear_shapes(shape.trained, multiple, *degrees)[HEAD]
        counts[HEAD] += sum(prod(each) for each in matrices)
    return counts
