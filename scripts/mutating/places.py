"""Functions of the project, named so that an edit above them changes no name."""

import ast
import re
from cProfile import Profile
from types import CodeType

PACKAGE = "/meshwright/"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def place(code: CodeType) -> str | None:
    """Return file and name of a function; None where it is not of the project.

    What has no name of its own, as a lambda or a comprehension, belongs to what it is written in.

    >>> place(compile("x", "/y/meshwright/planner/a.py", "exec"))
    'meshwright/planner/a.py:'
    """
    if PACKAGE not in code.co_filename:
        return None
    name = re.sub(r"(\.<locals>)?(^|\.)<(?!locals>)\w+>.*", "", code.co_qualname)
    return f"{PACKAGE[1:]}{code.co_filename.rpartition(PACKAGE)[2]}:{name}"


def enclosing(text: str, line: int) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    r"""Return the classes and functions whose bodies hold a *line*, the outermost first.

    >>> [each.name for each in enclosing("class A:\n    def f(self):\n        return 1\n", 3)]
    ['A', 'f']
    """
    kinds = FUNCTIONS | ast.ClassDef
    found = [
        each
        for each in ast.walk(ast.parse(text))
        if isinstance(each, kinds) and each.body[0].lineno <= line <= (each.end_lineno or 0)
    ]
    return sorted(found, key=lambda each: each.lineno)


def place_of_line(path: str, text: str, line: int) -> str:
    r"""Return file and name of the function that runs a *line* of a file's *text*.

    The name is empty where the line runs as the file is imported.

    >>> place_of_line("a.py", "class A:\n    x = 1\n    def f(self):\n        return 1\n", 4)
    'a.py:A.f'
    >>> place_of_line("a.py", "class A:\n    x = 1\n    def f(self):\n        return 1\n", 2)
    'a.py:'
    """
    outer = enclosing(text, line)
    while outer and isinstance(outer[-1], ast.ClassDef):
        outer.pop()
    parts = [
        f"{each.name}{'.<locals>' if isinstance(each, FUNCTIONS) else ''}" for each in outer[:-1]
    ]
    return f"{path}:{'.'.join([*parts, *(each.name for each in outer[-1:])])}"


def called(profile: Profile) -> list[str]:
    """Return the functions of the project that were called while *profile* was enabled."""
    codes = [entry.code for entry in profile.getstats() if isinstance(entry.code, CodeType)]
    return sorted({found for code in codes if (found := place(code)) is not None})
