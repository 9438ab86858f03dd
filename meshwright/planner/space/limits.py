"""What of a space is searched."""

from typing import cast

from meshwright.hwprofiles import StackProfile, suggestion
from meshwright.simulator import PlanError, TrainingJob
from meshwright.simulator.layout import AXES, PLAN_FIELDS, SEARCHED_FIELDS, Axis

LONG_SEQUENCE = 8192  # tokens from which a search cuts sequences unasked
COLUMNS = tuple(each.name for each in SEARCHED_FIELDS)


class SpaceLimits:
    """What of the space is searched: allowed values of a field (None: all), and largest values.

    Values of a field are a tuple by its name, as ``tp=(4, 8)``, rules in that of ``stages``; a
    largest value is a number, as ``max_pp=16``.

    Raises:
        PlanError: If a name is no searched field, or a limit leaves nothing of one.

    >>> SpaceLimits(tp=(8,), max_pp=16)
    SpaceLimits(tp=(8,), max_pp=16)
    """

    def __init__(self, **limits: tuple[object, ...] | int | None) -> None:
        self._limits = {name: value for name, value in limits.items() if value is not None}
        known = [*COLUMNS, *(each.limit for each in SEARCHED_FIELDS if each.declaration.is_limited)]
        for name, value in self._limits.items():
            if name not in known:
                raise PlanError(f"{name} is no field of a search; {suggestion(name, known)}")
            if isinstance(value, int) and value < 1:
                raise PlanError(f"{name}={value} leaves nothing; allowed: at least 1")

    def __repr__(self) -> str:
        """Return the limits as they are written."""
        said = (f"{name}={value!r}" for name, value in self._limits.items())
        return f"SpaceLimits({', '.join(said)})"

    def values(self, name: str) -> tuple[object, ...] | None:
        """Return the allowed values of a field, None for all."""
        return cast("tuple[object, ...] | None", self._limits.get(name))

    def allows(self, name: str, value: object) -> bool:
        """Return whether *value* of the field *name* may be searched."""
        allowed, largest = self.values(name), self.most(name)
        if allowed is not None and value not in allowed:
            return False
        return largest is None or cast("int", value) <= largest

    def most(self, name: str) -> int | None:
        """Return the largest value of a field that is asked for, None without one."""
        return cast("int | None", self._limits.get(PLAN_FIELDS[name].limit))

    def asks_for(self, name: str) -> bool:
        """Return whether a largest value of a field is given, or others than the habit."""
        values = self.values(name) or (None,)
        return set(values) != {None} or PLAN_FIELDS[name].limit in self._limits

    def pinned(self, **values: tuple[object, ...] | int) -> "SpaceLimits":
        """Return the same limits with other allowed, or largest, values."""
        return SpaceLimits(**self._limits | values)


def is_searched(axis: Axis, job: TrainingJob, stack: StackProfile, limits: SpaceLimits) -> bool:
    """Return whether degrees of *axis* are laid out: of a rare one if it is asked for.

    Sequences are cut unasked where they are long and the stack does so: of GPT-3 on 3,072 GPUs it
    makes 6.6 times as many layouts, and the search 3.6 times as long, whose best has cp = 1.
    """
    known = AXES[axis]
    if not known.is_rare or limits.values(axis) is not None:
        return True
    said = (each for each in SEARCHED_FIELDS if axis in {each.name, each.declaration.acts_on})
    is_asked = any(limits.asks_for(each.name) for each in said)
    is_offered = bool(getattr(stack, known.offered_by or "", False))
    return is_offered and (is_asked or job.seq_len >= LONG_SEQUENCE)
