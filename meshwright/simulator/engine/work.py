"""What the engine runs: durations in integer picoseconds, already decided by the cost model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from meshwright.simulator.engine.copies import CopyPoint
from meshwright.simulator.errors import TooManyTasksError
from meshwright.simulator.schedules import NO_REFETCHES, Action, Periodic, Phase, Refetches

# Stages x microbatches of a step that is run whole: fifteen times the 64 x 512 of the largest
# published steps. More would take minutes and gigabytes.
MAX_PASSES = 500_000


class PassSegment(NamedTuple):
    """A part of a pass between two data-parallel collectives, or runs of them.

    In a forward pass the collective must end before the segment starts (parameter gather); in
    a backward pass it may start when the segment ends (gradient reduction).
    """

    compute_ps: int
    collective_ps: int


class UnitWork(NamedTuple):
    """A part of every pass whose parameters are sharded: gather, compute, reduce.

    The gather must end before the unit computes; the reduction may start when it has.  After the
    first microbatch a reduction takes ``again_ps`` more, for what earlier ones left elsewhere, and
    in the last one ``last_ps``, for sums over replicas of the shards.  A unit that ``stays`` is not
    freed between a forward pass and its backward.  The rank itself copies what was gathered out of
    the buffer (``unpack_ps``) before it computes, and gradients into that of the reduction
    (``pack_ps``) after.
    """

    compute_ps: int
    gather_ps: int = 0
    reduce_ps: int = 0
    again_ps: int = 0
    last_ps: int = 0
    unpack_ps: int = 0
    pack_ps: int = 0
    stays: bool = False
    is_once: bool = False

    def reduction_ps(self, microbatch: int, num_microbatches: int) -> int:
        """Return the time of the reduction of one of so many microbatches."""
        again_ps = self.again_ps if microbatch else 0
        last_ps = self.last_ps if microbatch == num_microbatches - 1 else 0
        return self.reduce_ps + again_ps + last_ps


def num_gathers(
    num_microbatches: int,
    *,
    stays: bool,
    keeps_units: bool,
    refetches: Refetches = NO_REFETCHES,
) -> int:
    """Return how often a sharded unit is gathered in a step.

    Where units stay gathered after a backward pass, the first pass gathers, and each one that
    follows a forward pass: once more than there are microbatches, whatever the schedule, and again
    where a unit that would have stayed was freed for other virtual stages.

    Args:
        num_microbatches: Microbatches of the step.
        stays: Whether the unit stays gathered from a forward pass to its backward.
        keeps_units: Whether units stay gathered from a backward pass to the next pass.
        refetches: How often all units of its virtual stage are freed and gathered anew.

    >>> [num_gathers(8, stays=False, keeps_units=keeps) for keeps in (False, True)]
    [16, 9]
    """
    if keeps_units:
        once = 1 + refetches.after_forward if stays else num_microbatches + 1
        return once + refetches.after_backward
    return num_microbatches if stays else 2 * num_microbatches


class Message(NamedTuple):
    """What a stage sends on: time on the sender's port, and time until the receiver may start."""

    occupy_ps: int = 0
    delay_ps: int = 0


class PassWork(NamedTuple):
    """A phase of a virtual stage of a rank.

    Args:
        compute_ps: One pass, recomputation included.
        message: To the next virtual stage, or to the previous one.
        gathers: Segments of the first pass, where parameters are gathered under it.
        reductions: Segments of a pass that reduces gradients under it.
        units: Units of each pass, where parameters are sharded, in the order in which they run.
        copies: Where a pass copies activations to the host, or has them back.
        reduces_always: Every pass reduces, not the last one alone. Where it does so in segments,
            the rank waits for all of them before its next pass.
    """

    compute_ps: int
    message: Message = Message()
    gathers: tuple[PassSegment, ...] = ()
    reductions: tuple[PassSegment, ...] = ()
    units: tuple[UnitWork, ...] = ()
    copies: tuple[CopyPoint, ...] = ()
    reduces_always: bool = False


