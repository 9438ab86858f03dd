"""What blocks of one shape keep and need, kind by kind, and what that makes of a stage's passes."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import prod
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from meshwright.hwprofiles import CudaGraphImpl, CudaGraphs, Kernels, Precision
from meshwright.simulator.blocks import (
    ADDED,
    BlockShape,
    BlockTable,
    Ending,
    makes_gradients,
)
from meshwright.simulator.graph import NUMBER_BYTES, BlockMemory, larger, several
from meshwright.simulator.graph import Size as Bytes
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import (
    HEAD,
    LAYERS,
    PREDICTIONS,
    BlockKind,
    BlockRun,
    linear_shapes,
    predicts_further,
)

OUTPUTS_WITHOUT_EXPERTS = 2
"""As wide as tokens, of a layer whose graph ends before experts: residual and normalised tokens."""


class Addable(Protocol):
    """A number of bytes, or a column of them."""

    def __add__(self, other: Self, /) -> Self:
        """Return the sum."""
        ...

    def __sub__(self, other: Self, /) -> Self:
        """Return the difference."""
        ...

    def __mul__(self, other: int, /) -> Self:
        """Return so many of them."""
        ...


Size = TypeVar("Size", bound=Addable)


def block_bytes(
    table: BlockTable,
    shape: BlockShape,
    ending: Ending = ADDED,
    *,
    others: Iterable[BlockKind] = (),
) -> dict[BlockKind, BlockMemory[int]]:
    """Return the bytes of a block of each kind of the model, whose backward ends with *ending*.

    *others* are kinds that a plan makes of the model's, as those of `Stage.passes`.
    """
    kinds = dict.fromkeys((*shape.parameters, *others))
    blocks = {kind: table.memory(shape, kind, ending) for kind in kinds}
    head, logits = blocks[HEAD], kept_logits_bytes(shape)
    blocks[HEAD] = head._replace(saved=head.saved + logits, forward=head.forward - logits)
    reader = PREDICTIONS if predicts_further(shape.trained) else HEAD
    blocks[reader] = blocks[reader]._replace(waiting=waiting_table_bytes(shape))
    return _with_graphs(shape, blocks)


def captures_whole_layers(shape: BlockShape) -> bool:
    """Return whether each layer is in CUDA graphs of its own, with its experts if it has some."""
    stack, model = shape.stack, shape.trained
    is_whole = model.experts is None or stack.captures_experts
    return stack.cuda_graphs == CudaGraphs.LAYERS and is_whole


def _with_graphs(
    shape: BlockShape, blocks: dict[BlockKind, BlockMemory[int]]
) -> dict[BlockKind, BlockMemory[int]]:
    """Return *blocks* with the static buffers of layers in graphs of Transformer Engine.

    A layer has, in each microbatch in flight, an input and a mask of its own, of a byte for each
    pair of tokens (get_layer_static_inputs of megatron/core/transformer/{module,transformer_layer}
    .py and `_get_sample_arguments` of cuda_graphs.py, core 0.16).  The input is what it keeps; the
    output of a whole layer, which lives until its backward is over, is one tensor more.  Where
    experts are left out its outputs are tensors that it keeps.  Gradients of outputs have buffers
    that all layers share (make_graphed_callables of transformer_engine/pytorch/graph.py, 2.9).
    Megatron-Core's own captures hand on outputs as inputs, and pass no mask.
    """
    stack = shape.stack
    is_theirs = stack.cuda_graph_impl == CudaGraphImpl.TRANSFORMER_ENGINE
    if not is_theirs or stack.cuda_graphs != CudaGraphs.LAYERS:
        return blocks
    is_whole = captures_whole_layers(shape)
    hidden_bytes = shape.num_local_tokens * shape.model.hidden_size * Precision.BF16.num_bytes
    static_bytes = shape.microbatch_size * shape.seq_len * shape.seq_len // shape.cp
    static_bytes += hidden_bytes if is_whole else 0
    num_layers = dict.fromkeys(LAYERS, 1) | {PREDICTIONS: shape.model.prediction_layers}
    gradients_bytes = hidden_bytes * (1 if is_whole else OUTPUTS_WITHOUT_EXPERTS)
    return blocks | {
        kind: block._replace(
            saved=block.saved + num_layers[kind] * static_bytes,
            buffer=block.buffer + gradients_bytes,
        )
        for kind, block in blocks.items()
        if kind in num_layers
    }


class SentBytes(NamedTuple):
    """Bytes of what a virtual stage sends in a microbatch; 0 where it sends nothing.

    Args:
        output: To the stage after it; it lives until the backward pass in any case.
        gradient: To the stage before it.
    """

    output: int = 0
    gradient: int = 0


NOTHING_SENT = SentBytes()


def stage_messages(blocks: Mapping[BlockKind, BlockMemory[Any]], stage: Stage) -> SentBytes:
    """Return what *stage* sends in a microbatch; a gradient is as large as what it received."""
    return SentBytes(
        output=0 if stage.has_head else blocks[stage.contents[-1].kind].sent,
        gradient=0 if stage.has_embedding else blocks[stage.contents[0].kind].received,
    )


def kept_logits_bytes(shape: BlockShape) -> int:
    """Return the logits as the last stage's output, where that lives until backward."""
    return shape.num_logits * shape.element_bytes if shape.keeps_outputs else 0


