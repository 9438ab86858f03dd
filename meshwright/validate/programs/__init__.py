"""From a plan to the PyTorch program that its stack stands for."""

from meshwright.validate.programs.build import PROGRAMS, build_program, check_program

__all__ = [
    "PROGRAMS",
    "build_program",
    "check_program",
]
