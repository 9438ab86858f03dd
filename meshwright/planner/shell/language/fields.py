"""Words of a command after expansion: joined parts, split where the shell splits them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from meshwright.planner.shell.language.patterns import escaped
from meshwright.planner.shell.language.texts import Text, joined, written

WHITE = " \t\n"
BRACES = re.compile(
    r"((?:.*?[^$])??)\{([^{}\s]*,[^{}\s]*|-?\d+\.\.-?\d+|[a-zA-Z]\.\.[a-zA-Z])\}(.*)"
)
MOST_OF_BRACES = 1_000


class Kind(Enum):
    """The quoting of a part of a word."""

    LITERAL = auto()  # not quoted, and not split: it was written so
    QUOTED = auto()
    SPLIT = auto()  # an expansion that is not quoted


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of a word.

    Args:
        text: Expanded.
        kind: Its quoting.
        begins: A new word begins with it: the second element of ``"${A[@]}"``.
    """

    text: Text
    kind: Kind
    begins: bool = False


SPACE = Fragment(Text(" ", (0,)), Kind.QUOTED)


@dataclass(frozen=True, slots=True)
class Field:
    """A word: its text, whether any of it was quoted, and the pattern that it is."""

    text: Text
    is_quoted: bool
    pattern: str


def field_of(fragments: Sequence[Fragment]) -> Field:
    """Return the one word that fragments make where nothing is split: an array is joined."""
    if any(each.begins for each in fragments[1:]):
        fragments = [
            part
            for number, each in enumerate(fragments)
            for part in ([SPACE, each] if each.begins and number else [each])
        ]
    pattern = "".join(
        escaped(each.text.characters) if each.kind is Kind.QUOTED else each.text.characters
        for each in fragments
    )
    text = joined([each.text for each in fragments]) if fragments else Text()
    return Field(text, any(each.kind is Kind.QUOTED for each in fragments), pattern)


def split(fragments: Iterable[Fragment], separators: str) -> list[Field]:
    """Return the words that fragments make.

    Args:
        fragments: Of one word as it was written.
        separators: The characters of ``IFS``.
    """
    fields: list[Field] = []
    current: list[Fragment] = []

    def end() -> None:
        if current:
            fields.append(field_of(current))
            current.clear()

    for each in fragments:
        if each.begins:
            end()
        if each.kind is not Kind.SPLIT:
            current.append(each)
            continue
        for part in _parts(each.text, separators):
            if part is None:
                end()
            else:
                current.append(Fragment(part, Kind.SPLIT))
    end()
    return fields


def _parts(text: Text, separators: str) -> Iterator[Text | None]:
    """Yield the parts between separators, and None for each border."""
    white = re.escape("".join(each for each in separators if each in WHITE))
    other = re.escape("".join(each for each in separators if each not in WHITE))
    borders = "|".join(
        ([f"[{white}]*[{other}][{white}]*"] if other and white else [f"[{other}]"] if other else [])
        + ([f"[{white}]+"] if white else [])
    )
    at = 0
    for found in re.finditer(borders, text.characters) if borders else ():
        if found.start() > at:
            yield text.part(at, found.start())
        elif other and found[0].strip(WHITE) and at:
            yield Text()
        yield None
        at = found.end()
    if at < len(text.characters):
        yield text.part(at, len(text.characters))


def braced(text: Text) -> list[Text]:
    """Return the words that ``a{b,c}`` or ``{1..3}`` stands for."""
    done: list[Text] = []
    waiting = [text]
    while waiting and len(done) + len(waiting) < MOST_OF_BRACES:
        first = waiting.pop()
        found = BRACES.fullmatch(first.characters)
        if found is None:
            done.append(first)
            continue
        before, after = first.part(*found.span(1)), first.part(*found.span(3))
        middle = [written(each, first.place) for each in _alternatives(found[2])]
        waiting.extend(joined([before, each, after]) for each in reversed(middle))
    return done


def _alternatives(inner: str) -> list[str]:
    if "," in inner:
        return inner.split(",")
    low, high = inner.split("..")
    if low.isalpha():
        start, stop = ord(low), ord(high)
    else:
        start, stop = int(low), int(high)
    step = 1 if stop >= start else -1
    numbers = range(start, stop + step, step)[:MOST_OF_BRACES]
    return [chr(each) if low.isalpha() else str(each) for each in numbers]
