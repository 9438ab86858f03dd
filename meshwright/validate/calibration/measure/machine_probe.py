"""Hardware and software of this machine, as PyTorch and the operating system report them."""

import os
import platform
from pathlib import Path

import torch
from torch import distributed

from meshwright.simulator import PlanError
from meshwright.validate.calibration.rows import Accelerator, Machine
from meshwright.validate.device import driver_version


def probe_machine(accelerator: Accelerator, num_ranks: int) -> Machine:
    """Return one process's share of this machine: its threads, memory and versions.

    Raises:
        PlanError: If there are fewer devices than ranks.
    """
    if accelerator is Accelerator.CUDA:
        return _gpu(num_ranks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        accelerator=accelerator,
        device=_processor_name(),
        driver=f"{platform.system()} {platform.release()}",
        versions=f"PyTorch {torch.__version__}",
        threads=max(1, (cores or 1) // num_ranks),
        num_sms=1,
        memory_bytes=memory_bytes // num_ranks,
    )


def _gpu(num_ranks: int) -> Machine:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        raise PlanError("--device cuda: PyTorch finds no GPU here; allowed: --device cpu")
    if num_ranks > found:
        raise PlanError(f"--ranks {num_ranks}: there are {found} GPUs; allowed: up to {found}")
    facts = torch.cuda.get_device_properties(0)
    versions = [f"PyTorch {torch.__version__}", f"CUDA {torch.version.cuda}"]
    if distributed.is_available() and distributed.is_nccl_available():
        versions.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    return Machine(
        accelerator=Accelerator.CUDA,
        device=torch.cuda.get_device_name(0),
        driver=driver_version(),
        versions=", ".join(versions),
        threads=1,
        num_sms=facts.multi_processor_count,
        memory_bytes=facts.total_memory,
    )


def _processor_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1] for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return " ".join(name.split()) or "unknown processor"
