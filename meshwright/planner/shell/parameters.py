"""Parameters (variables, elements, arguments, ``${...}``), and arithmetic: ``$(( ))``, indexes."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from meshwright.planner.shell.interpreter import Interpreter, Variable
from meshwright.planner.shell.words import (
    MARKS,
    WHITE,
    Fragment,
    Kind,
    Text,
    field_of,
    joined,
    written,
)
from meshwright.simulator import PlanError

PARAMETER = re.compile(
    r"(?P<length>#?)(?P<name>[A-Za-z_]\w*|\d+|[@*?$!#-])"
    r"(?:\[(?P<index>(?:[^][]|\[[^]]*\])*)\])?(?P<operator>:?[-=?+]|##?|%%?|\^\^?|,,?|$)",
    re.ASCII,
)
CASES: Mapping[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}
TOKEN = re.compile(
    r"\s*(?:(\d\w*|[A-Za-z_]\w*|<<=|>>=|\*\*|\+\+|--|<<|>>|&&|\|\||[-+*/%&|^<>=!]=|\S))", re.ASCII
)
SIGNS: Mapping[str, Callable[[int], int]] = {
    "-": operator.neg, "+": operator.pos, "!": operator.not_, "~": operator.invert,
}  # fmt: skip
Number = int | str  # a mark where it is unknown
Term = Callable[[], Number]  # evaluated when it is asked for: a side of `&&` may not be


class Parameter(NamedTuple):
    """Parameter between ``${`` and an operator."""

    name: str  # of the variable, or the number of an argument
    element: int | str = 0  # its index, or the mark of what that depends on; `@` or `*` all
    is_length: bool = False  # a `#` stands before it: a length, or a count

    @property
    def is_all(self) -> bool:
        """True if it stands for several values."""
        return self.name in {"@", "*"} or self.element in {"@", "*"}


def values(shell: Interpreter, parameter: Parameter, place: int) -> tuple[Text, ...] | None:
    """Return the values of a parameter; None of one that nothing sets."""
    name, state = parameter.name, shell.state
    if name in {"@", "*"}:
        return state.arguments
    if name == "#" or name.isdigit():
        return _of_arguments(shell, name, place)
    variable = state.variables.get(name)
    if variable is not None:
        return _of_variable(shell, parameter, variable, place)
    places = {"PWD": state.folder, "BASH_SOURCE": state.name, "IFS": written(WHITE, place)}
    # What nothing sets here, but a file that is not there may, is no reason for a default.
    value = places[name] if name in places else shell.unset(name, place)
    first = shell.unknowns.first(value.characters) if name not in places else None
    return None if first is not None and first.is_unset else (value,)


def _of_variable(
    shell: Interpreter, parameter: Parameter, variable: Variable, place: int
) -> tuple[Text, ...]:
    name, index, texts = parameter.name, parameter.element, variable.texts
    if name in shell.defines and any(not each.place for each in texts):
        shell.used.add(name)
    if parameter.is_all:
        if not variable.is_array and name in shell.defines and not texts[0].place:
            # No array can be given: its words are.
            return tuple(written(each, 0) for each in texts[0].characters.split())
        return texts
    if isinstance(index, str):
        return (written(index, place),)
    if -len(texts) <= index < len(texts):
        return (texts[index],)
    unknown = [each for each in texts if variable.is_array and MARKS.search(each.characters)]
    return (unknown[0] if unknown else Text(),)


def _of_arguments(shell: Interpreter, name: str, place: int) -> tuple[Text, ...] | None:
    """Return an argument of the script or the function, ``$1``, or how many there are, ``$#``."""
    arguments = shell.state.arguments
    if name == "#":
        first = shell.unknowns.first("".join(each.characters for each in arguments))
        is_open = first is not None and first.shown == "$@"
        return (
            shell.mark(place, first) if first and is_open else written(str(len(arguments)), place),
        )
    shell.used |= {name} & {*shell.defines}
    arguments_from = (shell.state.name, *arguments)[int(name) :][:1]
    return arguments_from or ((Text(),) if shell.state.knows_arguments else None)


def calculated(shell: Interpreter, characters: str, place: int) -> int | str:
    """Return the value of an expression, or the mark of what it depends on."""

    def value_of(name: str) -> str:
        shell.spend(place)
        texts = values(shell, Parameter(name), place)
        return (shell.unset(name, place) if texts is None else joined(texts)).characters

    def assign(name: str, value: str) -> None:
        shell.assign(name, written(value, place), place)

    try:
        return evaluate(characters.replace("\\\n", "").replace('"', ""), value_of, assign)
    except PlanError as error:
        raise shell.refusal(place, str(error)) from None


def operated(
    shell: Interpreter,
    parameter: Parameter,
    sign: str,
    word: Callable[[], list[Fragment]],
    place: int,
    kind: Kind,
) -> list[Fragment]:
    """Return the fragments of a parameter with an operator (``:-``, or none).

    *word* expands what stands after the operator; *kind* is the quoting of the whole.
    """
    texts = values(shell, parameter, place)
    if parameter.is_length and texts is not None:
        texts = (_length(shell, parameter, texts, place),)
    if sign.lstrip(":") in {"-", "=", "?", "+"}:
        fallback = _conditional(shell, parameter, sign, texts, word)
        if fallback is not None:
            return fallback or [Fragment(Text(), kind)]
    if texts is None:
        texts = (shell.unset(parameter.name, place),)
    if sign[:1] in {"#", "%"}:
        pattern = word()
        texts = tuple(_changed(shell, each, sign, pattern, place) for each in texts)
    elif sign in CASES:
        if word():
            raise shell.refusal(place, f"a pattern after `{sign}` is not read")
        texts = tuple(Text(CASES[sign](each.characters), each.places) for each in texts)
    if not parameter.is_all or parameter.is_length:
        return [Fragment(each, kind) for each in texts]
    # `"$*"` is one word, `"$@"` one for each argument.
    if "*" in (parameter.name, parameter.element) and kind is Kind.QUOTED:
        shell.spend(place, characters=sum(len(each.characters) for each in texts))
        return [Fragment(field_of([Fragment(e, kind, begins=True) for e in texts]).text, kind)]
    return [Fragment(each, kind, begins=number > 0) for number, each in enumerate(texts)]


def _length(shell: Interpreter, parameter: Parameter, texts: tuple[Text, ...], place: int) -> Text:
    first = shell.unknowns.first("".join(each.characters for each in texts))
    if first is not None and (first.is_open or not parameter.is_all):
        return shell.mark(place, first)
    return written(str(len(texts) if parameter.is_all else len(texts[0].characters)), place)


def _conditional(
    shell: Interpreter,
    parameter: Parameter,
    sign: str,
    texts: tuple[Text, ...] | None,
    word: Callable[[], list[Fragment]],
) -> list[Fragment] | None:
    """Return the word after an operator where it counts; None where the value does."""
    is_empty = not texts
    if sign[0] == ":":
        characters = "".join(each.characters for each in texts or ())
        is_empty = not shell.unknowns.without_unset(characters)
    if sign[-1] == "+":
        return [] if is_empty else word()
    if not is_empty or sign[-1] == "?":
        return None
    default = word()
    if sign[-1] == "=":
        text = field_of(default).text
        shell.assign(parameter.name, text, text.place)
    return default


def _changed(
    shell: Interpreter, text: Text, sign: str, pattern: list[Fragment], place: int
) -> Text:
    """Return a value after an operator that cuts (``#``, ``%``)."""
    characters = text.characters
    mark = MARKS.search(characters + field_of(pattern).text.characters)
    if mark is not None:
        return written(mark[0], place)
    match = shell.matched(pattern, characters, place, sign)
    return text.part(*match.span(1)) if match else text


def _quotient(left: int, right: int) -> int:
    """Return a quotient rounded towards 0, as bash does."""
    if right == 0:
        raise PlanError("division by 0")
    # Python rounds down.
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size


def _power(left: int, right: int) -> int:
    if right < 0:
        raise PlanError("an exponent below 0")
    # Values wrap at 64 bits: no higher power is built.
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
        """Return the term of operators that bind at least as *level*."""
        left = self.unary()
        while (sign := self.peek()) in OPERATORS and OPERATORS[sign][0] >= level:
            self.at += 1
            # `**` groups to the right, all others to the left.
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
    """Return the value of an operator; of ``&&`` and ``||`` one operand may suffice."""
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
    # As in C: a leading 0 is octal.
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
