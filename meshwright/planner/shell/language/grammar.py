"""The grammar of bash: a script as a tree, or the first line that is none."""

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from meshwright.hwprofiles import shown
from meshwright.planner.shell.language.texts import MARKS, Text, Unknowns

if TYPE_CHECKING:
    from tree_sitter import Node

# What a part that is no bash lacks the end of, most often.
OPENING = {"if", "for", "while", "until", "case", "{", "(", "[", "[[", "((", "$(", "${", "`", '"'}
PLACEHOLDER = re.compile(r"(?<!<)<\w[^<>]*>")  # VOCAB=<Specify path>
MOST_BYTES = 250_000


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
    parser = Parser(Language(tree_sitter_bash.language()))
    root = parser.parse(source.data).root_node
    if root.has_error:
        # The grammar has no continuation before an empty line; bash ends the command there.
        mended = re.sub(rb"\\(?=\n[ \t]*(\n|$))", b" ", source.data)
        again = parser.parse(mended).root_node
        root = root if again.has_error else again
    if root.has_error:
        node = _first_error(root)
        place = source.place(node.start_byte)
        line = source.data[source.data.rfind(b"\n", 0, node.start_byte) + 1 :].partition(b"\n")[0]
        text = MARKS.sub("$...", line.decode("utf-8", "replace")).strip()
        gap = PLACEHOLDER.search(text)
        if gap is not None:
            raise unknowns.refusal(place, f"{shown(gap[0])} is to be filled in")
        raise unknowns.refusal(place, f"this is not read as bash: {shown(text)}")
    return root


def _first_error(node: "Node") -> "Node":
    while not (node.is_error or node.is_missing):
        inner = next((each for each in node.children if each.has_error or each.is_missing), None)
        if inner is None:
            return node
        node = inner
    return next((each for each in node.children if each.type in OPENING), node)
