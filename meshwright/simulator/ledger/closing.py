"""Collectives that close a step: tensor-parallel sums, tied embeddings, norms, token counts.

With sequence parallelism the gradients of norms' weights, and of biases added to a rank's own
tokens, are of these tokens alone. Megatron-LM flattens all of a rank's and sums them in one
all-reduce: in `finalize_model_grads` of megatron/core/distributed/finalize_model_grads.py (core
r0.8) after the data-parallel reductions, in `reduce_model_grads` of Megatron-LM 3.0
(megatron/optimizer, 2022) before them. DTensor sums each gradient where it is reduced, at once or
after the last microbatch. A tied embedding on both ends of a pipeline is summed after that.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import lru_cache
from math import prod

from meshwright.hwprofiles import CollectiveOp, StackProfile
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import (
    REPLICATED,
    Axis,
    ExpertAxis,
    GroupSpan,
    Mesh,
    MeshAxis,
    ResolvedPlan,
    Stage,
    pair_span,
    strided_span,
    tied_embedding_rank,
)
from meshwright.simulator.ledger.collectives import StepCollective
from meshwright.simulator.memory import StateBytes
from meshwright.simulator.model import (
    EXPERT_LAYERS,
    BlockKind,
    ModelSpec,
    buffer_bytes,
    is_expert,
    parameter_tensors,
)
from meshwright.simulator.replication import (
    Replication,
    WireBytes,
    num_weights,
    unit_matrices,
)

HEAD_NORMS = "query_norm.", "key_norm."
NORM_BYTES = 4
TOKENS_BYTES = 8  # an int64
COUNT_BYTES = 4  # of an expert's tokens, in fp32


def sums_first(stack: StackProfile) -> bool:
    """Return True if tensor-parallel sums come before the data-parallel reductions end."""
    return stack.sums_norms_each_microbatch or not stack.overlap_gradient_reduce


class DeferredSums(IntEnum):
    """Gradients that tensor-parallel ranks all-reduce at the end of a step.

    Norms of each query and key head see the heads of a rank, also without sequence parallelism.
    """

    NONE = 0
    HEADS = 1
    ALL = 2


def deferred_sums(shape: BlockShape) -> DeferredSums:
    """Return the gradients whose tensor-parallel sums are deferred to the end of a step."""
    # DTensor has already summed each gradient where it was reduced.
    if shape.stack.sums_norms_each_microbatch and not shape.defers_norm_all_reduce:
        return DeferredSums.NONE
    if shape.sequence_parallel:
        return DeferredSums.ALL
    has_norms = isinstance(shape.trained, ModelSpec) and shape.model.qk_norm == "head"
    return DeferredSums.HEADS if has_norms and shape.tp > 1 else DeferredSums.NONE


def tensor_sums(
    shape: BlockShape, stages: tuple[Stage, ...], wire: WireBytes, span: GroupSpan
) -> list[StepCollective]:
    """Return the tensor-parallel all-reduces, over *span*, after the last backward of *stages*."""
    return [
        StepCollective(Axis.TP, CollectiveOp.ALL_REDUCE, size_bytes, span, num_calls)
        for size_bytes, num_calls in _tensor_sums(shape, stages, wire)
    ]


def _tensor_sums(
    shape: BlockShape, stages: tuple[Stage, ...], wire: WireBytes
) -> Iterator[tuple[int, int]]:
    """Yield the bytes of each all-reduce, and the number of those of that size."""
    deferred = deferred_sums(shape)
    if deferred is DeferredSums.NONE:
        return
    if not shape.stack.sums_norms_each_microbatch:
        replicated = _replicated_parameters(shape, stages, deferred)
        if replicated:
            yield replicated * wire.reduce_bytes, 1
        return
    # A gradient that fully_shard does not reduce stays a part of its sum, which the gradient norm
    # makes, and the update again.
    times = 2 if shape.is_unwrapped else 1
    each_bytes = shape.stack.gradient_bytes if shape.is_unwrapped else wire.reduce_bytes
    model, vectors = shape.model, times * (2 if shape.model.norm == "layernorm" else 1)
    num_layers = sum(stage.num_layers for stage in stages)
    if deferred is DeferredSums.ALL:
        size_bytes = model.hidden_size * each_bytes
        # Two norms a layer, and the final norm with the head.
        norms = 2 * num_layers + sum(stage.has_head for stage in stages)
        yield size_bytes, norms * vectors
        # Scattered before a position is added, a rank sees its own tokens of the table, too.
        has_positions = stages[0].has_embedding and model.positions == "learned"
        if has_positions and shape.stack.scatters_positions:
            yield model.max_positions * size_bytes, times
    if model.qk_norm == "head" and num_layers:
        yield model.head_dim * each_bytes, 2 * num_layers * vectors


def tied_embedding_sums(
    shape: BlockShape, wire: WireBytes, mesh: Mesh, plan: ResolvedPlan
) -> list[StepCollective]:
    """Return the all-reduce of a tied embedding's gradient between its two stages.

    FSDP units are reduced first: each rank has its shard of the sum, in the format of the shards.
    """
    other = tied_embedding_rank(plan)
    # With both ends on one rank autograd adds the two gradients.
    if other == 0 or not shape.tied_embedding_parameters:
        return []
    rows, width_bytes = shape.local_vocab_size, wire.reduce_bytes
    if shape.stack.is_fully_sharded:
        rows = -(-rows // plan.num_shards)  # equal shards on both ends, so that each meets its own
        width_bytes = StateBytes.of(shape.stack, shape.precision).sharded_parameter
    table_bytes = rows * shape.model.hidden_size * width_bytes
    span = pair_span(crosses_nodes=mesh.crosses_nodes(0, other))
    # Two ranks that meet after the pipeline has drained reach what a benchmark does: the times of
    # Zero Bubble (arXiv 2401.10241, 14.6B over two nodes) leave no room for the in-step share.
    return [StepCollective(Axis.PP, CollectiveOp.ALL_REDUCE, table_bytes, span)]


def gradient_norm(
    shape: BlockShape, stages: tuple[Stage, ...], mesh: Mesh, replication: Replication
) -> list[StepCollective]:
    """Return the gradient norm's all-reduces, for which all ranks meet, and that of token counts.

    The latter comes before the first pass, but costs the same there: a step waits for it. DTensor
    sums the norms of a rank's weights as one vector, axis by axis, those of experts with a group of
    their own separately (`clip_grad_norm_` of torchtitan 0.2.2, distributed/utils.py).
    """
    world = strided_span(0, 1, mesh.world_size, mesh.node_size)
    if shape.stack.optimizer_instances and replication.replica_span is not None:
        # Gradients are the same in each instance (intra_dist_opt_group of
        # megatron/core/optimizer/__init__.py, core 0.16).
        world = mesh.span_of_instances(replication.replica_span.num_ranks)
    # Experts that other ranks hold have an optimizer of their own; with sharded states it sums over
    # the same ranks (ChainedOptimizer.get_grad_norm of Megatron-Core 0.16).
    is_joint = shape.stack.joint_gradient_norm and replication.zero_stage > 0
    sums: list[tuple[MeshAxis, int, GroupSpan]]
    # The axis is a label here: the world spans all of them.
    sums = [(Axis.DP, NORM_BYTES, world)] * (2 if shape.expert_parameters and not is_joint else 1)
    if shape.stack.norm_by_axis:
        norm_bytes = shape.stack.gradient_bytes  # get_total_norm keeps a gradient's format
        norms, of_experts = (
            norm_bytes * sum(num_weights(shape, each, of_experts=apart) for each in stages)
            for apart in (False, True)
        )
        sums = [
            *_expert_norms(of_experts, mesh, replication, shape.stack),
            (Axis.DP, norms, replication.span),
            (Axis.TP, norms, mesh.span(Axis.TP)),
            (Axis.PP, norm_bytes, mesh.span(Axis.PP)),
        ]
    if shape.stack.sums_tokens:
        sums.append((Axis.DP, TOKENS_BYTES, mesh.span(Axis.DP)))
    return [
        StepCollective(axis, CollectiveOp.ALL_REDUCE, size_bytes, span)
        for axis, size_bytes, span in sums
    ]


def expert_tokens(shape: BlockShape, stages: tuple[Stage, ...], mesh: Mesh) -> list[StepCollective]:
    """Return the all-reduce of token counts by expert, over a stage's ranks, for routing biases.

    One fp32 number for each expert of all layers of a rank (`get_updated_expert_bias` of
    megatron/core/transformer/moe/moe_utils.py, core 0.16; `_update_expert_bias` of torchtitan
    0.2.2, components/optimizer.py); those of transformers are constant.
    """
    model = shape.trained
    if model.experts is None or not model.experts.routing_bias:
        return []
    if shape.stack.transformers_layers:
        return []
    runs = [run for stage in stages for run in stage.layers if run.kind in EXPERT_LAYERS]
    num_layers = sum(run.num_blocks for run in runs)
    # MTP layers have the last layer's kind, and experts where that has.
    if stages[-1].has_predictions and model.layer_runs[-1].kind in EXPERT_LAYERS:
        num_layers += model.prediction_layers
    size_bytes = COUNT_BYTES * model.experts.num_experts * num_layers
    ranks = mesh.span(Axis.TP, *REPLICATED)
    call = StepCollective(Axis.DP, CollectiveOp.ALL_REDUCE, size_bytes, ranks)
    return [call] if num_layers else []


def weight_scales(
    shape: BlockShape, stages: tuple[Stage, ...], span: GroupSpan
) -> list[StepCollective]:
    """Return the all-reduces of the scales of all weights gathered in 8 bits, stage by stage.

    Each scale is of a weight's largest element, in the weights' format (torchao 0.18,
    float8/fsdp_utils.py: `precompute_float8_dynamic_scale_for_fsdp`).
    """
    recipe = shape.recipe
    if recipe is None or not recipe.precomputes_scales:
        return []
    # Embedding and head stay in the training's format: only layers are converted.
    counts = (len(unit_matrices(shape, _layers_of(stage), 1)) for stage in stages)
    width = shape.stack.sharded_parameter_bytes
    return [
        StepCollective(Axis.DP, CollectiveOp.ALL_REDUCE, width * count, span)
        for count in counts
        if count
    ]


def _layers_of(stage: Stage) -> Stage:
    return stage._replace(has_embedding=False, has_head=False)


def _expert_norms(
    nbytes: int, mesh: Mesh, replication: Replication, stack: StackProfile
) -> list[tuple[MeshAxis, int, GroupSpan]]:
    """Return the all-reduces of *nbytes* of norms of experts with a group of their own, if any.

    One all-reduce goes over both axes of a shard group where these ranks are a mesh of their own,
    as they are for a sum of tokens if all replicas share one shard group (`_flatten` of torchtitan
    0.2.2, distributed/parallel_dims.py).
    """
    experts = replication.experts
    if experts is None or not nbytes:
        return []
    if replication.replica_span is None and stack.sums_tokens:
        return [(Axis.DP, nbytes, replication.span)]
    over_ep = ExpertAxis.EP, nbytes, mesh.span(ExpertAxis.EP)
    return [(experts.axis, nbytes, experts.span), over_ep]


def batch_calls(shape: BlockShape, span: GroupSpan, num_syncs: int) -> list[StepCollective]:
    """Return the collectives of replicas, over *span*, before passes: token counts and buffers.

    They count as closing the step, where they cost the same: a step waits for them. As often as
    gradients are reduced, DistributedDataParallel broadcasts buffers before a forward pass, all of
    a type as one (`_sync_buffers`, torch/nn/parallel/distributed.py of PyTorch 2.13).
    """
    stack, calls = shape.stack, []
    if stack.gathers_tokens:
        # The gathered buffer: one number of each replica.
        whole = TOKENS_BYTES * span.num_ranks
        calls.append(StepCollective(Axis.DP, CollectiveOp.ALL_GATHER, whole, span))
    if stack.broadcasts_buffers:
        sizes = buffer_bytes(shape.trained)
        op = CollectiveOp.BROADCAST
        calls += [StepCollective(Axis.DP, op, size, span, num_syncs) for size in sizes]
    return calls


def _replicated_parameters(
    shape: BlockShape, stages: tuple[Stage, ...], deferred: DeferredSums
) -> int:
    """Return the parameters of norms, and of biases added to a rank's own tokens, in *stages*."""
    counts = _replicated_by_block(shape.model, deferred, of_groups=shape.stack.grouped_experts)
    return sum([count * counts[kind] for stage in stages for kind, count in stage.blocks])


@lru_cache  # asked for of every rank
def _replicated_by_block(
    model: ModelSpec, deferred: DeferredSums, *, of_groups: bool
) -> Mapping[BlockKind, int]:
    """Return the replicated parameters of each kind of block, 0 of any other.

    Biases of experts in grouped GEMMs are excluded: TEGroupedLinear has no parallel mode with
    expert parallelism, and so no mark of Transformer Engine
    (megatron/core/extensions/transformer_engine.py of core 0.16, pytorch/module/grouped_linear.py).
    """
    counts: Counter[BlockKind] = Counter()
    for tensor in parameter_tensors(model):
        # Megatron adds positions before tokens are scattered: that table's gradient is of all.
        is_deferred = deferred is DeferredSums.ALL or tensor.name.startswith(HEAD_NORMS)
        is_grouped = is_expert(tensor) and of_groups
        is_whole = tensor.tp_dim is None and not is_grouped
        if is_whole and tensor.name != "position_embedding.weight" and is_deferred:
            counts[tensor.block] += prod(tensor.shape)
    return counts
