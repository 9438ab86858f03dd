"""The grammar of bash: a script as a tree, or the first line that is none."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from meshwright.hwprofiles import shown
from meshwright.planner.shell.texts import MARKS, Text, Unknowns

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Source:
    """A text that is read as a script.

    Args:
        text: The characters, with their places.
        data: The same in UTF-8: the grammar counts bytes.
        starts: The byte that each character starts at; empty where they are the same.
    """

    text: Text
    data: bytes
    starts: tuple[int, ...]

    def part(self, start: int, stop: int) -> Text:
        """Return the text from one byte to another."""
        return self.text.part(self.index(start), self.index(stop))

    def index(self, byte: int) -> int:
        """Return the character that a byte belongs to."""
        return bisect_right(self.starts, byte) - 1 if self.starts else byte

    def place(self, byte: int) -> int:
        """Return where a byte was written."""
        places = self.text.places
        index = min(self.index(byte), len(places) - 1)
        return places[index] if places else 0


def source_of(text: Text) -> Source:
    """Return a text as the grammar counts it."""
    data = text.characters.encode()
    starts: tuple[int, ...] = ()
    if len(data) != len(text.characters):
        widths = (len(each.encode()) for each in text.characters)
        starts = tuple(accumulate(widths, initial=0))
    return Source(text, data, starts)


def parse(source: Source, unknowns: Unknowns) -> "Node":
    """Return the tree of a script.

    Raises:
        PlanError: If a part of it is not bash, or not the bash that the grammar knows.
    """
    import tree_sitter_bash  # noqa: PLC0415 - only import needs it
    from tree_sitter import Language, Parser  # noqa: PLC0415

    if len(source.data) > MOST_BYTES:
        raise unknowns.refusal(source.place(0), f"a script has at most {MOST_BYTES:,} bytes")
    tree = Parser(Language(tree_sitter_bash.language())).parse(source.data)
    root = tree.root_node
    if root.has_error:
        node = _first_error(root)
        snippet = source.part(node.start_byte, node.end_byte).characters
        snippet = unknowns.shown(MARKS.sub("$?", snippet)).split("\n")[0]
        said = shown(snippet) if snippet else f"something before it, {shown(node.type)}, is missing"
        raise unknowns.refusal(source.place(node.start_byte), f"this is not read as bash: {said}")
    return root


def _first_error(node: "Node") -> "Node":
    while not (node.is_error or node.is_missing):
        inner = next((each for each in node.children if each.has_error or each.is_missing), None)
        if inner is None:
            return node
        node = inner
    return node
