"""Kinds of blocks, their lowering on a software stack, and the walk through one of them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp, Dispatcher, Kernels, Recompute, RecomputeModule
from meshwright.simulator.blocks.dense import layer
from meshwright.simulator.blocks.dims import Columns, LayerDims
from meshwright.simulator.blocks.ends import (
    embedding,
    final_norm,
    head,
    output,
    predictions,
    streams_like,
)
from meshwright.simulator.blocks.listed import bottleneck, classifier, end, linear_layer, stem
from meshwright.simulator.blocks.losses import loss_of
from meshwright.simulator.blocks.shape import BlockShape, fuses_qkv
from meshwright.simulator.graph import (
    Backward,
    Block,
    Dim,
    EightBits,
    Gradient,
    Kind,
    Lowering,
    Operator,
    Repetition,
    SavedOffload,
    Size,
    Tape,
    Tensor,
    Transfer,
    WeightGradients,
)
from meshwright.simulator.layout import Axis, ExpertAxis, MeshAxis, recomputed_modules
from meshwright.simulator.model import (
    COPY,
    COPY_OF_STREAMS,
    EMBEDDING,
    ENDS,
    EXPERT_LAYER,
    FINAL_NORM,
    HEAD,
    PREDICTIONS,
    TRANSFORMER_LAYER,
    WINDOWED_EXPERT_LAYER,
    WINDOWED_LAYER,
    BlockKind,
    ChainModel,
    ImageModel,
    LayerGroup,
    ModelSpec,
)

# Parts that full recomputation checkpoints: a layer, or several layers together.
LAYER, GROUP = "layer", "group"
DISCARDED = {RecomputeModule.LAYERNORM, RecomputeModule.MOE_ACT}
NOT_REFERENCED = {RecomputeModule.CORE_ATTN, RecomputeModule.LAYERNORM}
ATTENDED: frozenset[str] = frozenset({RecomputeModule.CORE_ATTN})
# Recompute modes that checkpoint whole layers; others recompute the modules a plan names.
WHOLE_LAYERS = {Recompute.FULL, Recompute.SELECTIVE_OP}


# Elements of the smallest tensor that Transformer Engine offloads (`_check_if_offload` of
# pytorch/cpu_offload.py, 2.10 to 2.18), and Megatron-Core (min_offloaded_tensor_size).
SMALLEST_TE_OFFLOAD, SMALLEST_MEGATRON_OFFLOAD = 256 * 1024, 1024 * 1024


class Written(NamedTuple):
    """The graph of a block, and its input."""

    block: Block
    first: Tensor


def _layer(
    block: Block, shape: BlockShape, dims: LayerDims, kind: BlockKind = TRANSFORMER_LAYER
) -> Tensor:
    x = dims.stream(block, shape)
    layer(block, x, shape, dims, kind)
    return x


def _group(block: Block, shape: BlockShape, dims: LayerDims, kinds: Sequence[BlockKind]) -> Tensor:
    """Add layers that share one checkpoint; return the input.

    Their first pass keeps the dropout masks of bias_dropout_add until all are done: Megatron-Core
    runs it with gradients enabled in any case (`bias_dropout_add_exec_handler` of
    transformer_layer.py, core 0.16).
    """
    first = x = dims.stream(block, shape)
    with block.part(GROUP):
        for kind in kinds:
            x = layer(block, x, shape, dims, kind)
        # Masks are second outputs, of one byte an element.
        made = (out for each in block.operators for out in each.outputs[1:])
        block.hold(*(each for each in made if each.width == 1 and each.dims == first.dims))
    return first


def _embedding(block: Block, shape: BlockShape, dims: LayerDims) -> Tensor:
    embedding(block, shape, dims)
    return block.operators[0].inputs[0]


def _final_norm(block: Block, shape: BlockShape, dims: LayerDims) -> Tensor:
    x = dims.stream(block, shape)
    final_norm(block, x, shape)
    return x


def _predictions(block: Block, shape: BlockShape, dims: LayerDims) -> Tensor:
    x = dims.stream(block, shape)
    predictions(block, x, shape, dims)
    return x


def _head(block: Block, shape: BlockShape, dims: LayerDims) -> Tensor:
    x = dims.stream(block, shape)
    if shape.model.prediction_layers:
        x = streams_like(x, shape)
    head(block, x, shape, dims)
    return x


def _copy(block: Block, shape: BlockShape, dims: LayerDims, kind: BlockKind = COPY) -> Tensor:
    """Add the copy of a stage without layers; its backward passes the gradient through.

    Megatron-Core keeps the inputs of microbatches in flight, even if unread (``input_tensors`` of
    pipeline_parallel/schedules.py, core 0.16).
    """
    x = dims.stream(block, shape)
    if kind == COPY_OF_STREAMS:
        x = streams_like(x, shape)
    made = x.like("copied input")
    block.add([x], [made], [Gradient(x, (x,), passes_through=True)], block.traffic(x, made))
    return x


def _output(block: Block, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Add the head without its loss, which another device computes."""
    x = dims.stream(block, shape)
    output(block, x, shape, dims)
    return x


OUTPUT: BlockKind = "output"  # a head without its loss

