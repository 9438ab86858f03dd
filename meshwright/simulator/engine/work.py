"""Input of the engine: durations in integer picoseconds, computed by the cost model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from meshwright.simulator.engine.copies import CopyPoint
from meshwright.simulator.errors import TooManyTasksError
from meshwright.simulator.schedules import NO_REFETCHES, Action, Periodic, Phase, Refetches

# Stages x microbatches of a step that is simulated whole: fifteen times the 64 x 512 of the largest
# published steps. More would take minutes and gigabytes.
MAX_PASSES = 500_000


class PassSegment(NamedTuple):
    """A part of a pass between two data-parallel collectives (of DDP or optimizer buckets).

    In a forward pass the collective must end before the segment starts (parameter gather); in
    a backward pass it may start when the segment ends (gradient reduction).
    """

    compute_ps: int
    collective_ps: int


class UnitWork(NamedTuple):
    """An FSDP unit in a pass: all-gather, compute, reduce-scatter.

    The gather must end before the unit computes; the reduction may start after it.  After the first
    microbatch a reduction takes ``accumulate_ps`` more, to add what earlier ones left, and in the
    last one ``last_ps``, the HSDP all-reduce.  A unit that ``stays`` is not resharded between
    forward and backward.  The rank itself copies parameters out of the all-gather's buffer
    (``unpack_ps``) before computing, and gradients into that of the reduction (``pack_ps``) after.
    """

    compute_ps: int
    gather_ps: int = 0
    reduce_ps: int = 0
    accumulate_ps: int = 0
    last_ps: int = 0
    unpack_ps: int = 0
    pack_ps: int = 0
    stays: bool = False
    gathered_once: bool = False

    def reduction_ps(self, microbatch: int, num_microbatches: int) -> int:
        """Return the time of the reduction in *microbatch* of *num_microbatches*."""
        accumulate_ps = self.accumulate_ps if microbatch else 0
        last_ps = self.last_ps if microbatch == num_microbatches - 1 else 0
        return self.reduce_ps + accumulate_ps + last_ps


def num_gathers(
    num_microbatches: int,
    *,
    stays: bool,
    keeps_units: bool,
    refetches: Refetches = NO_REFETCHES,
) -> int:
    """Return the number of all-gathers of an FSDP unit in a step.

    Without resharding after backward, the first pass gathers, and each one that follows a forward
    pass: once more than there are microbatches, whatever the schedule, and again where an unsharded
    unit was resharded for other virtual stages.

    Args:
        num_microbatches: Microbatches of the step.
        stays: Whether the unit stays unsharded from a forward pass to its backward.
        keeps_units: Whether units stay unsharded from a backward pass to the next pass.
        refetches: Numbers of times that all units of its virtual stage are resharded early.

    >>> [num_gathers(8, stays=False, keeps_units=keeps) for keeps in (False, True)]
    [16, 9]
    """
    if keeps_units:
        once = 1 + refetches.after_forward if stays else num_microbatches + 1
        return once + refetches.after_backward
    return num_microbatches if stays else 2 * num_microbatches


class Message(NamedTuple):
    """A p2p message: time on the sender's port, and time until the receiver may start."""

    occupy_ps: int = 0
    delay_ps: int = 0


class PassWork(NamedTuple):
    """Work of one phase of a rank's virtual stage.

    Args:
        compute_ps: Time of one pass, recomputation included.
        message: Message to the next virtual stage, or to the previous one.
        gathers: Segments of the first pass, overlapped with parameter gathers.
        reductions: Segments of a pass, overlapped with gradient reductions.
        units: FSDP units of each pass, in order.
        copies: Points of activation offload or reload.
        reduces_every_microbatch: Gradients are reduced in every one, not the last alone. With
            segments the rank waits for all of them before its next pass.
    """

    compute_ps: int
    message: Message = Message()
    gathers: tuple[PassSegment, ...] = ()
    reductions: tuple[PassSegment, ...] = ()
    units: tuple[UnitWork, ...] = ()
    copies: tuple[CopyPoint, ...] = ()
    reduces_every_microbatch: bool = False


class OverlapSavings(NamedTuple):
    """Time that F/B overlap saves, divided between the two passes."""

    forward_ps: int = 0
    backward_ps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """Work of one pipeline rank: its virtual stages, and the end of its step.

    Args:
        virtual_stages: The phases of each virtual stage, in model order.
        reduce_ps: Exposed gradient reduction after the last backward pass.
        norm_all_reduce_ps: All-reduces of norm gradients over tp, after the last backward pass.
        shared_embedding_ps: All-reduce of the tied embedding's gradient, first and last stage.
        optimizer_ps: Parameter update.
        gather_ps: Exposed parameter gather after the update.
        hidden: Overlap by virtual stages of a forward pass and of the backward pass beside it.
    """

    virtual_stages: tuple[Mapping[Phase, PassWork], ...]
    reduce_ps: int = 0
    norm_all_reduce_ps: int = 0
    shared_embedding_ps: int = 0
    optimizer_ps: int = 0
    gather_ps: int = 0
    hidden: Mapping[tuple[int, int], OverlapSavings] = field(default_factory=dict)


