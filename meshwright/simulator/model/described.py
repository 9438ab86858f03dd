"""Base classes of all kinds of models, strict parsing, and one-line errors."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol, TypeVar, get_args

from meshwright.hwprofiles import LINE_RULE, TEXT_RULE, has_controls, nearest_names
from meshwright.records import Record, model_validator
from meshwright.simulator.errors import PlanError, shorten
from meshwright.simulator.model.kinds import BlockKind, BlockRun, join_runs

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Upper limits: some tenfold above any published model, and low enough that a
# model's bytes fit a signed 64-bit integer with room for optimizer states.
MAX_LAYERS = 10_000
MAX_WIDTH = 262_144


class Fields(Record, strict=True):
    """A table of a user's file, read without type coercion."""


class Model(Fields):
    """A model; ``title`` defaults to ``name``.

    ``sample`` is the unit of batch sizes and rates: tokens of a sequence, or whole samples, which
    count as sequences of length 1.
    """

    sample: ClassVar[str] = "tokens"

    if TYPE_CHECKING:  # each kind declares both in the order in which its fields are shown
        name: str
        title: str

    def __repr__(self) -> str:
        """Return the model's name."""
        return f"{type(self).__name__}({self.name!r})"

    @model_validator(mode="before")
    @classmethod
    def _fill_title(cls, data: object) -> object:
        # Before validation, as an empty title is refused.
        if not isinstance(data, Mapping) or data.get("name") is None:
            return data
        return {"title": data["name"], **data}

    @model_validator(mode="after")
    def _check_names(self) -> None:
        for field in type(self).model_fields:
            text = getattr(self, field)
            if not isinstance(text, str):
                continue
            if field in {"name", "title"} and not text.isprintable():
                raise ValueError(f"{field}={shorten(text)} must {LINE_RULE}")
            # Texts of models are printed to terminals.
            if has_controls(text):
                raise ValueError(f"{field}={shorten(text)} must {TEXT_RULE}")


class ProductSize(NamedTuple):
    """A GEMM dim on a rank, best a multiple of what tensor cores load; *is_linear*: also in fp8."""

    name: str
    size: int
    is_linear: bool = True


class ParameterTensor(NamedTuple):
    """A parameter tensor; *tp_dim* is the dim split over tp, or None if it is replicated."""

    name: str
    shape: tuple[int, ...]
    block: BlockKind
    tp_dim: int | None


class LayerKind(Protocol):
    """A kind of layer, equal for layers of equal shapes."""

    @property
    def name(self) -> BlockKind:
        """Kind of block of the layer."""


K = TypeVar("K", bound=LayerKind)


class ListedModel(Model, Generic[K]):
    """A model with a list of different layers, whose samples count as sequences of length 1."""

    tied_embeddings: ClassVar[bool] = False
    experts: ClassVar[None] = None
    seq_len: ClassVar[int] = 1

    @property
    def layers(self) -> tuple[K, ...]:
        """All layers in model order."""
        raise NotImplementedError

    def layer(self, name: BlockKind) -> K:
        """Return the layer of kind *name*."""
        return next(kind for kind in self.layers if kind.name == name)

    @property
    def layer_runs(self) -> tuple[BlockRun, ...]:
        """Layers in model order, consecutive equal ones joined."""
        return join_runs([BlockRun(kind.name, 1) for kind in self.layers])


T = TypeVar("T", bound=Model)


def parse(kind: type[T], data: Mapping[str, object], *, origin: str) -> T:
    """Return the model of class *kind* described by the mapping of a file.

    Args:
        kind: Class of the model.
        data: Its fields by name.
        origin: Name of the mapping in errors, normally that of the file.

    Raises:
        PlanError: If a key is missing, unknown or out of range, or if sizes
            disagree; one line for the first fault found.
    """
    from pydantic import ValidationError  # noqa: PLC0415  (built-in models are not checked)

    try:
        return kind.model_validate(dict(data))
    except ValidationError as error:
        faults = error.errors()
        # A misspelt key is also a missing one; the misspelling is the better hint.
        unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]
        raise PlanError(f"{origin}: {_describe(kind, (unknown or faults)[0])}") from None


def _describe(kind: type[Model], fault: "ErrorDetails") -> str:
    """Return a one-line message for an error of pydantic."""
    loc = fault["loc"]
    key = ".".join(str(part) for part in loc)
    match fault["type"]:
        case "missing":
            return f"{key} is missing"
        case "extra_forbidden":
            fields = list(_table(kind, loc).model_fields)
            nearest = nearest_names(str(loc[-1]), fields)
            hint = f"nearest: {', '.join(nearest)}" if nearest else f"known: {', '.join(fields)}"
            return f"unknown key {shorten(key)}; {hint}"
        case "value_error":
            where = f"{key}: " if key else ""
            return f"{where}{fault['ctx']['error']}"
        case _:
            rule = fault["msg"][0].lower() + fault["msg"][1:]
            return f"{key}={shorten(fault['input'])}: {rule}"


def _table(kind: type[Model], loc: tuple[int | str, ...]) -> type[Fields]:
    """Return the class of the table at *loc*: the model's, or that of a list of tables."""
    if len(loc) == 1:
        return kind
    item: type[Fields] = get_args(kind.model_fields[str(loc[0])].annotation)[0]
    return item
