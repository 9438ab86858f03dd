"""The options of ``meshwright calibrate``, as a record."""

from dataclasses import dataclass

from meshwright.hwprofiles import Precision
from meshwright.planner.options import flag, option
from meshwright.validate.calibration.rows import Accelerator


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateOptions:
    """Device to measure or files to read, and the folder of the profiles."""

    device: Accelerator | None = option(
        None, "|".join(Accelerator), "Measure this machine's GPU or CPU."
    )
    ranks: int | None = option(None, "N", "Measure collectives of N local processes.")
    name: str | None = option(None, "NAME", "Name of the profiles [calibrated].")
    out: str | None = option(None, "DIR", "Folder to write, or to continue [./NAME].")
    precision: Precision | None = option(
        None, "|".join(Precision), "Number format of the kernels [bf16; fp32 on CPU]."
    )
    like: str | None = option(None, "DEVICE", "Take datasheet facts of this device [detected].")
    peak: str | None = option(None, "RATE", 'Peak, such as "312 TFLOP/s" [the datasheet\'s].')
    budget_seconds: float | None = option(None, "S", "Measure for about S seconds.")
    stack: list[str] | None = option(None, "STACK", "CPU: also write this stack; repeat for more.")
    nccl_tests: list[str] | None = option(
        None, "FILE", "Output of nccl-tests to read; repeat for more."
    )
    trace: list[str] | None = option(
        None, "FILE", "PyTorch profiler trace to read; repeat for more."
    )
    force: bool = flag("--force", "Measure anew, keep no old rows.")
