"""What PyTorch computes, keeps and holds in one pass through a module, counted on fake tensors.

The witness of `meshwright.simulator.graph`: it knows nothing of it. Bytes are beside weights. What
counts is what a pass allocates: its inputs from when they are there, the gradient of its output,
which arrives in a tensor of its own, and gradients of weights as long as they are kept.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import set_checkpoint_early_stop

from meshwright.hwprofiles import Precision
from meshwright.simulator.blocks import BlockShape, fuses_qkv
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.programs.fused import (
    AutogradFunction,
    Context,
    accumulate_weight_gradient,
)
from meshwright.validate.programs.layers import Ends, LayerOptions, VirtualStage
from meshwright.validate.programs.layers.transformer import DROPOUT
from meshwright.validate.programs.megatron import (
    DTYPES,
    MegatronParts,
    TensorParallelGroup,
    default_dtype,
    vocabulary_loss,
)
from meshwright.validate.programs.pytorch import autocast, plain_parts
from meshwright.validate.programs.pytorch.loss import loss_context, token_loss
from meshwright.validate.programs.pytorch.tensor_parallel import split_over_tensor_ranks
from meshwright.validate.ranks import CollectiveCount

Run = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One pass forward and backward of one microbatch.

    Args:
        saved_bytes: Kept from forward for backward.
        forward_peak_bytes: Most that live in forward, inputs among them.
        backward_peak_bytes: Most that live in backward, with what is kept and what arrives.
        left_bytes: Gradients of inputs, and of weights where those are kept.
        forward_flops: Of matrix products, convolutions and attention.
        backward_flops: The same, with what is computed again.
        forward_calls: Collectives.
        backward_calls: The same.
    """

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    left_bytes: int
    forward_flops: int
    backward_flops: int
    forward_calls: tuple[CollectiveCount, ...] = ()
    backward_calls: tuple[CollectiveCount, ...] = ()


class Given(NamedTuple):
    """An input of a pass; gradients of those that are numbers are kept until its end."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


class _Begin(AutogradFunction):
    """Makes an input that no leaf holds, and hands its gradient over without a copy."""

    @staticmethod
    def forward(ctx: Context, leaf: Tensor, given: Given, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return leaf.new_empty(given.shape, dtype=given.dtype)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[None, ...]:
        ctx.gradients.append(gradient)
        return None, None, None


class _End(AutogradFunction):
    """Stands for what follows, which keeps nothing and returns a gradient of its own."""

    @staticmethod
    def forward(ctx: Context, output: Tensor) -> Tensor:
        ctx.made = output.shape, output.dtype
        return output.new_empty((), dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Context, _gradient: Tensor) -> Tensor:
        shape, dtype = ctx.made
        return torch.empty(shape, dtype=dtype)


def count_pass(run: Run, given: Sequence[Given], oracle: RankOracle) -> Measured:
    """Return what *run* does with inputs of its own; its weights are there before.

    Args:
        run: What is counted; it may enter contexts that end with forward, such as autocast.
        given: Its inputs.
        oracle: Of the cluster that the caller has entered.
    """
    with oracle:
        leaf, gradients = torch.empty((), requires_grad=True), []
        empty_bytes = oracle.live_bytes
        inputs = [
            _Begin.apply(leaf, each, gradients)
            if each.dtype.is_floating_point
            else torch.empty(each.shape, dtype=each.dtype)
            for each in given
        ]
        oracle.start_step()
        output = run(*inputs)
        inputs.clear()
        forward = oracle.peak_bytes - empty_bytes, oracle.flops, oracle.collectives
        end = _End.apply(output)
        del output
        saved_bytes = oracle.live_bytes - end.nbytes - empty_bytes
        oracle.start_step()
        end.backward()
        backward = oracle.peak_bytes - 2 * end.nbytes - empty_bytes, oracle.flops
        left_bytes = oracle.live_bytes - end.nbytes - empty_bytes
        return Measured(
            saved_bytes=saved_bytes,
            forward_peak_bytes=forward[0],
            backward_peak_bytes=backward[0],
            left_bytes=left_bytes,
            forward_flops=forward[1],
            backward_flops=backward[1],
            forward_calls=forward[2],
            backward_calls=oracle.collectives,
        )


def measure_module(
    make: Callable[[], Run],
    *given: Given,
    dtype: torch.dtype = torch.bfloat16,
    keeps_gradients: bool = True,
    casts: bool = False,
) -> Measured:
    """Return what one pass through a module or a function does.

    Args:
        make: Returns it; called where tensors have no data.
        given: Its inputs.
        dtype: Of its weights.
        keeps_gradients: Those of weights stay, as FSDP holds them until its unit is done; if
            not, each goes once it is there, as one that is added to others.
        casts: It runs under autocast to bf16.
    """
    with fake_cluster(0, 1):
        with default_dtype(dtype):
            made = make()
        if isinstance(made, nn.Module) and not keeps_gradients:
            _drop_gradients(made)

        def run(*inputs: Tensor) -> Tensor:
            with autocast(Precision.BF16 if casts else Precision.FP32, "cpu"):
                return made(*inputs)

        return count_pass(run, given, RankOracle({}))


def measure_layers(shape: BlockShape, num_layers: int = 1) -> Measured:
    """Return what layers of the project's own program of a stack do."""
    return measure_stage(shape, num_layers=num_layers)


