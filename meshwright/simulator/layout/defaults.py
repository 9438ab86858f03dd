"""What a job and a plan have where nobody says: what device and stack both can do."""

from meshwright.hwprofiles import EIGHT_BITS, Attention, Device, Precision, StackProfile

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
    bf16, *others = usual = [Precision.BF16, Precision.FP16, Precision.FP32, *EIGHT_BITS]
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