BLOCKS: dict[BlockKind, Callable[[Block, BlockShape, LayerDims], Tensor]] = {
    EMBEDDING: _embedding,
    TRANSFORMER_LAYER: _layer,
    WINDOWED_LAYER: partial(_layer, kind=WINDOWED_LAYER),
    EXPERT_LAYER: partial(_layer, kind=EXPERT_LAYER),
    WINDOWED_EXPERT_LAYER: partial(_layer, kind=WINDOWED_EXPERT_LAYER),
    FINAL_NORM: _final_norm,
    PREDICTIONS: _predictions,
    HEAD: _head,
    COPY: _copy,
    COPY_OF_STREAMS: partial(_copy, kind=COPY_OF_STREAMS),
    OUTPUT: _output,
}


class BorderGradients(NamedTuple):
    """Gradients at the borders of a block's backward: that of its output, and those of weights.

    Args:
        keeps_gradients: Weight gradients stay allocated until the pass is over.
        output_gradient_bytes: Bytes of the output's gradient; None for the output's size, 0 for a
            buffer that is counted elsewhere.
    """

    keeps_gradients: bool = False
    output_gradient_bytes: int | None = None


ADDED = BorderGradients()


def lowering_of(shape: BlockShape) -> Lowering:
    """Return the lowering of *shape*'s stack, whose facts are read here and nowhere else."""
    stack = shape.stack
    # Megatron-Core's own layers add gradients in their products, too, but hand autograd an empty
    # tensor for each (core/tensor_parallel/layers.py, LinearWithGradAccumulation...).
    fuses_gradients = stack.fused_gradient_accumulation and stack.kernels is not Kernels.EAGER
    return Lowering(
        kernels=stack.kernels,
        uses_transformers_ops=stack.transformers_layers,
        # Under context parallelism torchtitan passes position ids (`reshape_for_broadcast` of
        # models/llama3/model/model.py, 0.2.2).
        indexes_rope_cache=shape.cp > 1
        and not (stack.transformers_layers or stack.megatron_layers),
        fuses_products=fuses_qkv(shape),
        fuses_gate=stack.megatron_layers,
        fuses_redistribute=stack.megatron_layers,
        redistributes_each_input=stack.tp_plan and shape.tp > 1,
        fuses_norms=stack.transformer_engine and stack.kernels is Kernels.FUSED,
        fuses_residual=stack.megatron_layers,
        saves_first=not stack.megatron_layers,
        weight_gradients=WeightGradients.FUSED if fuses_gradients else WeightGradients.ADDED,
        loss=stack.loss,
        casts=shape.casts_weights,
        caches_casts=shape.caches_casts,
        copies_operands=stack.transformer_engine,
        eight_bits=_eight_bits(shape),
        groups_experts=stack.grouped_experts and stack.kernels is not Kernels.EAGER,
        pads_rows=stack.pads_rows,
    )


def saved_offload(shape: BlockShape) -> SavedOffload:
    """Return the activation offload of a layer, by its modules or Transformer Engine's default."""
    if not shape.offload_modules:
        return SavedOffload(frozenset(), SMALLEST_TE_OFFLOAD)
    return SavedOffload(frozenset(map(str, shape.offload_modules)), SMALLEST_MEGATRON_OFFLOAD)


def materializes_weight_gradients(shape: BlockShape) -> bool:
    """Return True if a weight's gradient is a tensor of its own before accumulation."""
    return lowering_of(shape).weight_gradients is not WeightGradients.FUSED


def _eight_bits(shape: BlockShape) -> EightBits | None:
    recipe = shape.recipe
    if recipe is None:
        return None
    return EightBits(
        keeps_copy=shape.keeps_narrow_inputs,
        keeps_weights=recipe.weight_copy_bytes > 0 or recipe.gathers_parameters,
        gathers=recipe.tp_gathers_fp8,
        scaled=recipe.scaled_elements,
        # HybridEP pads rows as it dispatches, so that nothing is left to pad
        # (_HybridEPManager of megatron/core/transformer/moe/token_dispatcher.py, core 0.16).
        # Nor with an expert capacity, which is a multiple of the GEMM's alignment.
        pads_experts=recipe.fills_expert_rows
        and shape.dispatcher is not Dispatcher.HYBRIDEP
        and shape.stack.expert_capacity is None,
        fuses_expert_activation=recipe.fuses_experts,
        discarded=outputs_again(shape)
        | (ATTENDED if recipe.keeps_attention_output else frozenset()),
    )


def outputs_again(shape: BlockShape) -> frozenset[str]:
    """Return the parts whose outputs are discarded and recomputed, in fp8."""
    if shape.recipe is None:
        return frozenset()
    return frozenset(DISCARDED.intersection(recomputed_modules(shape.recompute, shape.modules)))


