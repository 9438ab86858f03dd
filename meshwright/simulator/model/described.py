"""What all kinds of models have in common: a name, a source, strict reading, one line a fault."""

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
    """A table that a person wrote."""


class Model(Fields):
    """What is trained; ``title`` equals ``name`` where it is not given.

    ``sample`` is what a batch counts and a rate is of: tokens of a sequence, or whole samples,
    which are sequences of length 1.
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
            if has_controls(text):
                raise ValueError(f"{field}={shorten(text)} must {TEXT_RULE}")


class ProductSize(NamedTuple):
    """A size on a rank that tensor cores load in whole lines; *is_linear* in those of fp8, too."""

    name: str
    size: int
    is_linear: bool = True


class ParameterTensor(NamedTuple):
    """One weight tensor; *tp_dim* is the dim split over tp, or None if each rank has it all."""

    name: str
    shape: tuple[int, ...]
    block: BlockKind
    tp_dim: int | None


class LayerKind(Protocol):
    """A kind of layer: all that tells it from others."""

    @property
    def name(self) -> BlockKind:
        """What it is called."""


K = TypeVar("K", bound=LayerKind)


class ListedModel(Model, Generic[K]):
    """A model whose layers differ, and whose sample is a sequence of length 1."""

    tied_embeddings: ClassVar[bool] = False
    experts: ClassVar[None] = None
    seq_len: ClassVar[int] = 1

    @property
    def layers(self) -> tuple[K, ...]:
        """The kind of each layer, in the order in which they run."""
        raise NotImplementedError

    def layer(self, name: BlockKind) -> K:
        """Return the kind of layer of a name."""
        return next(kind for kind in self.layers if kind.name == name)

    @property
    def layer_runs(self) -> tuple[BlockRun, ...]:
        """The layers as runs of equal ones."""
        return join_runs([BlockRun(kind.name, 1) for kind in self.layers])


T = TypeVar("T", bound=Model)


def parse(kind: type[T], data: Mapping[str, object], *, origin: str) -> T:
    """Return the model of one kind that a mapping read from a file describes.

    Args:
        kind: What it is.
        data: Names of its fields with their values.
        origin: What to call the mapping in an error, normally the file name.

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
    """Return one line for one fault that pydantic found."""
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
    """Return the table in which *loc* is: the model's own, or one of a list of tables."""
    if len(loc) == 1:
        return kind
    item: type[Fields] = get_args(kind.model_fields[str(loc[0])].annotation)[0]
    return item
