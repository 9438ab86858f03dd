"""The kinds of blocks by name, how a stack runs them, and a walk through one of them."""

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
from meshwright.simulator.layout import Axis, ExpertAxis, MeshAxis, repeated_modules
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

# Parts of blocks that full recomputation runs again: a layer, or several in one checkpoint.
LAYER, GROUP = "layer", "group"
GIVEN_UP = {RecomputeModule.LAYERNORM, RecomputeModule.MOE_ACT}
NOT_HELD = {RecomputeModule.CORE_ATTN, RecomputeModule.LAYERNORM}
ATTENDED: frozenset[str] = frozenset({RecomputeModule.CORE_ATTN})
# Ways of recomputation that run whole layers again; others run the parts that a plan names.
OF_LAYERS = {Recompute.FULL, Recompute.SELECTIVE_OP}


# Elements of the smallest tensor that Transformer Engine moves (`_check_if_offload` of
# pytorch/cpu_offload.py, 2.10 to 2.18), and Megatron-Core (min_offloaded_tensor_size).
SMALLEST_OF_LAYERS, SMALLEST_OF_MODULES = 256 * 1024, 1024 * 1024


class Written(NamedTuple):
    """A block that is written down, and what enters it."""

    block: Block
    first: Tensor


def _layer(
    block: Block, shape: BlockShape, dims: LayerDims, kind: BlockKind = TRANSFORMER_LAYER
) -> Tensor:
    x = dims.stream(block, shape)
    layer(block, x, shape, dims, kind)
    return x


def _group(block: Block, shape: BlockShape, dims: LayerDims, kinds: Sequence[BlockKind]) -> Tensor:
    """Write layers that are checkpointed together.

    Their first pass keeps the masks of dropout ahead of residual sums until all are done: Megatron-
    Core adds with gradients enabled in any case (`bias_dropout_add_exec_handler` of
    transformer_layer.py, core 0.16).
    """
    first = x = dims.stream(block, shape)
    with block.part(GROUP):
        for kind in kinds:
            x = layer(block, x, shape, dims, kind)
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
    """Write what a stage without layers does; its backward hands the gradient on.

    Megatron-Core keeps the inputs of passes in flight, whatever reads them (``input_tensors`` of
    pipeline_parallel/schedules.py, core 0.16).
    """
    x = dims.stream(block, shape)
    if kind == COPY_OF_STREAMS:
        x = streams_like(x, shape)
    made = x.like("copied input")
    block.add([x], [made], [Gradient(x, (x,), passes_through=True)], block.traffic(x, made))
    return x


def _output(block: Block, shape: BlockShape, dims: LayerDims) -> Tensor:
    """Write the head without its loss, which another device makes."""
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


class Ending(NamedTuple):
    """How the backward pass of a block begins, and what becomes of weights' gradients.

    Args:
        keeps_gradients: Those of weights stay until the pass is over.
        arriving_bytes: What the gradient of its output takes; None if as much as the output, 0
            if it lies in a buffer that is counted elsewhere.
    """

    keeps_gradients: bool = False
    arriving_bytes: int | None = None


ADDED = Ending()