def kept_output_bytes(shape: BlockShape, messages: tuple[Bytes, Bytes]) -> Bytes:
    """Return what a stage keeps beyond its blocks.

    Where outputs live until backward, the output it hands on is one tensor more; the input of its
    first layer, as large as the gradient that goes back, is a message's buffer, which counts as
    such (`message_buffer_bytes`).
    """
    output, gradient = messages
    return output - gradient if shape.keeps_outputs else 0


def message_buffer_bytes(shape: BlockShape, messages: tuple[Bytes, Bytes]) -> Bytes:
    """Return the buffers of a microbatch's messages that live throughout the step.

    PyTorch's PipelineStage makes one for each microbatch: for activations but on the first
    stage, for gradients but on the last.
    """
    return sum(messages) if shape.keeps_outputs else 0


def batch_bytes(num_tokens: Bytes, cp: Bytes) -> Bytes:
    """Return the ids and targets of a microbatch that a rank of PyTorch's pipelines holds.

    A schedule cuts the batch of a whole step, which every stage has (`Trainer.train_step` of
    torchtitan 0.2.2 moves it to the device), and its own tokens beside where others have the rest.

    Args:
        num_tokens: Those of the rank in a microbatch.
        cp: Context-parallel ranks.
    """
    return 2 * NUMBER_BYTES * num_tokens * (1 + cp * several(cp))


def waiting_table_bytes(shape: BlockShape) -> int:
    """Return a shared table's gradient from another block, which waits for that from the embedding.

    Autograd adds both up, in place, before it adds them to the gradient that is kept.  That of
    rows that the head looks up is a tensor, whatever products make of theirs.
    """
    if shape.trained.tied_embeddings and not makes_gradients(shape):
        return 0
    return shape.copied_parameters * shape.residual_bytes


class PresentBytes(NamedTuple, Generic[Size]):
    """What blocks keep on the host and need on the device while another runs, by its place.

    None where all layers keep what they save.
    """

    forward: tuple[Size, ...]
    backward: tuple[Size, ...]

    @classmethod
    def of(
        cls, blocks: Mapping[BlockKind, BlockMemory[Size]], stage: Stage
    ) -> "PresentBytes[Size] | None":
        """Return those of a pass through *stage*; embedding and head need none.

        What came back counts as a layer's own for all of its backward, as Transformer Engine
        releases it when the next layer's begins (`bwd_step` of pytorch/cpu_offload.py, 2.10).
        """
        if not stage.offload.number:
            return None
        kinds = [kind for kind, count in stage.passes for _ in range(count)]
        first = int(stage.has_embedding)
        nothing = blocks[kinds[0]].saved * 0
        layers = kinds[first : first + stage.num_layers]
        sums = [
            [*accumulate((getattr(blocks[kind], name) for kind in layers), initial=nothing)]
            for name in ("moved", "copied")
        ]
        windows = [stage.offload.present(place - first) for place in range(len(kinds))]
        inside = [
            (each.start, each.stop) if place >= first and each else (0, 0)
            for place, each in enumerate(windows)
        ]
        return cls(*(tuple(of[end] - of[begin] for begin, end in inside) for of in sums))


