"""Bytes of the tensors that live in a layer's passes: activations, and operands of its products.

Around an fp8 product an operand has two 8-bit copies, one of them transposed (see `fp8_casts`),
under autocast one in 16 bit.  In other formats only what sequence parallelism gathers counts.
"""

from typing import NamedTuple

from meshwright.hwprofiles import Attention
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.liveness.activations import cast_weights


class TensorBytes(NamedTuple):
    """Bytes of the tensors of a layer's passes on one rank.

    ``local`` is an activation outside tensor-parallel regions, ``whole`` one with all tokens,
    ``scattered`` a rank's own tokens of a sum, where the sum is scattered,
    ``gathered`` a copy with all tokens where the rank has its own only, ``regathered`` the same
    where backward gathers again; ``repeated`` are keys and values that are copied for more heads.
    """

    local: int
    whole: int
    gathered: int
    regathered: int
    scattered: int
    core: int
    key_value: int
    mlp_in: int
    mlp_out: int
    scores: int
    score_mask: int
    repeated: int

    @classmethod
    def of(cls, shape: BlockShape) -> "TensorBytes":
        """Return the widths of *shape*."""
        element = shape.num_tokens * shape.element_bytes
        whole = element * shape.model.hidden_size
        gathered = whole if shape.sequence_parallel else 0
        num_scores = 0
        if shape.attention is Attention.UNFUSED:
            num_scores = shape.num_local_heads * shape.microbatch_size * shape.seq_len**2
        return cls(
            local=shape.message_bytes,
            whole=whole,
            gathered=gathered,
            regathered=0 if shape.stack.keeps_gathered_inputs else gathered,
            scattered=shape.message_bytes if shape.sequence_parallel else 0,
            core=element * shape.local_width,
            key_value=element * shape.local_kv_width,
            mlp_in=element * shape.mlp_in_width,
            mlp_out=element * shape.local_ffn_width,
            scores=num_scores * shape.element_bytes,
            score_mask=num_scores if shape.model.dropout else 0,
            repeated=2 * element * shape.local_width if shape.repeats_key_values else 0,
        )

    @property
    def qkv(self) -> int:
        """Queries, keys and values."""
        return self.core + 2 * self.key_value


def copies_bytes(shape: BlockShape, width: int) -> int:
    """Return both fp8 copies of an operand of *width* features and all tokens; none without fp8."""
    return 2 * shape.num_tokens * width if shape.fp8 else 0


def weight_copies_bytes(shape: BlockShape, outputs: int, inputs: int) -> int:
    """Return both fp8 copies of a weight where they are made anew; none where they are kept."""
    return 2 * outputs * inputs if shape.fp8 and not shape.fp8.weight_copy_bytes else 0


def whole_operand_bytes(shape: BlockShape) -> int:
    """Return what an operand as wide as the model takes: gathered, and cast.

    Where it is gathered in fp8, that is one of the two copies.
    """
    width = shape.model.hidden_size
    if shape.fp8 and shape.fp8.tp_gathers_fp8:
        return copies_bytes(shape, width)
    gathered = shape.num_tokens * width * shape.element_bytes if shape.sequence_parallel else 0
    return gathered + copies_bytes(shape, width)


def row_backward_bytes(shape: BlockShape, inputs: int) -> int:
    """Return what a row-parallel product of *inputs* features takes for both its gradients."""
    width = shape.model.hidden_size
    again = 0 if shape.keeps_fp8_inputs else copies_bytes(shape, inputs)
    return whole_operand_bytes(shape) + again + weight_copies_bytes(shape, width, inputs)


def column_backward_bytes(shape: BlockShape, outputs: int) -> int:
    """Return what a column-parallel product of *outputs* features takes for both its gradients.

    A kept fp8 input is as the product wants it, but for what is gathered again.
    """
    width = shape.model.hidden_size
    is_ready = shape.keeps_fp8_inputs and not shape.sequence_parallel
    again = 0 if is_ready else whole_operand_bytes(shape)
    # DTensor keeps the gathered input in 16 bit: nothing is gathered again, but it is cast again.
    if shape.stack.keeps_gathered_inputs:
        again = copies_bytes(shape, width)
    weights = weight_copies_bytes(shape, outputs, width)
    return again + copies_bytes(shape, outputs) + weights


def row_forward_bytes(shape: BlockShape, inputs: int) -> int:
    """Return what a row-parallel product takes beside its input of *inputs* features."""
    weights = weight_copies_bytes(shape, shape.model.hidden_size, inputs)
    return copies_bytes(shape, inputs) + weights


def column_forward_bytes(shape: BlockShape, outputs: int) -> int:
    """Return what a column-parallel product takes beside its input and its *outputs*."""
    weights = weight_copies_bytes(shape, outputs, shape.model.hidden_size)
    return whole_operand_bytes(shape) + weights


class OperandCopies(NamedTuple):
    """Copies of a product's operands in another format, and what of them goes with the product."""

    size_bytes: int
    freed: int


def forward_operands(shape: BlockShape) -> tuple[OperandCopies, ...]:
    """Return the copies of the four products' operands, for fp8 or under autocast."""
    fp8 = (
        column_forward_bytes(shape, shape.local_width + 2 * shape.local_kv_width),
        row_forward_bytes(shape, shape.local_width),
        column_forward_bytes(shape, shape.mlp_in_width),
        row_forward_bytes(shape, shape.local_ffn_width),
    )
    if not shape.casts_weights:
        return tuple(OperandCopies(size, size) for size in fp8)
    # Products give out 16 bit, so the inputs of the second and the fourth are so as they come;
    # those of the first and the third come from a norm of the residual stream, which is in fp32.
    copies = (shape.num_tokens * shape.model.hidden_size * shape.element_bytes, 0) * 2
    weights = [tensor.size_bytes for tensor in cast_weights(shape)]
    return tuple(
        OperandCopies(copy + weight, copy if shape.caches_casts else copy + weight)
        for copy, weight in zip(copies, weights, strict=True)
    )
