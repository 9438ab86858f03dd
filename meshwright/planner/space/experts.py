"""How the ranks of a stage may share routed experts."""

from collections.abc import Sequence
from typing import cast

from meshwright.hwprofiles import StackProfile
from meshwright.planner.space.limits import SpaceLimits
from meshwright.planner.space.switches import divisors
from meshwright.simulator import TrainingJob
from meshwright.simulator.layout import PLAN_FIELDS, experts_refusal
from meshwright.simulator.model import ModelSpec


def expert_degrees(
    job: TrainingJob, stack: StackProfile, limits: SpaceLimits, fixed: dict[str, int]
) -> list[tuple[int, int]]:
    """Return the numbers of ``ep`` and ``etp`` that the ranks of a stage can have together."""
    model = job.model
    has_experts = isinstance(model, ModelSpec) and model.experts is not None
    ranks, tp = fixed["tp"] * fixed["cp"] * fixed["dp"], fixed["tp"]
    asked, usual = limits.values("ep"), (None,) if tp == 1 else (None, 1)
    degrees = asked or (divisors(ranks) if has_experts and stack.expert_parallel else (1,))
    return [
        (ep, PLAN_FIELDS["etp"].code(etp))
        for ep in cast("Sequence[int]", degrees)
        for etp in cast("tuple[int | None, ...]", limits.values("etp") or usual)
        if limits.allows("ep", ep)
        and ranks % (ep * (etp or tp)) == 0
        and (ep > 1 or etp in {None, tp})
        and experts_refusal(model, ep, etp or tp) is None
    ]
