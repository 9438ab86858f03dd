"""Scripts of bash: the commands that they run, and the one that starts training."""

from meshwright.planner.shell.language import Word
from meshwright.planner.shell.launches import Launch, find_launches
from meshwright.planner.shell.running import Command
from meshwright.planner.shell.script import read_commands

__all__ = ["Command", "Launch", "Word", "find_launches", "read_commands"]
