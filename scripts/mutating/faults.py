"""The faults: every small change of an expression that a slip of the hand could make."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

PACKAGES = ("hwprofiles", "simulator", "planner", "validate")
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Eq: (ast.NotEq,),
    ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt), ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something else *written* from column *first* to *end*, in bytes, of a line of a file."""

    path: str
    line: int
    first: int
    end: int
    written: str

    @property
    def folder(self) -> str:
        """Folder of the file."""
        return Path(self.path).parent.as_posix()

    def changed(self, text: str) -> str:
        """Return the file's *text* with the fault in it."""
        lines = text.split("\n")
        content = lines[self.line - 1].encode()
        changed = content[: self.first] + self.written.encode() + content[self.end :]
        lines[self.line - 1] = changed.decode()
        return "\n".join(lines)

    def difference(self, text: str) -> str:
        """Return the line of *text* before and after."""
        before, after = (each.split("\n")[self.line - 1] for each in (text, self.changed(text)))
        return f"  - {before.strip()}\n  + {after.strip()}"


def faults_of(path: str, text: str) -> list[Fault]:
    """Return all faults of a file, by line.

    >>> [fault.written for fault in faults_of("x.py", "y = a + 1 if not b else c")]
    ['(c if not b else a + 1)', '(b)', '(a - 1)', '(a)', '2', '0']
    """
    found = [
        Fault(path, node.lineno, node.col_offset, node.end_col_offset or 0, written)
        for node in _expressions(ast.parse(text))
        if node.lineno == node.end_lineno
        for written in _written(node)
    ]
    return sorted(found, key=lambda fault: fault.line)


def chosen_faults(root: Path, under: Sequence[str], count: int, seed: int) -> list[Fault]:
    """Return *count* faults of different lines of folders or modules, the same for a seed."""
    by_line: dict[tuple[str, int], list[Fault]] = {}
    places = [root / each for each in under]
    paths = {path for each in places for path in (each, *each.rglob("*.py")) if path.is_file()}
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        if name.split("/")[1] in PACKAGES:
            for fault in faults_of(name, path.read_text(encoding="utf-8")):
                by_line.setdefault((fault.path, fault.line), []).append(fault)
    random = Random(seed)  # noqa: S311 - no secret
    lines = random.sample(sorted(by_line), min(count, len(by_line)))
    return [random.choice(by_line[line]) for line in lines]


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield all expressions that run and whose columns are known: no types, no formatted text."""
    for name, field in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "slice"} and not _runs(node, name):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                if isinstance(child, ast.expr):
                    yield child
                yield from _expressions(child)


def _runs(node: ast.AST, name: str) -> bool:
    """Whether a slice is an index; one of a name with a capital is a type."""
    if name != "slice" or not isinstance(node, ast.Subscript):
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id[:1].isupper())


def _written(node: ast.expr) -> Iterator[str]:
    """Yield what could stand in the place of an expression."""
    match node:
        case ast.Compare(left, [operator], [right]):
            for other in COMPARISONS[type(operator)]:
                yield f"({ast.unparse(ast.Compare(left, [other()], [right]))})"
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            yield f"({ast.unparse(ast.BinOp(left, OPERATORS[type(operator)](), right))})"
            yield f"({ast.unparse(left)})"
        case ast.BoolOp(operator, values):
            other_one = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(other_one, values))})"
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.IfExp(test, body, orelse):
            yield f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() | float() as value):
            yield from (repr(value + 1), repr(value - 1))
        case ast.Name(name) if name in NAMES:
            yield NAMES[name]
