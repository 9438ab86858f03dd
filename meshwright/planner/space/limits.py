"""Limits of a search: allowed and largest values of fields, and the framework to launch with."""

from typing import NamedTuple, cast

from meshwright.hwprofiles import (
    FrameworkProfile,
    StackProfile,
    frameworks_where,
    load_framework,
    shown,
    suggestion,
)
from meshwright.simulator import PlanError, TrainingJob
from meshwright.simulator.launching import framework_gaps, framework_refusal
from meshwright.simulator.layout import (
    AXES,
    DP_CP,
    PLAN_FIELDS,
    SEARCHED_FIELDS,
    Axis,
    Gap,
)

LONG_SEQUENCE = 8192  # tokens from which a search uses context parallelism by default
LAUNCHING = "framework", "any_layout"
COLUMNS = tuple(each.name for each in SEARCHED_FIELDS)


class SpaceLimits:
    """Limits of a search: allowed values of a field (None: all), and largest values.

    Values of a field are a tuple by its name, as ``tp=(4, 8)``, rules in that of ``stages``; a
    largest value is a number, as ``max_pp=16``. Layouts are those that ``framework`` can express:
    by default one that launches the stack; with ``any_layout`` all that the stack runs.

    Raises:
        PlanError: If a name is no searched field, or a limit leaves nothing of one.

    >>> SpaceLimits(tp=(8,), max_pp=16)
    SpaceLimits(tp=(8,), max_pp=16)
    """

    def __init__(self, **limits: tuple[object, ...] | int | str | None) -> None:
        self._limits = {name: value for name, value in limits.items() if value is not None}
        largest = [each.limit for each in SEARCHED_FIELDS if each.declaration.is_limited]
        known = [*COLUMNS, *LAUNCHING, *largest]
        for name, value in self._limits.items():
            if name not in known:
                raise PlanError(f"{name} is no field of a search; {suggestion(name, known)}")
            if type(value) is int and value < 1:
                raise PlanError(f"{name}={value} leaves nothing; allowed: at least 1")

    def __repr__(self) -> str:
        """Return the limits as keyword arguments."""
        said = (f"{name}={value!r}" for name, value in self._limits.items())
        return f"SpaceLimits({', '.join(said)})"

    def values(self, name: str) -> tuple[object, ...] | None:
        """Return the allowed values of a field, None for all."""
        return cast("tuple[object, ...] | None", self._limits.get(name))

    def allows(self, name: str, value: object) -> bool:
        """Return True if *value* of the field *name* may be searched."""
        allowed, largest = self.values(name), self.most(name)
        if allowed is not None and value not in allowed:
            return False
        return largest is None or cast("int", value) <= largest

    def most(self, name: str) -> int | None:
        """Return the largest value of a field that a user asks for, None without one."""
        return cast("int | None", self._limits.get(PLAN_FIELDS[name].limit))

    def asks_for(self, name: str) -> bool:
        """Return True if a largest value of a field is given, or others than its default."""
        values = self.values(name) or (None,)
        return set(values) != {None} or PLAN_FIELDS[name].limit in self._limits

    @property
    def framework(self) -> str | None:
        """Framework that a user asks for, None for the stack's."""
        return cast("str | None", self._limits.get("framework"))

    @property
    def any_layout(self) -> bool:
        """Whether layouts that no framework can express are searched, too."""
        return bool(self._limits.get("any_layout"))

    def without(self, name: str) -> "SpaceLimits":
        """Return the same limits with all values of a field."""
        names = {name, PLAN_FIELDS[name].limit}
        kept = {each: value for each, value in self._limits.items() if each not in names}
        return SpaceLimits(**kept)

    def launched_by(self, *names: str | None) -> "SpaceLimits":
        """Return the same limits for another framework, or the default; None: for all layouts."""
        kept = {each: value for each, value in self._limits.items() if each not in LAUNCHING}
        choice = (
            {} if not names else {"any_layout": 1} if names[0] is None else {"framework": names[0]}
        )
        return SpaceLimits(**kept | choice)

    def pinned(self, **values: tuple[object, ...] | int | str) -> "SpaceLimits":
        """Return the same limits with other allowed, or largest, values."""
        return SpaceLimits(**self._limits | values)