class Hidden(NamedTuple):
    """What two passes beside each other take less than by themselves, of each."""

    forward_ps: int = 0
    backward_ps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """One pipeline rank: its virtual stages, and what follows its last action.

    Args:
        virtual_stages: The phases of each virtual stage, in model order.
        reduce_ps: Gradient reduction after the last backward pass, where nothing hides it.
        sums_ps: Sums of gradients over tensor-parallel ranks that are left to the end.
        shared_embedding_ps: All-reduce of a tied table's gradient between first and last rank.
        optimizer_ps: Parameter update.
        gather_ps: Parameter gather after the update, where nothing hides it.
        hidden: Of a forward pass through the first virtual stage beside a backward pass through the
            second one.
    """

    virtual_stages: tuple[Mapping[Phase, PassWork], ...]
    reduce_ps: int = 0
    sums_ps: int = 0
    shared_embedding_ps: int = 0
    optimizer_ps: int = 0
    gather_ps: int = 0
    hidden: Mapping[tuple[int, int], Hidden] = field(default_factory=dict)


class StepWork(NamedTuple):
    """A whole step of one pipeline.

    Args:
        ranks: One entry a pipeline rank.
        actions: What each pipeline rank does, in order.
        num_microbatches: Microbatches of the step.
        pairs: Where the forward passes of each pipeline rank stand that run beside the backward
            pass behind them; none where all run one after the other.
        blocking_messages: The sender computes nothing while its message leaves.
        shared_port: Messages and data-parallel collectives leave through the same port.
        prefetches: The gather of a sharded unit is issued as the unit before it starts; if not,
            computation waits for each gather and each reduction.
        keeps_units: Gathered units stay from a backward pass to the next pass of their virtual
            stage.
        sums_first: Sums over tensor-parallel ranks follow the last pass, not the reductions.
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

    def hidden_of(self, pp_rank: int, position: int) -> int:
        """Return the picoseconds that a rank's pass takes less for the one beside it."""
        pairs = self.pairs[pp_rank] if self.pairs else ()
        first = position if position in pairs else position - 1
        if first not in pairs:
            return 0
        actions = self.actions[pp_rank]
        key = actions[first].virtual_stage, actions[first + 1].virtual_stage
        return self.ranks[pp_rank].hidden[key][position - first]

    def all_hidden_ps(self, pp_rank: int) -> int:
        """Return the picoseconds that all passes of a rank take less for those beside them."""
        if not self.pairs:
            return 0
        order, pairs = self.actions[pp_rank], self.pairs[pp_rank]
        if not isinstance(order, Periodic):
            return sum(
                self.hidden_of(pp_rank, each) for each in chain(pairs, (i + 1 for i in pairs))
            )
        once = range(pairs.start, pairs.stop - order.copies * order.size, pairs.step)
        period = range(order.end - order.size, order.end)
        return sum(
            self.hidden_of(pp_rank, order.place(each)) * (1 + order.copies * (each in period))
            for each in chain(once, (i + 1 for i in once))
        )


def check_passes(
    num_stages: int, num_microbatches: int, *, to: str = "simulate", num_tried: int = 0
) -> None:
    """Raise TooManyTasksError where all passes of a step are too many.

    Args:
        num_stages: Stages of the pipeline.
        num_microbatches: Microbatches of the step.
        to: For what.
        num_tried: Passes that were run before.
    """
    if num_stages * num_microbatches > MAX_PASSES:
        raise TooManyTasksError(
            f"{num_stages} stages x {num_microbatches} microbatches are too many to {to}; "
            f"allowed: {MAX_PASSES} in all; raise microbatch_size or dp",
            num_tried,
        )


def shortened(work: StepWork, orders: Sequence[Periodic[Action]], copies: int) -> StepWork:
    """Return *work* with fewer microbatches: *copies* of the period of its *orders*."""
    removed = orders[0].copies - copies
    size, group = orders[0].size * removed, orders[0].distance * removed
    return work._replace(
        actions=[each.repeated(copies) for each in orders],
        num_microbatches=work.num_microbatches - group,
        pairs=[range(each.start, each.stop - size, each.step) for each in work.pairs],
    )


def with_overhead(time_ps: int, overhead_per_million: int) -> int:
    """Return a step's time with its overhead; grows with *time_ps*, so bounds keep their order.

    >>> with_overhead(1_000_000, 4_000)
    1004000
    """
    # In integers: a float would round above 2**53 ps, two and a half hours.
    return time_ps + time_ps * overhead_per_million // 1_000_000
