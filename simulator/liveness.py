"""What lives for a moment in a pass through a layer, step by step.

Each step allocates, then runs, then frees; the highest level over the steps is what a block
needs beside the tensors that wait for backward.  The steps follow the order in which PyTorch's
autograd runs and frees: a node's saved tensors go when its backward has run, the gradient that
arrives when the node that received it has.
"""

from collections.abc import Iterable
from typing import NamedTuple

from hwprofiles import Attention, Recompute
from simulator.activations import (
    attention_core_tensors,
    layer_tensors,
    saved_layer_bytes,
)
from simulator.block_shape import BlockShape
from simulator.fp8_operands import (
    column_backward_bytes,
    column_forward_bytes,
    row_backward_bytes,
    row_forward_bytes,
)


class Step(NamedTuple):
    """Bytes that a step allocates before it runs, and frees after."""

    name: str
    allocates: int
    frees: int


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


class Widths(NamedTuple):
    """Bytes of the tensors of a layer's passes on one rank.

    ``local`` is an activation outside tensor-parallel regions, ``whole`` one with all tokens,
    ``gathered`` a copy with all tokens where the
    rank has its own only, ``regathered`` the same where backward gathers again.
    """

    local: int
    whole: int
    gathered: int
    regathered: int
    core: int
    key_value: int
    mlp_in: int
    mlp_out: int
    scores: int
    score_mask: int

    @classmethod
    def of(cls, shape: BlockShape) -> "Widths":
        """Return the widths of *shape*."""
        element = shape.num_tokens * shape.element_bytes
        whole = element * shape.model.hidden_size
        num_scores = 0
        if shape.attention is Attention.UNFUSED:
            num_scores = shape.num_local_heads * shape.microbatch_size * shape.seq_len**2
        return cls(
            local=shape.message_bytes,
            whole=whole,
            gathered=whole if shape.sequence_parallel else 0,
            regathered=0 if shape.stack.keeps_gathered_inputs else whole * shape.sequence_parallel,
            core=element * shape.local_width,
            key_value=element * shape.local_kv_width,
            mlp_in=element * shape.mlp_in_width,
            mlp_out=element * shape.local_ffn_width,
            scores=num_scores * shape.element_bytes,
            score_mask=num_scores if shape.model.dropout else 0,
        )

    @property
    def qkv(self) -> int:
        """Queries, keys and values."""
        return self.core + 2 * self.key_value


def forward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return the last layer's forward: its kept tensors are allocated in it, and stay."""
    wide = Widths.of(shape)
    mlp, attention = _outside_core(shape)
    core = sum(tensor.size_bytes for tensor in attention_core_tensors(shape))
    recomputed = core if shape.recompute is Recompute.SELECTIVE else 0
    kept = shape.num_tokens * shape.local_width * shape.linear_input_bytes
    # Flash attention whose output is kept apart has it already; unfused, it is copied once.
    outputs = 1 + (shape.attention is Attention.UNFUSED) - _keeps_output_apart(shape)
    output = outputs * wide.core + row_forward_bytes(shape, shape.local_width)
    summed = wide.whole + _part(shape)
    cast = row_forward_bytes(shape, shape.local_ffn_width)
    cast += wide.mlp_out - wide.mlp_out // shape.element_bytes * shape.linear_input_bytes
    return (
        Step("before the core", attention - kept, 0),
        Step("scores", wide.scores, 0),
        Step("core", core, wide.scores),
        Step("core output", output, output - kept + recomputed),
        Step("attention output", summed, summed),
        Step("mlp", mlp, 0),
        Step("mlp out", wide.whole + wide.local + cast, cast),
    )


def _keeps_output_apart(shape: BlockShape) -> bool:
    """Return whether flash attention keeps its output beside the linear layer's copy of it."""
    return shape.attention is Attention.FLASH and shape.keeps_fp8_inputs


def _outside_core(shape: BlockShape) -> tuple[int, int]:
    """Return the bytes kept of the MLP and of the attention but for its core."""
    core = {tensor.name for tensor in attention_core_tensors(shape)}
    outside = [tensor for tensor in layer_tensors(shape) if tensor.name not in core]
    mlp = sum(tensor.size_bytes for tensor in outside if tensor.name.startswith("mlp"))
    return mlp, sum(tensor.size_bytes for tensor in outside) - mlp


