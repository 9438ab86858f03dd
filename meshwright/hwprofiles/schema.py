"""Schema of devices, links and clusters."""

from meshwright.hwprofiles.complaints import ProfileError
from meshwright.hwprofiles.kinds import CollectiveOp, Precision, Source
from meshwright.hwprofiles.units import (
    ByteCount,
    Count,
    CountPerNode,
    FlopsRate,
    Fraction,
    GroupSize,
    Latency,
    LinkBandwidth,
    MemoryBandwidth,
    Name,
    PositiveFraction,
    PositiveRatio,
    Price,
    Profile,
    Ratio,
    RatioFromOne,
    Text,
    Title,
    format_bytes,
)
from meshwright.records import Field, model_validator, rare


class EightBitKernels(Profile):
    """Constants of 8-bit GEMMs that differ from `GemmKernels`; fractions are of the 8-bit peak."""

    plateau_fraction: PositiveFraction
    prologue_k: Ratio
    kind: Source
    source: Text


class GroupedKernels(Profile):
    """Loss of grouped GEMMs of experts against one plain GEMM.

    ``weight_traffic_fraction`` is the part of the traffic of weights, or of their gradients, that
    is not hidden by the computation.
    """

    weight_traffic_fraction: Ratio
    kind: Source
    source: Text


class GemmKernels(Profile):
    """Rate of matrix multiplications (GEMMs), as a fraction of the peak.

    A tile of m x n outputs runs at ``plateau * AI / (AI + half_rate_intensity)`` of the peak, where
    ``AI = m n / (m + n)``, and pays for ``k + prologue_k`` steps.  In 16 bits a product with a dim
    that is no multiple of a load reaches ``misaligned_fraction`` of that, one of a linear layer
    ``misaligned_linear_fraction`` where it is given: its operands' rows are read one by one, those
    of attention's batches as many small ones.
    """

    plateau_fraction: PositiveFraction
    prologue_k: Ratio
    half_rate_intensity: Ratio
    partial_wave_fraction: Fraction
    misaligned_fraction: PositiveFraction
    misaligned_linear_fraction: PositiveFraction | None = None
    kind: Source
    source: Text
    fp8: EightBitKernels | None = None
    mxfp8: EightBitKernels | None = None
    grouped: GroupedKernels | None = None

    def of(self, precision: Precision) -> "GemmKernels | EightBitKernels":
        """Return the constants of *precision*; those of 16 bits where the device has none of 8."""
        return self.eight_bit.get(precision) or self

    @property
    def eight_bit(self) -> "dict[Precision, EightBitKernels | None]":
        """Constants by 8-bit format, None where the device lacks it."""
        return {Precision.FP8: self.fp8, Precision.MXFP8: self.mxfp8}


class StridedKernels(Profile):
    """Time of a multiprocessor for one element of a strided or broadcast operand.

    PyTorch's kernel for such operands works out where each element lies and moves it by itself, so
    that those of one byte take as long as those of four.
    """

    element_time_s: Latency = Field(alias="element_time")
    kind: Source
    source: Text


class MemoryKernels(Profile):
    """Memory bandwidth of element-wise kernels, as a fraction of the device's."""

    bandwidth_fraction: PositiveFraction
    kind: Source
    source: Text
    strided: StridedKernels | None = None


class NarrowFlash(Profile):
    """Fractions of a flash-attention library at heads up to *head_dim*, in a window if given.

    A score costs one exponential whatever the width of a head is, so that narrow ones reach less;
    in a window kernels multiply whole tiles of scores, of which they mask most.
    """

    head_dim: Count
    window: Count | None = None
    forward_fraction: PositiveFraction
    backward_fraction: PositiveFraction
    kind: Source
    source: Text

    def covers(self, head_dim: int, window: int) -> bool:
        """Return True if these are the shares of heads of a width, in a window (0: in none)."""
        return head_dim <= self.head_dim and (self.window is None or 0 < window <= self.window)


class FlashKernels(Profile):
    """FLOP rate of a flash-attention library, as a fraction of the peak.

    Its FLOPs count causal attention as half of the full square, and backward as 2.5 x forward.
    """

    forward_fraction: PositiveFraction
    backward_fraction: PositiveFraction
    narrow: NarrowFlash | None = None
    narrow_window: NarrowFlash | None = None
    kind: Source
    source: Text

    def facts_of(self, head_dim: int, window: int) -> "FlashKernels | NarrowFlash":
        """Return the shares of heads of a width, in a window of so many tokens (0: in none)."""
        cases = (self.narrow_window, self.narrow)  # windowed ones first, as both cover narrow heads
        return next((case for case in cases if case and case.covers(head_dim, window)), self)


class ConvolutionKernels(Profile):
    """Rate of a convolution over that of a GEMM of its shape.

    More than 1 in fp32, where a 3 x 3 convolution of Winograd's form multiplies less often.
    """

    fp16_fraction: Ratio
    fp32_fraction: Ratio
    kind: Source
    source: Text


class DeviceOverheads(Profile):
    """Device memory that holds no tensors of a program.

    Args:
        usable_bytes: Total memory that CUDA reports to processes (`cudaMemGetInfo`).
        communicator_bytes: Buffers of one communicator between ranks (NCCL).
        product_workspace_bytes: cuBLAS workspace of each host thread that starts GEMMs.
        engine_workspace_bytes: cuBLAS workspace of Transformer Engine, one a process.
    """

    usable_bytes: ByteCount = Field(alias="usable")
    communicator_bytes: ByteCount = Field(alias="communicator")
    product_workspace_bytes: ByteCount = Field(alias="product_workspace")
    engine_workspace_bytes: ByteCount = Field(alias="engine_workspace")
    kind: Source
    source: Text


