"""Patterns of the shell: ``*``, ``?``, ``[a-z]``, with a backslash before what is meant itself."""

from collections.abc import Iterator
from typing import NamedTuple

SPECIAL = frozenset("*?[]\\()|!@+")


class Piece(NamedTuple):
    """A part of a pattern that matches one character, or any number of them.

    Args:
        kind: ``*`` any number, ``?`` any one, ``[`` one of *members*, empty: *members* itself.
        members: The character, or those between the brackets.
        is_negated: One that is not among them.
    """

    kind: str
    members: str = ""
    is_negated: bool = False

    def takes(self, character: str) -> bool:
        """Return whether it matches a character."""
        if self.kind == "?":
            return True
        return (character in self.members) is not self.is_negated


def escaped(characters: str) -> str:
    r"""Return a pattern that matches *characters* alone.

    >>> escaped("a*")
    'a\\*'
    """
    return "".join(f"\\{each}" if each in SPECIAL else each for each in characters)


def pieces_of(pattern: str) -> tuple[Piece, ...]:
    """Return the pieces of a pattern."""
    return tuple(_pieces(pattern))


def _pieces(pattern: str) -> Iterator[Piece]:
    at = 0
    while at < len(pattern):
        each = pattern[at]
        if each == "\\" and at + 1 < len(pattern):
            yield Piece("", pattern[at + 1])
            at += 2
        elif each == "[" and (end := pattern.find("]", at + 2)) > 0:
            inner = pattern[at + 1 : end]
            is_negated = inner[0] in "!^"
            yield Piece("[", _members(inner[is_negated:]), is_negated)
            at = end + 1
        else:
            yield Piece(each if each in "*?" else "", each)
            at += 1


def _members(inner: str) -> str:
    found = ""
    at = 0
    while at < len(inner):
        if inner[at + 1 : at + 2] == "-" and at + 2 < len(inner):
            found += "".join(map(chr, range(ord(inner[at]), min(ord(inner[at + 2]), 0x2FF) + 1)))
            at += 3
        else:
            found += inner[at]
            at += 1
    return found


def is_match(characters: str, pieces: tuple[Piece, ...]) -> bool:
    """Return whether a pattern matches a whole text; time is the product of the lengths at most.

    >>> is_match("llama3-8b", pieces_of("llama*-[0-9]?"))
    True
    """
    at = piece = 0
    star = restart = -1
    while at < len(characters):
        if piece < len(pieces) and pieces[piece].kind == "*":
            star, restart = piece, at
            piece += 1
        elif piece < len(pieces) and pieces[piece].takes(characters[at]):
            at += 1
            piece += 1
        elif star >= 0:
            restart += 1
            at, piece = restart, star + 1
        else:
            return False
    return all(each.kind == "*" for each in pieces[piece:])
