"""Verdict of a search that found nothing: memory, a refusal, or indivisible numbers; ways out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from meshwright.hwprofiles import (
    PS_PER_S,
    Cluster,
    counted,
    format_bytes,
    in_parentheses,
)
from meshwright.planner.space import COLUMNS, Mask, Space, SpaceLimits, undivided_splits
from meshwright.simulator import ResolvedPlan
from meshwright.simulator.layout import Gap, stack_gaps
from meshwright.simulator.memory import usable_bytes


class Cause(StrEnum):
    """Cause that rules a layout out, ordered: of layouts that run, memory."""

    UNDIVIDED = "not divisible"
    REFUSED = "refused"
    INEXPRESSIBLE = "not told"
    MEMORY = "no memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way out, with the layout that then fits.

    Args:
        options: Options to change in the command.
        num_gpus: Devices of the layout.
        step_ps: Simulated time of its step.
        device_bytes: Memory of its fullest device.
        note: Other changes, or costs.
    """

    options: str
    num_gpus: int
    step_ps: int
    device_bytes: int
    note: str = ""

    def __str__(self) -> str:
        """Return the way in a line.

        >>> print(Way(options="--gpus 32", num_gpus=32, step_ps=2 * 10**12, device_bytes=2**30))
        --gpus 32: 2 s a step on 32 GPUs, 1 GiB
        """
        step = f"{self.step_ps / PS_PER_S:.4g} s a step on {counted(self.num_gpus, 'GPU')}"
        notes = [step, format_bytes(self.device_bytes), *filter(None, [self.note])]
        return f"{self.options}: {', '.join(notes)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleCount:
    """A rule, with the number of layouts that it is the first to rule out.

    Args:
        whose: Stack, or framework with its release.
        field: Field of the plan that another value would help.
        reason: Text of the layouts.
        why: Rule of the framework, or a note that they are not modelled.
        allowed: Texts of the allowed values of the field.
        layouts: Number of layouts.
    """

    whose: str
    field: str
    reason: str
    why: str
    allowed: tuple[str, ...]
    layouts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Reason why a search found nothing, with ways out.

    Args:
        cause: Cause that rules out the layouts that came farthest.
        text: The same in a line, with its rule or the memory that is lacking.
        layouts: Number of layouts by cause; for indivisible ones the splits of the devices.
        rules: Rules that refuse layouts, those of most layouts first.
        ways: Ways out, the cheapest first: fewest options, then on the same devices, then by time.
    """

    cause: Cause
    text: str
    layouts: Mapping[Cause, int]
    rules: tuple[RuleCount, ...]
    ways: tuple[Way, ...] = ()

    @property
    def lines(self) -> Iterator[str]:
        """Lines of the verdict for a terminal: the reason, and the ways out."""
        yield self.text
        first, *others = self.ways or ("nothing of what was tried helps",)
        yield f"do: {first}"
        yield from (f"or: {each}" for each in others)


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts of a search that found nothing, by the cause that rules them out.

    Args:
        space: All layouts.
        gaps: Gaps of the stack and of the framework, with the owner of each rule.
        refused: Mask of layouts that the stack refuses.
        inexpressible: Mask of others that the framework cannot express.
    """

    space: Space
    gaps: tuple[tuple[str, Gap, Mask], ...]
    refused: Mask
    inexpressible: Mask

    @classmethod
    def of(cls, space: Space) -> "Layouts":
        """Return the layouts of *space*."""
        stack, launcher = space.stack, space.launcher
        own = [each for each in stack_gaps(stack, space.job) if each.field in COLUMNS]
        told = [] if launcher is None else list(launcher.gaps(stack, space.job))
        none = np.zeros(len(space), np.bool_)
        told = [replace(gap, reason=_untold(gap)) for gap in told]
        of_stack = [(stack.name, gap, none | gap.lacks(space.column)) for gap in own]
        title = "" if launcher is None else launcher.release
        of_launcher = [(title, gap, none | gap.lacks(space.column)) for gap in told]
        refused = np.asarray(sum((mask for *_, mask in of_stack), start=none), np.bool_)
        inexpressible = np.asarray(sum((mask for *_, mask in of_launcher), start=none), np.bool_)
        # Of a layout that both refuse the stack is the cause.
        return cls(space, (*of_stack, *of_launcher), refused, inexpressible & ~refused)

    @property
    def cause(self) -> Cause:
        """Cause that rules out the layouts that came farthest."""
        if not len(self.space):
            return Cause.UNDIVIDED
        if self.refused.all():
            return Cause.REFUSED
        return Cause.INEXPRESSIBLE if (self.refused | self.inexpressible).all() else Cause.MEMORY

    def counts(self, undivided: int) -> dict[Cause, int]:
        """Return the number of layouts by cause."""
        refused, inexpressible = int(self.refused.sum()), int(self.inexpressible.sum())
        # Layouts that stack and framework allow need too much memory.
        rest = len(self.space) - refused - inexpressible
        return dict(zip(Cause, (undivided, refused, inexpressible, rest), strict=True))

    def rules(self) -> tuple[RuleCount, ...]:
        """Return the rules that are the first to rule layouts out, those of most layouts first."""
        left = np.ones(len(self.space), np.bool_)
        found = []
        for whose, gap, mask in self.gaps:
            count = int(np.count_nonzero(left & mask))
            # A layout counts for its first rule alone.
            left &= ~mask
            if count:
                found.append(_rule_count(whose, gap, count))
        return tuple(sorted(found, key=lambda each: -each.layouts))

    def blocking(self) -> tuple[ResolvedPlan, list[tuple[str, Gap, Mask]]]:
        """Return the layout that fewest rules refuse, of those the stack runs if any, and these."""
        kept = np.flatnonzero(self.inexpressible if self.inexpressible.any() else self.refused)
        number = sum(mask[kept].astype(np.int64) for *_, mask in self.gaps)
        index = int(kept[int(np.argmin(number))])
        return self.space.plan(index), [each for each in self.gaps if each[2][index]]


