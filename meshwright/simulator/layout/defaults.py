"""What a job and a plan have where nobody says: what device and stack both can do."""

from meshwright.hwprofiles import Attention, ContextParallel, Device, Precision, StackProfile
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.layout.plan import ParallelPlan
from meshwright.simulator.model import ModelSpec

# Published 16-bit training runs used fp16 before this year, bf16 from it on.
FIRST_BF16_DATE = "2022"


def default_precision(device: Device, stack: StackProfile | None = None) -> Precision:
    """Return bf16 where device and stack have it and it was usual, else fp16, else fp32.

    Where they share none it is what the stack has, which the device then refuses.

    >>> from meshwright.hwprofiles import load_cluster, load_stack
    >>> core = load_stack("megatron-core")
    >>> [default_precision(load_cluster(name).device, core) for name in ("dgx-a100", "dgx-1v")]
    [<Precision.BF16: 'bf16'>, <Precision.FP16: 'fp16'>]
    """
    bf16, *others = usual = [Precision.BF16, Precision.FP16, Precision.FP32, Precision.FP8]
    if stack is not None and stack.date < FIRST_BF16_DATE:
        usual = [*others, bf16]
    offered = [each for each in usual if stack is None or each in stack.precisions]
    return next((each for each in offered if each in device.peak_flops_per_s), offered[0])


def default_attention(device: Device, stack: StackProfile) -> Attention:
    """Return the stack's kernel; unfused where the device lacks its flash kernel."""
    flash, unfused = Attention.FLASH, Attention.UNFUSED
    lacks_kernel = stack.flash_kernel not in device.flash
    if stack.attention is flash and lacks_kernel and unfused in stack.attention_kernels:
        return unfused
    return stack.attention


def context_way(plan: ParallelPlan, stack: StackProfile) -> ContextParallel | None:
    """Return how context-parallel ranks attend to each other's tokens, None where there are none.

    Without a word of it as the stack does; a ring where the stack has no way to.  A ring of swaps
    whose groups are single ranks is a ring, one of a single group a swap: Transformer Engine takes
    it so, too (attn_forward_func_with_cp).

    >>> from meshwright.hwprofiles import load_stack
    >>> plan = ParallelPlan(cp=8, cp_type=ContextParallel.RING_OF_SWAPS, cp_inner=8)
    >>> context_way(plan, load_stack("megatron-core"))
    <ContextParallel.ALL_TO_ALL: 'all-to-all'>
    """
    if plan.cp == 1:
        return None
    if plan.cp_inner == 1:
        return ContextParallel.RING
    if plan.cp_inner == plan.cp:
        return ContextParallel.ALL_TO_ALL
    return plan.cp_type or next(iter(stack.context_parallel), ContextParallel.RING)


def usual_inner(job: TrainingJob, tp: int, cp: int, node_size: int) -> int:
    """Return the most ranks of a node that can swap tokens for heads; 1 where none can.

    >>> from meshwright.simulator import load_model
    >>> job = TrainingJob(model=load_model("llama3-8b"), global_batch_size=1, seq_len=8192)
    >>> [usual_inner(job, tp, cp=16, node_size=8) for tp in (1, 2, 8)]
    [8, 4, 1]
    """
    heads = job.model.num_kv_heads if isinstance(job.model, ModelSpec) else 1
    fits = (each for each in range(1, cp + 1) if cp % each == heads % (tp * each) == 0)
    return max((each for each in fits if tp * each <= node_size), default=1)
