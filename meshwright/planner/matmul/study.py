"""Matrix products on several devices: every signature, chains of products, and a pipeline.

The numbers behind ``meshwright matmul``; every matrix is replicated at the start, so that any
slice or summand of it is at hand, and the result is wanted replicated.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from meshwright.hwprofiles import EIGHT_BITS, Cluster, Precision, load_cluster, shown
from meshwright.planner.options import MatmulOptions
from meshwright.simulator import Cost, PlanError
from meshwright.simulator.costs import p2p_cost
from meshwright.simulator.layout import Replicate, Split, default_precision
from meshwright.simulator.matmul import (
    REPLICATED,
    Boxing,
    Chain,
    DeviceMesh,
    LocalRun,
    PlacedOperator,
    Shape,
    Signature,
    TensorSize,
    best_chain,
    boxing,
    local_run,
    matmul,
)

MAX_DEVICES = 1024
MAX_MATRICES = 8
MAX_SIZE = 10**7
_MATRIX = re.compile(r"([0-9]{1,8})x([0-9]{1,8})")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Signature that these sizes do not allow, and the reason."""

    signature: Signature
    reason: str


@dataclass(frozen=True, slots=True)
class ProductRow:
    """A product under one signature, and the change of its output to replicated."""

    run: LocalRun
    boxing: Boxing

    @property
    def signature(self) -> Signature:
        """The signature on the only axis."""
        return self.run.signatures[0]

    @property
    def time_ps(self) -> int:
        """Time of the product and of the change after it."""
        return self.run.time_ps + self.boxing.time_ps


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The output of one pipeline stage on its way to the next device."""

    shape: Shape
    size_bytes: int
    transfer: Cost
    latency: Cost

    @property
    def time_ps(self) -> int:
        """Time from the first byte sent to the last one there."""
        return self.transfer.time_ps + self.latency.time_ps


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Whole products on one device after the other.

    Args:
        stages: The products of device 0, 1, ...; further devices stand idle.
        messages: From each device to the next.
    """

    stages: tuple[tuple[LocalRun, ...], ...]
    messages: tuple[StageOutput, ...]

    @property
    def stage_ps(self) -> tuple[int, ...]:
        """Time of each device's products."""
        return tuple(sum(run.time_ps for run in stage) for stage in self.stages)

    @property
    def compute_ps(self) -> int:
        """Time of all products, one after the other."""
        return sum(self.stage_ps)

    @property
    def message_ps(self) -> int:
        """Time of all messages, one after the other."""
        return sum(each.time_ps for each in self.messages)

    @property
    def time_ps(self) -> int:
        """Time of one input from end to end; the result lies on the last device."""
        return self.compute_ps + self.message_ps

    @property
    def period_ps(self) -> int:
        """Time between results when inputs follow each other: the slowest device or wire."""
        # Messages overlap with computation in a stream: the slowest resource sets the pace.
        return max(*self.stage_ps, *(each.transfer.time_ps for each in self.messages))


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulStudy:
    """Result of ``meshwright matmul``.

    Args:
        shapes: The matrices in order.
        num_devices: Devices of the one mesh axis.
        cluster: Their hardware.
        precision: Of all matrices.
        rows: Signatures of the first product, legal or refused.
        chains: The best chain for each legal signature of the first product, in that order.
        pipeline: The products on different devices; None for one product or one device.
    """

    shapes: tuple[Shape, ...]
    num_devices: int
    cluster: Cluster
    precision: Precision
    rows: tuple[ProductRow | Refusal, ...]
    chains: tuple[Chain, ...]
    pipeline: Pipeline | None

    @property
    def products(self) -> tuple[PlacedOperator, ...]:
        """The products in order."""
        return chain_products(self.shapes)

    @property
    def best(self) -> Chain:
        """The fastest of all chains; of equally fast ones the one that sends least."""
        return min(self.chains, key=lambda chain: (chain.time_ps, chain.sent_bytes))


