"""On what something was measured."""

import platform

import torch

from meshwright.validate.device.driver import driver_version


def device_facts(device: torch.device) -> dict[str, str]:
    """Return names and versions of a device and the software that drives it, by what they are."""
    facts = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type != "cuda":
        return facts | {"device": platform.machine()}
    return facts | {
        "device": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
