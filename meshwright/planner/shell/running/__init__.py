"""An interpreter of bash that executes nothing: it follows a script and notes down its commands."""

from meshwright.planner.shell.running.interpreter import Command, Flow, Frame, Interpreter
from meshwright.planner.shell.running.scripts_within import placed, run_text
from meshwright.planner.shell.running.statements import run_statement

__all__ = ["Command", "Flow", "Frame", "Interpreter", "placed", "run_statement", "run_text"]
