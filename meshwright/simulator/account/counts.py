"""The FLOPs of a rank in a step, as a program that counts would see them."""

from meshwright.hwprofiles import StackProfile
from meshwright.simulator.blocks import BlockOperators, BlockShape, BlockTable, FlashAttention, Gemm
from meshwright.simulator.layout import ParallelPlan, TrainingJob, rank_stages


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
        counted_flops(blocks.operators(shape, kind)) * count
        for stage in rank_stages(job.model, plan, pp_rank)
        for kind, count in stage.passes
    )
    return microbatches * flops


def counted_flops(block: BlockOperators) -> int:
    """Return the FLOPs of the products of a block, as a program that counts would see them."""
    flops = 0
    for operator in (*block.forward, *block.recompute, *block.backward):
        if isinstance(operator, Gemm):
            flops += operator.flops
        elif isinstance(operator, FlashAttention):
            flops += operator.flops
            if operator.causal:  # of the steps of a ring the first alone has a mask
                flops += operator.flops // operator.ranks
    return flops
