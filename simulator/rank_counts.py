"""All that a rank computes and says in a step, as a program that counts would see it.

`simulator.traffic` lists the collectives that repeat; here stand the messages between stages and
what closes a step, and the FLOPs.
"""

from collections.abc import Iterator
from math import prod

from hwprofiles import CollectiveOp, StackProfile
from simulator.block_shape import BlockShape
from simulator.data_parallel import Stage, Wire
from simulator.end_operators import embedding_operators, head_operators
from simulator.mesh import Axis
from simulator.operator_graph import layer_operators
from simulator.operators import BlockOperators, FlashAttention, Gemm
from simulator.parameters import parameter_tensors
from simulator.plan import ParallelPlan, TrainingJob
from simulator.step_builder import rank_stages
from simulator.traffic import Traffic


def rank_flops(
    job: TrainingJob, plan: ParallelPlan, stack: StackProfile, pp_rank: int, *, microbatches: int
) -> int:
    """Return the FLOPs of a rank's matrix products in a step, recomputation included.

    Attention counts its full square, as PyTorch's counter does, whether or not a kernel skips
    the masked half.

    Args:
        job: What is trained.
        plan: How it is laid out.
        stack: With what software.
        pp_rank: Whose FLOPs.
        microbatches: Microbatches that the rank runs.
    """
    shape = BlockShape.of(job, plan, stack)
    flops = sum(
        _counted_flops(operators) * count
        for stage in rank_stages(plan, pp_rank)
        for operators, count in stage_blocks(shape, stage)
    )
    return microbatches * flops


def stage_blocks(shape: BlockShape, stage: Stage) -> Iterator[tuple[BlockOperators, int]]:
    """Yield the operators of each kind of block of a virtual stage, and how many it has."""
    if stage.num_layers:
        yield layer_operators(shape), stage.num_layers
    if stage.has_embedding:
        yield embedding_operators(shape), 1
    if stage.has_head:
        yield head_operators(shape), 1


def _counted_flops(block: BlockOperators) -> int:
    flops = 0
    for operator in (*block.forward, *block.recompute, *block.backward):
        if isinstance(operator, Gemm):
            flops += operator.flops
        elif isinstance(operator, FlashAttention):
            flops += operator.flops * (2 if operator.causal else 1)
    return flops


def message_traffic(
    job: TrainingJob, plan: ParallelPlan, stack: StackProfile, pp_rank: int, *, microbatches: int
) -> tuple[list[Traffic], list[Traffic]]:
    """Return what a pipeline rank sends, and what it receives with the gathers that follow.

    With scatter/gather each tensor-parallel rank sends its part of a message, and the receivers
    gather the whole (Narayanan et al. 2021, section 4.1).
    """
    if plan.pp == 1:
        return [], []
    shape = BlockShape.of(job, plan, stack)
    size_bytes = shape.message_bytes
    in_parts = stack.scatter_gather_p2p and plan.tp > 1 and not shape.sequence_parallel
    part_bytes = size_bytes // plan.tp if in_parts else size_bytes
    # A stage sends forward unless it is the last, and backward unless it is the first.
    ends = [
        (not stage.has_embedding) + (not stage.has_head) for stage in rank_stages(plan, pp_rank)
    ]
    count = microbatches * sum(ends)
    message = Traffic(Axis.PP, CollectiveOp.P2P, part_bytes, 2, count)
    received = [message]
    if in_parts:
        received.append(Traffic(Axis.TP, CollectiveOp.ALL_GATHER, size_bytes, plan.tp, count))
    return [message], received


def closing_traffic(
    job: TrainingJob, plan: ParallelPlan, stack: StackProfile, pp_rank: int
) -> tuple[Traffic, ...]:
    """Return the collectives after the last backward pass, but for those of the replicas.

    Gradients of weights that saw only a rank's own tokens are summed over the tensor-parallel
    ranks, a tied table's over both ends of the pipeline; then the gradient norm.
    """
    shape = BlockShape.of(job, plan, stack)
    stages = rank_stages(plan, pp_rank)
    kept_bytes = Wire.of(stack, job.precision, plan).reduce_bytes
    calls: list[Traffic] = []
    if shape.sequence_parallel:
        calls.extend(_replicated_sums(shape, stages, kept_bytes))
    at_an_end = stages[0].has_embedding or stages[-1].has_head
    if plan.pp > 1 and job.model.tied_embeddings and at_an_end:
        # Units of fully_shard reduce it first: each rank has its shard of the sum.
        shards = plan.num_shards if stack.root_unit else 1
        rows = -(-shape.local_vocab_size // shards)
        table = rows * job.model.hidden_size * kept_bytes
        calls.append(Traffic(Axis.PP, CollectiveOp.ALL_REDUCE, table, 2, 1))
    return tuple(calls)


def _replicated_sums(
    shape: BlockShape, stages: tuple[Stage, ...], kept_bytes: int
) -> Iterator[Traffic]:
    """Yield the sums of weights' gradients that saw a rank's own tokens alone: in one, or each.

    Where every microbatch sums them there is nothing left to do.
    """
    if not shape.stack.sums_norms_each_microbatch:
        size = kept_bytes * sum(_replicated_parameters(shape, stage) for stage in stages)
        if size:
            yield Traffic(Axis.TP, CollectiveOp.ALL_REDUCE, size, shape.tp, 1)
    elif shape.in_pipeline:
        norms = sum(2 * stage.num_layers + stage.has_head for stage in stages)
        tensors = norms * (2 if shape.model.norm == "layernorm" else 1)
        size = shape.model.hidden_size * kept_bytes
        yield Traffic(Axis.TP, CollectiveOp.ALL_REDUCE, size, shape.tp, tensors)
        model, scatters = shape.model, shape.stack.scatters_positions
        if stages[0].has_embedding and model.positions == "learned" and scatters:
            size *= model.max_positions
            yield Traffic(Axis.TP, CollectiveOp.ALL_REDUCE, size, shape.tp, 1)


def norm_ranks(plan: ParallelPlan) -> int:
    """Return over how many ranks the gradient norm is summed; 1 where each has all gradients.

    Replicas of a set of shards hold the same gradients: one set is enough.
    """
    shards = plan.num_shards if plan.zero_stage else 1
    return plan.tp * plan.pp * shards


def _replicated_parameters(shape: BlockShape, stage: Stage) -> int:
    """Return the parameters of norms, and of biases added to a rank's own tokens."""
    model = shape.model
    counts = {"embedding": 0, "layer": 0, "head": 0}
    for tensor in parameter_tensors(model):
        if tensor.tp_dim is None and tensor.name != "position_embedding.weight":
            counts[tensor.block] += prod(tensor.shape)
    return (
        stage.num_layers * counts["layer"]
        + stage.has_embedding * counts["embedding"]
        + stage.has_head * counts["head"]
    )
