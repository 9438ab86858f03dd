"""The device under a program: what it is, what it holds, how it computes attention."""

from meshwright.validate.device.attention_kernels import (
    SavedAttention,
    attention_backward,
    attention_forward,
    flash_backward,
    flash_forward,
)
from meshwright.validate.device.facts import device_facts, driver_version
from meshwright.validate.device.memory import DeviceMemory

__all__ = [
    "DeviceMemory",
    "SavedAttention",
    "attention_backward",
    "attention_forward",
    "device_facts",
    "driver_version",
    "flash_backward",
    "flash_forward",
]
