"""Best placements for a chain of operators: signatures and the boxings between them.

Each operator's first input is the previous one's output.  Its other inputs have the signature's
placement from the start: parameters can be stored that way, and from a replicated tensor every
placement is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from meshwright.hwprofiles import Precision
from meshwright.simulator.blocks import Gemm, sum_flops
from meshwright.simulator.costs import Cost, gemm_cost, memory_bound_cost
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout import Placements, shard_shape
from meshwright.simulator.matmul.boxing import Boxing, DeviceMesh, TensorSize, boxings_from
from meshwright.simulator.matmul.signatures import (
    LocalShapes,
    PlacedOperator,
    Signature,
    input_placements,
    local_shapes,
    local_work,
    mesh_signatures,
    out_placements,
)


class LocalRun(NamedTuple):
    """One operator on one rank: signature on each axis, local shapes and costs.

    ``number`` is the index of the choice among those of `mesh_signatures`.
    """

    number: int
    operator: PlacedOperator
    signatures: tuple[Signature, ...]
    shapes: LocalShapes
    flops: int
    costs: tuple[Cost, ...]

    @property
    def time_ps(self) -> int:
        """Time on the device, without kernel launches."""
        return sum(cost.time_ps for cost in self.costs)

    @property
    def name(self) -> str:
        """Names of the signatures, outermost axis first."""
        return " / ".join(each.name for each in self.signatures)


class ChainStep(NamedTuple):
    """An operator's run, with the boxing before it."""

    boxing: Boxing
    run: LocalRun


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of operators with their placements, and the boxing to the target placement."""

    steps: tuple[ChainStep, ...]
    last_boxing: Boxing

    @property
    def boxings(self) -> tuple[Boxing, ...]:
        """Boxings: one before each operator, and the last."""
        return (*(step.boxing for step in self.steps), self.last_boxing)

    @property
    def compute_ps(self) -> int:
        """Time of all operators on a device."""
        return sum(step.run.time_ps for step in self.steps)

    @property
    def boxing_ps(self) -> int:
        """Time of all boxings."""
        return sum(each.time_ps for each in self.boxings)

    @property
    def time_ps(self) -> int:
        """Total time, without overlap."""
        return self.compute_ps + self.boxing_ps

    @property
    def sent_bytes(self) -> Fraction:
        """Bytes that one rank sends."""
        return sum((each.sent_bytes for each in self.boxings), start=Fraction(0))

    @property
    def flops(self) -> int:
        """Operations of the matrix products on one rank."""
        return sum(step.run.flops for step in self.steps)


class _SortKey(NamedTuple):
    """Sort key of chains: time, bytes sent, and choices to break ties."""

    time_ps: int
    sent_bytes: Fraction
    choices: tuple[int, ...]


class _Prefix(NamedTuple):
    rank: _SortKey
    steps: tuple[ChainStep, ...]


def local_run(
    operator: PlacedOperator,
    signatures: tuple[Signature, ...],
    mesh: DeviceMesh,
    precision: Precision,
    *,
    number: int = 0,
) -> LocalRun:
    """Return the run of an operator on one rank of the mesh.

    Args:
        operator: The operator with global shapes.
        signatures: One of its signatures for each axis.
        mesh: Device mesh.
        precision: Precision of all its tensors.
        number: Index of this choice of signatures.

    Raises:
        PlanError: If a dim does not divide, or the device lacks the precision.
    """
    shapes = local_shapes(operator, signatures, mesh.sizes)
    work = local_work(operator, shapes, precision.num_bytes)
    device = mesh.cluster.device
    costs = tuple(
        gemm_cost(item, device, precision)
        if isinstance(item, Gemm)
        else memory_bound_cost(item, device)
        for item in work
    )
    return LocalRun(number, operator, signatures, shapes, sum_flops(work), costs)


def legal_runs(
    operator: PlacedOperator, mesh: DeviceMesh, precision: Precision
) -> tuple[LocalRun, ...]:
    """Return the runs of an operator for all choices of signatures that divide its shapes.

    `local_shapes` raises with the reason where a choice does not.
    """
    runs = []
    for number, signatures in enumerate(mesh_signatures(operator, len(mesh.sizes))):
        try:
            local_shapes(operator, signatures, mesh.sizes)
        except PlanError:
            continue
        runs.append(local_run(operator, signatures, mesh, precision, number=number))
    return tuple(runs)


def best_chain(
    operators: Sequence[PlacedOperator],
    mesh: DeviceMesh,
    precision: Precision,
    *,
    source: Placements,
    target: Placements,
) -> Chain:
    """Return the fastest placements of a chain, by dynamic programming over placements.

    Of all prefixes that leave a tensor in one placement only the best can be part of the best
    chain, since the rest depends on the placement alone.  Less time wins, then fewer bytes sent,
    then the earlier signatures; nothing overlaps.

    Args:
        operators: In order; the first input of each is the output of the one before it.
        mesh: Device mesh.
        precision: Precision of all tensors.
        source: Placement of the first operator's first input, on each axis.
        target: Placement of the last output, on each axis.

    Raises:
        PlanError: If there are no operators, shapes do not follow each other, a dim does not
            divide at *source* or *target*, or an operator has no legal signature left.
    """
    _check_chain(operators)
    shard_shape(operators[-1].out, target, mesh.sizes)
    best = {source: _Prefix(_SortKey(0, Fraction(0), ()), ())}
    for operator in operators:
        best = _extended(best, operator, mesh, precision)
    tensor = TensorSize(operators[-1].out, precision.num_bytes)
    finished = []
    for placements, prefix in best.items():
        boxing = boxings_from(tensor, placements, mesh)[target]
        finished.append((_advance(prefix.rank, boxing, 0), Chain(prefix.steps, boxing)))
    return min(finished, key=lambda item: item[0])[1]


def _extended(
    best: dict[Placements, _Prefix],
    operator: PlacedOperator,
    mesh: DeviceMesh,
    precision: Precision,
) -> dict[Placements, _Prefix]:
    """Return the best prefixes extended by one operator, by the placement of its output."""
    tensor = TensorSize(operator.inputs[0], precision.num_bytes)
    runs = legal_runs(operator, mesh, precision)
    if not runs:
        raise PlanError(f"{operator.name} of shapes {operator.inputs}: no signature divides")
    extended: dict[Placements, _Prefix] = {}
    for placements, prefix in best.items():
        redistributions = boxings_from(tensor, placements, mesh)
        for run in runs:
            boxing = redistributions[input_placements(run.signatures, 0)]
            rank = _advance(prefix.rank, boxing, run.time_ps, run.number)
            out = out_placements(run.signatures)
            # Only the best prefix of a placement can be part of the best chain.
            if out not in extended or rank < extended[out].rank:
                extended[out] = _Prefix(rank, (*prefix.steps, ChainStep(boxing, run)))
    return extended


def _advance(rank: _SortKey, boxing: Boxing, time_ps: int, *choices: int) -> _SortKey:
    return _SortKey(
        rank.time_ps + boxing.time_ps + time_ps,
        rank.sent_bytes + boxing.sent_bytes,
        (*rank.choices, *choices),
    )


def _check_chain(operators: Sequence[PlacedOperator]) -> None:
    if not operators:
        raise PlanError("a chain has no operators; allowed: one or more")
    for first, second in pairwise(operators):
        if first.out != second.inputs[0]:
            raise PlanError(
                f"{second.name} takes shape {second.inputs[0]}; {first.name} before it gives "
                f"{first.out}"
            )
