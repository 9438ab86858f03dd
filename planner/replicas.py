"""Times of data-parallel collectives and updates of a rank, for the bounds."""

from typing import NamedTuple

from planner.roles import Role
from planner.space import Space
from simulator import Axis, CostModel, Mesh
from simulator.block_shape import BlockShape
from simulator.data_parallel import (
    Replication,
    Stage,
    Wire,
    bucket_parameters,
    bucket_stages,
    gather_cost,
    reduce_cost,
    sum_parameters,
    update_cost,
)
from simulator.plan import ParallelPlan
from simulator.step_builder import shared_embedding_ps


class ReplicaTimes(NamedTuple):
    """Picoseconds that the bounds need of one rank, and layers of some of its buckets.

    Args:
        exposed: What of the reduction follows the last backward pass at least.
        first_chunk: Reductions of the rank's first virtual stage, all its buckets.
        every_chunk: Reductions of all its virtual stages.
        first_chunk_layers: Layers of the first virtual stage's bucket that is reduced first.
        last_chunk_layers: The same of the last virtual stage.
        gather_first: First parameter gather of the first virtual stage.
        gather_all: All of that stage.
        update: Optimizer, and the gather after it where nothing hides it.
        shared_embedding: All-reduce of a tied table between first and last rank.
    """

    exposed: int
    first_chunk: int
    every_chunk: int
    first_chunk_layers: int
    last_chunk_layers: int
    gather_first: int
    gather_all: int
    update: int
    shared_embedding: int


class ReplicaCosts:
    """Computes `ReplicaTimes`, each stage and degree once."""

    def __init__(self, space: Space, costs: CostModel) -> None:
        self._space = space
        self._costs = costs
        self._stack = costs.stack
        self._wire = Wire.of(costs.stack, space.job.precision)
        self._buckets: dict[tuple[int, Stage], tuple[list[int], list[int]]] = {}
        self._parameters: dict[tuple[int, tuple[Stage, ...]], int] = {}

    def replication(self, tp: int, pp: int, dp: int, zero_stage: int) -> Replication:
        """Return the data-parallel side of a layout."""
        node_size = self._costs.cluster.devices_per_node
        mesh = Mesh(tp=tp, dp=dp, pp=pp, node_size=node_size)
        return Replication.of(dp, zero_stage, mesh.span(Axis.DP))

    def times(self, shape: BlockShape, role: Role, pp: int, to: Replication) -> ReplicaTimes:
        """Return the times of the ranks of *role*."""
        parameters = self._rank_parameters(shape, role.stages)
        update = update_cost(self._costs, parameters, self._wire, to).time_ps
        if not self._stack.overlap_parameter_gather:
            update += gather_cost(self._costs, parameters, self._wire, to).time_ps
        layers = [self._bucket(shape, stage)[1] for stage in role.stages]
        gathers = self._gathers(shape, role.stages[0], to)
        if self._stack.overlap_gradient_reduce and to.dp > 1:
            reductions = [self._reductions(shape, stage, to) for stage in role.stages]
        else:
            reductions = [[0]]
        exposed = reductions[0][0]
        if not self._stack.overlap_gradient_reduce:
            exposed = reduce_cost(self._costs, parameters, self._wire, to).time_ps
        return ReplicaTimes(
            exposed=exposed,
            first_chunk=sum(reductions[0]),
            every_chunk=sum(map(sum, reductions)),
            first_chunk_layers=layers[0][-1],
            last_chunk_layers=layers[-1][-1],
            gather_first=gathers[0],
            gather_all=sum(gathers),
            update=update,
            shared_embedding=self._shared_embedding(shape, pp, to.dp),
        )

    def _bucket(self, shape: BlockShape, stage: Stage) -> tuple[list[int], list[int]]:
        """Return parameters and layers of each bucket of *stage*, in model order."""
        key = (shape.tp, stage)
        if key not in self._buckets:
            parts = bucket_stages(shape, stage)
            self._buckets[key] = (
                bucket_parameters(shape, stage),
                [part.num_layers for part in parts],
            )
        return self._buckets[key]

    def _rank_parameters(self, shape: BlockShape, stages: tuple[Stage, ...]) -> int:
        key = (shape.tp, stages)
        if key not in self._parameters:
            self._parameters[key] = sum_parameters(shape, stages)
        return self._parameters[key]

    def _reductions(self, shape: BlockShape, stage: Stage, to: Replication) -> list[int]:
        parameters = self._bucket(shape, stage)[0]
        return [reduce_cost(self._costs, each, self._wire, to).time_ps for each in parameters]

    def _gathers(self, shape: BlockShape, stage: Stage, to: Replication) -> list[int]:
        if to.dp == 1 or to.gather_op is None or not self._stack.overlap_parameter_gather:
            return [0]
        parameters = self._bucket(shape, stage)[0]
        return [gather_cost(self._costs, each, self._wire, to).time_ps for each in parameters]

    def _shared_embedding(self, shape: BlockShape, pp: int, dp: int) -> int:
        stages = (1,) * pp
        plan = ParallelPlan(tp=shape.tp, pp=pp, dp=dp, stages=stages)
        node_size = self._costs.cluster.devices_per_node
        mesh = Mesh(tp=shape.tp, dp=dp, pp=pp, node_size=node_size)
        return shared_embedding_ps(self._costs, shape, plan, mesh)
