"""A change of a plan: its fields, the memory it saves and the time it costs."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.hwprofiles import format_bytes
from meshwright.simulator import ResolvedPlan, StepResult
from meshwright.simulator.layout import AXES, PLAN_FIELDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A plan that fits, near one that does not.

    Args:
        plan: The changed plan, every field resolved.
        fields: Changed values by the names of a plan's fields; ``stages`` by their rule, more
            devices as ``gpus``.
        saved_bytes: Device memory that it saves on the fullest rank.
        device_bytes: Device memory of its fullest rank.
        step_ps: Simulated time of its step.
        slower_fraction: Relative increase of the step time; negative where it is shorter.
        crossing: Text of parallelism that crosses nodes and usually does not; empty without any.
    """

    plan: ResolvedPlan
    fields: Mapping[str, object]
    saved_bytes: int
    device_bytes: int
    step_ps: int
    slower_fraction: float
    crossing: str = ""

    @classmethod
    def of(cls, before: StepResult, after: StepResult, fields: Mapping[str, object]) -> "Change":
        """Return the change of *fields* that turns *before* into *after*."""
        return cls(
            plan=after.plan,
            fields=fields,
            saved_bytes=before.memory.device_bytes - after.memory.device_bytes,
            device_bytes=after.memory.device_bytes,
            step_ps=after.step_ps,
            slower_fraction=after.step_ps / before.step_ps - 1,
            crossing=_crossing(before, after),
        )

    @property
    def options(self) -> str:
        """Options of the command line; one axis takes the rest of the devices and is not named."""
        rest = {axis for axis, known in AXES.items() if known.takes_rest}
        named = ((name, value) for name, value in self.fields.items() if name not in rest)
        return " ".join(_option(name, value) for name, value in named if value != ())

    def __str__(self) -> str:
        """Return the change in a line: options, memory and time, and traffic between nodes."""
        sign = "-" if self.saved_bytes >= 0 else "+"
        size = format_bytes(abs(self.saved_bytes))
        line = f"{self.options}: {sign}{size}, {self.slower_fraction:+.1%} time"
        return f"{line}; {self.crossing}" if self.crossing else line


def most_tp(before: StepResult) -> int:
    """Return the largest tensor-parallel degree that is named where anything else helps.

    Its collectives are exposed in every layer: they stay within the fast links of a node, unless
    the plan already crosses nodes.
    """
    return max(before.cluster.devices_per_node, before.plan.tp, before.plan.expert_tp)


def _crossing(before: StepResult, after: StepResult) -> str:
    """Return the text of tensor parallelism that crosses nodes, if it did not before."""
    plan, node_size = after.plan, after.cluster.devices_per_node
    if max(plan.tp, plan.expert_tp) <= most_tp(before):
        return ""
    degree = f"tp={plan.tp}" if plan.tp > node_size else f"etp={plan.expert_tp}"
    return f"{degree} crosses nodes of {node_size} devices"


def _option(name: str, value: object) -> str:
    """Return one field as an option of the command line."""
    option = PLAN_FIELDS[name].option.replace("_", "-") if name in PLAN_FIELDS else name
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f"--{option} {text}"
