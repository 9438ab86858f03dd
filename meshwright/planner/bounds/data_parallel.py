"""Times of data-parallel collectives and updates of a rank, for the bounds."""

from collections.abc import Sequence
from itertools import chain
from operator import add
from typing import NamedTuple

from meshwright.hwprofiles import Offload, StackProfile, Units
from meshwright.planner.space import Role
from meshwright.simulator import CostModel, Mesh
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Axis, Stage
from meshwright.simulator.ledger import (
    Exchange,
    bucket_exchanges,
    gradient_norm,
    gradient_reductions,
    held_exchanges,
    left_sums,
    parameter_gathers,
    price,
    replica_sums,
    sums_first,
    tensor_sums,
)
from meshwright.simulator.replication import (
    HeldParameters,
    Replication,
    StagePart,
    WireBytes,
    bucket_parts,
    buffer_copies,
    filled_parameters,
    held_parameters,
    reduced_parts,
    stage_bucket_limit,
    updated_cast_bytes,
)
from meshwright.simulator.step import HostSide, copy_back_ps, part_copies, rank_update_cost


class DataParallelTimes(NamedTuple):
    """Picoseconds that the bounds need of one rank, and blocks of some of its buckets.

    Args:
        exposed: What of the reduction follows the last backward pass at least, and of sums over
            tensor-parallel ranks that come before it.
        first_virtual_stage: Reductions of the rank's first virtual stage, all its buckets.
        every_virtual_stage: Reductions of all its virtual stages.
        first_virtual_stage_blocks: Blocks of the part of the first virtual stage that is reduced
            first, the last ones in model order.
        last_virtual_stage_blocks: The same of the last virtual stage.
        gather_first: First parameter gather of the first virtual stage.
        gather_all: All of that stage.
        gather_every: All of every virtual stage.
        norm: Sums of the gradient norm.
        update: Optimizer, and the gather after it where nothing hides it.
        forward_wait: What each microbatch's forward passes wait for parameters at least.
        backward_wait: The same of backward passes, with reductions that nothing hides.
        port_each: Port time of collectives in each microbatch.
        port_last: Port time of collectives in the last microbatch alone.
        sums_last: Such sums that follow all reductions.
    """

    exposed: int = 0
    first_virtual_stage: int = 0
    every_virtual_stage: int = 0
    first_virtual_stage_blocks: int = 0
    last_virtual_stage_blocks: int = 0
    gather_first: int = 0
    gather_all: int = 0
    gather_every: int = 0
    norm: int = 0
    update: int = 0
    forward_wait: int = 0
    backward_wait: int = 0
    port_each: int = 0
    port_last: int = 0
    sums_last: int = 0


