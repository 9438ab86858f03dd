"""The options of ``meshwright calibrate``, as a record."""

from dataclasses import dataclass
from typing import Annotated

import typer

from meshwright.hwprofiles import Precision
from meshwright.validate.calibration.rows import Accelerator


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateOptions:
    """What to measure or to read, and where the profiles go."""

    device: Annotated[
        Accelerator | None,
        typer.Option(metavar="|".join(Accelerator), help="Measure this machine's GPU or CPU."),
    ] = None
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Measure collectives of N local processes.")
    ] = None
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the profiles [calibrated].")
    ] = None
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder to write, or to continue [./NAME]."),
    ] = None
    precision: Annotated[
        Precision | None,
        typer.Option(
            metavar="|".join(Precision), help="Number format of the kernels [bf16; fp32 on CPU]."
        ),
    ] = None
    like: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="Take datasheet facts of this device [detected]."),
    ] = None
    peak: Annotated[
        str | None,
        typer.Option(metavar="RATE", help='Peak, such as "312 TFLOP/s" [the datasheet\'s].'),
    ] = None
    budget_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Measure for about S seconds.")
    ] = None
    stack: Annotated[
        list[str] | None,
        typer.Option(metavar="STACK", help="CPU: also write this stack; repeat for more."),
    ] = None
    nccl_tests: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Output of nccl-tests to read; repeat for more."),
    ] = None
    trace: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="PyTorch profiler trace to read; repeat for more."),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Measure anew, keep no old rows.")] = False
