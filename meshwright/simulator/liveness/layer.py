"""What lives for a moment in a pass through a layer, step by step.

Each step allocates, then runs, then frees; the highest level over the steps is what a block
needs beside the tensors that wait for backward.  The steps follow the order in which PyTorch's
autograd runs and frees: a node's saved tensors go when its backward has run, the gradient that
arrives when the node that received it has.
"""

from typing import NamedTuple

from meshwright.hwprofiles import Attention, Recompute
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.liveness.activations import (
    attention_core_tensors,
    cast_weights,
    layer_tensors,
    saved_layer_bytes,
    saved_tensors,
    unread_tensors,
)
from meshwright.simulator.liveness.fp8_operands import (
    column_backward_bytes,
    column_forward_bytes,
    row_backward_bytes,
    row_forward_bytes,
)
from meshwright.simulator.liveness.products import (
    Product,
    Step,
    cast_column_steps,
    cast_row_steps,
    highest,
    weight_gradient_bytes,
)
from meshwright.simulator.liveness.widths import Widths

# Where a pass that keeps nothing frees the output of an operator: of a product, a sum, the core.
FREED_IN = {
    **dict.fromkeys(("queries", "keys", "values"), "core"),
    "core output": "attention output",
    **dict.fromkeys(("attention output", "reduced attention output"), "attention residual"),
    **dict.fromkeys(("mlp gate", "mlp in"), "mlp activation"),
    **dict.fromkeys(("mlp out", "reduced mlp out"), "mlp residual"),
}


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
    norm = wide.local if shape.casts_weights else 0  # what is kept of it is its 16-bit copies
    return (
        Step("before the core", attention - kept + norm, 0),
        Step("scores", wide.scores, 0),
        Step("core", core, wide.scores),
        Step("core output", output, output - kept + recomputed),
        Step("attention output", summed, summed + norm),
        Step("mlp", mlp + norm, 0),
        Step("mlp out", wide.whole + wide.local + cast, cast + norm),
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

    A block's normalised input lives until the block returns, what autocast has cast of its
    weights longer.
    """
    wide = Widths.of(shape)
    norm = wide.local
    unfused = shape.attention is Attention.UNFUSED
    mask = wide.score_mask
    dropped = wide.scores if shape.model.dropout else 0
    output = wide.whole + _part(shape)
    qkv, of_core, mlp_in, of_mlp = _forward_operands(shape)
    return (
        Step("attention norm", norm, 0),
        Step("qkv", qkv.size_bytes + wide.qkv, qkv.freed),
        Step("softmax", wide.repeated + 2 * wide.scores, wide.scores),
        Step("attention dropout", dropped + mask, wide.scores * bool(dropped) + mask),
        Step(
            "core",
            wide.core * (1 + unfused),
            wide.core * unfused + wide.scores + wide.repeated + wide.qkv,
        ),
        Step("attention output", output + of_core.size_bytes, of_core.freed + wide.core + norm),
        Step("attention residual", wide.local, output),
        Step("mlp norm", norm, 0),
        Step("mlp in", mlp_in.size_bytes + wide.mlp_in, mlp_in.freed),
        Step("mlp activation", wide.mlp_out, wide.mlp_in),
        Step("mlp out", output + of_mlp.size_bytes, of_mlp.freed + norm + wide.mlp_out),
        Step("mlp residual", wide.local, output + wide.local),
    )


class _Operands(NamedTuple):
    """Copies of a product's operands in another format, and what of them goes with the product."""

    size_bytes: int
    freed: int


def _forward_operands(shape: BlockShape) -> tuple[_Operands, ...]:
    """Return the copies of the four products' operands, for fp8 or under autocast."""
    fp8 = (
        column_forward_bytes(shape, shape.local_width + 2 * shape.local_kv_width),
        row_forward_bytes(shape, shape.local_width),
        column_forward_bytes(shape, shape.mlp_in_width),
        row_forward_bytes(shape, shape.local_ffn_width),
    )
    if not shape.casts_weights:
        return tuple(_Operands(size, size) for size in fp8)
    # The inputs of the second and the fourth are in 16 bit as they come.
    copies = (shape.num_tokens * shape.model.hidden_size * shape.element_bytes, 0) * 2
    weights = [tensor.size_bytes for tensor in cast_weights(shape)]
    return tuple(
        _Operands(copy + weight, copy + weight * (not shape.caches_casts))
        for copy, weight in zip(copies, weights, strict=True)
    )


def _part(shape: BlockShape) -> int:
    """Return a rank's own tokens of a sum, where the sum is scattered."""
    return shape.message_bytes if shape.sequence_parallel else 0


def backward_steps(
    shape: BlockShape, *, keeps_weight_gradients: bool = False, from_buffer: bool = False
) -> tuple[Step, ...]:
    """Return a layer's backward; kept tensors count as negative once they are freed.

    Args:
        shape: Sizes of the layer.
        keeps_weight_gradients: Gradients of weights stay until the layer is done.
        from_buffer: The gradient of its output lies in a buffer that is counted elsewhere.
    """
    layer = _Layer(
        shape=shape,
        wide=Widths.of(shape),
        kept={tensor.name: tensor.size_bytes for tensor in layer_tensors(shape)},
        stays=keeps_weight_gradients,
        arriving=0 if from_buffer else shape.message_bytes,
    )
    return (*_mlp_backward(layer), *_attention_backward(layer))


class _Layer(NamedTuple):
    """What the steps of a layer's backward are read from."""

    shape: BlockShape
    wide: Widths
    kept: dict[str, int]
    stays: bool
    arriving: int

    @property
    def dropped(self) -> int:
        """The gradient of a block's output that is not the residual stream's: dropped or cast."""
        if self.shape.casts_weights:
            return self.wide.whole
        return self.wide.local if self.shape.model.dropout else 0

    def dropout_step(self, name: str) -> Step:
        """Return the backward of a dropout, and of the cast after it."""
        casts = self.dropped * bool(self.shape.casts_weights and self.shape.model.dropout)
        return Step(name, self.dropped + casts, casts + self.kept[f"{name} mask"])

    def row_steps(self, product: Product, inputs_bytes: int, freed: int) -> tuple[Step, ...]:
        """Return the backward of a row-parallel product with *inputs_bytes* of inputs."""
        freed += self.kept.get(f"{product.name} weights", 0)
        if self.shape.casts_weights:
            return cast_row_steps(
                self.shape, product, inputs_bytes=inputs_bytes, freed=freed, stays=self.stays
            )
        weight = weight_gradient_bytes(self.shape, product.inputs * sum(product.outputs))
        again = row_backward_bytes(self.shape, product.inputs)
        arrived = weight * (not self.stays)
        frees = again + arrived + product.gradient_bytes + freed
        return (Step(product.name, again + inputs_bytes + weight, frees, gradient=arrived),)

    def column_steps(self, product: Product, kept_input: int) -> tuple[Step, ...]:
        """Return the backward of a column-parallel layer."""
        operands = column_backward_bytes(self.shape, sum(product.outputs))
        return column_steps(self.shape, product, kept_input, operands=operands, stays=self.stays)


def _mlp_backward(layer: _Layer) -> tuple[Step, ...]:
    shape, wide, kept, _, arriving = layer
    hidden, ffn = shape.model.hidden_size, shape.local_ffn_width
    separate = shape.model.gated_mlp and not shape.stack.fused_qkv
    outputs = (ffn, ffn) if separate else (shape.mlp_in_width,)
    row = Product("mlp out", layer.dropped, ffn, (hidden,))
    return (
        Step("gradient", arriving, 0),
        layer.dropout_step("mlp dropout"),
        *layer.row_steps(row, wide.mlp_out, kept["mlp activation output"]),
        Step("mlp activation", wide.mlp_in, wide.mlp_out + kept["mlp activation input"]),
        *layer.column_steps(Product("mlp in", wide.mlp_in, hidden, outputs), kept["mlp input"]),
        Step("mlp norm", wide.local, 2 * wide.local + kept["mlp norm statistics"]),
        Step("mlp residual", 0, arriving),
    )


def _attention_backward(layer: _Layer) -> tuple[Step, ...]:
    shape, wide, kept, _, _ = layer
    hidden, width, kv_width = shape.model.hidden_size, shape.local_width, shape.local_kv_width
    outputs = (width + 2 * kv_width,) if shape.stack.fused_qkv else (kv_width, kv_width, width)
    row = Product("attention output", layer.dropped, width, (hidden,))
    unfused = shape.attention is Attention.UNFUSED
    freed = kept["attention output"] * (unfused or _keeps_output_apart(shape))
    return (
        layer.dropout_step("attention dropout"),
        *layer.row_steps(row, wide.core, freed),
        *(_unfused_core(shape, wide, kept) if unfused else _flash_core(shape, wide, kept)),
        *_packed(shape, wide, kept),
        *layer.column_steps(Product("qkv", wide.qkv, hidden, outputs), kept["qkv input"]),
        Step("attention norm", wide.local, 2 * wide.local),
        Step("attention residual", 0, wide.local + kept["attention norm statistics"]),
    )


def column_steps(
    shape: BlockShape, product: Product, kept_input: int, *, operands: int, stays: bool = False
) -> tuple[Step, ...]:
    """Return the backward of a column-parallel layer: the input again, and its gradient.

    Separate products of one input each make its gradient; the second is added to the first.
    """
    if shape.casts_weights:
        return cast_column_steps(shape, product, shape.num_tokens, stays=stays)
    wide = Widths.of(shape)
    outputs = sum(product.outputs) if stays else max(product.outputs)
    weight = weight_gradient_bytes(shape, outputs * product.inputs)
    copies = min(2, len(product.outputs))
    allocated = operands + copies * wide.whole + _part(shape) + weight
    leaves = allocated - weight * stays - wide.local
    arrived = weight * (not stays)
    frees = leaves + product.gradient_bytes + kept_input
    return (Step(product.name, allocated, frees, gradient=arrived),)


def _unfused_core(shape: BlockShape, wide: Widths, kept: dict[str, int]) -> tuple[Step, ...]:
    """Return the core's backward: value product, dropout, softmax, score product, repeats."""
    dropped = wide.scores if shape.model.dropout else 0
    copies = wide.repeated // 2
    value = copies or wide.key_value
    alone = _freed_with_values(shape, kept)
    again = _recomputed_core(
        shape, wide.repeated + wide.score_mask + dropped + wide.scores, wide.scores
    )
    return (
        *again,
        Step("values", wide.scores + value, wide.core + dropped + copies + alone),
        Step("probability dropout", dropped, dropped + wide.score_mask),
        Step("softmax", wide.scores, 2 * wide.scores),
        Step("scores", wide.core + value, wide.scores + copies),
        Step("repeats", 2 * wide.key_value * bool(copies), 2 * copies),
        _rotary_step(shape, wide, kept["rotated queries and keys"]),
    )


def _rotary_step(shape: BlockShape, wide: Widths, freed: int) -> Step:
    """Return the gradients of queries and keys being turned back."""
    turned = wide.core + wide.key_value if shape.model.positions == "rotary" else 0
    return Step("rotary", turned, turned + freed)


def _flash_core(shape: BlockShape, wide: Widths, kept: dict[str, int]) -> tuple[Step, ...]:
    statistics = kept["log-sum-exp"]
    output = kept["attention output"]
    if _keeps_output_apart(shape):  # recomputed with the core where that is
        is_kept = shape.recompute is not Recompute.SELECTIVE
        output = kept["attention output in bf16"] * is_kept
    rotated = kept["rotated queries and keys"]
    again = _recomputed_core(shape, wide.core + statistics, 0)
    recomputed = wide.core if again else 0
    return (
        *again,
        Step(
            "attention core",
            wide.qkv,
            wide.core + statistics + rotated + output + recomputed,
        ),
        _rotary_step(shape, wide, 0),
    )


def _recomputed_core(shape: BlockShape, size_bytes: int, transient: int) -> tuple[Step, ...]:
    """Return the core's forward in backward, where only that is recomputed."""
    if shape.recompute is not Recompute.SELECTIVE:
        return ()
    return (Step("core again", size_bytes + transient, transient),)


def _freed_with_values(shape: BlockShape, kept: dict[str, int]) -> int:
    """Return what the products' outputs keep, where the values alone have a use for it."""
    turned = kept["rotated queries and keys"] and shape.recompute is not Recompute.SELECTIVE
    is_early = turned and shape.attention is Attention.UNFUSED
    return kept["queries, keys and values"] if is_early else 0


def _packed(shape: BlockShape, wide: Widths, kept: dict[str, int]) -> tuple[Step, ...]:
    """Return the gradients of queries, keys and values becoming that of a fused product."""
    packed = wide.qkv if shape.stack.fused_qkv else 0
    freed = kept["queries, keys and values"] - _freed_with_values(shape, kept)
    return (Step("pack qkv", packed, packed + freed),)


def whole_backward_steps(
    shape: BlockShape, *, keeps_weight_gradients: bool = False, from_buffer: bool = False
) -> tuple[Step, ...]:
    """Return a layer's backward as `backward_steps`, after a forward where that is recomputed."""
    gradient, *rest = backward_steps(
        shape, keeps_weight_gradients=keeps_weight_gradients, from_buffer=from_buffer
    )
    return (gradient, *_recomputation(shape), *rest)


def layer_workspace_bytes(
    shape: BlockShape, *, keeps_weight_gradients: bool = False
) -> tuple[int, int]:
    """Return what the last layer's forward, and the first backward, need beside what is kept."""
    backward = layer_backward_bytes(shape, keeps_weight_gradients=keeps_weight_gradients)
    match shape.recompute:
        case Recompute.FULL:
            return highest(unkept_forward_steps(shape)), backward
        case Recompute.SELECTIVE_OP:
            return highest(_operators_forward(shape)), backward
        case Recompute.NONE | Recompute.SELECTIVE:
            return highest(forward_steps(shape)) - saved_layer_bytes(shape), backward


def layer_backward_bytes(
    shape: BlockShape, *, keeps_weight_gradients: bool = False, from_buffer: bool = False
) -> int:
    """Return what a layer's backward needs beside what is kept; arguments of `backward_steps`."""
    return highest(
        whole_backward_steps(
            shape, keeps_weight_gradients=keeps_weight_gradients, from_buffer=from_buffer
        )
    )


def _recomputation(shape: BlockShape) -> tuple[Step, ...]:
    """Return what of a layer's forward runs again when the gradient of its output is there."""
    kept = saved_layer_bytes(shape)
    match shape.recompute:
        case Recompute.FULL:
            first, *steps, last = forward_steps(shape)
            whole = sum(step.allocates - step.frees for step in (first, *steps, last))
            dropped = whole - sum(tensor.size_bytes for tensor in layer_tensors(shape))
            first = first._replace(allocates=first.allocates - kept)
            return (first, *steps, last._replace(frees=last.frees + dropped))
        case Recompute.SELECTIVE_OP:
            needed = (*layer_tensors(shape), *unread_tensors(shape))
            size_bytes = sum(tensor.size_bytes for tensor in needed) - kept
            return (Step("operators again", size_bytes, 0),)
        case Recompute.NONE | Recompute.SELECTIVE:
            return ()


def _operators_forward(shape: BlockShape) -> tuple[Step, ...]:
    """Return a layer's forward that keeps what some operators give out, which counts as there."""
    stays = dict.fromkeys(FREED_IN.values(), 0)
    for tensor in saved_tensors(shape):
        if tensor.name in FREED_IN:
            stays[FREED_IN[tensor.name]] += tensor.size_bytes
    steps = unkept_forward_steps(shape)
    return (
        Step("kept", -sum(stays.values()), 0),
        *(step._replace(frees=step.frees - stays.get(step.name, 0)) for step in steps),
    )
