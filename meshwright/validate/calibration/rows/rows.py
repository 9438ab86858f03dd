"""Benchmark cases, and rows of their measured times."""

from dataclasses import dataclass
from enum import StrEnum

from meshwright.hwprofiles import CollectiveOp, Precision
from meshwright.simulator.blocks import FlashAttention, Gemm, MemoryBound
from meshwright.simulator.costs import bus_factor

# AdamW in fp32 reads weight, gradient and two moments, and writes all but the gradient.
ADAMW_BYTES_PER_PARAMETER = 28
# Values that an operator reads and writes for each element of its output.
VALUES_MOVED = {"add": 3, "norm": 2, "gelu": 2, "silu": 2, "softmax": 2, "dropout": 2}
MASK_BYTES = {"dropout": 1}
LAUNCH_ELEMENTS = 1


class CaseGroup(StrEnum):
    """Kinds of micro-benchmark."""

    GEMM = "gemm"
    ATTENTION = "attention"
    MEMORY = "memory-bound"
    OPTIMIZER = "optimizer"
    COPY = "copy"
    LAUNCH = "launch"
    COLLECTIVE = "collective"


SIZE_NAMES: dict[CaseGroup, tuple[str, ...]] = {
    CaseGroup.GEMM: ("m", "n", "k", "batch"),
    CaseGroup.ATTENTION: ("batch_heads", "seq_len", "head_dim"),
    CaseGroup.MEMORY: ("num_rows", "width"),
    CaseGroup.OPTIMIZER: ("num_parameters",),
    CaseGroup.COPY: ("size_bytes",),
    CaseGroup.LAUNCH: ("num_elements",),
    CaseGroup.COLLECTIVE: ("size_bytes", "num_ranks"),
}
DeviceOperator = Gemm | FlashAttention | MemoryBound


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """One case to time; *sizes* in the order of `SIZE_NAMES`."""

    group: CaseGroup
    op: str
    precision: Precision
    sizes: tuple[int, ...]

    @property
    def shape(self) -> str:
        """The sizes with their names.

        >>> BenchmarkCase(CaseGroup.COLLECTIVE, "all_reduce", Precision.FP32, (1024, 2)).shape
        'size_bytes=1024 num_ranks=2'
        """
        names = SIZE_NAMES[self.group]
        return " ".join(f"{name}={size}" for name, size in zip(names, self.sizes, strict=True))

    @property
    def operator(self) -> DeviceOperator | None:
        """The simulator's operator, where its cost model knows one."""
        match self.group:
            case CaseGroup.GEMM:
                m, n, k, batch = self.sizes
                return Gemm(self.op, m=m, n=n, k=k, batch=batch)
            case CaseGroup.ATTENTION:
                heads, seq_len, head_dim = self.sizes
                backward = self.op.startswith("backward")
                return FlashAttention(self.op, heads, seq_len, head_dim, backward=backward)
            case CaseGroup.MEMORY:
                elements = self.sizes[0] * self.sizes[1]
                each = VALUES_MOVED[self.op] * self.precision.num_bytes + MASK_BYTES.get(self.op, 0)
                return MemoryBound(self.op, elements * each)
            case CaseGroup.OPTIMIZER if self.op == "adamw fused":
                return MemoryBound(self.op, ADAMW_BYTES_PER_PARAMETER * self.sizes[0])
            case CaseGroup.COPY if self.op == "on device":
                return MemoryBound(self.op, 2 * self.sizes[0])
            case _:
                return None

    @property
    def flops(self) -> int:
        """Operations of a matrix product or an attention call, else 0."""
        operator = self.operator
        return operator.flops if isinstance(operator, Gemm | FlashAttention) else 0

    @property
    def size_bytes(self) -> int:
        """Bytes that the case moves; of a collective the buffer; 0 where FLOPs count."""
        if self.flops:
            return 0
        operator = self.operator
        if isinstance(operator, MemoryBound):
            return operator.size_bytes
        if self.group is CaseGroup.OPTIMIZER:
            return ADAMW_BYTES_PER_PARAMETER * self.sizes[0]
        return self.sizes[0] if self.group in {CaseGroup.COPY, CaseGroup.COLLECTIVE} else 0

    @property
    def work(self) -> float:
        """FLOPs, bytes, or bytes on the bus, which a rate counts; 0 of a launch."""
        if self.group is CaseGroup.COLLECTIVE:
            return self.size_bytes * bus_factor(CollectiveOp(self.op), self.sizes[1])
        return self.flops or self.size_bytes


def collective(op: str, size_bytes: int, num_ranks: int) -> BenchmarkCase:
    """Return a collective of fp32 elements as a case."""
    return BenchmarkCase(CaseGroup.COLLECTIVE, op, Precision.FP32, (size_bytes, num_ranks))


@dataclass(frozen=True, slots=True)
class Row:
    """A case and its time: median and quartiles of the repeats, seconds of one call."""

    case: BenchmarkCase
    median_s: float
    quartile_1_s: float
    quartile_3_s: float
    num_repeats: int

    @property
    def rate(self) -> float:
        """Work a second: FLOP/s, or bytes/s on the memory or the bus; 0 of a launch."""
        return self.case.work / self.median_s


def summarised(case: BenchmarkCase, times_s: list[float]) -> Row:
    """Return the row of a case's repeats.

    >>> case = BenchmarkCase(CaseGroup.LAUNCH, "add", Precision.FP32, (1,))
    >>> row = summarised(case, [3.0, 1.0, 2.0, 5.0, 4.0])
    >>> row.quartile_1_s, row.median_s, row.quartile_3_s
    (2.0, 3.0, 4.0)
    """
    ordered = sorted(times_s)

    def quantile(fraction: float) -> float:
        place = fraction * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return Row(case, quantile(0.5), quantile(0.25), quantile(0.75), len(ordered))


def median(values: list[float]) -> float:
    """Return the median of at least one value.

    >>> median([4.0, 1.0, 2.0, 3.0])
    2.5
    """
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
