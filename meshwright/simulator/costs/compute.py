"""Times of compute operators: GEMMs, convolutions, attention, memory-bound kernels."""

from math import ceil

from meshwright.hwprofiles import Device, GemmKernels, Precision, Source
from meshwright.simulator.blocks import FlashAttention, Gemm, ImplicitGemm, MemoryBound
from meshwright.simulator.costs.cost import Cost
from meshwright.simulator.errors import PlanError

# Output tiles of the vendor's GEMM kernels; the best one is chosen per shape.
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
REFERENCE_TILE = (256, 128)
# 16-bit tensor-core kernels load 16 bytes at a time: 8 elements, in 8 bits 16.
ALIGNED_ELEMENTS = 8
ALIGNED_BYTES = 16


def peak_flops_per_s(device: Device, precision: Precision) -> float:
    """Return the dense peak of *device*.

    Raises:
        PlanError: If the device lacks the precision.
    """
    try:
        return device.peak_flops_per_s[precision]
    except KeyError:
        precisions = ", ".join(sorted(device.peak_flops_per_s))
        raise PlanError(
            f"precision={precision} is not available on {device.name}; allowed: {precisions}"
        ) from None


def gemm_cost(
    gemm: Gemm, device: Device, precision: Precision, expert_launch_s: float = 0.0
) -> Cost:
    """Return the time of a GEMM, without its launch.

    A tile of ``tm x tn`` outputs takes ``2 tm tn (k + k0)`` operations of a multiprocessor;
    ``w = batch ceil(m/tm) ceil(n/tn) / SMs`` waves run, of a last partial wave the share ``q``
    of the missing part is paid.  A tile's rate is ``I / (I + a0)`` with ``I = tm tn / (tm + tn)``,
    scaled so that the 256 x 128 tile reaches the plateau.  Never below the traffic's time.
    An fp8 GEMM has plateau and ``k0`` of *precision*; in an fp8 layer all others run in bf16.

    A grouped GEMM reads experts' weights, or accumulates their gradients, for few rows each: the
    device's share of that traffic is not overlapped; nor are launches of *expert_launch_s* each.
    """
    kernels = device.gemm
    # Only linear layers run in fp8; attention scores and logits stay in bf16.
    precision = precision if gemm.in_eight_bits else precision.storage
    facts = kernels.of(precision)
    best_s = _best_tile_s(gemm, device, precision) + _exposed_weights_s(gemm, device)
    if precision is not Precision.FP32 and _is_misaligned(gemm):
        # Unaligned sizes miss the 16-byte loads of tensor-core kernels.
        best_s /= _misaligned_fraction(gemm, kernels)
    traffic_s = _traffic_bytes(gemm, precision) / memory_rate_bytes_per_s(device)
    starts_s = gemm.batch * expert_launch_s if gemm.rows else 0.0
    return Cost.from_seconds(max(best_s, traffic_s, starts_s), facts.kind)


def _exposed_weights_s(gemm: Gemm, device: Device) -> float:
    """Return the exposed seconds of the traffic of experts' weights."""
    if not gemm.rows or device.gemm.grouped is None:
        return 0.0
    share = device.gemm.grouped.weight_traffic_fraction
    return share * gemm.weight_bytes / memory_rate_bytes_per_s(device)


def _best_tile_s(gemm: Gemm, device: Device, precision: Precision) -> float:
    """Return the seconds of a GEMM with its best tile."""
    kernels = device.gemm
    facts = kernels.of(precision)
    peak = peak_flops_per_s(device, precision) * facts.plateau_fraction
    # The plateau was measured with the reference tile.
    peak /= _intensity_fraction(*REFERENCE_TILE, kernels.half_rate_intensity)
    return min(
        _waves(gemm, tile, device.num_sms, kernels.partial_wave_fraction)
        * (device.num_sms * 2 * tile[0] * tile[1] * (gemm.k + facts.prologue_k))
        / (peak * _intensity_fraction(*tile, kernels.half_rate_intensity))
        for tile in TILES
    )


