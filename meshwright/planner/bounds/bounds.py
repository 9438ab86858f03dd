"""Lower bounds of the step time of whole spaces; no bound may exceed the simulated time.

Each is a chain of work that the engine runs one after the other:

- *work*: a microbatch reaches a rank, the rank does all its work, and the last gradient goes
  back to the first rank;
- *fill*: the first microbatch goes through the pipeline and back to a rank, which then has all
  its backward work and the forward work that it could not do before;
- *reduction*: gradient buckets are reduced one after the other once the first is ready.

Then come the tied embedding, the gradient norm for which all ranks meet, and the update;
tensor-parallel sums come before or after the last reductions.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster
from meshwright.planner.bounds.data_parallel import DataParallelTimes
from meshwright.planner.bounds.ranks import (
    Exchanges,
    Layouts,
    OverlapLimits,
    Ranks,
    Replicas,
    time_of,
)
from meshwright.planner.bounds.ways import SegmentTable
from meshwright.planner.space import (
    Column,
    Pipeline,
    ShapeTable,
    ShapeTimes,
    Space,
    distinct,
    row_slices,
)
from meshwright.simulator import CostModel
from meshwright.simulator.layout import DP_CP
from meshwright.simulator.step import PPM, overhead_per_million

LONGEST_PS = 2**62
MOST_ROWS = 2**15  # at a time, so that freed memory is reused


class StepBounds:
    """Lower bounds for the layouts of a space."""

    def __init__(self, space: Space, table: ShapeTable, costs: CostModel) -> None:
        self._space = space
        self._table = table
        self._costs = costs
        self._times = ShapeTimes.empty(table, costs)
        self._exchanges = Exchanges(space, table, costs)
        self._hidden, self._segments = OverlapLimits(table, costs), SegmentTable.of(space.pipelines)

    def rough_bounds_ps(self, indices: NDArray[np.int64]) -> Column:
        """Return bounds of the layouts *indices* without data-parallel communication.

        Layouts with one shape, pipeline and number of microbatches have one bound.
        """
        space = self._space
        columns = (self._table.index, space.pipeline_numbers, space.num_microbatches)
        is_far = np.asarray(_are_far(space, indices, self._costs.cluster), np.int64)
        first, member = distinct([*(column[indices] for column in columns), is_far])
        return self.lower_bounds_ps(indices[first], is_rough=True)[member]

    def lower_bounds_ps(self, indices: NDArray[np.int64], *, is_rough: bool = False) -> Column:
        """Return a lower bound of the step time of each layout among *indices*."""
        if not len(indices):
            return np.zeros(0, np.int64)
        shapes = self._table.index[indices]
        self._times.price(self._table, shapes[distinct([shapes])[0]])
        nothing: tuple[list[list[Replicas]], Column] = [], np.zeros(len(indices), np.int64)
        sharing, member = nothing if is_rough else self._exchanges.of(indices)
        bounds = [
            self._bounds(self._layouts(indices[rows], member[rows]), sharing)
            for rows in row_slices(len(indices), MOST_ROWS)
        ]
        return with_overhead(np.concatenate(bounds), overhead_per_million(self._costs.stack))

    def _layouts(self, indices: NDArray[np.int64], sharing: Column) -> Layouts:
        """Return the layouts *indices* with the times of their blocks and messages."""
        times, shapes = self._times, self._table.index[indices]
        is_far = _are_far(self._space, indices, self._costs.cluster)[:, None]
        messages, overlaps = times.messages[shapes], self._space.column("expert_overlap")[indices]
        blocks = times.blocks[shapes] - self._hidden.of(shapes, overlaps)
        forward, backward = blocks[:, 0::2], blocks[:, 1::2]
        pipeline = self._space.pipeline_numbers[indices]
        # Microbatches are cut where their work would overflow 64 bits (50 days): fewer take less
        # time, so the bound stays one.
        whole = self._segments.segments.whole[self._segments.starts[pipeline]]
        most = LONGEST_PS // np.maximum(time_of(forward, whole) + time_of(backward, whole), 1)
        count = np.minimum(
            self._space.num_microbatches[indices],
            np.maximum(most, self._space.column("pp")[indices]),
        )
        occupied = np.where(is_far, messages[:, :, 0], messages[:, :, 2])
        return Layouts(
            pipeline=pipeline,
            num_microbatches=count,
            forward=forward,
            backward=backward,
            occupied=occupied * np.int64(not self._costs.stack.overlap_p2p),
            travelled=np.where(is_far, messages[:, :, 1], messages[:, :, 3]),
            sharing=sharing,
        )

    def _bounds(self, layouts: Layouts, sharing: list[list[Replicas]]) -> Column:
        """Return the bounds of *layouts*, the maximum over the roles of their ranks."""
        first = self._ranks(layouts, sharing, 0)
        # Every rank's work hangs on the first forward pass, and that on the first rank's gathers.
        delay = _gather_delay(first)
        rank_end, first_rank_end, norm, update = np.zeros((4, len(delay)), np.int64)
        num_roles = self._segments.num_roles[layouts.pipeline]
        for place in range(int(num_roles.max())):
            rows = np.flatnonzero(num_roles > place)
            ranks = self._ranks(layouts.of(rows), sharing, place) if place else first
            end = _rank_end(ranks, delay[rows])
            # The first rank's own work may be short; its last pass waits for this rank's gradient.
            first_rank_end[rows] = _largest(
                first_rank_end[rows],
                end + _way_back(ranks),
                _way_through_last_stage(ranks, delay[rows]),
                _way_through_middle_stages(ranks, self._segments.pipelines, place, delay[rows]),
            )
            times = ranks.replicas.times
            rank_end[rows] = _largest(
                rank_end[rows],
                _reduced(ranks, end - ranks.occupy(ranks.segments.sent_last)),
                _reductions_alone(ranks, delay[rows]),
                _port_alone(ranks),
            )
            norm[rows] = np.maximum(norm[rows], times.norm)
            update[rows] = np.maximum(update[rows], times.update)
        # All ranks meet between reductions and updates: the longest of each may be added, even of
        # different ranks.
        return _largest(rank_end, _reduced(first, first_rank_end)) + norm + update

    def _ranks(self, layouts: Layouts, sharing: list[list[Replicas]], place: int) -> Ranks:
        """Return *layouts* in the role at index *place* of their pipelines."""
        pipelines, table = self._segments.pipelines, self._segments
        first, member = distinct([layouts.pipeline, layouts.num_microbatches])
        numbers, counts = layouts.pipeline[first], layouts.num_microbatches[first]
        passes = [
            pipelines[number].passes(pipelines[number].roles[place], count)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
        ]
        in_flight, *around = np.array(passes, np.int64)[member].T
        middle = len(around) // 2
        return Ranks(
            layouts=layouts,
            segments=table.segments.of(table.starts[layouts.pipeline] + place),
            num_ranks=np.array([each.pp for each in pipelines], np.int64)[layouts.pipeline],
            in_flight=in_flight,
            around_forward=np.stack(around[:middle], axis=1),
            around_backward=np.stack(around[middle:], axis=1),
            replicas=self._replicas(sharing, place, layouts.sharing),
        )

    def _replicas(self, sharing: list[list[Replicas]], place: int, member: Column) -> Replicas:
        """Return the data-parallel times of layouts in the role at index *place*."""
        none = np.zeros(len(self._table.kinds), np.int64)
        nothing = Replicas(DataParallelTimes(), none, none)
        # Roles differ in number: missing ones are zeros and never read.
        rows = [roles[place] if place < len(roles) else nothing for roles in sharing] or [nothing]
        times, *blocks = (np.array(each, np.int64)[member] for each in zip(*rows, strict=True))
        return Replicas(DataParallelTimes(*times.T), *blocks)


def _are_far(space: Space, indices: Column, cluster: Cluster) -> NDArray[np.bool_]:
    """Return the mask of *indices* where all p2p messages leave their node.

    Neighbours on the pipeline axis are tp x cp x dp ranks apart. With fewer of them than a node has
    some messages stay there, and the lesser of both times bounds all.
    """
    per_stage = space.column("tp")[indices] * space.column(DP_CP)[indices]
    return np.asarray(per_stage >= cluster.devices_per_node)


def _rank_end(ranks: Ranks, delay: Column) -> Column:
    """Return a lower bound of the time at which the role's last rank has done and sent all."""
    segments, times, count = ranks.segments, ranks.replicas.times, ranks.layouts.num_microbatches
    forward, backward = ranks.forward(segments.own), ranks.backward(segments.own)
    # A message that blocks is work of its sender; one that does not is only part of the way.
    sent_forward, sent_backward = map(ranks.occupy, (segments.sent_forward, segments.sent_backward))
    waits = times.forward_wait + times.backward_wait
    work = count * (forward + backward + waits + sent_forward + sent_backward)
    # A gradient comes through the stages behind the rank's last one.
    through = ranks.forward(segments.whole) + ranks.travel(segments.sent_whole)
    back = ranks.backward(segments.behind) + ranks.travel(segments.sent_behind)
    # Until then the schedule lets a rank run no more than *in_flight* forward passes, none longer
    # than that of its longest stage: all others are still to come, and so are all backward passes.
    longest = _largest(*map(ranks.forward, np.moveaxis(segments.longest, 1, 0)))
    remaining = np.maximum(count * forward - ranks.in_flight * longest, 0)
    fill = through + back + remaining + count * (backward + times.backward_wait + sent_backward)
    return delay + _largest(_arrival(ranks) + work, fill)