def written(shape: BlockShape, kind: BlockKind, columns: Columns | None = None) -> Written:
    """Return the graph of one block, with the sizes of *columns* if given."""
    sizes = columns or Columns.of(shape)
    # With DTensor plans embedding and head may be replicated while layers are split.
    is_whole = shape.tp == 1 or (shape.whole_ends and kind in {*ENDS, OUTPUT})
    mesh: dict[MeshAxis, Size] = {} if is_whole else {Axis.TP: sizes.tp}
    widths = sizes.tp if shape.splits_experts_alike else sizes.expert_tp
    if shape.ep > 1:
        mesh |= {ExpertAxis.EP: sizes.ep, ExpertAxis.ALL: sizes.ep * widths}
    if not shape.splits_experts_alike and shape.expert_tp > 1:
        mesh[ExpertAxis.ETP] = widths
    block = Block(mesh, lowering_of(shape), shape.element_bytes)
    if isinstance(shape.trained, ModelSpec):
        dims = LayerDims.of(shape, sizes)
        if isinstance(kind, LayerGroup):
            return Written(block, _group(block, shape, dims, kind.layers))
        return Written(block, BLOCKS[kind](block, shape, dims))
    return Written(block, listed(block, shape.trained, kind, sizes.microbatch_size))


def listed(
    block: Block, model: ImageModel | ChainModel, kind: BlockKind, num_samples: Size
) -> Tensor:
    """Add a block of a model that lists its layers; return its input."""
    match model:
        case ImageModel() if kind == EMBEDDING:
            return stem(block, model, num_samples)
        case ImageModel() if kind in {HEAD, OUTPUT}:
            x = classifier(block, model, num_samples)
            if kind == HEAD:
                loss_of(block, block.operators[-1].outputs[0])
            return x
        case ImageModel():
            return bottleneck(block, model.layer(kind), num_samples)
        case ChainModel() if kind in {EMBEDDING, HEAD, OUTPUT}:
            return end(block, model, num_samples, is_first=kind == EMBEDDING)
        case ChainModel():
            return linear_layer(block, model.layer(kind), num_samples)


def keeps_output(shape: BlockShape, kind: BlockKind) -> bool:
    """Return True if a layer's backward reads the layer's output."""
    if shape.recompute is Recompute.FULL:
        return False
    match shape.trained:
        case ImageModel():
            return True
        case ChainModel() as model:
            return model.layer(kind).activation
        case _:
            return False


def walk(
    shape: BlockShape,
    kind: BlockKind,
    known: Written | None = None,
    *,
    ending: BorderGradients = ADDED,
    repeats: bool = True,
) -> Backward:
    """Return the forward and backward walk of a block.

    Args:
        shape: Shape of the block.
        kind: Kind of block.
        known: The block's graph, if made before with columns of sizes.
        ending: Gradients at its borders.
        repeats: Whether backward recomputes as the plan says.
    """
    block, first = known or written(shape, kind)
    repetition = _repetition(shape, block) if repeats else Repetition()
    tape = Tape(block, repetition)
    tape.run_forward(first)
    policy = WeightGradients.KEPT if ending.keeps_gradients else block.lowering.weight_gradients
    result = Backward(tape, policy)
    arriving = None
    if ending.output_gradient_bytes is not None:
        arriving = block.tensor("arriving", Dim("bytes", ending.output_gradient_bytes), width=1)
    result.run(arriving)
    return result


def _repetition(shape: BlockShape, block: Block) -> Repetition:
    is_by_operator = shape.recompute is Recompute.SELECTIVE_OP
    modules = frozenset(recomputed_modules(shape.recompute, shape.modules))
    is_whole = shape.recompute in WHOLE_LAYERS
    parts = frozenset({LAYER, GROUP}) if is_whole else modules
    # Megatron's checkpoints of layers are reentrant, too; PyTorch's and DeepSpeed's own are not.
    is_reentrant = not is_whole or (shape.stack.megatron_layers and not is_by_operator)
    return Repetition(
        parts,
        shape.stack.recompute_stops_early,
        _saved_operators(block) if is_by_operator else frozenset(),
        # Reentrant checkpoints refer to their recomputed outputs; of core attention another storage
        # is as large by then, and norms have discarded theirs.
        held=parts - NOT_REFERENCED if is_reentrant else frozenset(),
    )


def _saved_operators(block: Block) -> frozenset[Operator]:
    """Return the operators whose outputs selective checkpointing per operator saves.

    torchtitan's ``selective_ac_option = "op"`` (torchtitan/parallelisms/parallelize_llama.py,
    commit 6b03ffa of 2024-12-26) saves the outputs of listed operators: attention, reduce-scatters,
    and every second GEMM, counted through the layer.  The list has ``aten.mm`` alone: PyTorch runs
    a linear layer with a bias as ``addmm``, which is always recomputed, but torchao adds the bias
    of an fp8 GEMM afterwards (torchao/float8/float8_linear.py,
    commit eab345c of 2024-12-20).
    """
    kept, num_listed = set(), 0
    for each in block.operators:
        scatters = any(
            isinstance(work, Transfer) and work.op is CollectiveOp.REDUCE_SCATTER
            for work in each.work
        )
        is_listed = each.kind is Kind.PRODUCT and (len(each.inputs) == 2 or each.eight_bits)
        num_listed += is_listed
        if scatters or each.kind is Kind.ATTENTION or (is_listed and num_listed % 2 == 1):
            kept.add(each)
    return frozenset(kept)
