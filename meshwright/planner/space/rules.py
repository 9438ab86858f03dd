"""Rules that take layouts out of a search before any is simulated, each with a reason.

A rule reads whole columns and returns, for each of its reasons, the mask of layouts that it takes
out. To add one, write a function like these and a line in `RULES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import UNSET, Cluster
from meshwright.planner.space.columns import Column
from meshwright.planner.space.limits import COLUMNS
from meshwright.planner.space.space import Space
from meshwright.simulator.layout import stack_gaps
from meshwright.simulator.memory import usable_bytes

Mask = NDArray[np.bool_]
LACKS_MEMORY = "needs more memory than a device has"


@dataclass(frozen=True, slots=True)
class Candidates:
    """Input of rules: the space, the cluster, and each layout's memory.

    ``host_bytes`` is that of the fullest node's host; None where no layout offloads.
    """

    space: Space
    cluster: Cluster
    device_bytes: Column
    memory_limit_bytes: int | None
    host_bytes: Column | None = None


Rule = Callable[[Candidates], dict[str, Mask]]


def stack_offers(candidates: Candidates) -> dict[str, Mask]:
    """Reject layouts that the software stack does not offer."""
    return offered(candidates.space)


def offered(space: Space) -> dict[str, Mask]:
    """Return the masks of layouts that the stack does not offer, by reason."""
    reasons: dict[str, Mask] = {}
    for gap in stack_gaps(space.stack, space.job):
        if gap.field in COLUMNS:
            reason, mask = f"{space.stack.name} lacks {gap.reason}", gap.lacks(space.column)
            reasons[reason] = reasons.get(reason, False) | mask
    return reasons


def framework_takes(candidates: Candidates) -> dict[str, Mask]:
    """Reject layouts that the launching framework cannot express."""
    return told(candidates.space)


def told(space: Space) -> dict[str, Mask]:
    """Return the masks of layouts that the framework of the search cannot express, by reason."""
    if space.launcher is None:
        return {}
    name, reasons = space.launcher.framework.name, dict[str, Mask]()
    for gap in space.launcher.gaps(space.stack, space.job):
        allowed = ", ".join(dict.fromkeys(map(_shown_value, gap.allowed)))
        reason = f"{name} is told no {gap.field} but {allowed}"
        reasons[reason] = reasons.get(reason, False) | gap.lacks(space.column)
    return reasons


def _shown_value(value: object) -> str:
    return "none" if value in (None, UNSET) else str(value)


def fits_memory(candidates: Candidates) -> dict[str, Mask]:
    """Reject layouts that need more device memory than there is."""
    limit = usable_bytes(candidates.cluster, candidates.memory_limit_bytes)
    return {LACKS_MEMORY: candidates.device_bytes > limit}


def fits_hosts(candidates: Candidates) -> dict[str, Mask]:
    """Reject layouts that offload more than a host's memory."""
    if candidates.host_bytes is None:
        return {}
    have = candidates.cluster.host_memory_capacity_bytes or 0
    return {"needs more memory than a host has": candidates.host_bytes > have}


def cannot_be_expressed(space: Space) -> Mask:
    """Return the mask of layouts that the framework of the search cannot express."""
    return _any(space, told(space))


def lacks(space: Space) -> Mask:
    """Return the mask of layouts that the stack does not offer."""
    return _any(space, offered(space))


def _any(space: Space, reasons: Mapping[str, Mask]) -> Mask:
    """Return the mask of layouts that any of *reasons* takes out."""
    return np.asarray(sum(reasons.values(), start=np.zeros(len(space), np.bool_)), np.bool_)


RULES: dict[str, Rule] = {
    "stack": stack_offers,
    "framework": framework_takes,
    "memory": fits_memory,
    "hosts": fits_hosts,
}


def take_out(left: Mask, reasons: Mapping[str, Mask], counts: dict[str, int]) -> Mask:
    """Return those *left* that no reason takes out; add the number of others to *counts*.

    A layout counts for the first reason that takes it out.
    """
    for reason, mask in reasons.items():
        taken = int(np.count_nonzero(left & mask))
        if taken:
            counts[reason] = counts.get(reason, 0) + taken
            left = left & ~mask
    return left


def apply_rules(candidates: Candidates) -> tuple[Mask, dict[str, int]]:
    """Return the mask of layouts that are left, and the number each reason took out, in order."""
    left, counts = np.ones(len(candidates.space), np.bool_), dict[str, int]()
    for rule in RULES.values():
        left = take_out(left, rule(candidates), counts)
    return left, counts
