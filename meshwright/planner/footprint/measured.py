"""The memory of a search's layouts, all of them measured at once."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster
from meshwright.planner.footprint.footprint import Footprint, device_bytes_column
from meshwright.planner.space import Column, Space

UNKNOWN = np.iinfo(np.int64).max


@dataclass
class Measured:
    """Memory of layouts, a column each; one that is not known is larger than any limit."""

    space: Space
    cluster: Cluster
    footprint: Footprint
    peaks: Column = field(init=False)
    device_bytes: Column = field(init=False)
    lean: Column = field(init=False)

    def __post_init__(self) -> None:
        """Measure all layouts."""
        self.peaks, self.device_bytes = (np.full(len(self.space), UNKNOWN) for _ in range(2))
        self.lean = np.arange(len(self.space))
        self.measure(self.lean)

    @property
    def is_known(self) -> NDArray[np.bool_]:
        """Which layouts are measured, or need too much in any case."""
        return self.device_bytes < UNKNOWN

    def measure(self, indices: NDArray[np.int64]) -> None:
        """Find the memory of *indices*."""
        self.peaks[indices] = self.footprint.peak_bytes(indices)
        self.device_bytes[indices] = device_bytes_column(
            self.space, self.cluster, self.peaks[indices], indices
        )

    def drop_families(self, limit_bytes: int) -> None:
        """Take those whose leanest layout needs more than the limit for as large as that one."""
        if not self.is_known.all():
            least = self.device_bytes[self.lean][self.space.family]
            self.device_bytes[least > limit_bytes] = least[least > limit_bytes]
