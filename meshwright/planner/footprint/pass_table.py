"""What lives in the passes of a pipeline rank as counts of its sizes, once for all layouts alike.

The counts are read off `kept_levels` of the simulator: it only adds and subtracts sizes, so
sizes that are powers of 2 ** 32 give a number whose digits say how often each of them counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space import PERIODS, Column
from meshwright.simulator import Phase, Schedule
from meshwright.simulator.graph import Size
from meshwright.simulator.memory import PassPeak, PassPeaks, RankMemory, pass_levels, pass_states
from meshwright.simulator.units import StageUnits

DIGIT_BITS = 32
NUM_SIZES = 19


class RankOrder(NamedTuple):
    """What a rank runs; ``kinds`` numbers its virtual stages, those that are alike the same.

    ``reshards`` says that gathered weights are freed after a forward pass, ``sums`` that gradients
    are summed until the last microbatch, outside a pipeline.
    """

    schedule: Schedule
    pp: int
    pp_rank: int
    num_microbatches: int
    kinds: tuple[int, ...]
    reshards: bool
    sums: bool


def representative_microbatches(
    schedule: Schedule, pp: int, num_microbatches: int, num_stages: int
) -> int:
    """Return as few of a rank's microbatches as show its fullest moments.

    1F1B repeats itself once its warm-up is over, and so does an interleaved order, but for what
    each microbatch sends, and for its last period, which looks ahead to no other.  Backward
    passes of GPipe differ by equal steps.  With groups larger than the pipeline the whole order is
    walked.
    """
    count = 2 * pp + 1
    if num_stages > 1 and num_microbatches % pp:
        count = num_microbatches
    elif schedule.holds_sent:
        count = (PERIODS + 1) * pp if num_stages > 1 else 3
    return min(num_microbatches, count)


@dataclass(frozen=True, slots=True)
class PassTable:
    """Moments of a rank: how often each size of its virtual stages counts.

    Each microbatch more than *num_microbatches* adds ``growth`` to the moment of the same row.
    """

    rows: NDArray[np.int64]
    growth: NDArray[np.int64]
    num_microbatches: int

    @classmethod
    def of(cls, order: RankOrder) -> "PassTable":
        """Return the moments of a rank that runs *order*."""
        num_kinds = max(order.kinds) + 1
        symbols = [1 << DIGIT_BITS * number for number in range(NUM_SIZES * num_kinds)]
        virtual_stages = [
            symbolic_stage(symbols[NUM_SIZES * kind : NUM_SIZES * (kind + 1)]).virtual_stage(
                keeps_units=order.pp > 1, sums=order.sums
            )
            for kind in range(num_kinds)
        ]
        memory = RankMemory(
            parameters_bytes=0,
            gradients_bytes=0,
            virtual_stages=tuple(virtual_stages[kind] for kind in order.kinds),
            holds_sent=order.schedule.holds_sent,
        )
        pairs = [*dict.fromkeys(_moments(order, memory))]
        rows, growth = (_digits(each, len(symbols)) for each in zip(*pairs, strict=True))
        return cls(rows, growth, order.num_microbatches)

    def most_moving(self, sizes: NDArray[np.int64], num_microbatches: Column) -> Column:
        """Return the most that moves in the passes of ranks.

        Args:
            sizes: Those of `pass_sizes`, kind by kind, one row a rank.
            num_microbatches: Of each.
        """
        left_out, counts = num_microbatches - self.num_microbatches, self.rows
        if left_out.any() and self.growth.any():
            counts = np.concatenate([self.rows, self.growth], axis=1)
            sizes = np.concatenate([sizes, left_out[:, None] * sizes], axis=1)
        is_used = counts.any(axis=0)
        return _most(sizes[:, is_used], counts[:, is_used])


def _most(sizes: NDArray[np.int64], counts: NDArray[np.int64]) -> Column:
    """Return the largest sum of *sizes*, a row a rank, each as often as some row of *counts* says.

    Libraries multiply matrices of floats ten times as fast as whole numbers; below 2 ** 53 floats
    are exact.
    """
    most = np.abs(counts).max(axis=0) @ np.abs(sizes).max(axis=0, initial=0).astype(np.float64)
    if most >= 2**53:
        return np.asarray((sizes @ counts.T).max(axis=1), np.int64)
    # OpenBLAS uses one thread up to 2 ** 18 multiplications; others would wait in a loop.
    num_rows = max(2, 2**17 // max(1, counts.size))
    blocks = np.zeros((-(-len(sizes) // num_rows), num_rows, sizes.shape[1]))
    blocks.reshape(-1, sizes.shape[1])[: len(sizes)] = sizes
    product = blocks @ counts.T.astype(np.float64)
    return np.asarray(product.max(axis=2).ravel()[: len(sizes)], np.int64)


def _moments(order: RankOrder, memory: RankMemory) -> Iterator[tuple[int, int]]:
    """Yield what moves in each moment, and what each microbatch that is left out adds to that."""
    schedule, pp, pp_rank, count, kinds, reshards, _ = order
    actions = schedule.rank_actions(pp_rank, pp, count, len(kinds))
    states = pass_states(actions, len(kinds), reshards=reshards)
    sent = sum(map(sum, memory.sent))
    forward = [index for index, action in enumerate(actions) if action.phase is Phase.FORWARD]
    for index, levels in enumerate(pass_levels(memory, actions, states)):
        growth = 0
        if schedule.holds_sent and len(kinds) > 1:
            growth = sent if index >= forward[-min(len(forward), 2 * pp * len(kinds))] else 0
        elif schedule.holds_sent:
            growth = sent if index == len(actions) - 1 else memory.virtual_stages[0].saved_bytes
        for level in levels:
            yield level.moving_bytes, growth


def _digits(numbers: Sequence[int], num_digits: int) -> NDArray[np.int64]:
    """Return the signed digits of *numbers*, the lowest first, one row a number.

    >>> _digits([5 - 2 * 2**32, 7], 3).tolist()
    [[5, -2, 0], [7, 0, 0]]
    """
    # Half of the base on every digit makes all of them positive, so that none borrows.
    half = 1 << (DIGIT_BITS - 1)
    halves = sum(half << DIGIT_BITS * place for place in range(num_digits))
    length = num_digits * DIGIT_BITS // 8
    raw = b"".join((number + halves).to_bytes(length, "little") for number in numbers)
    digits = np.frombuffer(raw, np.dtype("<u4")).astype(np.int64) - half
    return digits.reshape(len(numbers), num_digits)


def pass_sizes(stage: StageUnits) -> tuple[Size, ...]:
    """Return the sizes of a virtual stage that its passes are made of."""
    peaks = (*stage.apart, *stage.whole, *stage.ahead, stage.last)
    held = (stage.saved, stage.late, stage.after_forward, stage.after_backward, stage.fetched)
    totals = (peak.total_bytes for peak in peaks)
    return (*held, stage.reduction, stage.reduced, *stage.sent, *totals)


def symbolic_stage(symbols: Sequence[int]) -> StageUnits:
    """Return the virtual stage whose `pass_sizes` are *symbols*."""
    saved, late, after_forward, after_backward, fetched, reduction, reduced, *sent = symbols[:9]
    peaks: list[PassPeak[Size]] = [PassPeak(symbol, 0) for symbol in symbols[9:]]
    return StageUnits(
        surplus=0,
        copied=0,
        buffers=0,
        saved=saved,
        late=late,
        after_forward=after_forward,
        after_backward=after_backward,
        reduction=reduction,
        reduced=reduced,
        fetched=fetched,
        sent=(sent[0], sent[1]),
        apart=PassPeaks(*peaks[:3]),
        whole=PassPeaks(*peaks[3:6]),
        ahead=PassPeaks(*peaks[6:9]),
        last=peaks[9],
    )
