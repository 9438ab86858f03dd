"""Sizes that keep code readable: the tail matters, not the median."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES_OF_A_FUNCTION = 40  # its body, without the docstring
MOST_LINES_OF_A_CLASS = 150
MOST_LINES_OF_A_MODULE = 400
SOURCES = sorted((ROOT / "meshwright").rglob("*.py"))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines from the first statement after the docstring to the last."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    last = body[-1].end_lineno
    assert last is not None
    return last - body[0].lineno + 1


def class_lines(node: ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_there_is_code_to_measure() -> None:
    assert len(SOURCES) > 40


def test_no_function_is_longer_than_a_screen() -> None:
    functions = {
        f"{shown(path)}:{node.lineno} {node.name}": body_lines(node)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert [name for name, count in functions.items() if count > MOST_LINES_OF_A_FUNCTION] == []


def test_no_class_does_too_much() -> None:
    classes = {
        f"{shown(path)}:{node.lineno} {node.name}": class_lines(node)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }
    assert [name for name, count in classes.items() if count > MOST_LINES_OF_A_CLASS] == []


def test_no_module_holds_two_subjects() -> None:
    lines = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert [name for name, count in lines.items() if count > MOST_LINES_OF_A_MODULE] == []


def test_the_docstring_is_not_counted() -> None:
    code = 'def f():\n    """One.\n\n    Two.\n    """\n    x = 1\n\n    return x\n'
    function = ast.parse(code).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert body_lines(function) == 3