def read_study(options: MatmulOptions) -> MatmulStudy:
    """Return the study that the options of ``meshwright matmul`` ask for.

    Raises:
        PlanError: If shapes, devices or the precision are at fault, or missing.
        ProfileError: If the cluster is at fault.
    """
    shapes = parse_matrices(options.shapes or ())
    if options.devices is None:
        raise PlanError(f"--devices is missing; allowed 1 to {MAX_DEVICES}")
    _check_devices(shapes, options.devices)
    cluster = load_cluster(options.cluster)
    precision = options.precision or default_precision(cluster.device)
    return study_matmul(shapes, options.devices, cluster, precision)


def parse_matrices(words: Sequence[str]) -> tuple[Shape, ...]:
    """Return the shapes of matrices that can be multiplied in order.

    Raises:
        PlanError: If a word is no shape, the inner sizes differ, or there are too few or many.

    >>> parse_matrices(["4x5", "5x8"])
    ((4, 5), (5, 8))
    """
    if not 2 <= len(words) <= MAX_MATRICES:
        raise PlanError(
            f"{len(words)} matrices given; allowed: 2 to {MAX_MATRICES}, such as 4x5 5x8"
        )
    shapes = tuple(_shape(word) for word in words)
    for left, right in pairwise(shapes):
        if left[1] != right[0]:
            raise PlanError(
                f"matrix {shape_text(right)} has {right[0]} rows, but {shape_text(left)} before "
                f"it has {left[1]} columns; nearest: {left[1]}x{right[1]}"
            )
    return shapes


def _shape(word: str) -> Shape:
    match = _MATRIX.fullmatch(word)
    if match is None:
        raise PlanError(f"matrix {shown(word)} is not ROWSxCOLUMNS; allowed: such as 4x5")
    rows, columns = int(match[1]), int(match[2])
    for size in (rows, columns):
        if not 1 <= size <= MAX_SIZE:
            raise PlanError(f"matrix {word}: size {size} is out of range; allowed 1 to {MAX_SIZE}")
    return rows, columns


def shape_text(shape: Shape) -> str:
    """Return a shape as the command line writes it.

    >>> shape_text((4, 5))
    '4x5'
    """
    return "x".join(str(size) for size in shape)


def chain_products(shapes: Sequence[Shape]) -> tuple[PlacedOperator, ...]:
    """Return the products of matrices multiplied from the left.

    >>> [product.out for product in chain_products([(4, 5), (5, 8), (8, 3)])]
    [(4, 8), (4, 3)]
    """
    rows = shapes[0][0]
    return tuple(matmul((rows, inner), (inner, columns)) for inner, columns in shapes[1:])


def study_matmul(
    shapes: tuple[Shape, ...], num_devices: int, cluster: Cluster, precision: Precision
) -> MatmulStudy:
    """Return signatures, best chains and the pipeline of a product of matrices.

    Args:
        shapes: The matrices in order; inner sizes agree.
        num_devices: Devices of the one mesh axis.
        cluster: Whose devices they are.
        precision: Of all matrices.

    Raises:
        PlanError: If there are more devices than the cluster has or than any matrix could be
            split over, or the precision is not one of single products, or not the device's.
    """
    _check_devices(shapes, num_devices)
    _check_precision(cluster, precision)
    mesh = DeviceMesh((num_devices,), cluster)
    products = chain_products(shapes)
    rows = tuple(
        _product_row(products[0], signature, mesh, precision)
        for signature in products[0].signatures
    )
    everywhere = (Replicate(),)
    # One chain for each signature of the first product: the others are chosen for it.
    chains = tuple(
        best_chain(
            [replace(products[0], signatures=(row.signature,)), *products[1:]],
            mesh,
            precision,
            source=everywhere,
            target=everywhere,
        )
        for row in rows
        if isinstance(row, ProductRow)
    )
    return MatmulStudy(
        shapes=shapes,
        num_devices=num_devices,
        cluster=cluster,
        precision=precision,
        rows=rows,
        chains=chains,
        pipeline=_pipeline(products, mesh, precision),
    )


