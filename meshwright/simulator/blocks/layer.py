"""From shapes to operators: what one microbatch runs in a layer, and what blocks share.

Element-wise traffic is counted per token of width h, 16-bit unless the precision says
otherwise.  Forward: a norm reads and writes (2 values), a residual add with dropout moves 3
values and a mask byte.  Backward: a norm moves 5 values, a residual add 3, dropout 2 and a
mask byte, a bias gradient 1.
"""

from dataclasses import replace

from meshwright.hwprofiles import Attention, CollectiveOp, Recompute
from meshwright.simulator.blocks.fp8_casts import backward_casts, forward_casts
from meshwright.simulator.blocks.operators import (
    BlockOperators,
    Collective,
    FlashAttention,
    Gemm,
    HostPasses,
    KernelLaunches,
    MemoryBound,
    Operator,
    gemm_backward,
)
from meshwright.simulator.blocks.recompute_policy import repeated_products
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.layout import (
    Axis,
    PairCommunication,
    Redistribution,
    Replicate,
    Split,
    linear_pair_communication,
)
from meshwright.simulator.model import TRANSFORMER_LAYER


def pair_communication(shape: BlockShape) -> PairCommunication:
    """Return the collectives around each column / row parallel pair, from the placements."""
    outside = Split(0) if shape.sequence_parallel else Replicate()
    return linear_pair_communication(activations=outside)


def tp_collective(
    shape: BlockShape,
    change: Redistribution | None,
    name: str,
    hides_under: Gemm | None = None,
    *,
    of_linear: bool = False,
) -> tuple[Operator, ...]:
    """Return the collective that a change of placement on the tp axis costs, if any.

    What is gathered *of_linear*, an operand of a layer's linear products, may be cast before.
    """
    if change is None or change.op is None or shape.tp == 1:
        return ()
    gathers = of_linear and change.op is CollectiveOp.ALL_GATHER
    element_bytes = shape.gathered_bytes if gathers else shape.element_bytes
    size_bytes = shape.num_tokens * shape.model.hidden_size * element_bytes
    return (Collective(name, change.op, size_bytes, Axis.TP, hides_under),)


def layer_operators(shape: BlockShape) -> BlockOperators:
    """Return the operators of one transformer layer on one rank."""
    comm = pair_communication(shape)
    attention_forward, attention_backward = _attention_core(shape)
    linears = _layer_linears(shape)
    gather = tp_collective(shape, comm.forward_in, "tp forward gather", of_linear=True)
    reduce = tp_collective(shape, comm.forward_out, "tp forward reduce")
    products = (*linears, *(item for item in attention_forward if isinstance(item, Gemm)))
    forward: tuple[Operator, ...] = (
        *gather,
        linears[0],
        *attention_forward,
        linears[1],
        *reduce,
        *gather,
        linears[2],
        linears[3],
        *reduce,
        *forward_casts(shape, linears),
        *_layer_elementwise(shape, backward=False),
        KernelLaunches("layer forward", shape.stack.forward_kernels_per_layer + len(products)),
        HostPasses("layer forward", 1),
    )
    return BlockOperators(
        forward=forward,
        backward=_layer_backward(shape, comm, linears, attention_backward),
        recompute=_recomputed(shape, forward, attention_forward),
    )


def _layer_linears(shape: BlockShape) -> tuple[Gemm, Gemm, Gemm, Gemm]:
    hidden, tokens = shape.model.hidden_size, shape.num_tokens
    qkv = shape.local_width + 2 * shape.local_kv_width
    is_fp8 = shape.fp8 is not None
    return (
        Gemm("qkv", m=tokens, n=qkv, k=hidden, is_fp8=is_fp8),
        Gemm("attention output", m=tokens, n=hidden, k=shape.local_width, is_fp8=is_fp8),
        Gemm("mlp in", m=tokens, n=shape.mlp_in_width, k=hidden, is_fp8=is_fp8),
        Gemm("mlp out", m=tokens, n=hidden, k=shape.local_ffn_width, is_fp8=is_fp8),
    )


