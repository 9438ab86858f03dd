"""Tables of published figures: lines of a CSV file as typed rows."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from meshwright.hwprofiles import FileKind, ProfileError, nearest_names
from meshwright.planner.reports import Json, named
from meshwright.simulator.layout import PLAN_FIELDS


def empty_is_none(value: object) -> object:
    """Return None for an empty cell."""
    return None if value == "" else value


Text = Annotated[str, Field(min_length=1, max_length=2000)]
Note = Annotated[str, Field(max_length=2000)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Tolerance = Annotated[float, Field(gt=0, le=1)]
OptionalPositive = Annotated[Positive | None, BeforeValidator(empty_is_none)]


SIZES = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size"),
    *("vocab_size", "seq_len"),
)


class Row(BaseModel):
    """A line of a table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Text

    @property
    def plan_columns(self) -> dict[str, Json]:
        """Columns with the name of a plan's field."""
        return named(self, *(name for name in PLAN_FIELDS if name in type(self).model_fields))


R = TypeVar("R", bound=Row)
TABLE_FILE = FileKind(title="CSV file", most_bytes=10_000_000)


def load_rows(row_type: type[R], path: Path | None, built_in: str) -> tuple[R, ...]:
    """Return the rows of a table, each checked.

    Args:
        row_type: Type of a row; its fields are the columns.
        path: The table, or None for the built-in one.
        built_in: Name of that.

    Raises:
        ProfileError: Naming file, line, column and value of the first mistake.
    """
    file = str(path or built_in)
    if path is None:
        source = files("meshwright.validate") / "data" / built_in
        text = source.read_text(encoding="utf-8")
    else:
        text = TABLE_FILE.read_text(path)
    columns, table = TABLE_FILE.parse_table(text, file)
    _check_columns(row_type, columns, file)
    rows: dict[str, R] = {}
    for number, cells in table:
        row = _checked(row_type, cells, f"{file}: line {number}")
        if row.id in rows:
            raise ProfileError(
                f"{file}: line {number}: id={row.id!r} repeats; allowed: each id once"
            )
        rows[row.id] = row
    return tuple(rows.values())


def _check_columns(row_type: type[Row], names: Sequence[str], file: str) -> None:
    field_names = list(row_type.model_fields)
    for name in names:
        if name not in field_names:
            near = ", ".join(nearest_names(name, field_names) or field_names)
            raise ProfileError(f"{file}: column {name!r} is unknown; nearest: {near}")
    for name in field_names:
        if name not in names:
            raise ProfileError(
                f"{file}: column {name!r} is missing; required: {', '.join(field_names)}"
            )


def _checked(row_type: type[R], data: Mapping[str, object], place: str) -> R:
    try:
        return row_type.model_validate(data)
    except ValidationError as error:
        fault = error.errors()[0]
        if fault["type"] == "value_error":
            raise ProfileError(f"{place}: {fault['ctx']['error']}") from None
        column = ".".join(str(part) for part in fault["loc"][:1])
        rule = fault["msg"][0].lower() + fault["msg"][1:]
        raise ProfileError(f"{place}: {column}={fault['input']!r}: {rule}") from None
