"""Conditions of the shell: ``[ ]``, ``test`` and ``[[ ]]``, true, false or not known."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.planner.shell.expansion import divided, fragments, word_groups
from meshwright.planner.shell.interpreter import Interpreter, Status
from meshwright.planner.shell.parameters import calculated
from meshwright.planner.shell.words import MARKS, Field, Text, field_of

if TYPE_CHECKING:
    from tree_sitter import Node

ORDERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt,
    "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
EQUALITIES = {"=", "==", "!="}
BINARY = {*ORDERS, *EQUALITIES, "<", ">", "=~", "-nt", "-ot", "-ef"}
UNARY = frozenset(f"-{each}" for each in "abcdefghknoprstuvwxzGLNORS")


def negated(status: Status) -> Status:
    """Return the opposite of a status."""
    return status if isinstance(status, str) else not status


def both(left: Status, right: Status) -> Status:
    """Return the status of ``a && b``."""
    # False decides, whether or not the other side is known.
    if left is False or right is False:
        return False
    return right if left is True else left


def either(left: Status, right: Status) -> Status:
    """Return the status of ``a || b``."""
    return negated(both(negated(left), negated(right)))


@dataclass(slots=True)
class Condition:
    """The words between the brackets of a test, expanded."""

    shell: Interpreter
    words: Sequence[Field]
    place: int
    is_double: bool  # it is `[[ ]]`: the right side of `==` is a pattern
    at: int = 0  # the word that is read next

    def peek(self, ahead: int = 0) -> str:
        """Return a word that follows; empty where it was quoted."""
        index = self.at + ahead
        if index >= len(self.words) or (self.words[index].is_quoted and self.is_double):
            return ""
        return self.words[index].text.characters

    def take(self, *choices: str) -> bool:
        """Read one of *choices* where it comes next."""
        is_next = self.peek() in choices
        self.at += 1 if is_next else 0
        return is_next

    def result(self) -> Status:
        """Return the status of the test; refuse one that is not read."""
        # `[ x ]` holds if x is not empty.
        if len(self.words) < 2:
            return bool(self.words) and self.filled(self.words[0].text)
        status = self.disjunction()
        if self.at != len(self.words):
            raise self.shell.refusal(self.place, "this test is not read")
        return status

    def disjunction(self) -> Status:
        """Return the value of ``a && b || c``."""
        status = self.conjunction()
        while self.take("||", "-o"):
            status = either(status, self.conjunction())
        return status

    def conjunction(self) -> Status:
        """Return the value of ``a && b``."""
        status = self.term()
        while self.take("&&", "-a"):
            status = both(status, self.term())
        return status

    def term(self) -> Status:
        """Return the value of one comparison."""
        following = self.words[self.at : self.at + 3]
        if len(following) == 3 and self.peek(1) in BINARY:
            self.at += 3
            return self.compared(following[0].text, self.words[self.at - 2], following[2])
        if self.take("!"):
            return negated(self.term())
        if self.take("(", r"\("):
            status = self.disjunction()
            if not self.take(")", r"\)"):
                raise self.shell.refusal(self.place, "this test is not read")
            return status
        if len(following) > 1 and self.peek() in UNARY:
            self.at += 2
            return self.unary(following[0].text.characters, following[1])
        self.at += 1
        return self.filled(following[0].text) if following else False

    def filled(self, text: Text) -> Status:
        """Return True if a text has characters; an unset variable has none."""
        rest = self.shell.unknowns.without_unset(text.characters)
        return True if MARKS.sub("", rest) else rest[:1] or False

    def unary(self, sign: str, word: Field) -> Status:
        """Return the value of ``-z X`` and the like."""
        characters = word.text.characters
        if sign in {"-n", "-z"}:
            unset = not self.shell.unknowns.without_unset(characters)
            if sign == "-n" and unset and not (word.is_quoted or self.is_double):
                return True  # the word vanishes, and `[ -n ]` is true
            status = self.filled(word.text)
            return status if sign == "-n" else negated(status)
        reason = "asks for what is not in the file"
        return self.shell.unread(self.place, f"the test `{sign} {characters}`", reason).characters

    def compared(self, left: Text, sign: Field, right: Field) -> Status:
        """Return the value of a comparison."""
        name, sides = sign.text.characters, (left.characters, right.text.characters)
        if name in ORDERS:
            return self.ordered(name, sides)
        if name not in EQUALITIES:
            test = f"the test `{sides[0]} {name} {sides[1]}`"
            return self.shell.unread(self.place, test, "is not evaluated").characters
        mark = MARKS.search("".join(sides))
        status: Status
        if not all(sides):
            status = negated(self.filled(left if sides[0] else right.text))
        elif mark is not None:
            return mark[0]
        elif self.is_double:
            status = self.shell.matched(right.parts, sides[0], self.place) is not None
        else:
            status = sides[0] == sides[1]
        return negated(status) if name == "!=" else status

    def ordered(self, name: str, sides: Sequence[str]) -> Status:
        """Return the value of a comparison of numbers."""
        numbers: list[int] = []
        for each in sides:
            value: int | str
            # `[[ ]]` evaluates arithmetic, `[ ]` takes whole numbers.
            if self.is_double or MARKS.search(each):
                value = calculated(self.shell, each, self.place)
            elif re.fullmatch(r"\s*[-+]?[0-9]{1,19}\s*", each):
                value = int(each)
            else:
                return False  # bash complains, and goes on
            if isinstance(value, str):
                return value
            numbers.append(value)
        return ORDERS[name](*numbers)


def leaves(node: "Node") -> Iterator["Node"]:
    """Yield the words and the operators of a test, in order."""
    for each in node.children:
        if each.type.endswith("_expression"):
            yield from leaves(each)
        else:
            yield each


def tested(shell: Interpreter, node: "Node") -> Status:
    """Return the status of ``[ ... ]`` or ``[[ ... ]]``."""
    inner = list(leaves(node))[1:-1]
    is_double = node.children[0].type == "[["
    words: list[Field] = []
    for group in _groups(shell, inner, is_double=is_double):
        start, stop = group[0].start_byte, group[-1].end_byte
        parts = fragments(shell, node, start, stop, "word")
        words += [field_of(parts)] if is_double else divided(shell, parts)
    return Condition(shell, words, shell.place(node), is_double).result()


def _groups(shell: Interpreter, nodes: Sequence["Node"], *, is_double: bool) -> list[list["Node"]]:
    """Return the parts of each word of a test; of ``[[ a=b ]]`` these are three, of ``[`` one."""
    if not is_double:
        return word_groups(shell, nodes)
    groups: list[list[Node]] = [[]]
    for each in nodes:
        if each.type == "test_operator" or not (each.is_named or each.type == "$"):
            groups += [[each], []]
        else:
            groups[-1].append(each)
    return [word for group in groups for word in word_groups(shell, group)]
