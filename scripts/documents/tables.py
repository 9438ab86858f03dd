"""Tables in Markdown: set, and read back where only a row or a column is made anew."""

import re
from collections.abc import Iterable, Sequence

Table = list[list[str]]
ESCAPED = r"\|"
BORDER = re.compile(r"(?<!\\)\|")


def block(text: str) -> str:
    """Return *text* as it stands between two marks on lines of their own.

    Python-Markdown reads a table only between empty lines.
    """
    return "\n\n" + text.strip("\n") + "\n\n"


def row(cells: Iterable[object]) -> str:
    r"""Return a line of a table; a border within a cell is none of the table's.

    >>> row(["fsdp", 3, "Et|tL"])
    '| fsdp | 3 | Et\\|tL |'
    """
    return f"| {' | '.join(str(cell).replace('|', ESCAPED) for cell in cells)} |"


def table(head: Sequence[str], rows: Iterable[Iterable[object]], *, rule: str = "---") -> str:
    """Return a whole table between marks.

    Args:
        head: Its first line.
        rows: Its others.
        rule: How a column is set: ``" --- "`` is no other Markdown than ``"---"``.
    """
    under = "|" + "|".join([rule] * len(head)) + "|"
    return block("\n".join([row(head), under, *map(row, rows)]))


def cells_of(text: str) -> Table:
    """Return the cells of a table, head and rule among its lines.

    >>> cells_of("| a | b |")
    [['a', 'b']]
    """
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in BORDER.split(line)[1:-1]] for line in lines]


def with_cells(text: str, changes: dict[tuple[int, int], str]) -> str:
    """Return a table with other cells at some (line, column) of its lines; -1 is the last.

    >>> with_cells("| a | b |", {(0, -1): "c"}).strip()
    '| a | c |'
    """
    lines = text.strip("\n").splitlines()
    for (line, column), value in changes.items():
        first, *cells, last = BORDER.split(lines[line])
        cells[column] = f" {value} "
        lines[line] = "|".join([first, *cells, last])
    return block("\n".join(lines))
