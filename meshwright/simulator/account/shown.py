"""Results with their documents, tables and pictures in Python.

A package above this one makes them, which a result imports on first use: a simulation waits neither
for pandas nor for matplotlib.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

PRESENTATION = "meshwright.planner.presentation"


class Presenter(NamedTuple):
    """Presentation of a result, as its command shows it.

    Args:
        document: Returns the document of ``--json``.
        rows: Returns the rows of the CSV file.
        picture: Returns a picture by name; raises PlanError if there is none.
    """

    document: "Callable[[], Mapping[str, object]]"
    rows: "Callable[[], list[Mapping[str, object]]]"
    picture: "Callable[[str | None], Figure]"


class Shown:
    """Result with the documents, tables and pictures of its command."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``--json``, in base units: seconds, bytes, FLOP/s."""
        return dict(self._document())

    def to_frame(self) -> "DataFrame":
        """Return the CSV file of ``--out`` as a table; every row has the columns to join tables by.

        That is ``model``, ``cluster``, ``stack``, ``num_gpus``, ``global_batch_size``, ``seq_len``
        and ``precision``.
        """
        from pandas import DataFrame  # noqa: PLC0415 - half a second that only tables need

        rows = self._rows()
        frame = DataFrame(rows)
        # Whole numbers of which some rows have none would be floats otherwise.
        whole = [
            str(name)
            for name in frame
            if frame[name].dtype == float
            and all(isinstance(row.get(str(name)), int | None) for row in rows)
        ]
        return frame.astype(dict.fromkeys(whole, "Int64"))

    def plot(self, kind: str | None = None) -> "Figure":
        """Return a picture, which a notebook shows and whose ``savefig`` writes it.

        Args:
            kind: Name of its file in the folder of ``--out``; by default the first.

        Raises:
            PlanError: If the result has no such picture.
        """
        return self._picture(kind)

    def _document(self) -> Mapping[str, object]:
        return _presenter(self).document()

    def _rows(self) -> list[Mapping[str, object]]:
        return _presenter(self).rows()

    def _picture(self, kind: str | None) -> "Figure":
        return _presenter(self).picture(kind)


def _presenter(result: Shown) -> Presenter:
    return cast("Presenter", import_module(PRESENTATION).presenter_of(result))
