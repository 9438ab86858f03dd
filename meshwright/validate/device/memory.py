"""What a GPU's allocator holds for tensors, apart from what libraries hold of it."""

import gc

import torch
import torch.nn.functional as F  # noqa: N812

# PyTorch's names; "requested" is "allocated" before sizes are rounded up to blocks.
TENSOR_STATISTICS = ("allocated", "active", "requested")
RESERVED, LIBRARIES = "reserved", "libraries"
WARM_DTYPES = (torch.float32, torch.bfloat16)
WARM_SIZE = 256


class DeviceMemory:
    """The peaks of a device's allocator; of nothing where the device is none with an allocator.

    The workspaces of cuBLAS are the allocator's, too: one for each thread that multiplies (that of
    the program, and autograd's) and stream, tens of MiB on recent devices, for as long as the
    process lives. They are made here, before the first measured tensor, and left out of the peaks.

    Args:
        device: Whose; a program's tensors must not be there yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.has_allocator = device.type == "cuda"
        self._held: dict[str, int] = {}
        if self.has_allocator:
            _use_libraries(device)
            gc.collect()  # what an earlier program left
            torch.cuda.empty_cache()
            self._held = self._read("current")

    def give_back(self) -> None:
        """Keep nothing that no tensor uses; the next step is slow, as it must ask for it again."""
        if self.has_allocator:
            torch.cuda.empty_cache()

    def forget_peaks(self) -> None:
        """Begin new peaks."""
        if self.has_allocator:
            torch.cuda.reset_peak_memory_stats(self._device)

    def peaks(self) -> dict[str, int]:
        """Return the most bytes since then by name, and what libraries hold besides.

        All but "reserved" are without the libraries' bytes.
        """
        if not self.has_allocator:
            return {}
        peaks = self._read("peak")
        found = {name: peaks[name] - self._held[name] for name in TENSOR_STATISTICS}
        return found | {RESERVED: peaks[RESERVED], LIBRARIES: self._held["allocated"]}

    def _read(self, when: str) -> dict[str, int]:
        statistics = torch.cuda.memory_stats(self._device)
        names = (*TENSOR_STATISTICS, RESERVED)
        return {name: int(statistics[f"{name}_bytes.all.{when}"]) for name in names}


def _use_libraries(device: torch.device) -> None:
    """Multiply in this thread and in autograd's."""
    for dtype in WARM_DTYPES:
        inputs, weight = (
            torch.ones(WARM_SIZE, WARM_SIZE, device=device, dtype=dtype, requires_grad=True)
            for _ in range(2)
        )
        F.linear(inputs, weight).sum().backward()
    torch.cuda.synchronize(device)
