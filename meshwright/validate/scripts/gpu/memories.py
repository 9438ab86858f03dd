"""Live tensors of a script, on its GPU and on its host."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.validate.counting import Memories, tensors_in

GPU, HOST = "cuda", torch.device("cpu")
# Device that PyTorch's C++ code takes a GPU for: autograd knows it, and it needs no hardware.
PLACEHOLDER_DEVICE = torch.device("lazy", 0)


def is_gpu(device: object) -> bool:
    """Return True if a script means a GPU by *device*.

    >>> [is_gpu(each) for each in ("cuda:1", torch.device("cuda"), 0, "cpu", None, True)]
    [True, True, True, False, False, False]
    """
    if isinstance(device, torch.device):
        return device.type in (GPU, PLACEHOLDER_DEVICE.type)
    if isinstance(device, str):
        return device.partition(":")[0] == GPU
    return isinstance(device, int) and not isinstance(device, bool)


class ScriptMemories(Memories):
    """The GPU of a script, and its host.

    Tensors without data know where they are. Those with data are all on the host for PyTorch; on
    the GPU are those that the script puts there, and what is computed of them.

    Attributes:
        leaves_gpu: Whether what runs copies to the host.
    """

    def __init__(self) -> None:
        super().__init__(torch.device(GPU))
        self.leaves_gpu = False
        self._made_on_gpu = False

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is on the GPU."""
        if isinstance(tensor, FakeTensor):
            return tensor.fake_device.type == GPU
        return any(local in self.device for local in tensors_in(tensor))

    def choose_place(self, given: object) -> None:
        """Put the next tensors with data on the GPU if it is named, or they are made of such."""
        named = given[1].get("device") if isinstance(given, tuple) and given else None
        goes_to_gpu = is_gpu(named) or any(map(self.is_on_gpu, tensors_in(given)))
        self._made_on_gpu = goes_to_gpu and not self.leaves_gpu

    def add(self, tensor: torch.Tensor, where: str) -> None:
        """Count the storage of *tensor* from now on, if it has memory at all."""
        if not tensor.is_meta:
            super().add(tensor, where)

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return not self.is_on_gpu(tensor)
        return tensor not in self.device and (tensor in self.host or not self._made_on_gpu)
