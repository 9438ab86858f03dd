"""PyTorch reference programs of plans, one for each stack that has one."""

from meshwright.validate.programs.build import PROGRAMS, build_program, check_program

__all__ = [
    "PROGRAMS",
    "build_program",
    "check_program",
]