def _way_through_last_stage(ranks: Ranks, delay: Column) -> Column:
    """Return a lower bound of the first rank's end by way of the rank's last stage, or 0.

    All passes of a virtual stage wait for the first activation to reach it, and the last of them is
    a backward pass, whose gradient goes back to the model's first stage. In between the rank runs
    the passes that the schedule has between those of its last stage.
    """
    segments = ranks.segments
    arrives = delay + ranks.forward(segments.to_last) + ranks.travel(segments.sent_to_last)
    gathered = ranks.replicas.times.gather_every - ranks.forward(segments.last)
    passes = ranks.forward(ranks.around_forward) + ranks.backward(ranks.around_backward)
    back = ranks.backward(segments.to_last) + ranks.travel(segments.sent_to_last)
    end = np.maximum(arrives, gathered) + passes + back
    return np.asarray(np.where(segments.is_interleaved, end, 0), np.int64)


def _way_through_middle_stages(
    ranks: Ranks, pipelines: Sequence[Pipeline], place: int, delay: Column
) -> Column:
    """Return the same by way of stages before the last one and behind the first, or 0.

    With fewer microbatches than ranks a rank idles between its virtual stages: there a chain
    through one of these may be longer, with all passes of the stage and of those behind it on the
    rank.
    """
    layouts, longest = ranks.layouts, np.zeros(len(delay), np.int64)
    idles = np.flatnonzero(
        ranks.segments.is_interleaved & (layouts.num_microbatches < ranks.num_ranks)
    )
    for number in sorted({*layouts.pipeline[idles].tolist()}):
        rows = idles[layouts.pipeline[idles] == number]
        pipeline = pipelines[number]
        role = pipeline.roles[place]
        places = np.array(pipeline.places(role))[1:-1]
        if not len(places):
            continue
        ahead = pipeline.through[places].T
        sent = pipeline.senders.cumsum(axis=0)[places - 1].T
        later = pipeline.own_blocks(role)[::-1].cumsum(axis=0)[::-1][1:-1].T
        passes = layouts.forward[rows] + layouts.backward[rows]
        transit = passes @ ahead + 2 * layouts.travelled[rows] @ sent
        own_work = layouts.num_microbatches[rows, None] * (passes @ later)
        longest[rows] = delay[rows] + (transit + own_work).max(axis=1)
    return longest