class StepWork(NamedTuple):
    """Work of a whole step of one pipeline.

    Args:
        ranks: Work of each pipeline rank.
        actions: Action list of each pipeline rank.
        num_microbatches: Microbatches of the step.
        pairs: Positions of each rank's forward passes that are overlapped with the backward pass
            after them; empty without F/B overlap.
        blocking_messages: The sender computes nothing while its message leaves.
        shared_port: Messages and data-parallel collectives share a port (NIC).
        prefetches: The gather of an FSDP unit is issued as the unit before it starts; if not,
            computation waits for each gather and each reduction.
        keeps_units: Units are not resharded after backward.
        sums_first: All-reduces over tp follow the last pass, not the reductions.
        norm_ps: Gradient-norm all-reduce, for which every rank waits before it updates.
        overhead_per_million: Time outside the model of a step, per million of its time.
    """

    ranks: tuple[RankWork, ...]
    actions: Sequence[Sequence[Action]]
    num_microbatches: int
    pairs: Sequence[range] = ()
    blocking_messages: bool = False
    shared_port: bool = False
    prefetches: bool = True
    keeps_units: bool = False
    sums_first: bool = False
    norm_ps: int = 0
    overhead_per_million: int = 0

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    @property
    def num_virtual_stages(self) -> int:
        """Virtual stages a rank."""
        return len(self.ranks[0].virtual_stages)

    def pass_saving_ps(self, pp_rank: int, position: int) -> int:
        """Return the picoseconds that F/B overlap saves for a pass of a rank."""
        pairs = self.pairs[pp_rank] if self.pairs else ()
        first = position if position in pairs else position - 1
        if first not in pairs:
            return 0
        actions = self.actions[pp_rank]
        key = actions[first].virtual_stage, actions[first + 1].virtual_stage
        return self.ranks[pp_rank].hidden[key][position - first]

    def total_overlap_saving_ps(self, pp_rank: int) -> int:
        """Return the picoseconds that F/B overlap saves for all passes of a rank."""
        if not self.pairs:
            return 0
        order, pairs = self.actions[pp_rank], self.pairs[pp_rank]
        if not isinstance(order, Periodic):
            return sum(
                self.pass_saving_ps(pp_rank, each) for each in chain(pairs, (i + 1 for i in pairs))
            )
        once = range(pairs.start, pairs.stop - order.copies * order.size, pairs.step)
        period = range(order.end - order.size, order.end)
        return sum(
            # A pass of the period counts once for each copy.
            self.pass_saving_ps(pp_rank, order.place(each)) * (1 + order.copies * (each in period))
            for each in chain(once, (i + 1 for i in once))
        )


def check_passes(
    num_stages: int, num_microbatches: int, *, to: str = "simulate", num_tried: int = 0
) -> None:
    """Raise TooManyTasksError if a step has too many passes to simulate.

    Args:
        num_stages: Stages of the pipeline.
        num_microbatches: Microbatches of the step.
        to: Verb for the message.
        num_tried: Passes simulated before.
    """
    if num_stages * num_microbatches > MAX_PASSES:
        raise TooManyTasksError(
            f"{num_stages} stages x {num_microbatches} microbatches are too many to {to}; "
            f"allowed: {MAX_PASSES} in all; raise microbatch_size or dp",
            num_tried,
        )


def shortened(work: StepWork, orders: Sequence[Periodic[Action]], copies: int) -> StepWork:
    """Return *work* with fewer microbatches: *copies* of the period of *orders*."""
    removed = orders[0].copies - copies
    size, group = orders[0].size * removed, orders[0].distance * removed
    return work._replace(
        actions=[each.repeated(copies) for each in orders],
        num_microbatches=work.num_microbatches - group,
        pairs=[range(each.start, each.stop - size, each.step) for each in work.pairs],
    )


def with_overhead(time_ps: int, overhead_per_million: int) -> int:
    """Return a step's time with its overhead; monotonic in *time_ps*, so bounds stay bounds.

    >>> with_overhead(1_000_000, 4_000)
    1004000
    """
    # In integers: a float would round above 2**53 ps, two and a half hours.
    return time_ps + time_ps * overhead_per_million // 1_000_000