def _untold(gap: Gap) -> str:
    """Return the text of settings that a framework cannot express."""
    return f"{gap.field} other than {', '.join(map(str, gap.allowed))}"


def _rule_count(whose: str, gap: Gap, count: int) -> RuleCount:
    return RuleCount(
        whose=whose,
        field=gap.field,
        reason=gap.reason,
        why=gap.why,
        allowed=tuple(map(str, gap.allowed)),
        layouts=count,
    )


def refusal_line(layouts: Layouts) -> str:
    """Return the reason why no layout is left: the rule that refuses most of the nearest."""
    _, gaps = layouts.blocking()
    whose, gap, mask = gaps[0]
    cause, number = layouts.cause, len(layouts.space)
    count = int(np.count_nonzero(mask))
    of_all = f"all {counted(number, 'layout')}" if count == number else f"{count:,} of {number:,}"
    others = "" if count == number else f", the others by {len(layouts.rules()) - 1} other rules"
    known = "" if cause is Cause.INEXPRESSIBLE else f"; allowed: {', '.join(map(str, gap.allowed))}"
    rule = f"{whose}: {gap.reason}{known}{in_parentheses(gap.why)}"
    return f"{cause}: {of_all} by {rule}{others}"


def undivided_line(space: Space, limits: SpaceLimits) -> tuple[str, int]:
    """Return the reason why no split of the devices divides the job, and the number of splits."""
    reasons, total = undivided_splits(space.job, space.stack, space.num_gpus, limits)
    count = sum(reasons.values())
    first = max(reasons, key=lambda each: reasons[each], default="")
    said = first or "what is asked for of microbatches, stages or experts goes with none"
    gpus = f"{counted(total, 'way')} to split {counted(space.num_gpus, 'GPU')}"
    return f"{Cause.UNDIVIDED}: none of {gpus}; {said}", count


def memory_line(
    layouts: Layouts, cluster: Cluster, memory_limit_bytes: int | None, lacks_bytes: int | None
) -> str:
    """Return the text of the memory that the smallest of the layouts that run lacks."""
    have, number = usable_bytes(cluster, memory_limit_bytes), layouts.counts(0)[Cause.MEMORY]
    smallest = f"the smallest of {counted(number, 'layout')}" if number > 1 else "the one layout"
    whose = cluster.device.name if memory_limit_bytes is None else "--memory-limit"
    if lacks_bytes is None:
        return f"{Cause.MEMORY}: {smallest} that fits on devices needs more than a host has"
    return (
        f"{Cause.MEMORY}: {smallest} that {layouts.space.stack.name} runs lacks "
        f"{format_bytes(lacks_bytes)} beyond the {format_bytes(have)} of {whose}"
    )
