"""Rules that take layouts out of a search before any is simulated; each says why.

A rule looks at whole columns and returns, for each of its reasons, which layouts it takes out.
To add one, write a function like these and a line in `RULES`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster
from meshwright.planner.space.space import RECOMPUTES, Column, Space
from meshwright.simulator.memory import usable_bytes

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Candidates:
    """What rules may look at: the space, what it runs on, and each layout's device memory."""

    space: Space
    cluster: Cluster
    device_bytes: Column
    memory_limit_bytes: int | None


Rule = Callable[[Candidates], dict[str, Mask]]


def stack_offers(candidates: Candidates) -> dict[str, Mask]:
    """Reject what the software stack cannot express."""
    space, stack = candidates.space, candidates.space.stack
    reasons: dict[str, Mask] = {}
    for axis, offered in (("tp", stack.tensor_parallel), ("pp", stack.pipeline_parallel)):
        if not offered:
            reasons[f"{axis} > 1"] = space.column(axis) > 1
    for index, mode in enumerate(RECOMPUTES):
        if mode not in stack.recompute_modes:
            reasons[f"recompute={mode}"] = space.column("recompute") == index
    for index, name in enumerate(space.schedules):
        if name not in stack.schedules:
            reasons[f"schedule={name}"] = space.column("schedule") == index
    if not stack.sequence_parallel:
        split = (space.column("sequence_parallel") == 1) & (space.column("tp") > 1)
        reasons["sequence_parallel"] = split
    reasons |= _zero_offers(space)
    return {f"{stack.name} lacks {reason}": mask for reason, mask in reasons.items()}


def _zero_offers(space: Space) -> dict[str, Mask]:
    """Return the ZeRO stages that the stack lacks; with one replica a stage has no effect."""
    stack, zero = space.stack, space.column("zero_stage")
    replicated, staged = space.column("dp") > 1, space.column("pp") > 1
    reasons: dict[str, Mask] = {}
    for stage in np.unique(zero[replicated]).tolist():
        if stage not in stack.zero_stages:
            reasons[f"zero_stage={stage}"] = (zero == stage) & replicated
        elif stage not in stack.pipeline_zero_stages:
            reasons[f"zero_stage={stage} in a pipeline"] = (zero == stage) & replicated & staged
    return reasons


def fits_memory(candidates: Candidates) -> dict[str, Mask]:
    """Reject what needs more device memory than there is."""
    limit = usable_bytes(candidates.cluster, candidates.space.stack, candidates.memory_limit_bytes)
    return {"needs more memory than a device has": candidates.device_bytes > limit}


RULES: dict[str, Rule] = {
    "stack": stack_offers,
    "memory": fits_memory,
}


def apply_rules(candidates: Candidates) -> tuple[Mask, dict[str, int]]:
    """Return which layouts are left, and how many each reason took out, in rule order.

    A layout counts for the first reason that takes it out.
    """
    left = np.ones(len(candidates.space), np.bool_)
    counts: dict[str, int] = {}
    for rule in RULES.values():
        for reason, mask in rule(candidates).items():
            taken = int(np.count_nonzero(left & mask))
            if taken:
                counts[reason] = taken
            left &= ~mask
    return left, counts
