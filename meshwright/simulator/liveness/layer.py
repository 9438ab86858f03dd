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
    layer_tensors,
    saved_layer_bytes,
    saved_tensors,
    unread_tensors,
)
from meshwright.simulator.liveness.products import (
    Product,
    Step,
    cast_row_steps,
    column_steps,
    highest,
    weight_gradient_bytes,
)
from meshwright.simulator.liveness.tensor_bytes import (
    TensorBytes,
    column_backward_bytes,
    forward_operands,
    row_backward_bytes,
    row_forward_bytes,
)

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
    sizes = TensorBytes.of(shape)
    mlp, attention = _outside_core(shape)
    core = sum(tensor.size_bytes for tensor in attention_core_tensors(shape))
    recomputed = core if shape.recompute is Recompute.SELECTIVE else 0
    kept = shape.num_tokens * shape.local_width * shape.linear_input_bytes
    # Flash attention whose output is kept apart has it already; unfused, it is copied once.
    outputs = 2 if shape.attention is Attention.UNFUSED else int(not _keeps_output_apart(shape))
    output = outputs * sizes.core + row_forward_bytes(shape, shape.local_width)
    summed = sizes.whole + sizes.scattered
    cast = row_forward_bytes(shape, shape.local_ffn_width)
    cast += sizes.mlp_out - sizes.mlp_out // shape.element_bytes * shape.linear_input_bytes
    norm = sizes.local if shape.casts_weights else 0  # what is kept of it is its 16-bit copies
    return (
        Step("before the core", attention - kept + norm, 0),
        Step("scores", sizes.scores, 0),
        Step("core", core, sizes.scores),
        Step("core output", output, output - kept + recomputed),
        Step("attention output", summed, summed + norm),
        Step("mlp", mlp + norm, 0),
        Step("mlp out", sizes.whole + sizes.local + cast, cast + norm),
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
    sizes = TensorBytes.of(shape)
    norm = sizes.local
    unfused = shape.attention is Attention.UNFUSED
    mask = sizes.score_mask
    dropped = sizes.scores if shape.model.dropout else 0
    output = sizes.whole + sizes.scattered
    qkv, of_core, mlp_in, of_mlp = forward_operands(shape)
    return (
        Step("attention norm", norm, 0),
        Step("qkv", qkv.size_bytes + sizes.qkv, qkv.freed),
        Step("softmax", sizes.repeated + 2 * sizes.scores, sizes.scores),
        Step("attention dropout", dropped + mask, dropped + mask),
        Step(
            "core",
            sizes.core * (1 + unfused),
            sizes.core * unfused + sizes.scores + sizes.repeated + sizes.qkv,
        ),
        Step("attention output", output + of_core.size_bytes, of_core.freed + sizes.core + norm),
        Step("attention residual", sizes.local, output),
        Step("mlp norm", norm, 0),
        Step("mlp in", mlp_in.size_bytes + sizes.mlp_in, mlp_in.freed),
        Step("mlp activation", sizes.mlp_out, sizes.mlp_in),
        Step("mlp out", output + of_mlp.size_bytes, of_mlp.freed + norm + sizes.mlp_out),
        Step("mlp residual", sizes.local, output + sizes.local),
    )


def backward_steps(
    shape: BlockShape, *, keeps_weight_gradients: bool = False, from_buffer: bool = False
) -> tuple[Step, ...]:
    """Return a layer's backward; kept tensors count as negative once they are freed.

    Args:
        shape: Sizes of the layer.
        keeps_weight_gradients: Gradients of weights stay until the layer is done.
        from_buffer: The gradient of its output lies in a buffer that is counted elsewhere.
    """
    layer = _LayerBackward(
        shape=shape,
        sizes=TensorBytes.of(shape),
        kept={tensor.name: tensor.size_bytes for tensor in layer_tensors(shape)},
        stays=keeps_weight_gradients,
        arriving=0 if from_buffer else shape.message_bytes,
    )
    return (*_mlp_backward(layer), *_attention_backward(layer))


class _LayerBackward(NamedTuple):
    """What the steps of a layer's backward are read from."""

    shape: BlockShape
    sizes: TensorBytes
    kept: dict[str, int]
    stays: bool
    arriving: int

    @property
    def dropped(self) -> int:
        """The gradient of a block's output that is not the residual stream's: dropped or cast."""
        if self.shape.casts_weights:
            return self.sizes.whole
        return self.sizes.local if self.shape.model.dropout else 0

    def dropout_step(self, name: str) -> Step:
        """Return the backward of a dropout, and of the cast after it."""
        # The stream's gradient is cast to 16 bit, from which dropout makes another of that size.
        casts = self.dropped if self.shape.casts_weights and self.shape.model.dropout else 0
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
        arrived = 0 if self.stays else weight
        frees = again + arrived + product.gradient_bytes + freed
        return (Step(product.name, again + inputs_bytes + weight, frees, gradient=arrived),)

    def column_steps(self, product: Product, kept_input: int) -> tuple[Step, ...]:
        """Return the backward of a column-parallel layer."""
        operands = column_backward_bytes(self.shape, sum(product.outputs))
        return column_steps(self.shape, product, kept_input, operands=operands, stays=self.stays)


def _mlp_backward(layer: _LayerBackward) -> tuple[Step, ...]:
    shape, sizes, kept, _, arriving = layer
    hidden, ffn = shape.model.hidden_size, shape.local_ffn_width
    separate = shape.model.gated_mlp and not shape.stack.fused_qkv
    outputs = (ffn, ffn) if separate else (shape.mlp_in_width,)
    row = Product("mlp out", layer.dropped, ffn, (hidden,))
    return (
        # It lives to the end, where the norm's input adds its own gradient to it.
        Step("gradient", arriving, 0),
        layer.dropout_step("mlp dropout"),
        *layer.row_steps(row, sizes.mlp_out, kept["mlp activation output"]),
        Step("mlp activation", sizes.mlp_in, sizes.mlp_out + kept["mlp activation input"]),
        *layer.column_steps(Product("mlp in", sizes.mlp_in, hidden, outputs), kept["mlp input"]),
        Step("mlp norm", sizes.local, 2 * sizes.local + kept["mlp norm statistics"]),
        Step("mlp residual", 0, arriving),
    )


def _attention_backward(layer: _LayerBackward) -> tuple[Step, ...]:
    shape, sizes, kept, _, _ = layer
    hidden, width, kv_width = shape.model.hidden_size, shape.local_width, shape.local_kv_width
    outputs = (width + 2 * kv_width,) if shape.stack.fused_qkv else (kv_width, kv_width, width)
    row = Product("attention output", layer.dropped, width, (hidden,))
    unfused = shape.attention is Attention.UNFUSED
    # Flash attention reads the product's input once more: it goes with the core.
    freed = kept["attention output"] if unfused or _keeps_output_apart(shape) else 0
    return (
        layer.dropout_step("attention dropout"),
        *layer.row_steps(row, sizes.core, freed),
        *(_unfused_core(shape, sizes, kept) if unfused else _flash_core(shape, sizes, kept)),
        *_packed(shape, sizes, kept),
        *layer.column_steps(Product("qkv", sizes.qkv, hidden, outputs), kept["qkv input"]),
        Step("attention norm", sizes.local, 2 * sizes.local),
        Step("attention residual", 0, sizes.local + kept["attention norm statistics"]),
    )


def _unfused_core(shape: BlockShape, sizes: TensorBytes, kept: dict[str, int]) -> tuple[Step, ...]:
    """Return the core's backward: value product, dropout, softmax, score product, repeats."""
    dropped = sizes.scores if shape.model.dropout else 0
    copies = sizes.repeated // 2
    value = copies or sizes.key_value
    alone = _freed_with_values(shape, kept)
    again = _recomputed_core(
        shape, sizes.repeated + sizes.score_mask + dropped + sizes.scores, sizes.scores
    )
    return (
        *again,
        Step("values", sizes.scores + value, sizes.core + dropped + copies + alone),
        Step("probability dropout", dropped, dropped + sizes.score_mask),
        Step("softmax", sizes.scores, 2 * sizes.scores),
        Step("scores", sizes.core + value, sizes.scores + copies),
        # The gradients of copies are summed to those of the heads they were made of.
        Step("repeats", 2 * sizes.key_value if copies else 0, 2 * copies),
        _rotary_step(shape, sizes, kept["rotated queries and keys"]),
    )


def _rotary_step(shape: BlockShape, sizes: TensorBytes, freed: int) -> Step:
    """Return the gradients of queries and keys being turned back."""
    turned = sizes.core + sizes.key_value if shape.model.positions == "rotary" else 0
    return Step("rotary", turned, turned + freed)


def _flash_core(shape: BlockShape, sizes: TensorBytes, kept: dict[str, int]) -> tuple[Step, ...]:
    statistics = kept["log-sum-exp"]
    output = kept["attention output"]
    if _keeps_output_apart(shape):  # recomputed with the core where that is
        is_again = shape.recompute is Recompute.SELECTIVE
        output = 0 if is_again else kept["attention output in bf16"]
    rotated = kept["rotated queries and keys"]
    again = _recomputed_core(shape, sizes.core + statistics, 0)
    recomputed = sizes.core if again else 0
    return (
        *again,
        Step(
            "attention core",
            sizes.qkv,
            sizes.core + statistics + rotated + output + recomputed,
        ),
        _rotary_step(shape, sizes, 0),
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


def _packed(shape: BlockShape, sizes: TensorBytes, kept: dict[str, int]) -> tuple[Step, ...]:
    """Return the gradients of queries, keys and values becoming that of a fused product."""
    packed = sizes.qkv if shape.stack.fused_qkv else 0
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
            # Its input is there, as what was kept.  The output is made a second time and dropped at
            # once: the layer behind has long had the first.
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
