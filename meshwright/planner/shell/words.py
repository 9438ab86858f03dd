"""Words of a script: the line of each character, what of them is unknown, quoting and splitting.

An unknown part of a text is one character of a private plane, a mark: so texts are joined, split
and compared as usual, and a word still says what of it is unknown, and why.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from meshwright.simulator import PlanError

FIRST_MARK = 0xF0000
MARKS = re.compile("[\U000f0000-\U000ffffd]")
FILE_STRIDE = 10_000_000  # a place is a line number, plus this for each file read before
MOST_CHARACTERS = 200_000  # of one value
WHITE = " \t\n"  # what the shell splits at
PARTS = re.compile(f"([{WHITE}]+)|[^{WHITE}]+")
PATTERN = re.compile(r"\\(.)|(\*+)|(\?)|\[([!^]?)(\]?[^\]]*)\]|(.)", re.DOTALL)
NOT_READ = re.compile(r"[@?!+*]\(|\[\[:")
LIKELY_COUNT = re.compile(r"GPU|NODE|NPROC|NUM_|WORLD")
LIKELY_OPTIONS = re.compile(r"ARG|OPT|FLAG|EXTRA|CMD", re.IGNORECASE)


class Word(NamedTuple):
    """A word of a command, expanded.

    Args:
        text: The word; what is unknown of it stands there as it was written: ``$X``.
        line: Where it was written, from 1: an element of an array or a part of a string there.
        unknown: Why it is not known, as a sentence with the remedy; empty where it is known.
        is_open: It may stand for any number of words, options among them.
        file: The file it was written in, where that is not the script itself.
    """

    text: str
    line: int
    unknown: str = ""
    is_open: bool = False
    file: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Characters with the place that each was written at."""

    characters: str = ""
    places: Sequence[int] = ()

    def part(self, start: int, stop: int) -> "Text":
        """Return the characters from *start* to *stop*."""
        return Text(self.characters[start:stop], self.places[start:stop])

    @property
    def place(self) -> int:
        """The place of the first character, 0 where there is none."""
        return self.places[0] if self.places else 0


def written(characters: str, place: int) -> Text:
    """Return *characters* that were all written at one place."""
    return Text(characters, (place,) * len(characters))


def joined(parts: Sequence[Text]) -> Text:
    """Return texts after each other."""
    if len(parts) == 1:
        return parts[0]
    characters = "".join(part.characters for part in parts)
    return Text(characters, tuple(place for part in parts for place in part.places))


class Unknown(NamedTuple):
    """Part of a text that the script does not tell."""

    shown: str  # as it stands in messages: `$X`
    cause: str  # `$X at line 3 is not set in the file`
    name: str = ""  # of the variable that would tell it
    is_unset: bool = False  # nothing sets it: a test for an empty value finds it empty
    is_open: bool = False  # it may stand for any number of words
    is_usual: bool = False  # the success of a command that a script counts on: `cd x && python y`

    @property
    def message(self) -> str:
        """The cause, with the remedy."""
        if not self.name:
            return f"{self.cause}; give the command as it runs (`bash -x` prints it)"
        sample = "8" if LIKELY_COUNT.search(self.name) else "VALUE"
        sample = '""' if LIKELY_OPTIONS.search(self.name) else sample
        return f"{self.cause}; give it with --define {self.name}={sample}"


