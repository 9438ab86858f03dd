"""Conditions of the shell: ``[ ]``, ``test`` and ``[[ ]]``, true, false or not known."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.planner.shell.language import (
    MARKS,
    Field,
    Text,
    Unknown,
    field_of,
    is_match,
    pieces_of,
    split,
)
from meshwright.planner.shell.running.expansion import fragments, separators, word_groups
from meshwright.planner.shell.running.interpreter import MOST_NESTED, Interpreter, Status
from meshwright.planner.shell.running.parameters import calculated
from meshwright.simulator import PlanError

if TYPE_CHECKING:
    from tree_sitter import Node

ORDERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
NUMBERS = frozenset(ORDERS)
BINARY = NUMBERS | {"=", "==", "!=", "<", ">", "=~", "-nt", "-ot", "-ef"}
NESTING = frozenset(
    {"binary_expression", "unary_expression", "parenthesized_expression", "negated_expression"}
)
UNARY = frozenset(f"-{each}" for each in "abcdefghknoprstuvwxzGLNORS")


def negated(status: Status) -> Status:
    """Return the opposite of a status."""
    return status if isinstance(status, str) else not status


def both(left: Status, right: Status) -> Status:
    """Return whether two conditions hold."""
    if left is False or right is False:
        return False
    return right if left is True else left


def either(left: Status, right: Status) -> Status:
    """Return whether one of two conditions holds."""
    return negated(both(negated(left), negated(right)))


@dataclass(slots=True)
class Condition:
    """The words between the brackets of a test.

    Args:
        shell: The script.
        words: Expanded.
        place: Of the test.
        is_double: It is ``[[ ]]``: the right side of ``==`` is a pattern.
        at: The word that is read next.
    """

    shell: Interpreter
    words: Sequence[Field]
    place: int
    is_double: bool
    at: int = 0

    def peek(self, ahead: int = 0) -> str:
        """Return a word that follows; empty where it was quoted."""
        index = self.at + ahead
        if index >= len(self.words) or (self.words[index].is_quoted and self.is_double):
            return ""
        return self.words[index].text.characters

    def take(self, *choices: str) -> bool:
        """Read one of *choices* where it comes next."""
        is_next = self.peek() in choices
        self.at += is_next
        return is_next

    def result(self) -> Status:
        """Return whether the condition holds.

        Raises:
            PlanError: If it is not read.
        """
        if not self.words:
            return False
        if len(self.words) == 1:
            return self.filled(self.words[0].text)
        status = self.disjunction()
        if self.at < len(self.words):
            raise self.shell.unknowns.refusal(self.place, "this test is not read")
        return status

    def disjunction(self) -> Status:
        """Return the value of ``a || b``."""
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
        if len(self.words) - self.at >= 3 and self.peek(1) in BINARY:
            left, operator, right = self.words[self.at : self.at + 3]
            self.at += 3
            return self.compared(left, operator.text.characters, right)
        if self.take("!"):
            return negated(self.term())
        if self.take("(", r"\("):
            status = self.disjunction()
            if not self.take(")", r"\)"):
                raise self.shell.unknowns.refusal(self.place, "this test is not read")
            return status
        if self.at >= len(self.words):
            raise self.shell.unknowns.refusal(self.place, "this test is not read")
        if self.peek() in UNARY and len(self.words) - self.at >= 2:
            self.at += 2
            return self.unary(self.words[self.at - 2].text.characters, self.words[self.at - 1])
        self.at += 1
        return self.filled(self.words[self.at - 1].text)

    def filled(self, text: Text) -> Status:
        """Return whether a text has characters; what nothing sets has none."""
        rest = self.shell.unknowns.without_unset(text.characters)
        if MARKS.sub("", rest):
            return True
        return rest[0] if rest else False

    def unary(self, operator: str, word: Field) -> Status:
        """Return the value of ``-z X`` and the like."""
        characters = word.text.characters
        if operator in {"-n", "-z"}:
            unset = not self.shell.unknowns.without_unset(characters)
            if operator == "-n" and unset and not (word.is_quoted or self.is_double):
                return True  # the word vanishes, and `[ -n ]` is true
            status = self.filled(word.text)
            return status if operator == "-n" else negated(status)
        if operator == "-v":
            name = characters.partition("[")[0]
            return MARKS.findall(name)[0] if MARKS.search(name) else self.is_set(name)
        shown = self.shell.unknowns.shown(characters)
        where = self.shell.unknowns.where(self.place)
        what = f"test `{operator} {shown[:60]}`"
        return self.unknown(what, f"the {what} at {where} asks for what is not in the file")

    def is_set(self, name: str) -> bool:
        """Return whether a variable is set."""
        if name in self.shell.defines:
            self.shell.used.add(name)
        return name in self.shell.state.variables

    def unknown(self, shown: str, cause: str) -> str:
        """Return the mark of a condition that is not known."""
        return self.shell.unknowns.mark(Unknown(shown, cause))

    def compared(self, left: Field, operator: str, right: Field) -> Status:
        """Return the value of a comparison."""
        unknowns = self.shell.unknowns
        if operator in NUMBERS:
            return _ordered(self, left.text.characters, operator, right.text.characters)
        if operator in {"-nt", "-ot", "-ef"} or (operator == "=~"):
            shown = unknowns.shown(f"{left.text.characters} {operator} {right.text.characters}")
            where = unknowns.where(self.place)
            return self.unknown(shown[:60], f"the test `{shown[:60]}` at {where} is not evaluated")
        if operator in {"=", "==", "!="} and not (left.text.characters and right.text.characters):
            filled = self.filled(left.text if left.text.characters else right.text)
            return filled if operator == "!=" else negated(filled)
        first = MARKS.search(left.text.characters + right.text.characters)
        if first is not None:
            return first[0]
        if operator in {"<", ">"}:
            is_less = left.text.characters < right.text.characters
            return is_less if operator == "<" else left.text.characters > right.text.characters
        if self.is_double:
            pieces = pieces_of(right.pattern)
            length = len(left.text.characters)
            self.shell.spend(self.place, steps=1 + length * len(pieces) // 100)
            is_equal = is_match(left.text.characters, pieces)
        else:
            is_equal = left.text.characters == right.text.characters
        return is_equal is (operator != "!=")


def _ordered(test: Condition, left: str, operator: str, right: str) -> Status:
    """Return the value of a comparison of numbers."""
    sides: list[int] = []
    for each in (left, right):
        first = MARKS.search(each)
        if first is not None:
            return first[0]
        if test.is_double:
            value = calculated(test.shell, each, test.place)
            if isinstance(value, str):
                return value
            sides.append(value)
        elif re.fullmatch(r"\s*[-+]?[0-9]{1,19}\s*", each):
            sides.append(int(each))
        else:
            return False  # bash complains, and goes on
    return ORDERS[operator](*sides)


def leaves(node: "Node") -> list["Node"]:
    """Return the words and the operators of a test, in order."""
    found: list[Node] = []
    waiting = [(each, 0) for each in reversed(node.children)]
    while waiting:
        each, depth = waiting.pop()
        if depth > MOST_NESTED:
            raise PlanError("a test nests too deeply")
        if each.type in NESTING:
            waiting.extend((inner, depth + 1) for inner in reversed(each.children))
        else:
            found.append(each)
    return found


def tested(shell: Interpreter, node: "Node") -> Status:
    """Return whether ``[ ... ]`` or ``[[ ... ]]`` holds."""
    inner = leaves(node)[1:-1]
    is_double = node.children[0].type == "[["
    words: list[Field] = []
    for group in _groups(shell, inner, is_double=is_double):
        start, stop = group[0].start_byte, group[-1].end_byte
        found = fragments(shell, node, start, stop, "word")
        words += [field_of(found)] if is_double else split(found, separators(shell))
    return Condition(shell, words, shell.place(node), is_double).result()


def _groups(shell: Interpreter, nodes: Sequence["Node"], *, is_double: bool) -> list[list["Node"]]:
    if not is_double:
        return word_groups(shell, nodes)  # of `[ a=b ]` the one word
    groups: list[list[Node]] = []
    for each in nodes:
        is_operator = each.type == "test_operator" or not (each.is_named or each.type == "$")
        if is_operator or not groups or not groups[-1]:
            groups += [[each], []] if is_operator else [[each]]
        else:
            groups[-1].append(each)
    return [word for group in groups for word in word_groups(shell, group)]
