"""Conditions on a plan and its job, as a stack's file writes them: ``tp > 1 and not cp > 1``.

Python's parser reads them; the few kinds of nodes that a condition may have are interpreted here,
on numbers or on columns of numbers. Nothing of a file is ever run.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache, reduce
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from meshwright.hwprofiles.complaints import ProfileError, shown, suggestion
from meshwright.hwprofiles.units import Flag, Name, Profile, Title
from meshwright.records import AfterValidator, model_validator, rare

# A number, or a NumPy column of numbers: both compare, and what they compare to combines with "&".
# This package does without NumPy, so the type is open.
Number: TypeAlias = Any
Compare: TypeAlias = Callable[[Number, Number], Number]

MOST_LETTERS = 400
NOT_MODELLED = "not modelled here"
IN_BRACES = re.compile(r"\{([a-z_.]+)\}")
GRAMMAR = "comparisons of fields and facts, as: tp > 1 and model.experts.num_experts % ep != 0"
COMPARISONS: Mapping[type[ast.cmpop], Compare] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
ARITHMETIC: Mapping[type[ast.operator], Compare] = {
    # A count such as tp_cp_inner is 0 where a plan has no such ranks, and then divides everything.
    ast.Mod: lambda number, ranks: number % (ranks + (ranks == 0)),
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda number, ranks: number // (ranks + (ranks == 0)),
}
CONNECTIVES: Mapping[type[ast.boolop], Compare] = {ast.And: operator.and_, ast.Or: operator.or_}
# Allow-list of syntax: a call, a subscript or a lambda is refused before anything is evaluated.
NODES: tuple[type[ast.AST], ...] = (
    *(ast.BoolOp, ast.UnaryOp, ast.Not, ast.BinOp, ast.Compare, ast.List, ast.Load, ast.Constant),
    *(ast.And, ast.Or, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(ast.Mod, ast.Mult, ast.FloorDiv),
)


class Names(Protocol):
    """Values of the names in a condition."""

    def number(self, name: str) -> Number:
        """Return the number of a plan field, or a fact of the job, by its *name*."""

    def code(self, name: str, value: object) -> Number:
        """Return the integer code of *value*, a literal that a condition compares with *name*."""


class Condition:
    """A parsed condition.

    >>> condition = Condition("tp > 1 and tp % 2 == 0 or model.experts")
    >>> sorted(condition.names)
    ['model.experts', 'tp']
    """

    __slots__ = ("names", "names_of_parts", "parts", "text")

    def __init__(self, text: str) -> None:
        """Parse *text*.

        Raises:
            ProfileError: If it is no condition.
        """
        try:
            if len(text) > MOST_LETTERS:  # bounds time and memory of Python's parser
                raise ValueError
            tree = ast.parse(text, mode="eval").body
            is_and = isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And)
            parts = tuple(tree.values) if isinstance(tree, ast.BoolOp) and is_and else (tree,)
            names_of_parts = tuple(frozenset(_names(part)) for part in parts)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ProfileError(f"{shown(text)} is no condition; allowed: {GRAMMAR}") from None
        self.text, self.parts, self.names_of_parts = text, parts, names_of_parts
        self.names = frozenset().union(*names_of_parts)

    def __repr__(self) -> str:
        """Return the text."""
        return f"Condition({self.text!r})"

    def __eq__(self, other: object) -> bool:
        """Return True if *other* has the same text."""
        return isinstance(other, Condition) and self.text == other.text

    def __hash__(self) -> int:
        """Return a number of the text."""
        return hash(self.text)

    def about(self, predicate: Callable[[str], bool]) -> tuple[tuple[ast.expr, ...], ...]:
        """Return the operands of ``and`` whose names all satisfy *predicate*, and the others."""
        are_chosen = [all(map(predicate, names)) for names in self.names_of_parts]
        pairs = [*zip(self.parts, are_chosen, strict=True)]
        return tuple(part for part, is_so in pairs if is_so), tuple(
            part for part, is_so in pairs if not is_so
        )

    def holds(self, names: Names) -> Number:
        """Return True, or a column of booleans, where the condition holds."""
        return all_hold(self.parts, names)


@cache
def parsed(text: str) -> Condition:
    """Return the condition of *text*, which several stacks may have; raises as `Condition`."""
    return Condition(text)


def all_hold(parts: tuple[ast.expr, ...], names: Names) -> Number:
    """Return True if all *parts* of a condition hold; an empty conjunction is True.

    Parts behind one that holds of no plan are not evaluated.
    """
    result: Number = True
    for part in parts:
        result = _truth(part, names) & result
        if not (result.any() if hasattr(result, "any") else result):
            break
    return result


def names_of(parts: tuple[ast.expr, ...]) -> frozenset[str]:
    """Return the names that *parts* of a condition read."""
    return frozenset(name for part in parts for name in _names(part))


def filled(text: object, value: Callable[[str], object]) -> object:
    """Return *text* with ``{name}`` replaced by its value; a value of None leaves it as it is."""

    def replacement(match: re.Match[str]) -> str:
        inserted = value(match[1])
        return match[0] if inserted is None else str(inserted)

    return IN_BRACES.sub(replacement, text) if isinstance(text, str) else text


@cache
def _names(condition: ast.expr) -> tuple[str, ...]:
    """Return the names that a condition reads.

    Raises:
        ValueError: If it is none: a chain of comparisons, a list or a word that none compares.
    """
    names: list[str] = []
    compared: list[ast.AST] = []
    waiting: list[ast.AST] = [condition]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            names.append(_dotted(node))
            continue
        if not isinstance(node, NODES):
            raise ValueError(node)
        if isinstance(node, ast.Compare):
            (sign,), (other,) = node.ops, node.comparators
            if isinstance(other, ast.List) != isinstance(sign, ast.In | ast.NotIn):
                raise ValueError(other)
            compared += [node.left, other, *(other.elts if isinstance(other, ast.List) else ())]
        elif isinstance(node, ast.Constant | ast.List):
            _check_operand(node, is_compared=node in compared)
        waiting += ast.iter_child_nodes(node)
    return tuple(names)


def _check_operand(node: ast.Constant | ast.List, *, is_compared: bool) -> None:
    """Raise ValueError for a list with non-constants, or a word where nothing compares it."""
    if isinstance(node, ast.List):
        if not (is_compared and node.elts and all(isinstance(x, ast.Constant) for x in node.elts)):
            raise ValueError(node)
    elif type(node.value) is not int and not (  # isinstance would take True for 1
        is_compared and isinstance(node.value, str | bool | None)
    ):
        raise ValueError(node)


def _dotted(node: ast.expr) -> str:
    """Return a name, or names joined by dots; raises ValueError for what is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError(node)