def is_searched(axis: Axis, job: TrainingJob, stack: StackProfile, limits: SpaceLimits) -> bool:
    """Return True if degrees of *axis* are searched: of a rare one if a user asks for it.

    Context parallelism is searched by default for long sequences if the stack has it: for GPT-3 on
    3,072 GPUs it makes 6.6 times as many layouts, and the search 3.6 times as long, whose best has
    cp = 1.
    """
    declaration = AXES[axis]
    if not declaration.is_rare or limits.values(axis) is not None:
        return True
    # Asking for a field that acts on the axis asks for the axis as well.
    relevant = (each for each in SEARCHED_FIELDS if axis in {each.name, each.declaration.acts_on})
    is_asked = any(limits.asks_for(each.name) for each in relevant)
    is_offered = bool(getattr(stack, declaration.offered_by or "", False))
    return is_offered and (is_asked or job.seq_len >= LONG_SEQUENCE)


def stages_of_one_rank(limits: SpaceLimits) -> int | None:
    """Return the number of ZeRO stages that matter for one rank: for moments, or offloading."""
    if limits.asks_for("offload") and limits.values("zero_stage") is None:
        return None
    is_asked = limits.asks_for("moment_precision") and limits.values("zero_stage") is None
    return 2 if is_asked else 1


class Launcher(NamedTuple):
    """Framework whose files launch the plans of a search."""

    framework: FrameworkProfile
    version: str

    @property
    def title(self) -> str:
        """Name and version of the framework."""
        return f"{self.framework.name} {self.version}".rstrip()

    @property
    def release(self) -> str:
        """Framework and release of its table."""
        return self.framework.release_of(self.version)

    def gaps(self, stack: StackProfile, job: TrainingJob) -> tuple[Gap, ...]:
        """Return the layouts that it cannot express."""
        known = {*COLUMNS, DP_CP}
        found = framework_gaps(self.framework, self.version, stack, job)
        return tuple(gap for gap in found if gap.fields <= known)


def launcher_of(
    job: TrainingJob, stack: StackProfile, limits: SpaceLimits
) -> tuple[Launcher | None, str]:
    """Return the framework that layouts are searched for; None with the reason, if there is one.

    Raises:
        PlanError: If one is asked for that does not launch the stack, or not the job.
    """
    if limits.any_layout and limits.framework is not None:
        raise PlanError("--any and --for contradict each other: allowed one of them")
    if limits.any_layout or not stack.launched_by:
        if limits.framework is not None:
            raise PlanError(
                f"--for {limits.framework}: no framework launches stack {stack.name}"
                f"{_launched_with(limits.framework)}"
            )
        return None, ""
    known = stack.launched_by
    if limits.framework is not None and limits.framework not in known:
        raise PlanError(
            f"--for {shown(limits.framework)} does not launch stack {stack.name}; "
            f"allowed: {', '.join(known)}{_launched_with(limits.framework)}"
        )
    refusals = []
    # The first framework that can launch the job, in the stack's order.
    for name in known if limits.framework is None else (limits.framework,):
        framework = load_framework(name)
        version = framework.version_for(stack.release or stack.name)
        refusal = framework_refusal(framework, version, stack, job)
        if refusal is None:
            return Launcher(framework, version), ""
        refusals.append(refusal)
    if limits.framework is not None:
        raise PlanError(refusals[0])
    return None, refusals[0]


def _launched_with(framework: str) -> str:
    """Return the text of the stacks that a framework launches."""
    names = frameworks_where(lambda stack: framework in stack.launched_by)
    return f"; stacks that it launches: {', '.join(names)}" if names else ""
