"""Measure the kernels of one device, batch by batch, until all is there or time is over."""

import time

import torch

from meshwright.hwprofiles import GIBI, MEBI, Precision
from meshwright.validate.calibration.measure.stopwatch import measure_batch, warm_up_gpu
from meshwright.validate.calibration.rows import (
    Accelerator,
    Coverage,
    Progress,
    RowFile,
    device_cases,
    in_batches,
)

BATCH_CASES = 8
# Tensors of a batch, each case's up to `kernels.FOOTPRINT_BYTES` of copies besides.
BATCH_BYTES = {Accelerator.CPU: 512 * MEBI, Accelerator.CUDA: 8 * GIBI}


def measure_device(
    file: RowFile, precision: Precision, *, deadline_s: float, progress: Progress
) -> Coverage:
    """Append rows of this machine's device to *file*.

    Args:
        file: File of rows; cases that it has are not measured again.
        precision: Number format of the kernels.
        deadline_s: On the clock of `time.monotonic`; no batch starts after it.
        progress: Told what is measured, how many cases are done, of how many.
    """
    machine = file.machine
    device = torch.device(machine.accelerator)
    if machine.accelerator is Accelerator.CPU:
        torch.set_num_threads(machine.threads)
    cases = device_cases(machine.accelerator, precision, machine.memory_bytes)
    missing = [case for case in cases if case not in file.cases]
    batches = in_batches(missing, most=BATCH_CASES, limit_bytes=BATCH_BYTES[machine.accelerator])
    done = len(cases) - len(missing)
    if batches:
        warm_up_gpu(device)
    for seed, batch in enumerate(batches):
        if time.monotonic() >= deadline_s:
            break
        rows = measure_batch(batch, device, seed, deadline_s)
        file.append(rows)
        done += len(rows)
        if progress is not None:
            progress("kernels", done, len(cases))
    return Coverage(done, len(cases))
