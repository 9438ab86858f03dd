"""Copies of activations between a device and its host, beside the passes of a rank."""

from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.simulator.engine.record import COPIES, Span
from meshwright.simulator.schedules import Phase

NO_LAYER = -1


class CopyPoint(NamedTuple):
    """Where a pass starts a copy of a layer's saved tensors, or waits for one.

    Args:
        after_ps: Computation of the pass before it.
        layer: Whose tensors.
        copy_ps: Time of the copy; 0 where the pass waits for the last one of that layer.
    """

    after_ps: int
    layer: int
    copy_ps: int = 0


@dataclass(slots=True)
class HostCopies:
    """The copies of a rank: a stream to the host in forward passes, one back in backward passes.

    A copy starts when the pass has come to its point and those before it are over; a tensor comes
    back when it has left.

    Args:
        ends_ps: End of the last copy of each layer.
        free_ps: When the stream of each phase is free.
        waits_ps: What each pass waited.
        points: Those of the pass that runs.
        phase: Of that pass.
        passed: How many of its points it has passed.
        computed_ps: What of it is computed.
        spans: The copies of each phase.
        most_behind: The most layers whose copies to the host were not over at a time.
    """

    ends_ps: dict[int, int] = field(default_factory=dict)
    free_ps: dict[Phase, int] = field(default_factory=dict)
    waits_ps: list[int] = field(default_factory=list)
    points: tuple[CopyPoint, ...] = ()
    phase: Phase = Phase.FORWARD
    passed: int = 0
    computed_ps: int = 0
    spans: dict[Phase, list[Span]] = field(default_factory=dict)
    most_behind: int = 0

    def begin(self, phase: Phase, points: tuple[CopyPoint, ...]) -> None:
        """Begin a pass with *points* in order of what is computed before them."""
        self.phase, self.points = phase, points
        self.passed = self.computed_ps = 0
        self.waits_ps.append(0)

    def compute(self, part_ps: int, now: int) -> int:
        """Compute a part of the pass, from *now* on; return when that is done.

        Where it ends it still starts copies; what the next part waits for is left to that.
        """
        end_ps = self.computed_ps + part_ps
        while self.passed < len(self.points):
            point = self.points[self.passed]
            if point.after_ps >= end_ps + bool(point.copy_ps):
                break
            now += point.after_ps - self.computed_ps
            self.computed_ps = point.after_ps
            now = self._pass(point, now)
            self.passed += 1
        now += end_ps - self.computed_ps
        self.computed_ps = end_ps
        return now

    def _pass(self, point: CopyPoint, now: int) -> int:
        """Start a copy, or wait for one; return when the pass goes on."""
        if not point.copy_ps:
            waited_ps = max(0, self.ends_ps.get(point.layer, 0) - now)
            self.waits_ps[-1] += waited_ps
            return now + waited_ps
        left_ps = 0 if self.phase is Phase.FORWARD else self.ends_ps.get(point.layer, 0)
        start_ps = max(now, self.free_ps.get(self.phase, 0), left_ps)
        end_ps = self.ends_ps[point.layer] = self.free_ps[self.phase] = start_ps + point.copy_ps
        self.spans.setdefault(self.phase, []).append(
            Span(COPIES[self.phase.direction], start_ps, end_ps)
        )
        if self.phase is Phase.FORWARD:
            behind = sum(end_ps > now for end_ps in self.ends_ps.values())
            self.most_behind = max(self.most_behind, behind)
        return now
