"""Dummy accelerator beside the host, for one process: a device without hardware or data.

PyTorch lets a process have one device of a kind that it does not know, given in Python. Private
interfaces of PyTorch that this takes are in here, by the rule of `internals`: what must be there
and is not raises an error that names it.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch.utils import backend_registration

from meshwright.simulator import PlanError

NAME = "standin"
REGISTER = "_setup_privateuseone_for_python_backend"


class IdleEvent:
    """Event of a stream; all work is done at once, so that nothing waits for it.

    Args:
        options: Of no effect.
    """

    def __init__(self, **options: object) -> None:
        """Make an event."""

    def record(self, _stream: object = None) -> None:
        """Mark the moment."""

    def wait(self, _stream: object = None) -> None:
        """Let a stream wait."""

    def synchronize(self) -> None:
        """Let the host wait."""

    def query(self) -> bool:
        """Return True: all work before it is done."""
        return True

    def elapsed_time(self, _end: object) -> float:
        """Return 0 ms: work takes no time."""
        return 0.0


class IdleStream:
    """Stream of the device; work is done in the order of the calls.

    Args:
        device: Of no effect.
        priority: Of no effect.
    """

    cuda_stream = 0

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device, self.priority = device, priority

    def is_capturing(self) -> bool:
        """Return False: work is run, never captured."""
        return False

    def synchronize(self) -> None:
        """Let the host wait for all work."""

    def wait_stream(self, _stream: object) -> None:
        """Wait for all work of another stream."""

    def wait_event(self, _event: object) -> None:
        """Wait for a moment of another stream."""

    def record_event(self) -> IdleEvent:
        """Return this moment."""
        return IdleEvent()


class DummyAccelerator:
    """Device module: ``torch.cuda`` of a machine with one GPU that does nothing."""

    Stream = IdleStream
    Event = IdleEvent

    def __init__(self) -> None:
        self._stream = IdleStream()

    def is_available(self) -> bool:
        """Return True: the device is there."""
        return True

    def is_initialized(self) -> bool:
        """Return True: the device can be used."""
        return True

    def device_count(self) -> int:
        """Return the number of devices."""
        return 1

    def current_device(self) -> int:
        """Return the index of the current device."""
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the formats of autocast: without them nothing is computed again."""
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, _device: object = None) -> torch.Tensor:
        """Return the state of the device's random numbers, as large as a GPU's."""
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Forget a state: nothing is drawn."""

    def current_stream(self) -> IdleStream:
        """Return the only stream that anything runs on."""
        return self._stream

    def stream(self, _stream: object) -> AbstractContextManager[None]:
        """Return a context whose work is on a stream."""
        return nullcontext()


def dummy_accelerator() -> torch.device:
    """Return the dummy device of a fake cluster, for tensors that are not on the host.

    It stays for the rest of the process, in which nothing may have run backward before: autograd
    takes stock of devices when it does so first.

    Raises:
        PlanError: If this release of PyTorch cannot be given one.
    """
    register = getattr(backend_registration, REGISTER, None)
    if register is None:
        raise PlanError(
            f"torch {torch.__version__} has no {REGISTER}, which counting what is offloaded takes; "
            "allowed: a later release, or --backend gloo"
        )
    if not hasattr(torch, NAME):
        register(rename=NAME, backend_module=DummyAccelerator())
        # The fake backend serves only the device types that are listed for it.
        dist.Backend.backend_capability[dist.Backend.FAKE].append(NAME)
    return torch.device(NAME, 0)
