"""``torch.cuda`` of a rank whose GPU is not there: it has all the memory that can be asked for."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch

from meshwright.hwprofiles import GIBI
from meshwright.validate.counting import IdleEvent, IdleStream, Memories
from meshwright.validate.scripts.gpu.memories import GPU, HOST, is_gpu

CAPABILITY = (9, 0)  # of a recent GPU: libraries choose their formats and kernels by it
MEMORY_BYTES = 1024 * GIBI  # nothing is too large to be counted
_NOTHING = (
    "init _lazy_init _lazy_call set_device set_stream synchronize empty_cache ipc_collect "
    "reset_peak_memory_stats reset_max_memory_allocated reset_accumulated_memory_stats "
    "set_per_process_memory_fraction manual_seed manual_seed_all seed seed_all set_rng_state "
    "set_rng_state_all check_error"
)
_TYPES = {
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class HostGenerator(torch.Generator):
    """A source of random numbers, of a host or of a GPU that is not there."""

    def __new__(cls, device: Any = HOST) -> Self:  # noqa: ANN401 - as torch's
        """Return one of the host."""
        make: Callable[..., Self] = super().__new__
        return make(cls, HOST if is_gpu(device) else device)


class OldType(type):
    """The type of tensors on a GPU by their format, as old code makes and knows them."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:  # noqa: ANN401
        """Return a tensor of a size, or of values."""
        if args and isinstance(args[0], list | tuple):
            return torch.tensor(args[0], dtype=cls.dtype, device=GPU)
        return torch.empty(*args, dtype=cls.dtype, device=GPU)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype is cls.dtype


@contextmanager
def idle_gpu(number: int, count: int, memories: Memories) -> Iterator[None]:
    """Let ``torch.cuda`` and ``torch.accelerator`` answer for a GPU that is not there.

    Args:
        number: Of the GPU in its node.
        count: GPUs of a node.
        memories: Live tensors on it.
    """
    answers = _answers(number, count, memories)
    accelerator = {
        "is_available": answers["is_available"],
        "device_count": answers["device_count"],
        "current_device_index": answers["current_device"],
        "set_device_index": answers["set_device"],
        "current_stream": answers["current_stream"],
        "current_accelerator": lambda *_args, **_kwargs: torch.device(GPU),
        **{name: answers[name] for name in ("set_stream", "synchronize", "empty_cache")},
        **{name: answers[name] for name in ("memory_allocated", "max_memory_allocated")},
    }
    load: Callable[..., object] = torch.load

    def load_here(file: object, map_location: object = None, **kwargs: object) -> object:
        return load(file, HOST if is_gpu(map_location) else map_location, **kwargs)

    with ExitStack() as stack:
        for name, function in accelerator.items():
            stack.enter_context(patch.object(torch.accelerator, name, function))
        for name, function in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, function, create=True))
            for module in (torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, function))
        # Torch's own Python code asks through these.
        for name in ("_get_accelerator", "_accelerator_getAccelerator"):
            stack.enter_context(patch.object(torch._C, name, accelerator["current_accelerator"]))  # noqa: SLF001
        stack.enter_context(patch.object(torch, "Generator", HostGenerator))
        stack.enter_context(patch.object(torch, "load", load_here))
        yield


def _answers(number: int, count: int, memories: Memories) -> dict[str, Callable[..., Any] | type]:
    """Return the answers of ``torch.cuda``, by name."""
    major, minor = CAPABILITY
    properties = SimpleNamespace(
        name="a counted GPU", total_memory=MEMORY_BYTES, major=major, minor=minor
    )
    stream = IdleStream()
    values = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "device_count": count,
        "current_device": number,
        "get_device_name": properties.name,
        "get_device_capability": CAPABILITY,
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "is_tf32_supported": True,
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
        "current_stream": stream,
        "default_stream": stream,
        "get_arch_list": [f"sm_{major}{minor}"],
        "initial_seed": 0,
        "memory_stats": defaultdict(int),
        "utilization": 0,
        "is_current_stream_capturing": False,
        **dict.fromkeys(_NOTHING.split()),
    }
    made: dict[str, Callable[..., Any] | type] = {
        name: _answering(partial(_identity, value)) for name, value in values.items()
    }
    made |= {name: _answering(nullcontext) for name in ("stream", "device")}
    for name in ("get_rng_state", "get_rng_state_all"):
        made[name] = _answering(lambda: torch.zeros(16, dtype=torch.uint8))
    for kind in ("allocated", "reserved"):
        made[f"memory_{kind}"] = _answering(lambda: memories.device.live_bytes)
        made[f"max_memory_{kind}"] = _answering(lambda: memories.device.peak_bytes)
    for name, dtype in _TYPES.items():
        made[name] = OldType(name, (), {"dtype": dtype})
    return {**made, "Stream": IdleStream, "Event": IdleEvent}


def _identity(value: object) -> object:
    return value


def _answering(answer: Callable[[], object]) -> Callable[..., object]:
    return lambda *_args, **_kwargs: answer()
