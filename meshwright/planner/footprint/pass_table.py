"""What lives in the passes of a pipeline rank as counts of its sizes, once for all layouts alike.

The counts are read off `kept_levels` of the simulator: it only adds and subtracts sizes, so
sizes that are powers of 2 ** 32 give a number whose digits say how often each of them counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space import PERIODS
from meshwright.simulator import Phase, Schedule
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import (
    KeptUnits,
    PassPeak,
    PassPeaks,
    RankMemory,
    SentBytes,
    VirtualStageMemory,
    kept_levels,
    pass_states,
)

DIGIT_BITS = 32
NUM_SIZES = 18


class RankOrder(NamedTuple):
    """What a rank runs; ``kinds`` numbers its virtual stages, those that are alike the same.

    ``reshards`` says that gathered weights are freed after a forward pass.
    """

    schedule: Schedule
    pp: int
    pp_rank: int
    num_microbatches: int
    kinds: tuple[int, ...]
    reshards: bool


def representative_order(
    schedule: Schedule,
    pp: int,
    pp_rank: int,
    num_microbatches: int,
    stages: Sequence[Stage],
    *,
    reshards: bool,
) -> RankOrder:
    """Return the order of a rank with as few of its microbatches as show its fullest moments.

    1F1B repeats itself once its warm-up is over, and so does an interleaved order, but for what
    each microbatch sends, and for its last period, which looks ahead to no other.  Backward
    passes of GPipe differ by equal steps.  With groups larger than the pipeline the whole order is
    walked.
    """
    count = 2 * pp + 1
    if len(stages) > 1 and num_microbatches % pp:
        count = num_microbatches
    elif schedule.holds_sent:
        count = (PERIODS + 1) * pp if len(stages) > 1 else 3
    numbers = {stage: number for number, stage in enumerate(dict.fromkeys(stages))}
    kinds = tuple(numbers[stage] for stage in stages)
    return RankOrder(schedule, pp, pp_rank, min(num_microbatches, count), kinds, reshards)


@dataclass(frozen=True, slots=True)
class PassTable:
    """Moments of a rank: how often each size of its virtual stages counts.

    Each microbatch more than *num_microbatches* adds ``growth`` to the moment of the same row.
    """

    rows: NDArray[np.int64]
    growth: NDArray[np.int64]
    num_microbatches: int
    kinds: tuple[int, ...]

    @classmethod
    def of(cls, order: RankOrder) -> "PassTable":
        """Return the moments of a rank that runs *order*."""
        memory = _symbolic_memory(order)
        pairs: dict[tuple[int, int], None] = {}
        for level, growth in _moments(order, memory):
            pairs[level, growth] = None
        num_sizes = NUM_SIZES * (max(order.kinds) + 1)
        rows, growths = (
            np.array([_digits(pair[which], num_sizes) for pair in pairs]) for which in (0, 1)
        )
        return cls(rows, growths, order.num_microbatches, order.kinds)

    def most_moving(self, memory: RankMemory, num_microbatches: int) -> int:
        """Return the most that moves in the passes of a rank with the sizes of *memory*."""
        of_kinds = dict(zip(self.kinds, memory.virtual_stages, strict=True))
        sizes = [size for kind in sorted(of_kinds) for size in _sizes(of_kinds[kind])]
        vector = np.array(sizes, np.int64)
        left_out = num_microbatches - self.num_microbatches
        moving = self.rows @ vector + left_out * (self.growth @ vector)
        return memory.message_buffers_bytes + int(moving.max())


def _moments(order: RankOrder, memory: RankMemory) -> Iterator[tuple[int, int]]:
    """Yield what moves in each moment, and what each microbatch that is left out adds to that."""
    schedule, pp, pp_rank, count, kinds, _ = order
    actions = schedule.rank_actions(pp_rank, pp, count, len(kinds))
    states = pass_states(actions, len(kinds), reshards=order.reshards)
    sent = sum(map(sum, memory.sent))
    forward = [index for index, action in enumerate(actions) if action.phase is Phase.FORWARD]
    for index, levels in enumerate(kept_levels(memory, actions, states)):
        growth = 0
        if schedule.holds_sent and len(kinds) > 1:
            growth = sent if index >= forward[-min(len(forward), 2 * pp * len(kinds))] else 0
        elif schedule.holds_sent:
            growth = sent if index == len(actions) - 1 else memory.virtual_stages[0].saved_bytes
        for level in levels:
            yield level.moving_bytes, growth


def _digits(number: int, num_digits: int) -> NDArray[np.int64]:
    """Return the signed digits of *number*, the lowest first.

    >>> _digits(5 - 2 * 2**32, 3).tolist()
    [5, -2, 0]
    """
    # Half of the base on every digit makes all of them positive, so that none borrows.
    half = 1 << (DIGIT_BITS - 1)
    shifted = number + sum(half << DIGIT_BITS * place for place in range(num_digits))
    raw = shifted.to_bytes(num_digits * DIGIT_BITS // 8, "little")
    return np.frombuffer(raw, np.dtype("<u4")).astype(np.int64) - half


def _symbolic_memory(order: RankOrder) -> RankMemory:
    """Return the memory of a rank whose sizes are powers of the base of the digits."""
    numbers = range(NUM_SIZES * (max(order.kinds) + 1))
    symbols = [1 << DIGIT_BITS * number for number in numbers]
    virtual_stages = tuple(
        _symbolic_virtual_stage(symbols[NUM_SIZES * kind : NUM_SIZES * (kind + 1)])
        for kind in order.kinds
    )
    return RankMemory(
        parameters_bytes=0,
        gradients_bytes=0,
        optimizer_states_bytes=0,
        update_temporary_bytes=0,
        virtual_stages=virtual_stages,
        holds_sent=order.schedule.holds_sent,
    )


def _sizes(stage: VirtualStageMemory) -> tuple[int, ...]:
    """Return the sizes of a virtual stage."""
    kept, first = stage.kept_units, stage.first_backward
    assert kept is not None
    assert first is not None
    return (
        stage.forward_workspace_bytes,
        first.total_bytes,
        stage.backward_workspace_bytes,
        *(moment.total_bytes for moment in (*kept.whole, *kept.ahead)),
        stage.saved_bytes,
        stage.late_gradients_bytes,
        stage.after_forward_bytes,
        stage.after_backward_bytes,
        kept.ahead_bytes,
        *kept.reduction,
        *stage.sent,
    )


def _symbolic_virtual_stage(symbols: Sequence[int]) -> VirtualStageMemory:
    """Return the virtual stage whose sizes, in the order of `_sizes`, are *symbols*."""
    moments = [PassPeak(symbol) for symbol in symbols[:9]]
    (
        saved,
        late,
        after_forward,
        after_backward,
        ahead,
        reduction_bytes,
        reduced_bytes,
        output,
        gradient,
    ) = symbols[9:]
    return VirtualStageMemory(
        forward_workspace_bytes=symbols[0],
        first_backward=moments[1],
        backward_workspace_bytes=symbols[2],
        saved_bytes=saved,
        late_gradients_bytes=late,
        after_forward_bytes=after_forward,
        after_backward_bytes=after_backward,
        kept_units=KeptUnits(
            whole=PassPeaks(*moments[3:6]),
            ahead=PassPeaks(*moments[6:]),
            ahead_bytes=ahead,
            reduction=PassPeak(reduction_bytes, reduced_bytes),
        ),
        sent=SentBytes(output, gradient),
    )