def _arrival(ranks: Ranks) -> Column:
    """Return the time of a microbatch's way to the role's last rank."""
    return ranks.forward(ranks.segments.ahead) + ranks.travel(ranks.segments.sent_ahead)


def _way_back(ranks: Ranks) -> Column:
    """Return the time from a rank's end to the end of the first rank's last pass."""
    # A blocking send counts as the rank's work already, and is part of the first hop back.
    segments = ranks.segments
    back = ranks.backward(segments.ahead) + ranks.travel(segments.sent_ahead)
    return back - ranks.occupy(segments.sent_last)


def _gather_delay(ranks: Ranks) -> Column:
    """Return the delay of the very first forward pass by parameter gathers."""
    # Gathers run one after the other, overlapped with the pass: the last part waits for all of
    # them, the first part for the first one.
    replicas = ranks.replicas
    final = ranks.forward(replicas.first_end)
    late = replicas.times.gather_all + final - ranks.forward(ranks.segments.first)
    return np.asarray(np.maximum(replicas.times.gather_first, late), np.int64)


def _reduced(ranks: Ranks, end: Column) -> Column:
    """Return a lower bound of the time at which a rank has reduced, if passes end at *end*."""
    # A rank's last pass is the backward of its first stage.  None of the stage's buckets can go out
    # before the pass has completed the first, and they go one after the other.
    replicas, times = ranks.replicas, ranks.replicas.times
    ready = ranks.backward(replicas.first_end)
    queued = end - ranks.backward(ranks.segments.first) + ready + times.first_virtual_stage
    # Only ends of the pipeline hold the tied embedding.
    tied = times.tied * ranks.segments.is_end
    return _largest(end + times.exposed, queued) + times.closing + tied


def _reductions_alone(ranks: Ranks, delay: Column) -> Column:
    """Return a lower bound of the time at which a rank has reduced all its buckets.

    The first is ready in the last microbatch's pass through the last virtual stage, which
    follows all forward passes and, interleaved, all but p of the backward passes of each
    stage, with p - 1 of its own among them.
    """
    segments, times, count = ranks.segments, ranks.replicas.times, ranks.layouts.num_microbatches
    # Microbatches that go through a stage in a row: pp of them with interleaving.
    group = np.where(segments.is_interleaved, ranks.num_ranks, 1)
    ready = (
        delay
        + _arrival(ranks)
        + count * ranks.forward(segments.own)
        + (count - group) * ranks.backward(segments.own)
        + (group - 1) * ranks.backward(segments.last)
        + ranks.backward(ranks.replicas.last_end)
    )
    return np.asarray(ready + times.every_virtual_stage + times.closing, np.int64)


def _port_alone(ranks: Ranks) -> Column:
    """Return a lower bound of the time at which every pass's collectives have left the port."""
    # None of them can start before the first microbatch is at the rank; a port sends one at a time.
    times = ranks.replicas.times
    port = ranks.layouts.num_microbatches * times.port_each + times.port_last
    return np.asarray(_arrival(ranks) + port, np.int64)


def _largest(*columns: Column) -> Column:
    return np.asarray(np.maximum.reduce(columns), np.int64)


def with_overhead(times: Column, per_million: int) -> Column:
    """Return the engine's `with_overhead` of each time, without overflow of the product."""
    # The overhead grows with the time, so that what was a bound before it is one after.
    millions, rest = np.divmod(times, PPM)
    return np.asarray(times + millions * per_million + rest * per_million // PPM, np.int64)
