"""Benchmark cases, in an order in which any first part covers the whole range."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from meshwright.hwprofiles import GIBI, KIBI, MEBI, TERA, CollectiveOp, Precision
from meshwright.simulator.blocks import Gemm
from meshwright.validate.calibration.rows.machine import Accelerator
from meshwright.validate.calibration.rows.rows import (
    LAUNCH_ELEMENTS,
    VALUES_MOVED,
    BenchmarkCase,
    CaseGroup,
)

T = TypeVar("T")
MEASURED_OPS = (
    CollectiveOp.ALL_REDUCE,
    CollectiveOp.ALL_GATHER,
    CollectiveOp.REDUCE_SCATTER,
    CollectiveOp.BROADCAST,
    CollectiveOp.P2P,
)
# Each is four times the one before.
COLLECTIVE_SIZES = tuple(KIBI * 4**power for power in range(10))
ADAMW_OPS = ("adamw fused", "adamw foreach")
FP32_BYTES = 4
OPTIMIZER_TENSORS = 4  # weight, gradient and two moments
# Tensors of a case may take this share of the memory; several cases are alive at a time.
MEMORY_SHARE = 16


# Told what is measured, how many cases are done, and of how many.
Progress = Callable[[str, int, int], None] | None


class Coverage(NamedTuple):
    """Number of measured cases, of all cases."""

    num_measured: int
    num_cases: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Shapes for one kind of accelerator; *max_flops* and bytes bound the time of a case."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    odd_products: tuple[tuple[int, int, int], ...]
    batched_products: tuple[tuple[int, int, int, int], ...]
    max_flops: float
    attention: tuple[tuple[int, int, int], ...]
    attention_ops: tuple[str, ...]
    without_attention: Precision | None
    memory: tuple[tuple[int, int], ...]
    parameters: tuple[int, ...]
    copies: tuple[int, ...]
    copy_ops: tuple[str, ...]


RANGES: dict[Accelerator, Range] = {
    Accelerator.CUDA: Range(
        rows=(128, 512, 1024, 2048, 4096, 8192, 16384),
        widths=(256, 1024, 2048, 4096, 8192, 12288, 28672),
        odd_products=((2048, 50257, 1600), (4096, 4097, 4096), (2047, 2048, 2049)),
        batched_products=((1024, 1024, 64, 64), (2048, 2048, 128, 32), (2048, 128, 2048, 32)),
        max_flops=16 * TERA,
        attention=tuple(
            (heads, seq_len, head_dim)
            for seq_len, heads in ((512, 256), (1024, 128), (2048, 64), (4096, 32), (8192, 16))
            for head_dim in (64, 128)
        ),
        attention_ops=("forward", "backward", "forward cudnn", "backward cudnn"),
        without_attention=Precision.FP32,  # these kernels have 16-bit formats alone
        memory=tuple((rows, width) for rows in (1024, 8192, 32768) for width in (2048, 8192)),
        parameters=tuple(MEBI * 4**power for power in range(1, 5)),
        copies=tuple(MEBI * 4**power for power in range(6)),
        copy_ops=("on device", "host to device", "device to host"),
    ),
    Accelerator.CPU: Range(
        rows=(64, 128, 256, 1024),
        widths=(64, 256, 768, 2048, 3072),
        odd_products=((128, 5025, 768), (255, 768, 769)),
        batched_products=((128, 128, 64, 12), (256, 256, 64, 24), (256, 64, 256, 24)),
        max_flops=0.005 * TERA,
        attention=tuple(
            (heads, seq_len, head_dim)
            for seq_len, heads in ((128, 24), (256, 24), (512, 12), (1024, 8))
            for head_dim in (64, 128)
        ),
        attention_ops=("forward", "backward"),
        without_attention=None,
        memory=tuple((rows, width) for rows in (256, 1024, 4096) for width in (768, 3072)),
        parameters=(4 * MEBI, 16 * MEBI, 32 * MEBI),
        copies=(MEBI, 4 * MEBI, 16 * MEBI, 64 * MEBI),
        copy_ops=("on device",),
    ),
}


def device_cases(
    accelerator: Accelerator, precision: Precision, memory_bytes: int = 64 * GIBI
) -> list[BenchmarkCase]:
    """Return the cases of one device, in the order to measure them.

    Args:
        accelerator: GPU or processor; has a range of shapes.
        precision: Number format of all but the optimizer.
        memory_bytes: Capacity of the device, which limits the shapes.
    """
    span = RANGES[accelerator]
    groups = (
        _cases(CaseGroup.LAUNCH, ("add",), precision, [(LAUNCH_ELEMENTS,)]),
        _products(span, precision),
        _cases(CaseGroup.GEMM, ("forward",), precision, [(*each, 1) for each in span.odd_products]),
        _cases(CaseGroup.GEMM, ("batched",), precision, span.batched_products),
        _cases(CaseGroup.MEMORY, VALUES_MOVED, precision, span.memory),
        *(
            _cases(CaseGroup.ATTENTION, (op,), precision, span.attention)
            for op in (span.attention_ops if precision is not span.without_attention else ())
        ),
        _cases(
            CaseGroup.OPTIMIZER, ADAMW_OPS, Precision.FP32, [(each,) for each in span.parameters]
        ),
        _cases(CaseGroup.COPY, span.copy_ops, precision, [(each,) for each in span.copies]),
    )
    limit_bytes = memory_bytes // MEMORY_SHARE
    fitting = [[case for case in group if tensor_bytes(case) <= limit_bytes] for group in groups]
    # By work, so that a run that ends early has small and large cases of each group.
    return evenly_mixed([covering(sorted(group, key=_weight)) for group in fitting])


def _products(span: Range, precision: Precision) -> list[BenchmarkCase]:
    cases = [
        BenchmarkCase(CaseGroup.GEMM, op, precision, sizes)
        for rows in span.rows
        for outputs in span.widths
        for inputs in span.widths
        for op, sizes in (
            ("forward", (rows, outputs, inputs, 1)),
            ("dgrad", (rows, inputs, outputs, 1)),
            ("wgrad", (outputs, inputs, rows, 1)),
        )
    ]
    return [case for case in dict.fromkeys(cases) if case.flops <= span.max_flops]


def _cases(
    group: CaseGroup,
    ops: Collection[str],
    precision: Precision,
    shapes: Iterable[tuple[int, ...]],
) -> list[BenchmarkCase]:
    """Return a case for each shape and operation."""
    return [BenchmarkCase(group, op, precision, shape) for shape in shapes for op in ops]


def _weight(case: BenchmarkCase) -> tuple[float, str, tuple[int, ...]]:
    return case.work, case.op, case.sizes


def tensor_bytes(case: BenchmarkCase) -> int:
    """Return the approximate bytes of the tensors of *case*."""
    operator = case.operator
    if isinstance(operator, Gemm):
        return operator.num_elements * case.precision.num_bytes
    if case.group is CaseGroup.ATTENTION:
        heads, seq_len, head_dim = case.sizes
        return 10 * heads * seq_len * head_dim * case.precision.num_bytes
    if case.group is CaseGroup.OPTIMIZER:
        return OPTIMIZER_TENSORS * FP32_BYTES * case.sizes[0]
    return 2 * case.size_bytes


def collective_cases(num_ranks: int) -> list[BenchmarkCase]:
    """Return the collectives of *num_ranks* processes and of powers of two below.

    Messages go between two ranks.  Buffers are whole numbers of fp32 elements a rank.

    >>> {case.sizes[1] for case in collective_cases(6)}
    {2, 4, 6}
    """
    members = sorted({num_ranks, *(2**power for power in range(1, num_ranks.bit_length()))})
    groups = [
        [
            BenchmarkCase(CaseGroup.COLLECTIVE, op, Precision.FP32, (_whole(size, count), count))
            for size in COLLECTIVE_SIZES
        ]
        for count in members
        if count <= num_ranks
        for op in MEASURED_OPS
        if op is not CollectiveOp.P2P or count == 2
    ]
    return evenly_mixed([covering(group) for group in groups])


def _whole(size_bytes: int, num_ranks: int) -> int:
    each = FP32_BYTES * num_ranks
    return size_bytes // each * each


def covering(items: Sequence[T]) -> list[T]:
    """Return *items* so that each beginning is spread over all of them.

    The place of an item is its index with the bits reversed (van der Corput 1935).

    >>> covering([0, 1, 2, 3, 4, 5, 6, 7])
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    num_bits = max(1, (len(items) - 1).bit_length())
    reversed_bits = [int(f"{index:0{num_bits}b}"[::-1], 2) for index in range(2**num_bits)]
    return [items[index] for index in reversed_bits if index < len(items)]


def evenly_mixed(groups: Sequence[Sequence[T]]) -> list[T]:
    """Return one list of all groups in which each group is spread evenly.

    >>> evenly_mixed([["a", "b"], [1, 2, 3, 4]])
    ['a', 1, 2, 'b', 3, 4]
    """
    placed = [
        (index / len(group), number, item)
        for number, group in enumerate(groups)
        for index, item in enumerate(group)
    ]
    return [item for _, _, item in sorted(placed, key=lambda each: each[:2])]


def in_batches(
    cases: Sequence[BenchmarkCase], *, most: int, limit_bytes: int
) -> list[list[BenchmarkCase]]:
    """Return *cases* in batches whose tensors are alive together.

    Args:
        cases: In the order to measure them.
        most: Cases of a batch.
        limit_bytes: Most bytes of the tensors of a batch; a larger case stands alone.
    """
    batches: list[list[BenchmarkCase]] = []
    batch_bytes = 0
    for case in cases:
        case_bytes = tensor_bytes(case)
        if not batches or len(batches[-1]) == most or batch_bytes + case_bytes > limit_bytes:
            batches.append([])
            batch_bytes = 0
        batches[-1].append(case)
        batch_bytes += case_bytes
    return batches
