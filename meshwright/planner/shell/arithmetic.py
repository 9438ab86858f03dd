"""Whole-number arithmetic of the shell: ``$(( ))``, ``(( ))``, indexes of arrays."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from meshwright.simulator import PlanError

TOKEN = re.compile(
    r"\s*(?:(\d\w*|[A-Za-z_]\w*|<<=|>>=|\*\*|\+\+|--|<<|>>|&&|\|\||[-+*/%&|^<>=!]=|\S))", re.ASCII
)
SIGNS: Mapping[str, Callable[[int], int]] = {
    "-": operator.neg, "+": operator.pos, "!": operator.not_, "~": operator.invert,
}  # fmt: skip
MARKS = re.compile("[\U000f0000-\U000ffffd]")
Number = int | str  # a mark where it is unknown
Term = Callable[[], Number]  # evaluated when it is asked for: a side of `&&` may not be


def _quotient(left: int, right: int) -> int:
    """Return a quotient rounded towards 0, as bash does."""
    if right == 0:
        raise PlanError("division by 0")
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size


def _power(left: int, right: int) -> int:
    if right < 0:
        raise PlanError("an exponent below 0")
    return pow(left, right, 2**64)


# How tight each binds, and its value.
OPERATORS: Mapping[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (1, operator.or_), "&&": (2, operator.and_), "|": (3, operator.or_),
    "^": (4, operator.xor), "&": (5, operator.and_), "==": (6, operator.eq),
    "!=": (6, operator.ne), "<": (7, operator.lt), ">": (7, operator.gt), "<=": (7, operator.le),
    ">=": (7, operator.ge), "<<": (8, lambda left, right: left << right % 64),
    ">>": (8, lambda left, right: left >> right % 64), "+": (9, operator.add),
    "-": (9, operator.sub), "*": (10, operator.mul), "/": (10, _quotient),
    "%": (10, lambda left, right: left - _quotient(left, right) * right), "**": (11, _power),
}  # fmt: skip
ASSIGNMENTS = {"=", *(f"{each}=" for each in ("+", "-", "*", "/", "%", "<<", ">>", "&", "|", "^"))}


@dataclass(slots=True)
class Formula:
    """An expression that is being read, with how variables are read and set."""

    tokens: list[str]
    value_of: Callable[[str], str]
    assign: Callable[[str, str], None]
    at: int = 0  # the token that is read next

    def peek(self) -> str:
        """Return the next token; empty at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def binary(self, level: int = 1) -> Term:
        """Return what operators that bind at least as *level* make."""
        left = self.unary()
        while (sign := self.peek()) in OPERATORS and OPERATORS[sign][0] >= level:
            self.at += 1
            right = self.binary(OPERATORS[sign][0] + (1 if sign != "**" else 0))
            left = partial(_combined, sign, left, right)
        return left

    def choice(self) -> Term:
        """Return ``a ? b : c``, or less."""
        condition = self.binary()
        if self.peek() != "?":
            return condition
        self.at += 1
        first = self.choice()
        if self.peek() != ":":
            raise PlanError("a `?` has no `:`")
        self.at += 1
        return partial(_chosen, condition, first, self.choice())

    def unary(self) -> Term:
        """Return a number, a variable or what is in parentheses, with its sign."""
        token = self.peek()
        self.at += 1
        if token in {"++", "--"} and self.peek().isidentifier():
            self.at += 1
            return partial(self.changed, self.tokens[self.at - 1], token[0], lambda: 1)
        if token in SIGNS:
            return partial(_signed, token, self.unary())
        if token[:1].isdigit():
            number = _number(token)
            return lambda: number
        if token.isidentifier():
            return self.variable(token)
        if MARKS.fullmatch(token):
            return lambda: token
        if token != "(":  # noqa: S105 - a parenthesis
            raise PlanError(f"arithmetic has `{token}` where a number is expected")
        inner = self.choice()
        if self.peek() != ")":
            raise PlanError(f"arithmetic has `{self.peek()}` where `)` is expected")
        self.at += 1
        return inner

    def variable(self, name: str) -> Term:
        """Return the value of a variable, after what is assigned to it here."""
        sign = self.peek()
        if sign in ASSIGNMENTS:
            self.at += 1
            return partial(self.changed, name, sign[:-1], self.choice())
        if sign in {"++", "--"}:
            self.at += 1
            return partial(self.changed, name, sign[0], None)
        return partial(self.value, name)

    def changed(self, name: str, sign: str, operand: Term | None) -> Number:
        """Assign a value; return it, or of ``A++`` the one before."""
        before = partial(self.value, name)
        number = before() if operand is None else 0
        right: Term = operand or (lambda: 1)
        value = _combined(sign, before, right) if sign else right()
        self.assign(name, str(value))
        return number if operand is None else value

    def value(self, name: str) -> Number:
        """Return the number that a variable holds: it may be an expression itself."""
        return evaluate(self.value_of(name), self.value_of, self.assign)


def _chosen(condition: Term, first: Term, second: Term) -> Number:
    value = condition()
    return value if isinstance(value, str) else first() if value else second()


def _signed(sign: str, term: Term) -> Number:
    value = term()
    return value if isinstance(value, str) else int(SIGNS[sign](value))


def _combined(sign: str, left: Term, right: Term) -> Number:
    """Return what an operator makes of two values; of ``&&`` and ``||`` one may suffice."""
    values: list[Number] = []
    for term in (left, right):
        value = term()
        if sign in {"&&", "||"} and isinstance(value, int) and bool(value) is (sign == "||"):
            return int(sign == "||")
        values.append(value)
    first, second = values
    if isinstance(first, str) or isinstance(second, str):
        return first if isinstance(first, str) else second
    return (int(OPERATORS[sign][1](first, second)) + 2**63) % 2**64 - 2**63  # bash has 64 bits


def _number(text: str) -> int:
    base = 16 if text.lower().startswith("0x") else 8 if text.startswith("0") else 10
    try:
        return int(text, base)
    except ValueError:
        raise PlanError(f"arithmetic has {text[:40]!a}, which is no whole number") from None


def evaluate(
    text: str, value_of: Callable[[str], str], assign: Callable[[str, str], None]
) -> Number:
    """Return the value of an expression, or the mark of what it depends on.

    Raises:
        PlanError: If it is no expression, has ``,`` or an element, or divides by 0.

    >>> evaluate("(2 + 3) * -4 ** 2 % 7", lambda name: "", lambda name, value: None)
    3
    """
    tokens = TOKEN.findall(text)
    if not tokens:
        return 0
    formula = Formula(tokens, value_of, assign)
    term = formula.choice()
    if formula.at < len(tokens):
        raise PlanError(f"arithmetic has `{formula.peek()[:40]}` where it should end")
    return term()