def convolution_cost(operator: ImplicitGemm, device: Device, precision: Precision) -> Cost:
    """Return the time of a convolution, or of one of its gradients, without its launch.

    It runs as a GEMM of its shape, at the device's fraction of that GEMM's rate; in 16 bits cuDNN
    pads channels to whole loads. Never below the traffic's time.

    Raises:
        PlanError: If the device has no facts of convolutions.
    """
    facts = device.convolution
    if facts is None:
        raise PlanError(f"device {device.name} has no table [convolution]; allowed: one that has")
    precision = precision.storage
    channels, fraction = operator.inputs, facts.fp32_fraction
    if precision is not Precision.FP32:
        channels = -(-channels // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
        fraction = facts.fp16_fraction
    gemm = Gemm(operator.name, m=operator.pixels, n=operator.outputs, k=channels * operator.taps)
    traffic_s = operator.moved * precision.num_bytes / memory_rate_bytes_per_s(device)
    return Cost.from_seconds(
        max(_best_tile_s(gemm, device, precision) / fraction, traffic_s), facts.kind
    )


def _traffic_bytes(gemm: Gemm, precision: Precision) -> int:
    if not gemm.in_eight_bits:
        return gemm.num_elements * precision.num_bytes
    # Operands have one byte an element, the output two (bf16).
    return gemm.num_elements + gemm.num_outputs * (precision.num_bytes - 1)


def _waves(gemm: Gemm, tile: tuple[int, int], num_sms: int, partial_share: float) -> float:
    # Tile quantization: a tile over the edge takes as long as a whole one.
    tiles = gemm.batch * -(-gemm.m // tile[0]) * -(-gemm.n // tile[1])
    waves = tiles / num_sms
    return waves + partial_share * (ceil(waves) - waves)


def _intensity_fraction(rows: int, columns: int, half_rate_intensity: float) -> float:
    intensity = rows * columns / (rows + columns)
    return intensity / (intensity + half_rate_intensity)


def _misaligned_fraction(gemm: Gemm, kernels: GemmKernels) -> float:
    if gemm.is_attention or kernels.misaligned_linear_fraction is None:
        return kernels.misaligned_fraction
    return kernels.misaligned_linear_fraction


def _is_misaligned(gemm: Gemm) -> bool:
    aligned = ALIGNED_BYTES if gemm.in_eight_bits else ALIGNED_ELEMENTS
    sizes = {"m": gemm.m, "n": gemm.n, "k": gemm.k}
    # An expert's rows are no operand's contiguous dim: each row is aligned by itself.
    sizes.pop(gemm.rows, None)
    return any(size % aligned for size in sizes.values())


def flash_attention_cost(
    attention: FlashAttention, device: Device, precision: Precision, kernel: str
) -> Cost:
    """Return the time of a flash attention call, from the kernel's fraction of the peak.

    Raises:
        PlanError: If the device has no such kernel.
    """
    if kernel not in device.flash:
        kernels = ", ".join(sorted(device.flash)) or "none"
        raise PlanError(
            f"attention=flash: {device.name} has no kernel {kernel!r}; known there: {kernels}"
        )
    facts = device.flash[kernel].facts_of(attention.head_dim, attention.window)
    # Backward reaches less of the peak than forward, so each has a share of its own.
    fraction = facts.backward_fraction if attention.backward else facts.forward_fraction
    rate = peak_flops_per_s(device, precision.storage) * fraction
    return Cost.from_seconds(attention.flops / rate, facts.kind)


def memory_rate_bytes_per_s(device: Device) -> float:
    """Return the memory bandwidth that element-wise kernels reach, in bytes per second."""
    return device.memory_bandwidth_bytes_per_s * device.memory.bandwidth_fraction


def memory_bound_cost(operator: MemoryBound, device: Device) -> Cost:
    """Return the time of *operator*'s traffic, or of its strided elements if that is longer."""
    facts = device.memory
    time_s, kind = operator.size_bytes / memory_rate_bytes_per_s(device), facts.kind
    if operator.strided and facts.strided is not None:
        one_by_one_s = operator.strided * facts.strided.element_time_s / device.num_sms
        if one_by_one_s > time_s:
            time_s, kind = one_by_one_s, facts.strided.kind
    return Cost.from_seconds(time_s, kind)


def constant_cost(count: int, time_s: float) -> Cost:
    """Return *count* times *time_s*, a fitted constant of the stack."""
    return Cost.from_seconds(count * time_s, Source.FITTED)
