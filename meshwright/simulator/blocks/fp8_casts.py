"""Casts around fp8 linear layers: their memory traffic, their kernels and the copies they leave.

A cast reads an element of bf16 and writes it twice, as it stands and transposed: on Hopper an
fp8 product takes both its operands along the inner dimension only, so the products for the
gradients need each operand the other way round.  That is ``2 + 1 + 1`` bytes an element
(Transformer Engine 1.x, ``fp8_cast_transpose_fused`` in pytorch/module/linear.py; torchao counts
the same, float8/roofline_utils.py).  Delayed scaling finds the maximum in the same pass, and a
compiled torchao cast is fused with the kernel before it, so neither reads the tensor once more.

Cast are the inputs of the four linear layers in forward, the gradients of their outputs in
backward, and the weights as often as the stack does.
"""

from collections.abc import Sequence

from meshwright.hwprofiles import Precision, WeightCast
from meshwright.simulator.blocks.operators import Gemm, KernelLaunches, MemoryBound, Operator
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.blocks.spelling import layer_table_bytes

CAST_BYTES = 4


def forward_casts(shape: BlockShape, linears: Sequence[Gemm]) -> tuple[Operator, ...]:
    """Return the casts of one layer's forward pass, or of what it repeats; none without fp8.

    Args:
        shape: Sizes and recipe.
        linears: Its products ``[tokens, k] x [k, n]``.
    """
    if shape.fp8 is None:
        return ()
    inputs = sum(linear.m * linear.k * linear.batch for linear in linears)
    casts_weights = shape.fp8.weight_casts is not WeightCast.STEP
    return _casts("forward", linears, inputs, casts_weights=casts_weights)


def backward_casts(shape: BlockShape, linears: Sequence[Gemm]) -> tuple[Operator, ...]:
    """Return the casts of one layer's backward pass, none without fp8.

    Args:
        shape: Sizes and recipe.
        linears: The layer's products ``[tokens, k] x [k, n]`` of the forward pass.
    """
    if shape.fp8 is None:
        return ()
    gradients = sum(linear.m * linear.n * linear.batch for linear in linears)
    casts_weights = shape.fp8.weight_casts is WeightCast.FORWARD_BACKWARD
    return _casts("backward", linears, gradients, casts_weights=casts_weights)


def _casts(
    phase: str, linears: Sequence[Gemm], num_elements: int, *, casts_weights: bool
) -> tuple[Operator, ...]:
    weights = sum(linear.k * linear.n * linear.batch for linear in linears)
    num_elements += weights * casts_weights
    return (
        MemoryBound(f"fp8 casts {phase}", CAST_BYTES * num_elements),
        KernelLaunches(f"fp8 casts {phase}", len(linears) * (1 + casts_weights)),
    )


def step_cast_bytes(shape: BlockShape, num_layers: int) -> int:
    """Return the traffic of casting the weights of *num_layers* layers once a step, if it is so."""
    if shape.fp8 is None or shape.fp8.weight_casts is not WeightCast.STEP:
        return 0
    return CAST_BYTES * num_linear_weights(shape) * num_layers


def weight_copy_bytes(shape: BlockShape, num_layers: int) -> int:
    """Return the bytes of fp8 copies that *num_layers* layers keep beside their weights.

    Copies that are the weights count as these do.
    """
    if shape.fp8 is None:
        return 0
    held = shape.fp8.holds_parameters * Precision.BF16.num_bytes
    return (shape.fp8.weight_copy_bytes - held) * num_linear_weights(shape) * num_layers


def beside_weights_bytes(shape: BlockShape, num_layers: int) -> int:
    """Return what *num_layers* layers hold beside their weights: fp8 copies, tables of angles."""
    tables = layer_table_bytes(shape) * num_layers
    return weight_copy_bytes(shape, num_layers) + tables


def num_linear_weights(shape: BlockShape) -> int:
    """Return the weights of the four linear layers of one layer, without biases, on one rank.

    With experts, which all layers then have, those of the rank's own in the place of the MLP.
    """
    qkv = shape.local_width + 2 * shape.local_kv_width
    widths = qkv + shape.local_width
    experts = shape.model.experts
    if experts is None:
        return shape.model.hidden_size * (widths + shape.mlp_in_width + shape.local_ffn_width)
    num_local = experts.num_experts // shape.ep
    widths += 3 * num_local * experts.hidden_size // shape.expert_tp
    widths += 3 * experts.shared_hidden_size // shape.tp
    return shape.model.hidden_size * widths
