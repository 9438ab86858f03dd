"""Differences of steps: time and memory in terms that add up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.simulator import Category, StepResult
from meshwright.simulator.account import Shown

Terms = Mapping[str, int]


def time_terms(step: StepResult) -> Terms:
    """Return the picoseconds of a step by `Category`; they add up to it.

    What averaging over ranks rounds away, a few picoseconds, is with the bubble.
    """
    terms = {category.value: time_ps for category, time_ps in step.breakdown_ps.items()}
    terms[Category.BUBBLE.value] += step.step_ps - sum(terms.values())
    return terms


def memory_terms(step: StepResult) -> Terms:
    """Return the bytes of the fullest device by term; they add up to ``device_bytes``."""
    memory, stage = step.memory, step.memory.worst_stage
    return {
        **stage.terms,
        "allocator": memory.reserved_bytes - memory.peak_bytes,
        "context_and_communicators": memory.device_bytes - memory.reserved_bytes,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Shown):
    """Simulated steps to compare; the first is the reference of the others.

    Args:
        names: What each is called.
        steps: As many simulated steps.
        refused: Stacks that cannot be asked for so, and why.
    """

    names: tuple[str, ...]
    steps: tuple[StepResult, ...]
    refused: Mapping[str, str] = field(default_factory=dict)

    def rows(self, terms: Callable[[StepResult], Terms]) -> dict[str, tuple[int, ...]]:
        """Return the values of each step by term; terms that are zero in all are left out."""
        terms_by_step = [terms(step) for step in self.steps]
        rows = {name: tuple(each[name] for each in terms_by_step) for name in terms_by_step[0]}
        return {name: values for name, values in rows.items() if any(values)}


def differences(values: Sequence[int]) -> tuple[int, ...]:
    """Return the difference of each of *values* but the first to the first.

    >>> differences((3, 5, 1))
    (2, -2)
    """
    return tuple(value - values[0] for value in values[1:])


def compare(*steps: StepResult, names: Sequence[str] = ()) -> Comparison:
    """Return a comparison of steps; the first is the reference of the others.

    Args:
        steps: Simulated steps.
        names: What each is called; by default its number.
    """
    # Numbered from 1, as plans of a search are.
    numbers = tuple(str(number) for number in range(1, len(steps) + 1))
    return Comparison(names=tuple(names) or numbers, steps=steps)
