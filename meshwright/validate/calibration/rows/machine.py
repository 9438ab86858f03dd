"""Measured machine and its software: the head of a row file."""

from dataclasses import dataclass, fields
from enum import StrEnum

from meshwright.hwprofiles import single_line


class Accelerator(StrEnum):
    """Kind of device that is measured: GPU or processor."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One device of a machine and the software that drives it.

    Args:
        accelerator: GPU or processor.
        device: Name that the driver or the operating system gives it.
        driver: Driver of a GPU; the operating system of a processor.
        versions: Of PyTorch and the libraries under it.
        threads: Of one process on a processor; 1 on a GPU.
        num_sms: Multiprocessors of a GPU; 1 of a processor.
        memory_bytes: Of a GPU; the process's part on a processor.
    """

    accelerator: Accelerator
    device: str
    driver: str
    versions: str
    threads: int
    num_sms: int
    memory_bytes: int

    def difference(self, other: "Machine") -> str | None:
        """Return the first difference between two machines, or None."""
        for field in fields(self):
            mine, yours = getattr(self, field.name), getattr(other, field.name)
            if mine != yours:
                return f"{field.name} {mine!s} there, {yours!s} here"
        return None


def machine_of(texts: dict[str, str]) -> Machine:
    """Return the machine that the head of a file describes.

    Raises:
        KeyError: If something is missing.
        ValueError: If a number is none.
    """
    return Machine(
        accelerator=Accelerator(texts["accelerator"]),
        device=single_line(texts["device"]),
        driver=single_line(texts["driver"]),
        versions=single_line(texts["versions"]),
        threads=int(texts["threads"]),
        num_sms=int(texts["num_sms"]),
        memory_bytes=int(texts["memory_bytes"]),
    )