@dataclass(slots=True)
class Unknowns:
    """Unknown values of a script, each with the mark that stands for it, and the files read."""

    listed: list[Unknown] = field(default_factory=list)
    marks: dict[Unknown, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=lambda: [""])

    def mark(self, unknown: Unknown) -> str:
        """Return the character that stands for an unknown."""
        if unknown not in self.marks:
            # The private plane has 65,534 characters.
            if len(self.listed) >= 60_000:
                raise PlanError("the script has more than 60,000 unknown values")
            self.marks[unknown] = chr(FIRST_MARK + len(self.listed))
            self.listed.append(unknown)
        return self.marks[unknown]

    def meaning(self, mark: str) -> Unknown:
        """Return the unknown that a mark stands for."""
        return self.listed[ord(mark) - FIRST_MARK]

    def first(self, characters: str) -> Unknown | None:
        """Return the first unknown part of a text, None where all is known."""
        match = MARKS.search(characters)
        return self.meaning(match[0]) if match else None

    def without_unset(self, characters: str) -> str:
        """Return a text in which unset variables are empty, as the script would find them."""
        return MARKS.sub(
            lambda found: "" if self.meaning(found[0]).is_unset else found[0], characters
        )

    def shown(self, characters: str) -> str:
        """Return a text with its unknown parts as they were written."""
        return MARKS.sub(lambda found: self.meaning(found[0]).shown, characters)

    def where(self, place: int) -> str:
        """Return ``line 12``, or ``FILE: line 12`` where that is not the script itself."""
        number, line = divmod(place, FILE_STRIDE)
        return f"{self.files[number]}: line {line}" if number else f"line {line}"

    def refusal(self, place: int, problem: str) -> PlanError:
        """Return the error of a script that cannot be read on."""
        return PlanError(f"{self.where(place)}: {' '.join(problem.split())}")

    def word(self, text: Text, place: int, *, is_quoted: bool = True) -> Word:
        """Return the word that a text is; *place* is that of the command."""
        number, line = divmod(text.place or place, FILE_STRIDE)
        unknown = self.first(text.characters)
        is_open = not is_quoted and any(
            self.meaning(mark).is_open for mark in MARKS.findall(text.characters)
        )
        return Word(
            self.shown(text.characters),
            line,
            unknown.message if unknown else "",
            is_open,
            self.files[number],
        )


class Kind(Enum):
    """The quoting of a part of a word."""

    LITERAL = auto()  # not quoted, and not split: it was written so
    QUOTED = auto()
    SPLIT = auto()  # an expansion that is not quoted


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of a word, expanded, with its quoting."""

    text: Text
    kind: Kind
    begins: bool = False  # a new word begins with it: the second element of `"${A[@]}"`


@dataclass(frozen=True, slots=True)
class Field:
    """A word after splitting: its text, and the parts that it is made of."""

    text: Text
    parts: Sequence[Fragment]

    @property
    def is_quoted(self) -> bool:
        """True if any of it was quoted."""
        return any(each.kind is Kind.QUOTED for each in self.parts)


def field_of(fragments: Sequence[Fragment]) -> Field:
    """Return the one word that fragments make where nothing is split: an array is joined."""
    space = Fragment(Text(" ", (0,)), Kind.QUOTED)
    parts: list[Fragment] = []
    for each in fragments:
        parts += [space, each] if each.begins and parts else [each]
    return Field(joined([each.text for each in parts]), parts)


def split(fragments: Sequence[Fragment]) -> list[Field]:
    """Return the words that the parts of one word make: those not quoted end at white space."""
    fields: list[list[Fragment]] = [[]]
    for each in fragments:
        if each.begins:
            fields.append([])
        if each.kind is not Kind.SPLIT:
            fields[-1].append(each)
            continue
        for match in PARTS.finditer(each.text.characters):
            if match[1]:
                fields.append([])
            else:
                fields[-1].append(Fragment(each.text.part(*match.span()), Kind.SPLIT))
    return [field_of([Fragment(p.text, p.kind) for p in each]) for each in fields if each]


def regex_of(fragments: Sequence[Fragment], star: str = ".*") -> str:
    """Return a pattern of the shell (``*``, ``?``, ``[a-z]``) as a regular expression.

    Quoted parts match themselves; ``*`` becomes *star*.

    Raises:
        PlanError: If it is an extended pattern, or has a class as ``[[:digit:]]``.
    """

    def translated(found: re.Match[str]) -> str:
        if found[2] or found[3]:
            return star if found[2] else "."
        if found[5]:
            members = re.sub(r"([][^\\&~|])", r"\\\1", found[5])
            return f"[^{members}]" if found[4] else f"[{members}]"
        return re.escape(found[1] or found[6] or found[0])

    regex = ""
    for each in fragments:
        characters = each.text.characters
        is_quoted = each.kind is Kind.QUOTED
        if not is_quoted and NOT_READ.search(characters):
            raise PlanError(f"the pattern {characters[:40]!a} is not read")
        # Quotes take the meaning from `*`, `?` and `[`.
        regex += re.escape(characters) if is_quoted else PATTERN.sub(translated, characters)
    return regex
