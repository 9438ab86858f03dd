"""A GPU that is not there: what a script does with ``cuda`` is done on tensors of the host."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.amp import autocast_mode
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils import _device, _foreach_utils

from meshwright.validate.counting import IdleEvent, IdleStream
from meshwright.validate.scripts.torchrun import RANKS_PER_NODE

GPU = "cuda"
HOST = torch.device("cpu")
CAPABILITY = (9, 0)  # of a recent GPU: libraries choose their formats and kernels by it
MEMORY_BYTES = 2**40  # nothing is too large to be counted


def is_gpu(device: object) -> bool:
    """Return whether a script means a GPU by *device*.

    >>> [is_gpu(each) for each in ("cuda:1", torch.device("cuda"), 0, "cpu", None, True)]
    [True, True, True, False, False, False]
    """
    if isinstance(device, torch.device):
        return device.type == GPU
    if isinstance(device, str):
        return device.partition(":")[0] == GPU
    return isinstance(device, int) and not isinstance(device, bool)


class GpuNames(TorchFunctionMode):
    """Puts on the host what a script puts on a GPU; tells of each tensor that comes there.

    Args:
        arrived: Is told each tensor that the script puts on a GPU.
    """

    def __init__(self, arrived: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._arrived = arrived

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call *func* with the host in the place of a GPU."""
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return self._moved(args[0], args[0])
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined] # a C property
            return True
        went = is_gpu(named.get("device"))
        if went:
            named["device"] = HOST
        if func is torch.Tensor.to:
            went = went or any(is_gpu(each) for each in args[1:2])
            args = (args[0], *(HOST if is_gpu(each) else each for each in args[1:]))
        elif any(isinstance(each, torch.device) and each.type == GPU for each in args):
            args = tuple(HOST if isinstance(each, torch.device) else each for each in args)
            went = True
        result = func(*args, **named)
        return self._moved(result, args[0] if args else None) if went else result

    def _moved(self, result: object, given: object) -> object:
        if not isinstance(result, torch.Tensor):
            return result
        if result is given and not hasattr(result, "fake_mode"):
            result = result.clone()  # on a GPU it would be another tensor
        self._arrived(result)
        return result


class NoGpu:
    """The functions of ``torch.cuda`` on a rank's GPU, which has all the memory there is.

    Args:
        local_rank: Number of the GPU in its node.
        world_size: Ranks of the run.
        live_bytes: Returns what is live on it.
        peak_bytes: Returns the most that was.
    """

    def __init__(
        self,
        local_rank: int,
        world_size: int,
        live_bytes: Callable[[], int],
        peak_bytes: Callable[[], int],
    ) -> None:
        self._stream = IdleStream()
        self._live, self._peak = live_bytes, peak_bytes
        self._local_rank, self._count = local_rank, min(world_size, RANKS_PER_NODE)

    def functions(self) -> dict[str, object]:
        """Return what stands in ``torch.cuda``, by name."""
        properties = SimpleNamespace(
            name="counted GPU",
            total_memory=MEMORY_BYTES,
            major=CAPABILITY[0],
            minor=CAPABILITY[1],
            multi_processor_count=132,
            gcnArchName="",
        )
        answers: dict[str, object] = {
            "is_available": True,
            "is_initialized": True,
            "device_count": self._count,
            "current_device": self._local_rank,
            "get_device_name": properties.name,
            "get_device_capability": CAPABILITY,
            "get_device_properties": properties,
            "is_bf16_supported": True,
            "is_tf32_supported": True,
            "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
            "current_stream": self._stream,
            "default_stream": self._stream,
            "get_arch_list": [f"sm_{CAPABILITY[0]}{CAPABILITY[1]}"],
            "initial_seed": 0,
            "memory_stats": defaultdict(int),
            "utilization": 0,
            "is_current_stream_capturing": False,
            **dict.fromkeys(_NOTHING),
        }
        made: dict[str, object] = {name: _answering(value) for name, value in answers.items()}
        for name in ("memory_allocated", "memory_reserved"):
            made[name] = lambda *_args, **_kwargs: self._live()
        for name in ("max_memory_allocated", "max_memory_reserved"):
            made[name] = lambda *_args, **_kwargs: self._peak()
        for name in ("get_rng_state", "get_rng_state_all"):
            made[name] = lambda *_args, **_kwargs: torch.zeros(16, dtype=torch.uint8)
        for name in ("stream", "device"):
            made[name] = lambda *_args, **_kwargs: nullcontext()
        return {**made, "Stream": IdleStream, "Event": IdleEvent}


_NOTHING = (
    "init",
    "_lazy_init",
    "_lazy_call",
    "set_device",
    "set_stream",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
)


def _answering(value: object) -> Callable[..., object]:
    return lambda *_args, **_kwargs: value


@contextmanager
def without_gpu(gpu: NoGpu, names: GpuNames) -> Iterator[None]:
    """Let the code inside use GPUs that are not there, and what PyTorch does only on those."""
    construct, place = torch.autocast.__init__, _device.DeviceContext.__init__
    asked = {name: getattr(torch, name) for name in ("is_autocast_enabled", "get_autocast_dtype")}

    def autocast(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == GPU:
            device_type = HOST.type
            if not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float16  # that of a GPU
        construct(self, device_type, *args, **kwargs)

    def context(self: _device.DeviceContext, device: object) -> None:
        place(self, HOST if is_gpu(device) else device)

    def of_host(name: str) -> Callable[..., object]:
        return lambda device=GPU: asked[name](HOST.type if device == GPU else device)

    with ExitStack() as stack:
        for name, function in gpu.functions().items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        for name in asked:
            stack.enter_context(patch.object(torch, name, of_host(name)))
        changes = (
            (torch.autocast, "__init__", autocast),
            (_device.DeviceContext, "__init__", context),
            *((each, _FOREACH, lambda: [HOST.type, GPU]) for each in (optimizers, _foreach_utils)),
        )
        for owner, name, function in changes:
            stack.enter_context(patch.object(owner, name, function))
        stack.enter_context(names)
        yield


_FOREACH = "_get_foreach_kernels_supported_devices"  # an optimizer of a GPU updates all at once
assert autocast_mode.autocast is torch.autocast