def _check_devices(shapes: tuple[Shape, ...], num_devices: int) -> None:
    if not 1 <= num_devices <= MAX_DEVICES:
        raise PlanError(f"--devices {num_devices} is out of range; allowed 1 to {MAX_DEVICES}")
    largest = max(size for shape in shapes for size in shape)
    if num_devices > largest:
        raise PlanError(
            f"--devices {num_devices} is more than any dim of "
            f"{' '.join(shape_text(shape) for shape in shapes)}; allowed 1 to {largest}"
        )


def _product_row(
    product: PlacedOperator, signature: Signature, mesh: DeviceMesh, precision: Precision
) -> ProductRow | Refusal:
    reason = _refusal_reason(product, signature, mesh.num_devices)
    if reason is not None:
        return Refusal(signature, reason)
    run = local_run(product, (signature,), mesh, precision)
    tensor = TensorSize(product.out, precision.num_bytes)
    return ProductRow(run, boxing(tensor, (signature.out,), (Replicate(),), mesh))


def _refusal_reason(product: PlacedOperator, signature: Signature, num_devices: int) -> str | None:
    """Return the dim that does not divide, in a few words for a table."""
    placements = (*signature.inputs, signature.out)
    for name, shape, placement in zip(
        "ABC", (*product.inputs, product.out), placements, strict=True
    ):
        if isinstance(placement, Split) and shape[placement.dim] % num_devices:
            dim_name = ("rows", "columns")[placement.dim]
            return f"{shape[placement.dim]} {dim_name} of {name} over {num_devices}"
    return None


def _pipeline(
    products: tuple[PlacedOperator, ...], mesh: DeviceMesh, precision: Precision
) -> Pipeline | None:
    """Return the split of the products over devices whose slowest device is fastest."""
    num_stages = min(len(products), mesh.num_devices)
    if num_stages == 1:
        return None
    alone = DeviceMesh((1,), mesh.cluster)
    runs = [_whole_run(each, alone, precision) for each in products]
    # All cuts are tried: there are few products.
    splits = ((0, *cuts, len(runs)) for cuts in combinations(range(1, len(runs)), num_stages - 1))
    candidates = (
        tuple(tuple(runs[first:end]) for first, end in pairwise(bounds)) for bounds in splits
    )
    stages = min(
        candidates,
        key=lambda stages: max(sum(run.time_ps for run in stage) for stage in stages),
    )
    messages = (
        _message(stage[-1].operator.out, device, mesh.cluster, precision)
        for device, stage in enumerate(stages[:-1])
    )
    return Pipeline(stages, tuple(messages))


def _whole_run(product: PlacedOperator, alone: DeviceMesh, precision: Precision) -> LocalRun:
    """Return a product on a single device."""
    whole = next(each for each in product.signatures if each.name == REPLICATED)
    return local_run(product, (whole,), alone, precision)


def _message(shape: Shape, sender: int, cluster: Cluster, precision: Precision) -> StageOutput:
    size_bytes = TensorSize(shape, precision.num_bytes).size_bytes
    cost = p2p_cost(
        size_bytes,
        cluster,
        # Devices are numbered node by node.
        crosses_nodes=(sender + 1) % cluster.devices_per_node == 0,
        network_fraction=cluster.inter_node.busbw_fraction,
    )
    return StageOutput(shape, size_bytes, cost.transfer, cost.latency)


def _check_precision(cluster: Cluster, precision: Precision) -> None:
    if precision.is_eight_bit:
        allowed = ", ".join(sorted(cluster.device.peak_flops_per_s.keys() - set(EIGHT_BITS)))
        raise PlanError(f"precision={precision} is a mix for whole layers; allowed: {allowed}")