def lowering_of(shape: BlockShape) -> Lowering:
    """Return how the stack of *shape* runs operators; its facts are read here and nowhere else."""
    stack = shape.stack
    # Megatron-Core's own layers add gradients in their products, too, but hand autograd an empty
    # tensor for each (core/tensor_parallel/layers.py, LinearWithGradAccumulation...).
    fuses_gradients = stack.fused_gradient_accumulation and stack.kernels is not Kernels.EAGER
    return Lowering(
        kernels=stack.kernels,
        spells_out=stack.transformers_layers,
        # Of cut sequences torchtitan says which positions are whose (`reshape_for_broadcast` of
        # models/llama3/model/model.py, 0.2.2).
        indexes_rope_cache=shape.cp > 1
        and not (stack.transformers_layers or stack.megatron_layers),
        fuses_products=fuses_qkv(shape),
        fuses_gate=stack.megatron_layers,
        fuses_places=stack.megatron_layers,
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
    """Return which saved tensors of a layer wait on the host, where some do."""
    if not shape.offload_modules:
        return SavedOffload(frozenset(), SMALLEST_OF_LAYERS)
    return SavedOffload(frozenset(map(str, shape.offload_modules)), SMALLEST_OF_MODULES)


def makes_gradients(shape: BlockShape) -> bool:
    """Return whether a weight's gradient is a tensor before it is added to what is kept."""
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
        # HybridEP fills rows up as it dispatches, so that nothing is left to be filled up
        # (_HybridEPManager of megatron/core/transformer/moe/token_dispatcher.py, core 0.16).
        # Nor where rows are those of a capacity, a multiple of what a product takes.
        pads_experts=recipe.fills_expert_rows
        and shape.dispatcher is not Dispatcher.HYBRIDEP
        and shape.stack.expert_capacity is None,
        fuses_expert_activation=recipe.fuses_experts,
        discarded=outputs_again(shape)
        | (ATTENDED if recipe.keeps_attention_output else frozenset()),
    )


def outputs_again(shape: BlockShape) -> frozenset[str]:
    """Return the parts whose outputs are given up and made again, in 8 bits."""
    if shape.recipe is None:
        return frozenset()
    return frozenset(GIVEN_UP.intersection(repeated_modules(shape.recompute, shape.modules)))


def written(shape: BlockShape, kind: BlockKind, columns: Columns | None = None) -> Written:
    """Return the block of one kind, with the sizes of *columns* in the place of the shape's own."""
    sizes = columns or Columns.of(shape)
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
    """Write a block of a model that lists its layers; return what enters it."""
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
    """Return whether backward of a layer reads what the layer hands on."""
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
    ending: Ending = ADDED,
    repeats: bool = True,
) -> Backward:
    """Return a walk forward and backward through a block.

    Args:
        shape: Its sizes and switches.
        kind: Which block.
        known: The block where it is written already, as of columns of sizes.
        ending: How backward begins and ends.
        repeats: Whether backward runs again what the plan recomputes.
    """
    block, first = known or written(shape, kind)
    repetition = _repetition(shape, block) if repeats else Repetition()
    tape = Tape(block, repetition)
    tape.run_forward(first)
    policy = WeightGradients.KEPT if ending.keeps_gradients else block.lowering.weight_gradients
    result = Backward(tape, policy)
    arriving = None
    if ending.arriving_bytes is not None:
        arriving = block.tensor("arriving", Dim("bytes", ending.arriving_bytes), width=1)
    result.run(arriving)
    return result


def _repetition(shape: BlockShape, block: Block) -> Repetition:
    is_by_operator = shape.recompute is Recompute.SELECTIVE_OP
    modules = frozenset(repeated_modules(shape.recompute, shape.modules))
    is_whole = shape.recompute in OF_LAYERS
    parts = frozenset({LAYER, GROUP}) if is_whole else modules
    # Megatron's checkpoints of layers are reentrant, too; PyTorch's and DeepSpeed's own are not.
    is_named = not is_whole or (shape.stack.megatron_layers and not is_by_operator)
    return Repetition(
        parts,
        shape.stack.recompute_stops_early,
        _kept_operators(block) if is_by_operator else frozenset(),
        # Reentrant checkpoints have names for what they made again; of an attention core another
        # storage is as large by then, and norms have given theirs up.
        held=parts - NOT_HELD if is_named else frozenset(),
    )


def _kept_operators(block: Block) -> frozenset[Operator]:
    """Return the operators whose outputs selective recomputation per operator keeps.

    torchtitan's ``selective_ac_option = "op"`` (torchtitan/parallelisms/parallelize_llama.py,
    commit 6b03ffa of 2024-12-26) keeps what the operators of a list give out: attention, what is
    reduce-scattered, and products but for every second one, counted through the layer.  The list
    has ``aten.mm`` alone: PyTorch runs a product with a bias as ``addmm``, so that always runs
    again, but torchao adds the bias of an fp8 product afterwards (torchao/float8/float8_linear.py,
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