def _layer_backward(
    shape: BlockShape,
    comm: PairCommunication,
    linears: tuple[Gemm, Gemm, Gemm, Gemm],
    attention: tuple[Operator, ...],
) -> tuple[Operator, ...]:
    qkv, output, mlp_in, mlp_out = linears
    gemms = [item for item in attention if isinstance(item, Gemm)]
    num_products = 2 * len(linears) + len(gemms)
    gather = tp_collective(shape, comm.backward_out, "tp backward gather", of_linear=True)
    return (
        *gather,
        *gemm_backward(mlp_out),
        *column_backward(shape, comm, mlp_in),
        *gather,
        *gemm_backward(output),
        *attention,
        *column_backward(shape, comm, qkv),
        *backward_casts(shape, linears),
        *_layer_elementwise(shape, backward=True),
        accumulation(shape, shape.parameters[TRANSFORMER_LAYER]),
        *norm_reductions(shape, 2),
        KernelLaunches("layer backward", shape.stack.backward_kernels_per_layer + num_products),
        HostPasses("layer backward", 2),
    )


def column_backward(
    shape: BlockShape, comm: PairCommunication, forward: Gemm
) -> tuple[Operator, ...]:
    """Return the backward of a column-parallel layer.

    The re-gather of the input may run under the input gradient, the reduction of that
    gradient under the weight gradient (Megatron-LM's asynchronous linear layer).
    """
    input_gradient, weight_gradient = gemm_backward(forward)
    regather: tuple[Operator, ...] = ()
    if not shape.stack.keeps_gathered_inputs:
        regather = tp_collective(
            shape,
            comm.weight_gradient_regather,
            "tp backward re-gather",
            input_gradient,
            of_linear=forward.is_fp8,
        )
    return (
        *regather,
        input_gradient,
        *tp_collective(shape, comm.backward_in, "tp backward reduce", weight_gradient),
        weight_gradient,
    )


def _attention_core(shape: BlockShape) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    seq_len, dim, causal = shape.seq_len, shape.model.head_dim, shape.model.causal
    batch = shape.microbatch_size * shape.num_local_heads
    if shape.attention is Attention.FLASH:
        call = FlashAttention("attention", batch, seq_len, dim, causal=causal)
        return (call,), (replace(call, name="attention gradient", backward=True),)
    scores = Gemm("scores", m=seq_len, n=seq_len, k=dim, batch=batch, is_attention=True)
    values = Gemm("values", m=seq_len, n=dim, k=seq_len, batch=batch, is_attention=True)
    num_scores = batch * seq_len**2
    width = shape.element_bytes
    # Causal masking skips half of the reads: softmax 1/2 read + 1 write; dropout reads the
    # probabilities, writes them and a mask byte; backward 2 reads and 3 writes of half rows.
    softmax = num_scores * (3 if causal else 4) * width // 2
    dropout = num_scores * (2 * width + 1) if shape.model.dropout else 0
    gradient = num_scores * (5 if shape.model.dropout else 4) * width
    return (
        (scores, MemoryBound("softmax and dropout", softmax + dropout), values),
        (
            *gemm_backward(values),
            MemoryBound("softmax and dropout gradient", gradient),
            *gemm_backward(scores),
        ),
    )


def _layer_elementwise(shape: BlockShape, *, backward: bool) -> tuple[Operator, ...]:
    model = shape.model
    suffix = " gradient" if backward else ""
    if backward:
        outside = 2 * (5 + 3 + 2 * model.dropout) + model.output_bias + model.mlp_bias
    else:
        outside = 2 * (2 + 3)
    element = shape.num_local_tokens * model.hidden_size
    outside_bytes = element * (outside * shape.element_bytes + 2 * model.dropout)
    inside = _inside_values(shape, backward=backward) * shape.num_tokens * shape.element_bytes
    return (
        MemoryBound("norms and residuals" + suffix, outside_bytes),
        MemoryBound("activation and layout" + suffix, inside),
    )