class StageParts:
    """What stages are made of, each counted once."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[object, ...], tuple[StagePart, ...]] = {}
        self._parameters: dict[tuple[object, ...], HeldParameters] = {}

    def of_buckets(
        self, shape: BlockShape, stage: Stage, replication: Replication
    ) -> tuple[StagePart, ...]:
        """Return the parts of *stage* that complete buckets, in model order."""
        dp_cp, shards = replication.dp_cp, replication.zero_stage > 0
        key = (*shape.weight_degrees, stage, stage_bucket_limit(shape, stage, dp_cp), shards)
        if key not in self._buckets:
            self._buckets[key] = bucket_parts(shape, stage, dp_cp, shards=shards)
        return self._buckets[key]

    def parameters(self, shape: BlockShape, stages: tuple[Stage, ...]) -> HeldParameters:
        """Return the parameters of a rank that holds *stages*."""
        key = (*shape.weight_degrees, stages)
        if key not in self._parameters:
            self._parameters[key] = held_parameters(shape, stages)
        return self._parameters[key]


class DataParallelCosts:
    """Computes `DataParallelTimes`, each stage and degree once."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._stack = costs.stack
        self._parts = StageParts()
        self._known: dict[tuple[object, ...], DataParallelTimes] = {}
        self._sums_ps: dict[tuple[object, ...], int] = {}

    def times(self, shape: BlockShape, role: Role, side: HostSide) -> DataParallelTimes:
        """Return the times of the ranks of *role*."""
        _, wire, state, replication = side
        on_host = None if replication.offload is Offload.NONE else state
        key = (*shape.weight_degrees, role.stages, wire, on_host, replication)
        if key not in self._known:
            norm = _norm_ps(self._costs, shape, role.stages, replication)
            times = self._without_sums(shape, role, side)
            self._known[key] = times._replace(norm=norm)
        sums_ps = self._tensor_sums_ps(shape, role.stages, wire)
        return _with_sums(self._known[key], sums_ps, self._stack, replication)

    def _without_sums(self, shape: BlockShape, role: Role, side: HostSide) -> DataParallelTimes:
        _, wire, _, replication = side
        parameters = self._parts.parameters(shape, role.stages)
        cast_bytes = updated_cast_bytes(shape, role.stages, replication)
        updated = filled_parameters(shape, role.stages, replication)
        update = rank_update_cost(self._costs, updated, wire, replication, cast_bytes).time_ps
        if not (replication.gathers_units or self._stack.overlap_parameter_gather):
            update += self._whole_ps(parameter_gathers, parameters, replication, wire)
        if replication.in_units:
            update += copy_back_ps(side, sum(parameters))
            return self._sharded_times(shape, role, side, update)
        parts = {
            stage: self._parts.of_buckets(shape, stage, replication)
            for stage in dict.fromkeys(role.stages)
        }
        first, last = (parts[role.stages[end]][-1].stage for end in (0, -1))
        gathers = {stage: self._gathers(parts[stage], replication, wire) for stage in parts}
        reductions = [[0]]
        if self._stack.overlap_gradient_reduce and replication.has_replicas:
            known = {
                stage: self._times(gradient_reductions, parts[stage], replication, wire)
                for stage in parts
            }
            reductions = [known[stage] for stage in role.stages]
        exposed = reductions[0][0]
        if not self._stack.overlap_gradient_reduce:
            exposed = self._whole_ps(gradient_reductions, parameters, replication, wire)
        return DataParallelTimes(
            exposed=exposed,
            first_virtual_stage=sum(reductions[0]),
            every_virtual_stage=sum(map(sum, reductions)),
            first_virtual_stage_blocks=first.num_blocks,
            last_virtual_stage_blocks=last.num_blocks,
            gather_first=gathers[role.stages[0]][0],
            gather_all=sum(gathers[role.stages[0]]),
            gather_every=sum(sum(gathers[stage]) for stage in role.stages),
            update=update,
        )

    def _sharded_times(
        self, shape: BlockShape, role: Role, side: HostSide, update: int
    ) -> DataParallelTimes:
        """Return the times of ranks that gather or reduce parts in every pass."""
        _, wire, _, replication = side
        parts = [reduced_parts(shape, stage, replication) for stage in role.stages]
        reduces = [self._times(gradient_reductions, each, replication, wire) for each in parts]
        gathers = [[0] * len(each) for each in parts]
        if replication.gathers_units:
            gathers = [self._times(parameter_gathers, each, replication, wire) for each in parts]
        gathers, reduces, added = _with_host(side, parts, gathers, reduces)
        port_gather, port_reduce = (sum(map(sum, times)) for times in (gathers, reduces))
        # For a backward pass what does not stay is gathered again.
        once, freed = _once_and_freed(parts, gathers)
        port_gather -= once
        port_again = freed if replication.reshards else 0
        each = replication.reduces_each_microbatch
        times = DataParallelTimes(
            update=update,
            # All units are gathered for every forward pass, and those that it frees for backward;
            # where they stay from a backward pass on these alone, and all others once at least.
            port_each=port_again
            + (0 if replication.keeps_units else port_gather)
            + (port_reduce if each else 0)
            + added,
            port_last=once
            - added  # of the first microbatch, which adds to nothing
            + (port_gather if replication.keeps_units else 0)
            + (0 if each else port_reduce)
            + self._last_sums_ps(parts, replication, wire),
        )
        # One by one, computation waits for all of them.
        if self._stack.prefetches_units:
            forward, backward = _waits(parts, gathers, replication, self._stack)
            times = times._replace(
                exposed=reduces[0][0], forward_wait=forward, backward_wait=backward
            )
        else:
            times = times._replace(
                forward_wait=port_gather, backward_wait=port_again + port_reduce * each
            )
        copies = [_StageCopies.of(self._costs, each, wire, replication) for each in parts]
        return _with_copies(times, copies, replication)

    def _times(
        self,
        exchange: Exchange,
        parts: Sequence[StagePart],
        replication: Replication,
        wire: WireBytes,
    ) -> list[int]:
        """Return the time of the *exchange* of each of *parts*, in their order."""
        alike = {part.sizes: part for part in parts}
        known = {
            buckets: price(self._costs, bucket_exchanges(exchange, part, wire, replication)).time_ps
            for buckets, part in alike.items()
        }
        return [known[part.sizes] for part in parts]

    def _last_sums_ps(
        self, parts: list[tuple[StagePart, ...]], replication: Replication, wire: WireBytes
    ) -> int:
        """Return the time of sums over replicas that the last microbatch alone makes."""
        own = parts if replication.sums_replicas_last else []
        return sum(sum(self._times(replica_sums, each, replication, wire)) for each in own)

    def _whole_ps(
        self, exchange: Exchange, held: HeldParameters, replication: Replication, wire: WireBytes
    ) -> int:
        """Return the time of the *exchange* of what a rank has *held* as one."""
        return price(self._costs, held_exchanges(exchange, held, wire, replication)).time_ps

    def _tensor_sums_ps(self, shape: BlockShape, stages: tuple[Stage, ...], wire: WireBytes) -> int:
        key = (shape.tp, left_sums(shape), stages, wire.reduce_bytes)
        if key not in self._sums_ps:
            sums = tensor_sums(shape, stages, wire, self._costs.spans.of_block(Axis.TP, shape))
            self._sums_ps[key] = price(self._costs, sums).time_ps
        return self._sums_ps[key]

    def _gathers(
        self, parts: tuple[StagePart, ...], replication: Replication, wire: WireBytes
    ) -> list[int]:
        if (
            not replication.has_replicas
            or replication.gather_op is None
            or not self._stack.overlap_parameter_gather
        ):
            return [0]
        return self._times(parameter_gathers, parts, replication, wire)


