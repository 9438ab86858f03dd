"""Names and versions of a device and its software."""

import ctypes
import platform
from pathlib import Path

import torch

VERSION_FILE = Path("/proc/driver/nvidia/version")
# NVML reference manual: nvmlInit_v2, nvmlSystemGetDriverVersion; 0 is success, 80 bytes are enough.
MANAGEMENT_LIBRARY = "libnvidia-ml.so.1"
MAX_LENGTH = 80
UNKNOWN = "unknown"


def device_facts(device: torch.device) -> dict[str, str]:
    """Return names and versions of a device and of its software, by key."""
    facts = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type != "cuda":
        return facts | {"device": platform.machine()}
    return facts | {
        "device": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def driver_version() -> str:
    """Return the version as Linux shows it, else as the management library says it."""
    return _version_from_proc() or _version_from_nvml() or UNKNOWN


def _version_from_proc() -> str:
    if not VERSION_FILE.is_file():
        return ""
    lines = VERSION_FILE.read_text(encoding="utf-8", errors="replace").splitlines()
    words = lines[0].split() if lines else []
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def _version_from_nvml() -> str:
    """Return the version by NVML: a container may lack the driver's files in /proc."""
    try:
        library = ctypes.CDLL(MANAGEMENT_LIBRARY)
        text = ctypes.create_string_buffer(MAX_LENGTH)
        failed = library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, MAX_LENGTH)
    except (AttributeError, OSError):
        return ""
    return "" if failed else text.value.decode("ascii", "replace")
