"""What a rank puts on the wire in a step: every collective with its axis, size and count."""

from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp, StackProfile
from meshwright.simulator.blocks import BlockOperators, BlockShape, BlockTable, Collective
from meshwright.simulator.costs import sent_ratio
from meshwright.simulator.layout import Axis, ParallelPlan, Stage, TrainingJob
from meshwright.simulator.ledger import LedgerEntry, Moment, StepSetting, rank_ledger

REPLICAS = (Moment.GATHER, Moment.REDUCE, Moment.PASSES_DONE, Moment.UPDATED)
OTHER_SUMS = (Moment.SUMS, Moment.TIED_TABLE)  # who takes part in the norm is `norm_ranks`


class Traffic(NamedTuple):
    """Equal collectives of one rank in one step; ``size_bytes`` as in `Collective`."""

    axis: Axis
    op: CollectiveOp
    size_bytes: int
    num_ranks: int
    num_calls: int

    @property
    def sent_bytes(self) -> Fraction:
        """Bytes the rank sends in all of them, by ring; where one rank is the root, on average.

        >>> Traffic(Axis.DP, CollectiveOp.ALL_REDUCE, 800, 8, 1).sent_bytes
        Fraction(1400, 1)
        """
        return self.num_calls * self.size_bytes * sent_ratio(self.op, self.num_ranks)


def rank_traffic(
    job: TrainingJob, plan: ParallelPlan, stack: StackProfile, pp_rank: int
) -> tuple[Traffic, ...]:
    """Return the tensor- and data-parallel collectives of a pipeline rank in one step.

    Args:
        job: What is trained.
        plan: How it is laid out.
        stack: With what software.
        pp_rank: Whose collectives; messages between stages are not among them, nor what
            `closing_traffic` returns.
    """
    setting, blocks = StepSetting.of(job, plan, stack), BlockTable()
    traffic = [
        Traffic(Axis.TP, each.op, each.size_bytes, plan.tp, count * setting.num_microbatches)
        for stage in setting.rank_stages(pp_rank)
        for each, count in _stage_collectives(blocks, setting.shape, stage)
    ]
    entries = rank_ledger(setting, pp_rank).entries
    exchanged = _entries_traffic(entry for entry in entries if entry.moment in REPLICAS)
    return _counted([*traffic, *exchanged])


def closing_traffic(
    job: TrainingJob, plan: ParallelPlan, stack: StackProfile, pp_rank: int
) -> tuple[Traffic, ...]:
    """Return the collectives after the last backward pass, but for those of the replicas.

    Gradients of weights that saw only a rank's own tokens are summed over the tensor-parallel
    ranks, a tied table's over both ends of the pipeline; then the gradient norm.
    """
    entries = rank_ledger(StepSetting.of(job, plan, stack), pp_rank).closing
    return _counted(_entries_traffic(entry for entry in entries if entry.moment in OTHER_SUMS))


def _entries_traffic(entries: Iterable[LedgerEntry]) -> Iterator[Traffic]:
    """Yield what is sent in each of *entries*, with what fills it up."""
    for entry in entries:
        for each in entry.collectives:
            size_bytes = each.size_bytes + each.padding_bytes
            calls = each.num_calls * entry.num_times
            yield Traffic(each.axis, each.op, size_bytes, each.span.num_ranks, calls)


def _counted(traffic: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Return *traffic* with equal collectives as one; a rank alone has none."""
    counted: Counter[Traffic] = Counter()
    for each in traffic:
        counted[each._replace(num_calls=0)] += each.num_calls
    called = (call._replace(num_calls=count) for call, count in counted.items() if count)
    return tuple(call for call in called if call.num_ranks > 1)


def sent_bytes(traffic: tuple[Traffic, ...], axis: Axis) -> Fraction:
    """Return what a rank sends over *axis* in a step."""
    return sum((each.sent_bytes for each in traffic if each.axis is axis), start=Fraction(0))


def stage_blocks(
    blocks: BlockTable, shape: BlockShape, stage: Stage
) -> Iterator[tuple[BlockOperators, int]]:
    """Yield the operators of each run of blocks of a virtual stage, and how many it has."""
    for kind, count in stage.blocks:
        yield blocks.operators(shape, kind), count


def _stage_collectives(
    blocks: BlockTable, shape: BlockShape, stage: Stage
) -> Iterator[tuple[Collective, int]]:
    """Yield the tensor-parallel collectives of one microbatch and how often each runs."""
    for operators, count in stage_blocks(blocks, shape, stage):
        for operator in (*operators.forward, *operators.recompute, *operators.backward):
            if isinstance(operator, Collective):
                yield operator, count


def module_link_bytes(size_bytes: int, num_devices: int, num_passes: int = 1) -> int:
    """Return what crosses the link of device 0 of one process: a copy out, a gradient in.

    Args:
        size_bytes: Parameters, and gradients, as they are copied.
        num_devices: Replicas; device 0 is one.
        num_passes: Microbatches; each broadcasts and reduces again.

    >>> module_link_bytes(100, 8)
    1400
    """
    return 2 * (num_devices - 1) * size_bytes * num_passes


def server_link_bytes(size_bytes: int, num_workers: int) -> int:
    """Return what crosses the link of one server of its own in a step: pulls and pushes.

    >>> server_link_bytes(100, 8)
    1600
    """
    return 2 * num_workers * size_bytes


def sharded_worker_bytes(size_bytes: int, num_workers: int) -> Fraction:
    """Return what a worker sends in a step if all workers are servers: as in a ring all-reduce.

    As a worker it pushes, and as a server it hands out, its part to each of the others.

    >>> sharded_worker_bytes(800, 8)
    Fraction(1400, 1)
    """
    return Fraction(2 * (num_workers - 1), num_workers) * size_bytes
