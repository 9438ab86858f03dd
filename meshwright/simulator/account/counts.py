"""All that a rank computes and says in a step, as a program that counts would see it.

The list of collectives that repeat is elsewhere; here stand the messages between stages and
what closes a step, and the FLOPs.
"""

from collections import Counter

from meshwright.hwprofiles import CollectiveOp, StackProfile
from meshwright.simulator.account.traffic import Traffic
from meshwright.simulator.blocks import (
    BlockOperators,
    BlockShape,
    BlockTable,
    FlashAttention,
    Gemm,
)
from meshwright.simulator.layout import Axis, ParallelPlan, TrainingJob, rank_stages
from meshwright.simulator.memory import block_bytes, stage_messages


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
    shape, blocks = BlockShape.of(job, plan, stack), BlockTable()
    flops = sum(
        _counted_flops(blocks.operators(shape, kind)) * count
        for stage in rank_stages(job.model, plan, pp_rank)
        for kind, count in stage.blocks
    )
    return microbatches * flops


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
    blocks = block_bytes(BlockTable(), shape)
    in_parts = stack.scatter_gather_p2p and plan.tp > 1 and not shape.sequence_parallel
    # A stage sends forward unless it is the last, and backward unless it is the first: as much.
    sizes = Counter(
        size_bytes
        for stage in rank_stages(job.model, plan, pp_rank)
        for size_bytes in stage_messages(blocks, stage)
        if size_bytes
    )
    messages, gathers = [], []
    for size_bytes, num_messages in sizes.items():
        count = microbatches * num_messages
        part_bytes = size_bytes // plan.tp if in_parts else size_bytes
        messages.append(Traffic(Axis.PP, CollectiveOp.P2P, part_bytes, 2, count))
        if in_parts:
            gathers.append(Traffic(Axis.TP, CollectiveOp.ALL_GATHER, size_bytes, plan.tp, count))
    return messages, messages + gathers


def norm_ranks(plan: ParallelPlan) -> int:
    """Return over how many ranks the gradient norm is summed; 1 where each has all gradients.

    Replicas of a set of shards hold the same gradients: one set is enough.
    """
    shards = plan.num_shards if plan.zero_stage else 1
    return plan.tp * plan.pp * shards
