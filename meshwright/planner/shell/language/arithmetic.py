"""Whole-number arithmetic of the shell: ``$(( ))``, ``(( ))``, ``let``, indexes of arrays."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from meshwright.simulator import PlanError

TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9][0-9A-Za-z#]*)|(?P<name>[A-Za-z_]\w*(?:\[[^\[\]]*\])?)"
    r"|(?P<sign><<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),])"
    r"|(?P<mark>[\U000f0000-\U000ffffd]))"
)
LEVELS = {
    "||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "<": 7, ">": 7, "<=": 7, ">=": 7,
    "<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "%": 10, "**": 11,
}  # fmt: skip
ASSIGNMENTS = frozenset({"=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="})
SIGNS: Mapping[str, Callable[[int], int]] = {
    "-": lambda value: -value,
    "+": lambda value: value,
    "!": lambda value: int(not value),
    "~": lambda value: ~value,
}
MOST_NESTED = 40
Number = int | str  # a mark where it is unknown


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63  # bash counts in 64 bits


def _quotient(left: int, right: int) -> int:
    if right == 0:
        raise PlanError("division by 0")
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size


def _power(left: int, right: int) -> int:
    if right < 0:
        raise PlanError("an exponent below 0")
    return pow(left, right, 2**64)


OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "||": lambda left, right: int(bool(left or right)),
    "&&": lambda left, right: int(bool(left and right)),
    "|": lambda left, right: left | right,
    "^": lambda left, right: left ^ right,
    "&": lambda left, right: left & right,
    "==": lambda left, right: int(left == right),
    "!=": lambda left, right: int(left != right),
    "<": lambda left, right: int(left < right),
    ">": lambda left, right: int(left > right),
    "<=": lambda left, right: int(left <= right),
    ">=": lambda left, right: int(left >= right),
    "<<": lambda left, right: left << (right % 64),
    ">>": lambda left, right: left >> (right % 64),
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": _quotient,
    "%": lambda left, right: left - _quotient(left, right) * right,
    "**": _power,
}


@dataclass(slots=True)
class Formula:
    """An expression that is being evaluated.

    Args:
        tokens: Kind and text of each token.
        value_of: Returns the text of a variable, or of an element.
        assign: Sets one.
        at: The token that is read next.
        depth: Of parentheses, and of names whose values are expressions.
        is_skipped: Within the side of a condition that is not taken: nothing is assigned.
    """

    tokens: list[tuple[str, str]]
    value_of: Callable[[str], str]
    assign: Callable[[str, str], None]
    at: int = 0
    depth: int = 0
    is_skipped: bool = False

    def peek(self) -> str:
        """Return the next token where it is an operator; empty otherwise."""
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        return text if kind == "sign" else ""

    def take(self, sign: str) -> bool:
        """Read *sign* where it comes next."""
        is_next = self.peek() == sign
        self.at += is_next
        return is_next

    def comma(self) -> Number:
        """Return the last of several values."""
        value = self.choice()
        while self.take(","):
            value = self.choice()
        return value

    def choice(self) -> Number:
        """Return ``a ? b : c``, or an assignment, or less."""
        if self.depth > MOST_NESTED:
            raise PlanError("arithmetic is nested too deeply")
        self.depth += 1
        value = self.binary(1)
        if self.take("?"):
            first = self.side(self.choice, is_skipped=value == 0)
            if not self.take(":"):
                raise PlanError("a `?` has no `:`")
            second = self.side(self.choice, is_skipped=isinstance(value, int) and value != 0)
            if isinstance(value, int):
                value = first if value else second
            elif first == second:
                value = first
        self.depth -= 1
        return value

    def side(self, read: Callable[[], Number], *, is_skipped: bool) -> Number:
        """Return a side of a condition."""
        before, self.is_skipped = self.is_skipped, self.is_skipped or is_skipped
        value = read()
        self.is_skipped = before
        return value

    def binary(self, level: int) -> Number:
        """Return a value of operators that bind at least as *level*."""
        left = self.unary()
        while LEVELS.get(sign := self.peek(), 0) >= level:
            self.at += 1
            self.depth += 1
            skips = (sign == "&&" and left == 0) or (
                sign == "||" and isinstance(left, int) and left != 0
            )
            above = LEVELS[sign] + (sign != "**")
            right = self.side(partial(self.binary, above), is_skipped=skips)
            self.depth -= 1
            left = _combined(sign, left, right, is_skipped=self.is_skipped)
        return left

    def unary(self) -> Number:
        """Return a signed value."""
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise PlanError("arithmetic is nested too deeply")
        sign = self.peek()
        if sign in {"++", "--"}:
            self.at += 1
            kind, name = self.token()
            if kind != "name":
                raise PlanError(f"`{sign}` stands before no variable")
            value = self.changed(name, sign[0], 1)
        elif sign in SIGNS:
            self.at += 1
            value = self.unary()
            if isinstance(value, int):
                value = SIGNS[sign](value)
        else:
            value = self.atom()
        self.depth -= 1
        return value

    def token(self) -> tuple[str, str]:
        """Read the next token."""
        if self.at >= len(self.tokens):
            raise PlanError("arithmetic ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def atom(self) -> Number:
        """Return a number, a variable or what is in parentheses."""
        kind, text = self.token()
        if kind == "mark":
            return text
        if kind == "number":
            return _number(text)
        if kind == "name":
            return self.variable(text)
        if text != "(":
            raise PlanError(f"arithmetic has `{text}` where a number is expected")
        value = self.comma()
        if not self.take(")"):
            raise PlanError("arithmetic has a `(` without `)`")
        return value

    def variable(self, name: str) -> Number:
        """Return the value of a variable, after what is assigned to it here."""
        sign = self.peek()
        if sign in ASSIGNMENTS:
            self.at += 1
            value = self.choice()
            return self.changed(name, sign[:-1], value)
        if sign in {"++", "--"}:
            self.at += 1
            before = self.value(name)
            self.changed(name, sign[0], 1)
            return before
        return self.value(name)

    def changed(self, name: str, sign: str, value: Number) -> Number:
        """Assign a value, or what an operator makes of it and the value before."""
        if sign:
            value = _combined(sign, self.value(name), value, is_skipped=self.is_skipped)
        if not self.is_skipped:
            self.assign(name, str(value))
        return value

    def value(self, name: str) -> Number:
        """Return the number that a variable holds: it may be an expression itself."""
        if self.is_skipped:
            return 0
        return evaluate(self.value_of(name), self.value_of, self.assign, depth=self.depth + 1)


def _combined(sign: str, left: Number, right: Number, *, is_skipped: bool) -> Number:
    """Return what an operator makes of two values."""
    if sign == "&&" and 0 in (left, right):
        return 0
    if isinstance(left, str) or isinstance(right, str):
        if sign == "||" and any(isinstance(each, int) and each for each in (left, right)):
            return 1
        return left if isinstance(left, str) else right
    if is_skipped and sign in {"/", "%", "**"}:
        return 0
    return _wrapped(OPERATIONS[sign](left, right))


def _number(text: str) -> int:
    try:
        if "#" in text:
            base, digits = text.split("#")
            return _wrapped(int(digits, int(base)))
        if text.lower().startswith("0x"):
            return _wrapped(int(text, 16))
        return _wrapped(int(text, 8 if text.startswith("0") else 10))
    except ValueError:
        raise PlanError(f"arithmetic has {text[:40]!a}, which is no whole number") from None


def evaluate(
    text: str,
    value_of: Callable[[str], str],
    assign: Callable[[str, str], None],
    *,
    depth: int = 0,
) -> Number:
    """Return the value of an expression, or the mark of what it depends on.

    Args:
        text: The expression, in which the variables with a dollar are expanded.
        value_of: Returns the text of a variable, or of an element of an array.
        assign: Sets one.
        depth: Of the expressions that this is part of.

    Raises:
        PlanError: If it is no expression, or divides by 0.

    >>> evaluate("(2 + 3) * -4 ** 2 % 7", lambda name: "", lambda name, value: None)
    3
    """
    tokens: list[tuple[str, str]] = []
    at = 0
    text = text.strip()
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None or found.lastgroup is None:
            raise PlanError(f"arithmetic has {text[at : at + 20]!a}, which is not read")
        tokens.append((found.lastgroup, found[found.lastgroup]))
        at = found.end()
    if not tokens:
        return 0
    formula = Formula(tokens, value_of, assign, depth=depth)
    value = formula.comma()
    if formula.at < len(tokens):
        raise PlanError(f"arithmetic has `{tokens[formula.at][1][:40]}` where it should end")
    return value
