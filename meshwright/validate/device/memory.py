"""Peaks of a GPU's caching allocator, without the workspaces of libraries."""

import gc

import torch
import torch.nn.functional as F  # noqa: N812

# PyTorch's names; "requested" is "allocated" before sizes are rounded up to blocks.
TENSOR_STATISTICS = ("allocated", "active", "requested")
RESERVED, LIBRARIES = "reserved", "libraries"
WARM_DTYPES = (torch.float32, torch.bfloat16)
WARM_SIZE = 256


class DeviceMemory:
    """Peaks of a device's allocator; none on a device without one.

    The workspaces of cuBLAS are the allocator's, too: one for each thread that multiplies (that of
    the program, and autograd's) and stream, tens of MiB on recent devices, for as long as the
    process lives. They are made here, before the first measured tensor, and left out of the peaks.

    Args:
        device: Device, on which a program must have no tensors yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.has_allocator = device.type == "cuda"
        self._baseline: dict[str, int] = {}
        if self.has_allocator:
            _use_libraries(device)
            gc.collect()  # what an earlier program left
            torch.cuda.empty_cache()
            # Subtracted from the peaks: the workspaces, and what lives already.
            self._baseline = self._read("current")

    def give_back(self) -> None:
        """Release cached blocks; the next step is slow, as it must allocate them again."""
        if self.has_allocator:
            torch.cuda.empty_cache()

    def forget_peaks(self) -> None:
        """Reset the peaks."""
        if self.has_allocator:
            torch.cuda.reset_peak_memory_stats(self._device)

    def peaks(self) -> dict[str, int]:
        """Return the peak bytes since `forget_peaks` by name, and those of libraries.

        All but "reserved" are without the libraries' bytes.
        """
        if not self.has_allocator:
            return {}
        peaks = self._read("peak")
        found = {name: peaks[name] - self._baseline[name] for name in TENSOR_STATISTICS}
        return found | {RESERVED: peaks[RESERVED], LIBRARIES: self._baseline["allocated"]}

    def _read(self, when: str) -> dict[str, int]:
        statistics = torch.cuda.memory_stats(self._device)
        names = (*TENSOR_STATISTICS, RESERVED)
        return {name: int(statistics[f"{name}_bytes.all.{when}"]) for name in names}


def _use_libraries(device: torch.device) -> None:
    """Run GEMMs in this thread and in autograd's, so that cuBLAS makes its workspaces."""
    for dtype in WARM_DTYPES:
        inputs, weight = (
            torch.ones(WARM_SIZE, WARM_SIZE, device=device, dtype=dtype, requires_grad=True)
            for _ in range(2)
        )
        F.linear(inputs, weight).sum().backward()
    torch.cuda.synchronize(device)