class Device(Profile):
    """An accelerator: memory capacity, peak rates, and the fractions that kernels reach.

    Without ``overheads`` a program can have the whole capacity, and all of it for its tensors.
    """

    name: Name
    title: Title
    memory_capacity_bytes: ByteCount = Field(alias="memory_capacity")
    memory_bandwidth_bytes_per_s: MemoryBandwidth = Field(alias="memory_bandwidth")
    num_sms: Count
    peak_flops_per_s: dict[Precision, FlopsRate] = Field(alias="peak", min_length=1)
    gemm: GemmKernels
    memory: MemoryKernels
    flash: dict[Name, FlashKernels]
    convolution: ConvolutionKernels | None = None
    overheads: DeviceOverheads | None = None
    source: Text

    @property
    def usable_bytes(self) -> int:
        """Bytes of the capacity that processes can allocate."""
        return self.overheads.usable_bytes if self.overheads else self.memory_capacity_bytes

    @model_validator(mode="after")
    def _check_usable(self) -> None:
        if self.usable_bytes > self.memory_capacity_bytes:
            raise ProfileError(
                f"overheads.usable: {format_bytes(self.usable_bytes)} is more than memory_capacity "
                f"{format_bytes(self.memory_capacity_bytes)}; allowed: at most that"
            )

    @model_validator(mode="after")
    # A peak without constants, or the reverse, would fail only in the middle of a prediction.
    def _check_eight_bits(self) -> None:
        for name, kernels in self.gemm.eight_bit.items():
            has_peak, has_kernels = name in self.peak_flops_per_s, kernels is not None
            if has_peak != has_kernels:
                there, missing = ("peak", "gemm") if has_peak else ("gemm", "peak")
                raise ProfileError(
                    f"{there}.{name}: stands without {missing}.{name}; allowed: both or neither"
                )
            if has_peak and Precision.BF16 not in self.peak_flops_per_s:
                raise ProfileError(
                    f"peak.{name}: stands without peak.bf16, in which the rest of {name} training "
                    "runs; allowed: both"
                )


class CollectiveFact(Profile):
    """Bus bandwidth and start-up time of one operation over one number of ranks."""

    op: CollectiveOp
    num_ranks: GroupSize
    busbw_bytes_per_s: MemoryBandwidth = Field(alias="busbw")
    latency_s: Latency = Field(alias="latency")
    kind: Source
    source: Text


class Link(Profile):
    """A connection: of one device inside a node, or one network card between nodes.

    The bandwidth is the line rate of one direction. ``busbw_fraction`` is what a large collective
    or message reaches of it in a benchmark; facts in ``collectives`` go before it.
    ``latency_s`` is that of one hop, ``collective_latency_s`` what each round of a collective
    across nodes takes besides its hops.
    """

    name: Name
    title: Title
    bandwidth_bytes_per_s: LinkBandwidth = Field(alias="bandwidth")
    latency_s: Latency = Field(alias="latency")
    busbw_fraction: PositiveFraction
    collective_latency_s: Latency = Field(default=0.0, alias="collective_latency")
    collectives: tuple[CollectiveFact, ...] = ()
    kind: Source
    source: Text

    @model_validator(mode="after")
    def _check_collectives(self) -> None:
        seen: set[tuple[CollectiveOp, int]] = set()
        for fact in self.collectives:
            case = (fact.op, fact.num_ranks)
            if case in seen:
                raise ProfileError(
                    f"collectives: {fact.op} over {fact.num_ranks} ranks stands twice; "
                    "allowed: one entry for each op and num_ranks"
                )
            seen.add(case)


class Cluster(Profile):
    """Nodes of equal devices, a link inside each node and a network between them.

    ``oversubscription`` is how many times less bandwidth the network has above the leaf switches
    than below: 1.0 is a full fat tree. ``num_nodes`` limits the cluster, ``None`` does not.

    ``host_link`` is one way from devices to host memory, which ``devices_per_host_link`` of them
    share; capacity and bandwidth of host memory are those of a node. ``host_source`` says where
    these come from. A cluster that leaves them out cannot offload.  ``host_time_factor`` is what
    its hosts take to start a kernel, over what those did that a stack's host times are of.
    """

    name: Name
    title: Title
    device: Device
    devices_per_node: CountPerNode
    intra_node: Link
    inter_node: Link
    nics_per_node: CountPerNode
    oversubscription: RatioFromOne = 1.0
    num_nodes: Count | None = None
    price_usd_per_gpu_hour: Price | None = Field(default=None, alias="price")
    host_link: Link | None = None
    devices_per_host_link: CountPerNode = 1
    host_memory_capacity_bytes: ByteCount | None = Field(default=None, alias="host_memory")
    host_memory_bandwidth_bytes_per_s: MemoryBandwidth | None = Field(
        None, alias="host_memory_bandwidth"
    )
    host_source: Text | None = None
    host_time_factor: PositiveRatio = rare(1.0)
    source: Text

    @model_validator(mode="after")
    def _check_host(self) -> None:
        facts = {
            "host_link": self.host_link,
            "host_memory": self.host_memory_capacity_bytes,
            "host_memory_bandwidth": self.host_memory_bandwidth_bytes_per_s,
            "host_source": self.host_source,
        }
        # Offloading needs all of these: with some of them it would have no price.
        missing = [key for key, value in facts.items() if value is None]
        if missing and (len(missing) < len(facts) or self.devices_per_host_link > 1):
            raise ProfileError(
                f"{missing[0]}: missing; allowed: {', '.join(facts)} all together, or none of them"
            )