def unkept_forward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return a layer's forward that keeps nothing but its input, which is not counted.

    A block's normalised input lives until the block returns.
    """
    wide = Widths.of(shape)
    norm = wide.local
    unfused = shape.attention is Attention.UNFUSED
    mask = wide.score_mask
    dropped = wide.scores if shape.model.dropout else 0
    qkv = column_forward_bytes(shape, shape.local_width + 2 * shape.local_kv_width)
    output = wide.whole + _part(shape)
    of_core = row_forward_bytes(shape, shape.local_width)
    mlp_in = column_forward_bytes(shape, shape.mlp_in_width)
    of_mlp = row_forward_bytes(shape, shape.local_ffn_width)
    return (
        Step("attention norm", norm, 0),
        Step("qkv", qkv + wide.qkv, qkv),
        Step("softmax", 2 * wide.scores, wide.scores),
        Step("attention dropout", dropped + mask, wide.scores * bool(dropped) + mask),
        Step("core", wide.core * (1 + unfused), wide.core * unfused + wide.scores + wide.qkv),
        Step("attention output", output + of_core, of_core + wide.core + norm),
        Step("attention residual", wide.local, output),
        Step("mlp norm", norm, 0),
        Step("mlp in", mlp_in + wide.mlp_in, mlp_in),
        Step("mlp activation", wide.mlp_out, wide.mlp_in),
        Step("mlp out", output + of_mlp, of_mlp + norm + wide.mlp_out),
        Step("mlp residual", wide.local, output + wide.local),
    )


def _part(shape: BlockShape) -> int:
    """Return a rank's own tokens of a sum, where the sum is scattered."""
    return shape.message_bytes if shape.sequence_parallel else 0


def _weight_gradient(shape: BlockShape, outputs: int, inputs: int) -> int:
    """Return a weight's gradient before it is added to the buffer; none where that is fused.

    Autocast makes it in 16 bit and casts it to fp32.
    """
    if shape.stack.fused_gradient_accumulation:
        return 0
    cast = shape.residual_bytes if shape.casts_weights else 0
    return outputs * inputs * (shape.element_bytes + cast)


def backward_steps(shape: BlockShape, *, keeps_weight_gradients: bool = False) -> tuple[Step, ...]:
    """Return a layer's backward; kept tensors count as negative once they are freed.

    Args:
        shape: Sizes of the layer.
        keeps_weight_gradients: Gradients of weights stay until the layer is done.
    """
    layer = _Layer(
        shape=shape,
        wide=Widths.of(shape),
        kept={tensor.name: tensor.size_bytes for tensor in layer_tensors(shape)},
        stays=keeps_weight_gradients,
    )
    return (*_mlp_backward(layer), *_attention_backward(layer))


class ColumnLayer(NamedTuple):
    """A column-parallel layer: bytes of its outputs' gradient, outputs, separate products."""

    name: str
    gradient: int
    outputs: int
    num_products: int


class _Layer(NamedTuple):
    """What the steps of a layer's backward are read from."""

    shape: BlockShape
    wide: Widths
    kept: dict[str, int]
    stays: bool

    @property
    def dropped(self) -> int:
        """The gradient before a dropout, beside the one after it."""
        return self.wide.local if self.shape.model.dropout else 0

    def row_step(self, name: str, width: int, inputs: int, freed: int) -> Step:
        """Return the backward of a row-parallel product with *inputs* of *width* bytes."""
        weight = _weight_gradient(self.shape, self.shape.model.hidden_size, inputs)
        again = row_backward_bytes(self.shape, inputs)
        leaves = again + weight * (not self.stays) + self.dropped + freed
        return Step(name, again + width + weight, leaves + self.kept.get(f"{name} weights", 0))

    def column_step(self, column: ColumnLayer, kept_input: int) -> Step:
        """Return the backward of a column-parallel layer."""
        operands = column_backward_bytes(self.shape, column.outputs)
        return column_step(self.shape, column, kept_input, operands=operands, stays=self.stays)


def _mlp_backward(layer: _Layer) -> tuple[Step, ...]:
    shape, wide, kept, _ = layer
    separate = shape.model.gated_mlp and not shape.stack.fused_qkv
    column = ColumnLayer("mlp in", wide.mlp_in, shape.mlp_in_width, 2 if separate else 1)
    return (
        Step("gradient", wide.local, 0),
        Step("mlp dropout", layer.dropped, kept["mlp dropout mask"]),
        layer.row_step(
            "mlp out", wide.mlp_out, shape.local_ffn_width, kept["mlp activation output"]
        ),
        Step("mlp activation", wide.mlp_in, wide.mlp_out + kept["mlp activation input"]),
        layer.column_step(column, kept["mlp input"]),
        Step("mlp norm", wide.local, 2 * wide.local + kept["mlp norm statistics"]),
        Step("mlp residual", 0, wide.local),
    )


