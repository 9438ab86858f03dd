"""Critical path of a simulated step, from the record of its run."""

from collections import Counter
from typing import NamedTuple

from meshwright.simulator.costs import Category
from meshwright.simulator.engine import SpanKind, StepTimes, check_passes
from meshwright.simulator.schedules import Action
from meshwright.simulator.step import BuiltStep

CLOSING: dict[str, Category] = {
    SpanKind.REDUCTION_WAIT: Category.DP_COMM,
    SpanKind.SHARED_EMBEDDING: Category.DP_COMM,
    SpanKind.GRADIENT_NORM: Category.DP_COMM,
    SpanKind.PARAMETER_GATHER: Category.DP_COMM,
    SpanKind.TENSOR_SUM: Category.TP_COMM,
    SpanKind.OPTIMIZER: Category.OPTIMIZER,
}


class CriticalPath(NamedTuple):
    """Chain of work and messages that bounds the step's time.

    Args:
        time_ps: Picoseconds by category; they add up to the step.
        by_rank_ps: Picoseconds of its passes, by pipeline rank.
        num_passes: Number of passes on it.
    """

    time_ps: dict[Category, int]
    by_rank_ps: dict[int, int]
    num_passes: int


def critical_path(built: BuiltStep, times: StepTimes) -> CriticalPath:
    """Return the critical path, walked from the end of the step back to its beginning.

    A rank ends late for its own work before, or for a message, whose sender was late for the same
    reasons. Of two reasons at the same instant it is the rank's own.

    Raises:
        TooManyTasksError: If there are too many passes to look at each.
    """
    check_passes(built.setting.plan.num_stages, built.work.num_microbatches, to="explain")
    walk = _Walk(built, times)
    walk.run()
    return CriticalPath(
        {category: walk.spent_ps[category] for category in Category},
        dict(sorted(walk.by_rank_ps.items())),
        walk.num_passes,
    )


class _Walk:
    """A walk from the end of a step to its beginning."""

    def __init__(self, built: BuiltStep, times: StepTimes) -> None:
        self._built, self._times = built, times
        self.spent_ps: Counter[Category] = Counter()
        self.by_rank_ps: Counter[int] = Counter()
        self.num_passes = 0
        self._positions = [
            {action: place for place, action in enumerate(rank.actions)} for rank in times.ranks
        ]
        self._sent = [
            {action: sent[1] for action, sent in zip(rank.senders, rank.sent_ps, strict=True)}
            for rank in times.ranks
        ]

    def run(self) -> None:
        """Walk the whole step."""
        ranks = self._times.ranks
        last = max(range(len(ranks)), key=lambda each: ranks[each].end_ps)
        self.spent_ps[Category.STEP_OVERHEAD] += self._times.step_ps - ranks[last].end_ps
        update_ps = ranks[last].update_start_ps
        self._closing(last, ranks[last].end_ps, update_ps)
        # All ranks meet for the gradient norm: the last of them to reduce decides.
        norm_ps = update_ps - self._built.work.norm_ps
        self.spent_ps[Category.DP_COMM] += self._built.work.norm_ps
        rank = max(range(len(ranks)), key=lambda each: ranks[each].reduce_end_ps)
        rank = self._closing(rank, norm_ps, 0)
        self._passes(rank)

    def _closing(self, rank: int, now_ps: int, until_ps: int) -> int:
        """Walk from *now_ps* over the close of the step; return the rank whose passes it reaches.

        Both ends of a tied embedding's all-reduce wait for each other.
        """
        other = len(self._times.ranks) - 1 - rank
        while now_ps > max(until_ps, self._times.ranks[rank].passes_end_ps):
            spans = self._times.ranks[rank].closing
            span = next((each for each in spans if each.end_ps == now_ps), None)
            if span is None:
                rank, other = other, rank
                continue
            self.spent_ps[CLOSING[span.kind]] += span.end_ps - span.start_ps
            now_ps = span.start_ps
        return rank

    def _passes(self, rank: int) -> None:
        """Walk from the end of a rank's passes to the beginning of the step."""
        times = self._times.ranks[rank]
        place, now_ps = len(times.actions) - 1, times.passes_end_ps
        while place >= 0:
            times = self._times.ranks[rank]
            # What is between a pass and what waited for it is the message on its way.
            self.spent_ps[Category.PP_COMM] += now_ps - times.ends_ps[place]
            self._charge(rank, place)
            now_ps = times.starts_ps[place]
            own_ps = self._done_ps(rank, place - 1)
            # Idle before the pass: it waited for a message.
            if now_ps > own_ps:
                rank, place = self._awaited(rank, place)
            else:
                place -= 1

    def _done_ps(self, rank: int, place: int) -> int:
        """Return the time at which a rank is done with a pass, and with a blocking send of it."""
        if place < 0:
            return 0
        times = self._times.ranks[rank]
        end_ps = times.ends_ps[place]
        if not self._built.work.blocking_messages:
            return end_ps
        return self._sent[rank].get(times.actions[place], end_ps)

    def _awaited(self, rank: int, place: int) -> tuple[int, int]:
        """Return the rank and position of the pass whose message one at *place* waited for.

        An overlapped pair waits for both messages: the later one counts.
        """
        actions = self._times.ranks[rank].actions
        size = 2 if place in self._times.ranks[rank].pairs else 1
        senders = [self._sender(rank, each) for each in actions[place : place + size]]
        return max(
            (each for each in senders if each[0] in range(len(self._times.ranks))),
            key=lambda each: self._sent[each[0]][self._times.ranks[each[0]].actions[each[1]]],
        )

    def _sender(self, rank: int, action: Action) -> tuple[int, int]:
        """Return the rank and position of the pass that sent *action* its message."""
        pp, direction = len(self._times.ranks), action.phase.direction
        sender, sent = action.further(rank, pp, -direction)
        return sender, self._positions[sender][sent]

    def _charge(self, rank: int, place: int) -> None:
        """Add the times of a pass: compute by category, waits and copies."""
        times = self._times.ranks[rank]
        action, time_ps = times.actions[place], times.ends_ps[place] - times.starts_ps[place]
        hidden_ps = self._built.work.pass_saving_ps(rank, place)
        self.spent_ps[Category.EP_COMM] -= hidden_ps
        # Costs are of a pass alone: the time that overlap hides is taken off.
        cost = self._built.virtual_stage_costs[rank][action.virtual_stage][action.phase]
        for category in Category:
            self.spent_ps[category] += cost.category_ps(category)
        copied_ps = times.copy_waits_ps[place] if times.copy_waits_ps else 0
        waited_ps = time_ps - (cost.time_ps - hidden_ps) - copied_ps
        host_ps = int(waited_ps * self._built.host_shares[rank])
        self.spent_ps[Category.HOST_COPY] += host_ps + copied_ps
        self.spent_ps[Category.DP_COMM] += waited_ps - host_ps
        self.by_rank_ps[rank] += time_ps
        self.num_passes += 1