def _norm_ps(
    costs: CostModel, shape: BlockShape, stages: tuple[Stage, ...], replication: Replication
) -> int:
    """Return the time of the sums of the gradient norm."""
    pp = costs.world_size // (shape.tp * replication.dp_cp)
    node_size = costs.cluster.devices_per_node
    dp = replication.dp_cp // shape.cp
    experts = shape.expert_tp, shape.ep
    mesh = Mesh(node_size=node_size, experts=experts, tp=shape.tp, cp=shape.cp, dp=dp, pp=pp)
    return price(costs, gradient_norm(shape, stages, mesh, replication)).time_ps


def _with_host(
    side: HostSide,
    parts: Sequence[Sequence[StagePart]],
    gathers: list[list[int]],
    reduces: list[list[int]],
) -> tuple[list[list[int]], list[list[int]], int]:
    """Return gathers and reductions with the copies from and to the host on their stream.

    The last number is what adding to gradients of earlier microbatches takes there.
    """
    if side.replication.offload is Offload.NONE:
        return gathers, reduces, 0
    each = [[part_copies(side, part) for part in stage] for stage in parts]
    into = [[copies.in_ps for copies in stage] for stage in each]
    out = [[copies.out_ps for copies in stage] for stage in each]
    added = sum(copies.again_ps for stage in each for copies in stage)
    return _sums(gathers, into), _sums(reduces, out), added


def _sums(times: list[list[int]], more: list[list[int]]) -> list[list[int]]:
    """Return the sums of the times of each part."""
    return [[*map(add, *pair)] for pair in zip(times, more, strict=True)]