def _attention_backward(layer: _Layer) -> tuple[Step, ...]:
    shape, wide, kept, _ = layer
    outputs = shape.local_width + 2 * shape.local_kv_width
    column = ColumnLayer("qkv", wide.qkv, outputs, 1 if shape.stack.fused_qkv else 3)
    unfused = shape.attention is Attention.UNFUSED
    freed = kept["attention output"] * (unfused or _keeps_output_apart(shape))
    return (
        Step("attention dropout", layer.dropped, kept["attention dropout mask"]),
        layer.row_step("attention output", wide.core, shape.local_width, freed),
        *(_unfused_core(shape, wide) if unfused else _flash_core(shape, wide, kept)),
        *_packed(shape, wide, kept),
        layer.column_step(column, kept["qkv input"]),
        Step("attention norm", wide.local, 2 * wide.local),
    )


def column_step(
    shape: BlockShape, column: ColumnLayer, kept_input: int, *, operands: int, stays: bool = False
) -> Step:
    """Return the backward of a column-parallel layer: the input again, and its gradient.

    Separate products of one input each make its gradient; the second is added to the first.
    """
    wide = Widths.of(shape)
    widest = column.outputs
    if column.num_products > 1 and not stays:
        widest = shape.local_width if column.name == "qkv" else column.outputs // 2
    weight = _weight_gradient(shape, widest, shape.model.hidden_size)
    copies = min(2, column.num_products)
    allocated = operands + copies * wide.whole + _part(shape) + weight
    leaves = allocated - weight * stays - wide.local
    return Step(column.name, allocated, leaves + column.gradient + kept_input)


def _unfused_core(shape: BlockShape, wide: Widths) -> tuple[Step, ...]:
    """Return the core's backward: value product, dropout, softmax, score product."""
    dropped = wide.scores if shape.model.dropout else 0
    again = _recomputed_core(shape, wide.score_mask + dropped + wide.scores, wide.scores)
    return (
        *again,
        Step("values", wide.scores + wide.key_value, wide.core + dropped),
        Step("probability dropout", dropped, dropped + wide.score_mask),
        Step("softmax", wide.scores, 2 * wide.scores),
        Step("scores", wide.core + wide.key_value, wide.scores),
    )


def _flash_core(shape: BlockShape, wide: Widths, kept: dict[str, int]) -> tuple[Step, ...]:
    statistics = kept["log-sum-exp"]
    output = kept["attention output"]
    if _keeps_output_apart(shape):  # recomputed with the core where that is
        is_kept = shape.recompute is not Recompute.SELECTIVE
        output = kept["attention output in bf16"] * is_kept
    rotated = kept["rotated queries and keys"]
    turned = wide.core + wide.key_value if shape.model.positions == "rotary" else 0
    again = _recomputed_core(shape, wide.core + statistics, 0)
    recomputed = wide.core if again else 0
    return (
        *again,
        Step(
            "attention core",
            wide.qkv,
            wide.core + statistics + rotated + output + recomputed,
        ),
        Step("rotary", turned, turned),
    )


def _recomputed_core(shape: BlockShape, size_bytes: int, transient: int) -> tuple[Step, ...]:
    """Return the core's forward in backward, where only that is recomputed."""
    if shape.recompute is not Recompute.SELECTIVE:
        return ()
    return (Step("core again", size_bytes + transient, transient),)


def _packed(shape: BlockShape, wide: Widths, kept: dict[str, int]) -> tuple[Step, ...]:
    """Return the gradients of queries, keys and values becoming that of a fused product."""
    packed = wide.qkv if shape.stack.fused_qkv else 0
    return (Step("pack qkv", packed, packed + kept["queries, keys and values"]),)


def layer_workspace_bytes(shape: BlockShape) -> tuple[int, int]:
    """Return what the last layer's forward, and the first backward, need beside what is kept."""
    kept = saved_layer_bytes(shape)
    if shape.recompute is not Recompute.FULL:
        return highest(forward_steps(shape)) - kept, highest(backward_steps(shape))
    gradient, *rest = backward_steps(shape)
    again = forward_steps(shape)
    recomputation = (
        gradient,
        again[0]._replace(allocates=again[0].allocates - kept),
        *again[1:-1],
        again[-1]._replace(frees=again[-1].allocates),
    )
    return highest(unkept_forward_steps(shape)), highest((*recomputation, *rest))