def _truth(node: ast.expr, names: Names) -> Number:
    if isinstance(node, ast.BoolOp):
        return reduce(CONNECTIVES[type(node.op)], (_truth(each, names) for each in node.values))
    if isinstance(node, ast.UnaryOp):
        return _truth(node.operand, names) == 0  # "not" would fail on a column
    if not isinstance(node, ast.Compare):
        return _value(node, names) != 0
    (sign,), (other,) = node.ops, node.comparators
    if not isinstance(other, ast.List):
        left = _operand(node.left, other, names)
        return COMPARISONS[type(sign)](left, _operand(other, node.left, names))
    number = _value(node.left, names)
    listed = (number == _operand(each, node.left, names) for each in other.elts)
    is_one = reduce(operator.or_, listed)
    return is_one if isinstance(sign, ast.In) else is_one == 0  # as for "not"


def _value(node: ast.expr, names: Names) -> Number:
    if isinstance(node, ast.BinOp):
        return ARITHMETIC[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.Constant):
        return node.value
    return names.number(_dotted(node))


def _operand(node: ast.expr, other: ast.expr, names: Names) -> Number:
    """Return the number of an operand; a literal is coded as the field *other* codes it."""
    is_word = isinstance(node, ast.Constant) and type(node.value) is not int
    if is_word and isinstance(other, ast.Name | ast.Attribute):
        assert isinstance(node, ast.Constant)
        return names.code(_dotted(other), node.value)
    return _value(node, names)


def _checked(when: str) -> str:
    """Return *when* unchanged if it is empty or a condition; raises as `Condition`."""
    if when:
        parsed(when)
    return when


def in_parentheses(why: str) -> str:
    """Return ``(why)`` for the end of a refusal, empty where no rule is known."""
    return f" ({why})" if why else ""


class Rule(Profile):
    """The source of a refusal: a rule of the framework, or a limit of this model of it.

    Args:
        why: By which rule of the framework, a function or an option, and which release has it; of
            what is not modelled, what the framework does instead.
        modelled: False where the framework has no such rule: it is not modelled here.
    """

    why: Title | Literal[""] = ""
    modelled: Flag = rare(usual=True)

    def words(self, framework: str = "") -> str:
        """Return the rule in words, empty where it says nothing.

        >>> Rule(why="torchtitan 0.2.2 runs it", modelled=False).words()
        'not modelled here: torchtitan 0.2.2 runs it'
        >>> Rule(modelled=False).words("DeepSpeed 0.6")
        'not modelled here, of DeepSpeed 0.6'
        """
        # A limit of this model must not read as if it were a rule of the framework.
        if self.modelled:
            return self.why
        if self.why:
            return f"{NOT_MODELLED}: {self.why}"
        return f"{NOT_MODELLED}, of {framework}" if framework else NOT_MODELLED


class Refusal(Rule):
    """Plans that a stack, or a framework that launches it, does not run: ``[refused.NAME]``.

    Texts may name fields and facts in braces.

    Args:
        field: Of the plan, which another value would help; or ``model``, or a fact of job or stack.
        when: What holds of such plans; empty where a stack runs what its base refuses.
        allowed: Values of the field that go, or in words what does.
        reason: The plans in words; by default ``when``.  Of a field ``model``: what it has.
        conflict: What the field's value does not go with, where others of the plan are at fault.
    """

    field: Name
    when: Annotated[str, AfterValidator(_checked)]
    allowed: tuple[Flag | Title | int, ...] = ()
    reason: Title | Literal[""] = ""
    conflict: Title | Literal[""] = ""


class Ruled(Profile):
    """Refusals of a stack, and the framework's rules behind them.

    Args:
        ruled_by: Framework and releases whose code its lists were held to.
        rules: Why lists and switches offer no more, by the name of each; of others the framework
            has no more.
        refused: Plans that it does not run, by a name that a stack based on it may say anew.
    """

    ruled_by: Title | Literal[""] = rare("")
    rules: dict[Name, Rule] = rare({})
    refused: dict[Name, Refusal] = rare({})

    @model_validator(mode="after")
    def _check_rules(self) -> None:
        known = list(type(self).model_fields)
        for name in self.rules:
            if name not in known:
                raise ProfileError(f"rules: {name} is no trait; {suggestion(name, known)}")

    def rule(self, trait: str) -> str:
        """Return the rule that limits a list or a flag, in words; empty where none is known."""
        if trait in self.rules:
            return self.rules[trait].words(self.ruled_by)
        return f"{self.ruled_by} has no other" if self.ruled_by else ""
