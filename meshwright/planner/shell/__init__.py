"""Scripts of bash: the commands that they run, and the one that starts training."""

from meshwright.planner.shell.interpreter import Command
from meshwright.planner.shell.launches import Launch, find_launches
from meshwright.planner.shell.script import read_commands
from meshwright.planner.shell.words import Word

__all__ = ["Command", "Launch", "Word", "find_launches", "read_commands"]
