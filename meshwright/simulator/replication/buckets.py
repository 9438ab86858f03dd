"""Gradient buckets, tensor by tensor, and the parts of a stage that complete them in backward.

A backward pass makes the gradients of a stage's tensors in the reverse of module order. A bucket
takes them one by one and is full once it reaches the limit; no tensor is split. PyTorch's
DistributedDataParallel counts in bytes (arXiv 2006.15704, section 3.2.3; PyTorch 2.0's
`compute_bucket_assignment_by_size` over parameters in the order in which gradients arrived, with a
limit of its own for the first), Megatron-Core in elements (`param_and_grad_buffer.py`, core r0.8).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from math import prod
from operator import itemgetter

from meshwright.hwprofiles import Kernels, StackProfile
from meshwright.simulator.blocks import BlockShape, fuses_qkv, layer_code_of
from meshwright.simulator.layout import Stage, copies_embedding, reads_embedding
from meshwright.simulator.model import (
    HEAD,
    PREDICTIONS,
    BlockKind,
    ParameterTensor,
    in_engine_order,
    is_expert,
    rank_tensors,
    shares_embedding,
)
from meshwright.simulator.replication.data_parallel import stage_parameters
from meshwright.simulator.replication.parts import GradientBucket, StagePart, cut_at

USED_BYTES = 4  # an int32 for each tensor


def bucket_limit(stack: StackProfile, dp: int) -> int:
    """Return the parameters that fill a bucket with *dp* data-parallel ranks.

    Megatron-Core makes buckets larger with many replicas, so that each rank's message is not too
    small (distributed_data_parallel.py of core r0.8).

    >>> from meshwright.hwprofiles import load_stack
    >>> [bucket_limit(load_stack("megatron-core"), dp) for dp in (8, 128)]
    [40000000, 128000000]
    """
    return max(stack.gradient_bucket_parameters, stack.gradient_bucket_parameters_per_replica * dp)


def stage_bucket_limit(shape: BlockShape, stage: Stage, dp: int) -> int:
    """Return the parameters that fill a bucket of *stage*: all that it has, or fewer."""
    whole = stage_parameters(shape, stage)
    # Megatron-Core: on other stages reductions are not on the critical path, as the first one ends
    # last (distributed_data_parallel.py).
    if shape.stack.buckets_first_stage_only and not stage.has_embedding:
        return whole
    return min(whole, bucket_limit(shape.stack, dp))


def gradient_buckets(
    shape: BlockShape, stage: Stage, dp: int = 1, *, shards: bool = True, experts: bool = False
) -> tuple[GradientBucket, ...]:
    """Return the buckets of *stage* in the order in which backward completes them.

    Args:
        shape: Shape of its blocks.
        stage: Pipeline stage.
        dp: Data-parallel ranks.
        shards: Whether optimizer states are sharded.
        experts: Buckets of experts with a data-parallel group of their own, not of the others.
    """
    usual = stage_bucket_limit(shape, stage, dp)
    # DDP's first bucket is small, so that an all-reduce starts sooner.
    limit = shape.stack.first_gradient_bucket_parameters or usual
    buckets: list[GradientBucket] = []
    num_filled = 0
    last = stage.num_blocks - 1
    blocks = _backward_blocks(shape, stage, experts=experts)
    arriving = [(block, size) for block, sizes in blocks for size in sizes]
    shared = (
        _shared_embedding_index(shape, stage, len(arriving)) if shards and not experts else None
    )
    for index, (block, size) in enumerate(arriving):
        if index == shared and num_filled:
            # A bucket of its own begins and ends with the table: close the one before.
            buckets.append(GradientBucket(num_filled, last))
            num_filled = 0
        # A bucket is complete with its last gradient, that of its earliest block.
        last = block if num_filled == 0 else min(last, block)
        num_filled += size
        if num_filled >= limit or index == shared:
            buckets.append(GradientBucket(num_filled, last))
            num_filled, limit = 0, usual
    # What is left over when backward ends is reduced, too.
    return (*buckets, GradientBucket(num_filled, last)) if num_filled else tuple(buckets)


def listed_buckets(shape: BlockShape, stage: Stage) -> tuple[GradientBucket, ...]:
    """Return the buckets of *stage* in the order of its module's weights, last bucket first.

    DistributedDataParallel assigns them so at first, and keeps them with
    ``find_unused_parameters``: then it does not learn the order in which gradients arrive
    (`should_rebuild_buckets` of reducer.hpp, `_ddp_init_helper` of
    torch/nn/parallel/distributed.py, PyTorch 2.13).
    """
    usual = stage_bucket_limit(shape, stage, 1)
    limit = shape.stack.first_gradient_bucket_parameters or usual
    sizes, kinds = (
        _listed_sizes(shape),
        [kind for kind, count in stage.blocks for _ in range(count)],
    )
    buckets: list[GradientBucket] = []
    num_filled = first = 0
    for block, kind in enumerate(kinds):
        for size in sizes[kind]:
            first = first if num_filled else block
            num_filled += size
            if num_filled >= limit:
                buckets.append(GradientBucket(num_filled, first))
                num_filled, limit = 0, usual
    last = [GradientBucket(num_filled, first)] if num_filled else []
    return tuple(reversed(buckets + last))


def _shared_embedding_index(shape: BlockShape, stage: Stage, num_tensors: int) -> int | None:
    """Return the index, in order of arrival, of an embedding that two stages may hold.

    With a sharded optimizer it has a bucket of its own, so that both copies are sharded alike
    (`_does_param_require_new_bucket`, megatron/core/distributed/param_and_grad_buffer.py). It is
    the first weight of the embedding, wherever layers look it up; tied, it is the last of the head.
    """
    model = shape.trained
    is_whole = stage.has_embedding and stage.has_head
    has_table = stage.has_embedding or reads_embedding(model, stage)
    if is_whole or not (has_table and shares_embedding(model)):
        return None
    return 0 if stage.has_head and model.tied_embeddings else num_tensors - 1


def _backward_blocks(
    shape: BlockShape, stage: Stage, *, experts: bool = False
) -> Iterator[tuple[int, list[int]]]:
    """Yield the index of each block of *stage*, last first, and its tensors' sizes, likewise.

    The copy of an embedding in another stage lies ahead of all blocks, as a GPTModel of
    Megatron-Core has it; its gradient arrives after theirs.
    """
    sizes = _arriving_sizes(shape, experts=experts)
    embedding_copy = [shape.tied_embedding_parameters] * (
        copies_embedding(shape.trained, stage) and not experts
    )
    if embedding_copy and not stage.has_predictions:
        sizes = {**sizes, HEAD: [*embedding_copy, *sizes[HEAD]]}
    index = lookup_index = stage.num_blocks
    for kind, count in reversed(stage.blocks):
        for _ in range(count):
            index -= 1
            lookup_index = index if kind == PREDICTIONS else lookup_index
            yield index, sizes[kind]
    if embedding_copy and stage.has_predictions:
        yield lookup_index, embedding_copy


def _listed_sizes(shape: BlockShape) -> Mapping[BlockKind, list[int]]:
    """Return the parameters of each tensor of a block of each kind, as its module lists them."""
    sizes: dict[BlockKind, list[int]] = {kind: [] for kind in shape.parameters}
    for name, group in _modules(shape):
        local = [prod(shape.local_shape(tensor)) for tensor in group]
        widths = separate_widths(shape, name) or (1,)
        whole = sum(widths)
        # Separate weights share the elements of the fused one by their widths.
        sizes[group[0].block] += [s * width // whole for width in reversed(widths) for s in local]
    return sizes


def _modules(shape: BlockShape) -> list[tuple[str, list[ParameterTensor]]]:
    """Return the tensors of each module in model order, with its name."""
    tensors = rank_tensors(shape.trained, shape.ends_tp, shape.stack.vocabulary_multiple)
    groups = groupby(tensors, key=lambda each: (each.block, module_of(each)))
    return [(name, list(group)) for (_, name), group in groups]


@lru_cache  # of each shape every stage asks, and a search asks for thousands of stages
def _arriving_sizes(shape: BlockShape, *, experts: bool) -> Mapping[BlockKind, list[int]]:
    """Return the parameters of each tensor of a block of each kind, in order of arrival.

    Where GEMMs are separate, so are their weights. PyTorch's own modules give them in the order in
    which autograd finishes gradients: of each layer its bias first, of a norm its weight. Under
    autocast the weight that is cast last, behind the bias, comes first.
    """
    sizes: dict[BlockKind, list[int]] = {kind: [] for kind in shape.parameters}
    modules = _modules(shape)
    # Transformer Engine's modules register weights in another order than the model's tensors.
    if shape.stack.transformer_engine:
        modules = in_engine_order(modules, itemgetter(0))
    for _, module in reversed(modules):
        if shape.expert_parameters and is_expert(module[0]) is not experts:
            continue
        local = [prod(shape.local_shape(tensor)) for tensor in reversed(module)]
        if not shape.stack.megatron_layers:
            local = _separate(shape, module, local)
        elif is_expert(module[0]):
            # Each expert has a weight of its own, and its bias behind it (GroupedLinear of
            # Transformer Engine 2.9).
            num = shape.local_shape(module[0])[0]
            local = [size // num for size in local] * num
        sizes[module[0].block] += local
    return sizes


def module_of(tensor: ParameterTensor) -> str:
    """Return the name of the module that owns a *tensor*."""
    return tensor.name.partition(".")[0]


def _separate(shape: BlockShape, module: list[ParameterTensor], local: list[int]) -> list[int]:
    """Return the sizes of separate GEMMs' weights and biases in the order of their gradients."""
    name = module_of(module[0])
    if name.endswith("norm") or (shape.casts_weights and not _has_conv1d(shape)):
        local.reverse()
    widths = separate_widths(shape, name)
    if not widths:
        return local
    whole = sum(widths)
    return [size * width // whole for width in widths for size in local]


def _has_conv1d(shape: BlockShape) -> bool:
    """Return True if linear layers are the Conv1D of transformers' GPT-2, whose bias comes first.

    That is `torch.addmm(bias, x, weight)` (pytorch_utils.py of transformers 5), of which autocast
    casts the last argument first.
    """
    is_eager = shape.stack.transformers_layers and shape.stack.kernels is Kernels.EAGER
    return is_eager and fuses_qkv(shape) and shape.model.positions == "learned"


def separate_widths(shape: BlockShape, name: str) -> tuple[int, ...]:
    """Return the outputs of each GEMM into which the module *name* is split, if several."""
    if name == "qkv" and not fuses_qkv(shape):
        return (shape.local_kv_width, shape.local_kv_width, shape.local_width)
    if name == "mlp_in" and shape.model.gated_mlp and not layer_code_of(shape).fuses_mlp:
        return (shape.local_ffn_width,) * 2
    if name == "shared_in" and shape.model.experts is not None:
        return (shape.model.experts.shared_hidden_size // shape.tp,) * 2
    return ()


def used_map_bytes(shape: BlockShape, stages: Sequence[Stage]) -> int:
    """Return the bytes of DDP's map of used parameters of *stages*: an int32 for each tensor."""
    tensors = (len(sizes) for stage in stages for _, sizes in _backward_blocks(shape, stage))
    return USED_BYTES * sum(tensors)


def bucket_parts(
    shape: BlockShape, stage: Stage, dp: int = 1, *, shards: bool = True
) -> tuple[StagePart, ...]:
    """Return *stage* split where `gradient_buckets` are complete, in model order."""
    of_experts: tuple[GradientBucket, ...] = ()
    # Experts have buckets of their own, reduced over their own data-parallel group.
    if shape.expert_parameters:
        of_experts = gradient_buckets(shape, stage, dp, shards=shards, experts=True)
    return cut_at(stage, gradient_buckets(shape, stage, dp, shards=shards), of_experts)
