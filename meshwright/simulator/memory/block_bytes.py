"""Saved bytes and workspaces of each kind of block of one shape, and of a stage's passes."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import prod
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from meshwright.hwprofiles import CudaGraphImpl, CudaGraphs, Kernels, Precision
from meshwright.simulator.blocks import (
    ADDED,
    BlockShape,
    BlockTable,
    BorderGradients,
    materializes_weight_gradients,
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
    has_mtp_layers,
    linear_shapes,
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
    ending: BorderGradients = ADDED,
    *,
    others: Iterable[BlockKind] = (),
) -> dict[BlockKind, BlockMemory[int]]:
    """Return the bytes of a block of each kind of the model, whose backward ends with *ending*.

    *others* are kinds that a plan derives from the model's, as those of `Stage.passes`.
    """
    kinds = dict.fromkeys((*shape.parameters, *others))
    blocks = {kind: table.memory(shape, kind, ending) for kind in kinds}
    # Kept logits count as saved, so that they are no workspace of the forward pass.
    head, logits = blocks[HEAD], kept_logits_bytes(shape)
    blocks[HEAD] = head._replace(saved=head.saved + logits, forward=head.forward - logits)
    reader = PREDICTIONS if has_mtp_layers(shape.trained) else HEAD
    blocks[reader] = blocks[reader]._replace(waiting=tied_gradient_bytes(shape))
    return _with_graphs(shape, blocks)


def captures_whole_layers(shape: BlockShape) -> bool:
    """Return True if each layer, with its experts, is captured in CUDA graphs of its own."""
    stack, model = shape.stack, shape.trained
    is_whole = model.experts is None or stack.captures_experts
    return stack.cuda_graphs == CudaGraphs.LAYERS and is_whole


def _with_graphs(
    shape: BlockShape, blocks: dict[BlockKind, BlockMemory[int]]
) -> dict[BlockKind, BlockMemory[int]]:
    """Return *blocks* with the static buffers of layers in graphs of Transformer Engine.

    A layer has, for each microbatch in flight, an input and a mask of its own, the mask of a byte
    for each pair of tokens (get_layer_static_inputs of
    megatron/core/transformer/{module,transformer_layer}.py and `_get_sample_arguments` of
    cuda_graphs.py, core 0.16). The input is its saved activation; the output of a whole layer,
    which lives until its backward is over, is one tensor more. Where experts are excluded from the
    graph its outputs are tensors that it saves. Gradients of outputs have buffers that all layers
    share (make_graphed_callables of transformer_engine/pytorch/graph.py, 2.9). Megatron-Core's own
    captures pass outputs on as inputs, and no mask.
    """
    stack = shape.stack
    is_theirs = stack.cuda_graph_impl == CudaGraphImpl.TRANSFORMER_ENGINE
    if not is_theirs or stack.cuda_graphs != CudaGraphs.LAYERS:
        return blocks
    is_whole = captures_whole_layers(shape)
    hidden_bytes = shape.num_local_tokens * shape.model.hidden_size * Precision.BF16.num_bytes
    static_bytes = shape.microbatch_size * shape.seq_len * shape.seq_len // shape.cp
    # Outputs of a whole layer are static, as large as its input.
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
    """Bytes that a virtual stage sends in a microbatch; 0 where it sends nothing.

    Args:
        output: To the stage after it; it lives until the backward pass in any case.
        gradient: To the stage before it.
    """

    output: int = 0
    gradient: int = 0


NOTHING_SENT = SentBytes()


def stage_messages(blocks: Mapping[BlockKind, BlockMemory[Any]], stage: Stage) -> SentBytes:
    """Return the bytes that *stage* sends; a gradient is as large as the input it received."""
    return SentBytes(
        output=0 if stage.has_head else blocks[stage.contents[-1].kind].sent,
        gradient=0 if stage.has_embedding else blocks[stage.contents[0].kind].received,
    )


def kept_logits_bytes(shape: BlockShape) -> int:
    """Return the logits as the last stage's output, where outputs live until backward."""
    return shape.num_logits * shape.element_bytes if shape.keeps_outputs else 0


def kept_output_bytes(shape: BlockShape, messages: tuple[Bytes, Bytes]) -> Bytes:
    """Return the bytes that a stage saves beyond its blocks.

    Where outputs live until backward, the output that is sent is one tensor more; the input of the
    first layer, as large as the gradient that is sent back, is a p2p buffer, which counts as such
    (`message_buffer_bytes`).
    """
    output, gradient = messages
    return output - gradient if shape.keeps_outputs else 0


def message_buffer_bytes(shape: BlockShape, messages: tuple[Bytes, Bytes]) -> Bytes:
    """Return the p2p buffers of a microbatch that live throughout the step.

    PyTorch's PipelineStage makes one for each microbatch: for activations but on the first
    stage, for gradients but on the last.
    """
    # Other runtimes allocate p2p buffers pass by pass.
    return sum(messages) if shape.keeps_outputs else 0


def batch_bytes(num_tokens: Bytes, cp: Bytes) -> Bytes:
    """Return the token ids and targets of a microbatch that a rank of PyTorch's pipelines holds.

    A schedule splits the batch of a whole step, which every stage has (`Trainer.train_step` of
    torchtitan 0.2.2 moves it to the device); with context parallelism also the rank's own tokens.

    Args:
        num_tokens: Tokens of the rank in a microbatch.
        cp: Degree of context parallelism.
    """
    return 2 * NUMBER_BYTES * num_tokens * (1 + cp * several(cp))


