"""Activation offload: copies between device and host, overlapped with the passes of a rank."""

from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.simulator.engine.record import COPIES, Span
from meshwright.simulator.schedules import Phase

NO_LAYER = -1


class CopyPoint(NamedTuple):
    """Point of a pass where it starts a copy of a layer's saved tensors, or waits for one.

    Args:
        after_ps: Computation of the pass before the point.
        layer: Layer of the tensors.
        copy_ps: Time of the copy; 0 where the pass waits for the layer's last copy.
    """

    after_ps: int
    layer: int
    copy_ps: int = 0


@dataclass(slots=True)
class HostCopies:
    """Copy streams of a rank: one to the host in forward passes, one back in backward passes.

    A copy starts when the pass has reached its point and its stream is free; a tensor is reloaded
    only after its offload has ended.

    Args:
        ends_ps: End of the last copy of each layer.
        free_ps: Time at which the stream of each phase is free.
        waits_ps: Waiting time of each pass.
        points: Points of the current pass.
        phase: Phase of the current pass.
        passed: Number of its points behind it.
        computed_ps: Its computation so far.
        spans: Copies of each phase.
        most_behind: Peak number of layers whose offload had not ended.
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
        """Begin a pass with *points* in order of ``after_ps``."""
        self.phase, self.points = phase, points
        self.passed = self.computed_ps = 0
        self.waits_ps.append(0)

    def compute(self, part_ps: int, now: int) -> int:
        """Compute a part of the pass from *now* on; return its end.

        At its end it still starts copies; waits there belong to the next part.
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
        """Start a copy, or wait for one; return the time at which the pass resumes."""
        if not point.copy_ps:
            waited_ps = max(0, self.ends_ps.get(point.layer, 0) - now)
            self.waits_ps[-1] += waited_ps
            return now + waited_ps
        # A reload needs the finished offload of its layer.
        offloaded_ps = 0 if self.phase is Phase.FORWARD else self.ends_ps.get(point.layer, 0)
        start_ps = max(now, self.free_ps.get(self.phase, 0), offloaded_ps)
        end_ps = self.ends_ps[point.layer] = self.free_ps[self.phase] = start_ps + point.copy_ps
        self.spans.setdefault(self.phase, []).append(
            Span(COPIES[self.phase.direction], start_ps, end_ps)
        )
        if self.phase is Phase.FORWARD:
            num_pending = sum(end_ps > now for end_ps in self.ends_ps.values())
            self.most_behind = max(self.most_behind, num_pending)
        return now
