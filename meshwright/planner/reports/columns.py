"""Tables that fit a terminal: values that all rows share move to the heading, the rest stacks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

GAP = "  "
INDENT = 2


class Column(NamedTuple):
    """A column of a table.

    Args:
        head: Its title.
        cells: Its text in each row.
        is_word: Whether it is aligned on the left.
        is_layout: Whether it is part of a layout: said once, in the heading, where the terminal is
            narrow and all rows have the same.
        is_first: Whether it stands in the first line of a row as long as there is room.
    """

    head: str
    cells: Sequence[str]
    is_word: bool = False
    is_layout: bool = False
    is_first: bool = False

    @property
    def width(self) -> int:
        """Columns of the terminal that it takes."""
        return max(map(cell_len, (self.head, *self.cells)))

    @property
    def is_constant(self) -> bool:
        """True if several rows have the same."""
        return self.is_layout and len(self.cells) > 1 and len(set(self.cells)) == 1

    def text(self, cell: str) -> str:
        """Return *cell* as wide as the column."""
        space = " " * (self.width - cell_len(cell))
        return cell + space if self.is_word else space + cell


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """Rows of a table, in one line each where the terminal is wide enough.

    Where it is not, columns of a layout that do not vary are said in the heading; if that does not
    do, a row takes two lines or more.  No column is left out.

    Args:
        columns: In order; the first one numbers the rows, or names them.
        shared: What all rows have in common and no column shows, as ``name=value``.
    """

    columns: Sequence[Column]
    shared: Sequence[str] = ()

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the heading and the lines of the rows."""
        columns, shared = list(self.columns), list(self.shared)
        if _line_width(columns) > options.max_width:
            constants = [f"{each.head}={each.cells[0]}" for each in columns if each.is_constant]
            columns, shared = [each for each in columns if not each.is_constant], constants + shared
        if shared:
            yield Text(f"all with {' '.join(shared)}")
        lines = list(_stacked(columns, options.max_width))
        for number, line in enumerate(lines):
            text = _joined(line, [each.head for each in line], number)
            if text.strip():
                yield Text(text, style="cyan")
        for row in range(len(columns[0].cells)):
            for number, line in enumerate(lines):
                text = _joined(line, [each.cells[row] for each in line], number)
                if number == 0 or text.strip():
                    yield Text(text)


def _line_width(columns: Sequence[Column]) -> int:
    return sum(each.width for each in columns) + len(GAP) * (len(columns) - 1)


def _joined(line: Sequence[Column], cells: Sequence[str], number: int) -> str:
    texts = (column.text(cell) for column, cell in zip(line, cells, strict=True))
    return (" " * INDENT * (number > 0) + GAP.join(texts)).rstrip()


def _stacked(columns: Sequence[Column], width: int) -> Iterator[list[Column]]:
    """Yield the columns of each line, those that come first before the others; order is kept."""
    remaining, number = list(columns), 0
    while remaining:
        room = width - INDENT * (number > 0)
        chosen: list[Column] = []
        # A first column that does not fit may still leave room for a narrower one.
        for column in sorted(remaining, key=lambda each: not each.is_first):
            if not chosen or _line_width([*chosen, column]) <= room:
                chosen.append(column)
            elif not column.is_first:
                break
        yield [each for each in remaining if each in chosen]
        remaining, number = [each for each in remaining if each not in chosen], number + 1