def tied_gradient_bytes(shape: BlockShape) -> int:
    """Return a tied embedding's gradient from another block, until the embedding's own is added.

    Autograd adds both, in place, before it accumulates them into the kept gradient. A gradient of
    rows that the head looks up is a tensor in any case, also with fused accumulation.
    """
    if shape.trained.tied_embeddings and not materializes_weight_gradients(shape):
        return 0
    return shape.tied_embedding_parameters * shape.residual_bytes


class ReloadedBytes(NamedTuple, Generic[Size]):
    """Bytes of offloaded activations on the device while another block runs, by its index.

    None where no layer offloads activations.
    """

    forward: tuple[Size, ...]
    backward: tuple[Size, ...]

    @classmethod
    def of(
        cls, blocks: Mapping[BlockKind, BlockMemory[Size]], stage: Stage
    ) -> "ReloadedBytes[Size] | None":
        """Return the bytes of a pass through *stage*; embedding and head add none.

        A reloaded activation counts as its layer's for all of its backward, as Transformer Engine
        releases it when the next layer's begins (`bwd_step` of pytorch/cpu_offload.py, 2.10).
        """
        if not stage.offload.number:
            return None
        kinds = [kind for kind, count in stage.passes for _ in range(count)]
        # The embedding comes before layer 0 and is never offloaded.
        first = int(stage.has_embedding)
        nothing = blocks[kinds[0]].saved * 0
        layers = kinds[first : first + stage.num_layers]
        sums = [
            [*accumulate((getattr(blocks[kind], name) for kind in layers), initial=nothing)]
            for name in ("moved", "copied")
        ]
        windows = [stage.offload.present(place - first) for place in range(len(kinds))]
        spans = [
            (each.start, each.stop) if place >= first and each else (0, 0)
            for place, each in enumerate(windows)
        ]
        return cls(*(tuple(of[end] - of[begin] for begin, end in spans) for of in sums))


def pass_workspace_bytes(
    blocks: Mapping[BlockKind, BlockMemory[Any]],
    stage: Stage,
    *,
    holds_gradient: bool = False,
    has_pools: bool = False,
) -> tuple[Bytes, Bytes]:
    """Return the bytes that one pass through a virtual stage needs beyond its saved activations.

    The most, over its blocks, of a block's workspace less the activations of the blocks behind it:
    forward has not saved them yet, backward has freed them. Memory that graphs of layers have
    allocated is in a pool of their own, which embedding and head cannot use, nor layers theirs: the
    sum of both peaks.

    Args:
        blocks: Sizes of a block of each kind.
        stage: Virtual stage.
        holds_gradient: Whether the received output gradient is held throughout the backward pass.
        has_pools: Whether layers are in CUDA graphs (`captures_whole_layers`).

    Returns:
        Bytes of the forward and of the backward pass, each beyond the sum of all saved
        activations; 0 where those are the peak.
    """
    present, passes = ReloadedBytes.of(blocks, stage), stage.passes
    if present is not None:
        passes = tuple(BlockRun(kind, 1) for kind, count in passes for _ in range(count))
    last = passes[-1].kind
    nothing = blocks[last].saved * 0
    # The last stage receives no gradient: its loss makes it.
    holds_gradient &= not stage.has_head
    forward, backward, saved_behind = ([nothing, nothing] for _ in range(3))
    tied_gradient = cached_casts = nothing
    for kind, count in passes:
        cached_casts = cached_casts + blocks[kind].cached * count
    # From the last block on, so that the activations saved behind each are known.
    for place, (kind, count) in enumerate(reversed(passes)):
        block, workspace, forward_workspace = (
            blocks[kind],
            blocks[kind].backward,
            blocks[kind].forward,
        )
        pool = int(has_pools and kind in LAYERS)
        if holds_gradient:
            workspace = block.holding if place == 0 else workspace + blocks[last].sent
        if present is not None:
            forward_workspace, workspace = (
                forward_workspace + present.forward[-1 - place],
                workspace + present.backward[-1 - place],
            )
        # Of equal blocks the last one's pass is the fullest; its own casts are in what it needs.
        live = forward_workspace + cached_casts - block.cached - saved_behind[pool]
        forward[pool] = larger(forward[pool], live)
        backward[pool] = larger(backward[pool], workspace + tied_gradient - saved_behind[pool])
        cached_casts = cached_casts - block.cached * count
        saved_behind[pool] = saved_behind[pool] + block.saved * count
        # Without the embedding nothing comes to which a tied gradient could be added.
        if stage.has_embedding:
            tied_gradient = tied_gradient + block.waiting * count
    # Memory that one pool has freed is not available to the other.
    return forward[0] + forward[1], backward[0] + backward[1]


def dummy_gradient_bytes(shape: BlockShape, blocks: Iterable[BlockRun]) -> int:
    """Return the dummy gradients of a rank's *blocks*, 0 where its stack keeps none.

    With fused weight-gradient accumulation autograd still expects a ``.grad`` of the weight, and
    gets a dummy tensor of its shape that nobody reads. One is allocated for all weights of a shape,
    in their format, and never freed.

    They are Transformer Engine's (get_dummy_wgrad of pytorch/module/base.py: of linear layers from
    2.3 on, of experts from 2.10); Megatron-Core's output matrix has them from core 0.14 on
    (tensor_parallel/layers.py).
    """
    stack = shape.stack
    # Eager modules return a gradient, which is added afterwards: no dummy is needed.
    adds = stack.fused_gradient_accumulation and stack.kernels is not Kernels.EAGER
    if not (stack.keeps_stand_ins and adds):
        return 0
    multiple = stack.vocabulary_multiple
    shapes = linear_shapes(shape.trained, multiple, shape.tp, shape.ep, shape.etp)
    distinct_shapes = {size for kind, _ in blocks for size in shapes.get(kind, ())}
    return shape.element_bytes * sum(prod(size) for size in distinct_shapes)