def measure_embedding(shape: BlockShape) -> Measured:
    """Return what the first end does: ids come in, and are kept by what looks them up."""
    return measure_stage(shape, has_embedding=True)


def measure_head(shape: BlockShape) -> Measured:
    """Return what the last end does, from activations and targets to the loss."""
    return measure_stage(shape, has_head=True)


def measure_stage(
    shape: BlockShape,
    *,
    num_layers: int = 0,
    has_embedding: bool = False,
    has_head: bool = False,
) -> Measured:
    """Return what a virtual stage of a stack does to one microbatch on the first tensor rank."""
    with fake_cluster(0, shape.tp), ExitStack() as contexts:
        build = _megatron if shape.stack.megatron_layers else _plain
        dtype = torch.float32 if shape.casts_weights else DTYPES[shape.precision]
        with default_dtype(dtype):
            stage, loss = build(shape, num_layers, Ends(has_embedding, has_head))
        contexts.enter_context(set_checkpoint_early_stop(shape.stack.recompute_stops_early))
        if not shape.stack.megatron_layers:
            contexts.enter_context(loss_context(is_split=shape.tp > 1))

        def run(*inputs: Tensor) -> Tensor:
            precision = shape.precision if shape.stack.autocast else Precision.FP32
            with autocast(precision, "cpu"):
                output = stage(inputs[0])
                return loss(output, inputs[1]) if has_head else output

        ids = Given((shape.microbatch_size, shape.seq_len), torch.long)
        first = ids if has_embedding else Given(_activation_shape(shape), dtype)
        groups = {tuple(range(shape.tp)): "tp"} if shape.tp > 1 else {}
        return count_pass(run, [first, ids] if has_head else [first], RankOracle(groups))


def _activation_shape(shape: BlockShape) -> tuple[int, int, int]:
    """Return that of an activation on one rank: Megatron's have tokens first, others the batch."""
    tokens = shape.seq_len // shape.tp if shape.sequence_parallel else shape.seq_len
    batch, width = shape.microbatch_size, shape.model.hidden_size
    return (tokens, batch, width) if shape.stack.megatron_layers else (batch, tokens, width)


class _Sink:
    """Adds weight gradients in their products, in fp32, or returns them to be added."""

    def __init__(self, *, fuses: bool) -> None:
        self.fuses = fuses
        self.buffers: dict[Tensor, Tensor] = {}

    def add_product(self, weight: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor | None:
        """Add ``gradient^T inputs``, or return it where gradients are not fused."""
        if not self.fuses:
            return gradient.t().mm(inputs)
        accumulate_weight_gradient(self.buffers[weight], inputs, gradient)
        return None


def _options(shape: BlockShape) -> LayerOptions:
    dropout = DROPOUT if shape.model.dropout else 0.0
    return LayerOptions(attention=shape.attention, recompute=shape.recompute, dropout=dropout)


def _megatron(shape: BlockShape, num_layers: int, ends: Ends) -> tuple[nn.Module, Run]:
    group = dist.group.WORLD if shape.tp > 1 else None
    tp = TensorParallelGroup(group, 0, shape.tp, shape.sequence_parallel)
    sink, options = _Sink(fuses=shape.stack.fused_gradient_accumulation), _options(shape)
    rows = shape.tp * shape.local_vocab_size
    parts = MegatronParts(tp, sink, vocab_size=rows, dropout=options.dropout)
    stage = VirtualStage(shape.model, range(num_layers), options, parts, ends)
    for each in stage.parameters():
        if each.dim() == 2:
            sink.buffers[each] = torch.zeros(each.shape, dtype=torch.float32)
    _drop_gradients(stage)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        tokens_first = targets.t().contiguous()
        return vocabulary_loss(logits, tokens_first, tp, kernel=shape.stack.loss)

    return stage, loss


def _plain(shape: BlockShape, num_layers: int, ends: Ends) -> tuple[nn.Module, Run]:
    options = _options(shape)
    parts = plain_parts(
        shape.model,
        vocab_size=shape.model.vocab_size,
        dropout=options.dropout,
        fuses_qkv=fuses_qkv(shape),
    )
    stage = VirtualStage(shape.model, range(num_layers), options, parts, ends)
    if shape.tp > 1:
        mesh = init_device_mesh("cpu", (shape.tp,))
        split_over_tensor_ranks(stage, mesh, sequence_parallel=shape.sequence_parallel)
    if shape.stack.autocast:
        _drop_gradients(stage)
    return stage, token_loss


def _drop_gradients(module: nn.Module) -> None:
    """Let each gradient go once it is there: what keeps them adds it to its own."""
    for each in module.parameters():
        each.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