def _inside_values(shape: BlockShape, *, backward: bool) -> int:
    """Return the values a token moves in element-wise kernels of the tensor-parallel region.

    The activation function reads and writes the MLP width (backward: the gradient, its
    inputs, the result); rotary embeddings read and write queries and keys; unfused attention
    also transposes and adds biases: 8 widths forward, 14 backward.
    """
    model = shape.model
    ffn, width, kv_width = shape.local_ffn_width, shape.local_width, shape.local_kv_width
    if model.gated_mlp:
        values = (5 if backward else 3) * ffn
    else:
        values = (3 + model.mlp_bias if backward else 2) * ffn
    if model.positions == "rotary":
        values += 2 * (width + kv_width)
    if shape.attention is Attention.UNFUSED:
        values += (14 if backward else 8) * width
    elif backward and model.attention_bias:
        values += width + 2 * kv_width
    return values


def norm_reductions(shape: BlockShape, num_norms: int) -> tuple[Operator, ...]:
    """Return the sums of norm gradients over the ranks where every microbatch has its own.

    With sequence parallelism a rank's norms see its own tokens alone.
    """
    sums = shape.stack.sums_norms_each_microbatch and not shape.defers_sums
    if not (shape.sequence_parallel and sums):
        return ()
    size_bytes = shape.model.hidden_size * shape.element_bytes
    tensors = num_norms * (2 if shape.model.norm == "layernorm" else 1)
    return (Collective("tp norm reduce", CollectiveOp.ALL_REDUCE, size_bytes, Axis.TP),) * tensors


def accumulation(shape: BlockShape, num_parameters: int) -> MemoryBound:
    """Return the traffic of adding a microbatch's weight gradients to the gradient buffer.

    Fused, it is part of the weight-gradient products.
    """
    fused = shape.stack.fused_gradient_accumulation
    per_parameter = 0 if fused else shape.stack.accumulation_traffic_bytes
    return MemoryBound("gradient accumulation", num_parameters * per_parameter)


def _recomputed(
    shape: BlockShape, forward: tuple[Operator, ...], attention: tuple[Operator, ...]
) -> tuple[Operator, ...]:
    match shape.recompute:
        case Recompute.NONE:
            return ()
        case Recompute.FULL:
            return _until_last_kept(shape, forward)
        case Recompute.SELECTIVE:
            return (*attention, KernelLaunches("attention recompute", len(attention)))
        case Recompute.SELECTIVE_OP:
            return _operators_again(shape)


def _operators_again(shape: BlockShape) -> tuple[Operator, ...]:
    """Return what runs again where the outputs of some operators are kept (`operator_policy`)."""
    comm = pair_communication(shape)
    is_fp8 = shape.fp8 is not None
    products = tuple(
        Gemm(each.name, m=shape.num_tokens, n=each.outputs, k=each.inputs, is_fp8=is_fp8)
        for each in repeated_products(shape.model, tp=shape.tp, is_fp8=is_fp8)
    )
    gather = tp_collective(shape, comm.forward_in, "tp recomputed gather", of_linear=True)
    # What was scattered is kept; without dropout nothing reads the second sum.
    num_sums = 0 if shape.sequence_parallel else 1 + shape.model.dropout
    num_kernels = shape.stack.forward_kernels_per_layer + len(products)
    return (
        *(2 * gather),
        *products,
        *(num_sums * tp_collective(shape, comm.forward_out, "tp recomputed reduce")),
        *forward_casts(shape, products),
        *_layer_elementwise(shape, backward=False),
        KernelLaunches("layer recompute", num_kernels),
        HostPasses("layer recompute", 1),
    )


def _until_last_kept(shape: BlockShape, forward: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return a layer's forward up to the last tensor that backward reads.

    Without dropout that is the input of the last product, which need not run again.
    """
    if shape.model.dropout or not shape.stack.recompute_stops_early:
        return forward
    last = next(index for index, each in enumerate(forward) if each.name == "mlp out")
    is_collective = last + 1 < len(forward) and isinstance(forward[last + 1], Collective)
    return (*forward[:last], *forward[last + 1 + is_collective :])
