"""FLOPs of a rank in a step, as PyTorch's FLOP counter reports them."""

from meshwright.hwprofiles import ContextParallel, StackProfile
from meshwright.simulator.blocks import BlockOperators, BlockShape, BlockTable, FlashAttention, Gemm
from meshwright.simulator.layout import ResolvedPlan, TrainingJob, rank_stages

# Gathered keys are masked for a rank's early and its late rows alone, of half the width each.
_MASKED_HALVES = 2


def rank_flops(
    job: TrainingJob,
    plan: ResolvedPlan,
    stack: StackProfile,
    pp_rank: int,
    *,
    microbatches: int,
    cp_rank: int = 0,
) -> int:
    """Return the FLOPs of a rank's GEMMs and attention in a step, with recomputation.

    Attention counts its full square, as PyTorch's counter does, whether or not a kernel skips
    the masked half.

    Args:
        job: Model, sequence length and batch.
        plan: Parallel degrees and schedule.
        stack: Software stack.
        pp_rank: Pipeline rank.
        microbatches: Microbatches that the rank runs.
        cp_rank: Context-parallel rank.
    """
    shape, blocks = BlockShape.of(job, plan, stack), BlockTable()
    gathers = shape.cp_type is ContextParallel.ALL_GATHER and stack.transformer_engine
    masked = _MASKED_HALVES if gathers else 1
    flops = sum(
        counted_flops(blocks.operators(shape, kind), masked, cp_rank) * count
        for stage in rank_stages(job.model, plan, pp_rank)
        for kind, count in stage.passes
    )
    return microbatches * flops


def counted_flops(block: BlockOperators, masked: int = 1, cp_rank: int = 0) -> int:
    """Return the FLOPs of the GEMMs and attention of a block, as a FLOP counter reports them.

    Masked parts count as well: of each of *masked* parts of a rank's rows, or of a whole window.
    """
    flops = 0
    for operator in (*block.forward, *block.recompute, *block.backward):
        if isinstance(operator, Gemm):
            flops += operator.flops
        elif isinstance(operator, FlashAttention) and operator.has_shared_window:
            flops += 2 * operator.flops_of(cp_rank)
        elif isinstance(operator, FlashAttention):
            flops += operator.flops
            if operator.causal:  # of the steps of a ring the first alone has a mask
                flops += operator.flops // (operator.ranks * masked)
    return flops
