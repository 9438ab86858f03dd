"""The commands to run, and in which folders."""

import shlex
from pathlib import Path
from typing import NamedTuple

PARTS = Path(__file__).resolve().parent
COMMANDS, INPUTS = PARTS / "commands.txt", PARTS / "inputs"


class NotComparable(Exception):  # noqa: N818 - no error of ours: what the user is to change
    """Why nothing can be compared, in one line."""


class Block(NamedTuple):
    """Commands that share a folder, run in order."""

    lines: tuple[str, ...]

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command."""
        return [shlex.split(line) for line in self.lines]

    @property
    def needs_torch(self) -> bool:
        """Whether PyTorch is imported ahead; the other commands must not find it there."""
        return any(words[:1] == ["validate"] for words in self.commands)


def read_blocks(text: str) -> list[Block]:
    r"""Return the blocks of a command file: a line each, with the indented lines below it.

    >>> [len(block.lines) for block in read_blocks("models\n\n# Plans\nsearch\n  validate\n")]
    [1, 2]
    """
    groups: list[list[str]] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line[0].isspace() and groups:
            groups[-1].append(line.strip())
        else:
            groups.append([line.strip()])
    return [Block(tuple(group)) for group in groups]
