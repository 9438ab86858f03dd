"""Times of something that ran several times."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Seconds of something that ran several times: the median, the least and the most."""

    median_s: float
    least_s: float
    most_s: float
    num_samples: int

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> "Spread":
        """Return the spread of at least one sample.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median_s=2.0, least_s=1.0, most_s=3.0, num_samples=3)
        """
        return cls(
            median_s=median(samples_s),
            least_s=min(samples_s),
            most_s=max(samples_s),
            num_samples=len(samples_s),
        )
