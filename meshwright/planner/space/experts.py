"""How the ranks of a stage may share routed experts."""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import StackProfile
from meshwright.planner.space.columns import Column
from meshwright.planner.space.limits import SpaceLimits
from meshwright.planner.space.switches import divisors
from meshwright.simulator import TrainingJob
from meshwright.simulator.layout import PLAN_FIELDS, SHARDS, experts_refusal


def expert_degrees(
    job: TrainingJob, stack: StackProfile, limits: SpaceLimits, fixed: dict[str, int]
) -> list[tuple[int, int]]:
    """Return the numbers of ``ep`` and ``etp`` that the ranks of a stage can have together."""
    model = job.model
    ranks, tp = fixed["tp"] * fixed["cp"] * fixed["dp"], fixed["tp"]
    asked, usual = limits.values("ep"), (None,) if tp == 1 else (None, 1)
    divides = model.experts is not None and stack.expert_parallel
    degrees = asked or (divisors(ranks) if divides else (1,))
    return [
        (ep, PLAN_FIELDS["etp"].code(etp))
        for ep in cast("Sequence[int]", degrees)
        for etp in cast("tuple[int | None, ...]", limits.values("etp") or usual)
        if limits.allows("ep", ep)
        and ranks % (ep * (etp or tp)) == 0
        and (ep > 1 or etp in {None, tp})
        and experts_refusal(model, ep, etp or tp) is None
    ]


def slices_shards(column: Callable[[str], Column]) -> NDArray[np.bool_]:
    """Return in which layouts ranks of all experts are slices of a set of shards."""
    tp, etp, ep, shards = (column(name) for name in ("tp", "etp", "ep", SHARDS))
    is_whole = tp * shards % (ep * np.where(etp, etp, tp)) == 0
    return np.asarray((ep == 1) | is_whole)