def _waits(
    parts: Sequence[Sequence[StagePart]],
    gathers: Sequence[Sequence[int]],
    replication: Replication,
    stack: StackProfile,
) -> tuple[int, int]:
    """Return what forward and backward passes wait for gathers that come one ahead.

    All may hide but a pass's first, and where there is a root even that one: it may be left from
    the pass before.
    """
    if stack.units is not Units.LAYERS:
        return _first_gathers(parts, gathers, replication), 0
    forward, backward = (sum(times[end] for times in gathers) for end in (0, -1))
    return forward, backward


def _once_and_freed(
    parts: Sequence[Sequence[StagePart]], gathers: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """Return the gathers of parts that are gathered once a step, and of those that passes free."""
    every = [*zip(chain(*parts), chain(*gathers), strict=True)]
    once = sum(time_ps for part, time_ps in every if part.is_once)
    return once, sum(time_ps for part, time_ps in every if not part.stays)


def _first_gathers(
    parts: Sequence[Sequence[StagePart]],
    gathers: Sequence[Sequence[int]],
    replication: Replication,
) -> int:
    """Return the first gathers of the passes that follow a forward pass, one a virtual stage.

    Nothing runs beside them.  There are as many such passes as microbatches in pipelines that free
    units after forward passes alone; which of them are backward passes the schedule decides, so
    the shorter gather counts, and none where what comes first may be there.
    """
    if not (replication.keeps_units and replication.reshards):
        return 0
    return sum(
        min(0 if stage[end].stays else times[end] for end in (0, -1))
        for stage, times in zip(parts, gathers, strict=True)
        if stage
    )


class _StageCopies(NamedTuple):
    """A stage's copies after the gather of all parts, of those that are freed, and of gradients."""

    out: int
    again: int
    into: int

    @classmethod
    def of(
        cls,
        costs: CostModel,
        parts: tuple[StagePart, ...],
        wire: WireBytes,
        replication: Replication,
    ) -> "_StageCopies":
        """Return the copies of a stage's *parts*; gradients of one microbatch, which are fewer."""
        copies = [buffer_copies(costs, part, wire, replication, adds_up=False) for part in parts]
        stays = [part.stays or not replication.reshards for part in parts]
        freed = [each for stay, each in zip(stays, copies, strict=True) if not stay]
        return cls(
            out=sum(each.unpack_ps for each in copies),
            again=sum(each.unpack_ps for each in freed),
            into=sum(each.pack_ps for each in copies),
        )


def _with_copies(
    times: DataParallelTimes, copies: Sequence[_StageCopies], replication: Replication
) -> DataParallelTimes:
    """Return *times* with the copies of each stage from and to the buffers of collectives.

    Where units stay gathered after a backward pass, as many gathers as there are microbatches
    follow a forward pass, in whichever pass: they count as those of forward passes.
    """
    out, again, into = (sum(each) for each in zip(*copies, strict=True))
    each = replication.reduces_each_microbatch
    forward, backward = (again, 0) if replication.keeps_units else (out, again)
    return times._replace(
        # Reduced once a step, gradients are copied in the last passes, of which the very last is
        # the first stage's: its copies put off the end.
        exposed=times.exposed + (0 if each else copies[0].into),
        forward_wait=times.forward_wait + forward,
        backward_wait=times.backward_wait + backward + (into if each else 0),
    )


def _with_sums(
    times: DataParallelTimes, sums_ps: int, stack: StackProfile, replication: Replication
) -> DataParallelTimes:
    """Return *times* with the sums over tensor-parallel ranks that are left to the end.

    Where they come first, a reduction that is not under the pass either waits for them.
    """
    if not sums_first(stack):
        return times._replace(sums_last=sums_ps)
    is_serial = not (replication.in_units or stack.overlap_gradient_reduce)
    both = times.exposed + sums_ps if is_serial else max(times.exposed, sums_ps)
    return times._replace(exposed=both)