def pass_workspace_bytes(
    blocks: Mapping[BlockKind, BlockMemory[Any]],
    stage: Stage,
    *,
    holds_gradient: bool = False,
    has_pools: bool = False,
) -> tuple[Bytes, Bytes]:
    """Return what one pass through a virtual stage needs beside all that it keeps.

    That is the most, over its blocks, of what one needs less what those behind it keep: in forward
    they do not keep it yet, in backward no more.  What graphs of layers have allocated is in a pool
    of their own, which ends of the model cannot use, nor layers what ends have: of both the most.

    Args:
        blocks: Sizes of a block of each kind.
        stage: What it holds.
        holds_gradient: Whether the gradient that a stage receives is held throughout its backward.
        has_pools: Whether layers are in CUDA graphs (`captures_whole_layers`).

    Returns:
        Bytes of the forward and of the backward pass, each beyond the sum of the tensors that
        wait for backward; 0 where those are the most.
    """
    present, passes = PresentBytes.of(blocks, stage), stage.passes
    if present is not None:
        passes = tuple(BlockRun(kind, 1) for kind, count in passes for _ in range(count))
    last = passes[-1].kind
    nothing = blocks[last].saved * 0
    holds_gradient &= not stage.has_head
    forward, backward, kept_behind = ([nothing, nothing] for _ in range(3))
    waiting = cached = nothing
    for kind, count in passes:
        cached = cached + blocks[kind].cached * count
    for place, (kind, count) in enumerate(reversed(passes)):
        block, needed, own = blocks[kind], blocks[kind].backward, blocks[kind].forward
        pool = int(has_pools and kind in LAYERS)
        if holds_gradient:
            needed = block.holding if place == 0 else needed + blocks[last].sent
        if present is not None:
            own, needed = own + present.forward[-1 - place], needed + present.backward[-1 - place]
        # Of equal blocks the last one's pass is the fullest; its own casts are in what it needs.
        made = own + cached - block.cached - kept_behind[pool]
        forward[pool] = larger(forward[pool], made)
        backward[pool] = larger(backward[pool], needed + waiting - kept_behind[pool])
        cached = cached - block.cached * count
        kept_behind[pool] = kept_behind[pool] + block.saved * count
        if stage.has_embedding:
            waiting = waiting + block.waiting * count
    return forward[0] + forward[1], backward[0] + backward[1]


def stand_in_bytes(shape: BlockShape, blocks: Iterable[BlockRun]) -> int:
    """Return the dummy gradients of a rank's *blocks*, 0 where its stack keeps none.

    Where a product adds a weight's gradient to the sum that a rank keeps, autograd still asks for
    a gradient of that weight, and is given a tensor of its shape that nobody reads.  There is one
    for all weights of a shape, in their format, and it is never let go.

    They are Transformer Engine's (get_dummy_wgrad of pytorch/module/base.py: of linear layers from
    2.3 on, of experts from 2.10); Megatron-Core's output matrix has them from core 0.14 on
    (tensor_parallel/layers.py).
    """
    stack = shape.stack
    adds = stack.fused_gradient_accumulation and stack.kernels is not Kernels.EAGER
    if not (stack.keeps_stand_ins and adds):
        return 0
    multiple = stack.vocabulary_multiple
    known = linear_shapes(shape.trained, multiple, shape.tp, shape.ep, shape.etp)
    found = {size for kind, _ in blocks for size in known.get(kind, ())}
    return shape.element_bytes * sum(prod(size) for size in found)
