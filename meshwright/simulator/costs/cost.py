"""A time that says where it comes from."""

from dataclasses import dataclass

from meshwright.hwprofiles import Source, to_ps


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of one operator in whole picoseconds, and the kind of evidence behind it."""

    time_ps: int
    source: Source

    @classmethod
    def from_seconds(cls, time_s: float, source: Source) -> "Cost":
        """Return the cost of *time_s*, rounded once to picoseconds."""
        return cls(to_ps(time_s), source)
