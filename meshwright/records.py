"""Records that files hold: each field is declared once, and what a user writes pydantic checks.

Files of this package are read unchecked (`Record.trusted`), as a test holds that checked they give
the same. So pydantic, whose import takes longer than such files, is imported when something else
is first checked, or a record written: what is declared here names what pydantic has.
"""
# ruff: noqa: PLC0415

from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError
from enum import EnumType, StrEnum
from functools import partial
from inspect import get_annotations
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

if TYPE_CHECKING:
    from pydantic import BaseModel, GetCoreSchemaHandler
    from pydantic_core import CoreSchema

F = TypeVar("F")
Read: TypeAlias = Callable[[Any], object]
NO_LIMITS = {"alias", "default", "default_factory", "exclude_if"}


class Declaration:
    """What pydantic is to make of a field or a method: its name there, and the options of that.

    ``parse`` reads what a file has of a field, where it is not a value that TOML has.
    """

    parse: Read | None = None

    def __init__(self, name: str, *arguments: object, **options: Any) -> None:  # noqa: ANN401
        """Note what is asked for."""
        self.name, self.arguments, self.options = name, arguments, options

    def made(self) -> Any:  # noqa: ANN401  (one of many classes)
        """Return what pydantic makes of it."""
        import pydantic

        return getattr(pydantic, self.name)(*self.arguments, **self.options)

    def __get_pydantic_core_schema__(
        self, source: object, handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        """Return the schema of a type that has this behind it in ``Annotated``."""
        made = self.made()
        if hasattr(made, "__get_pydantic_core_schema__"):
            schema: CoreSchema = made.__get_pydantic_core_schema__(source, handler)
            return schema
        return handler.generate_schema(Annotated[source, made])


def Field(default: object = ..., **options: Any) -> Any:  # noqa: ANN401, N802  (as in pydantic)
    """Declare the default of a field, its name in files and its limits."""
    usual = {} if default is ... else {"default": default}
    return Declaration("Field", **usual, **options)


AfterValidator = partial(Declaration, "AfterValidator")
Strict = partial(Declaration, "Strict")
WrapValidator = partial(Declaration, "WrapValidator")


def model_validator(*, mode: Literal["before", "wrap", "after"]) -> Callable[[F], F]:
    """Declare a method that checks a whole record, or fills in what its file leaves out."""
    return partial(_declare, Declaration("model_validator", mode=mode))


def model_serializer(*, mode: Literal["wrap"]) -> Callable[[F], F]:
    """Declare a method that writes a record."""
    return partial(_declare, Declaration("model_serializer", mode=mode))


def _declare(declaration: Declaration, method: F) -> F:
    setattr(method, "declaration", declaration)  # noqa: B010  (of a function, or a classmethod)
    return method


class RecordField(NamedTuple):
    """A field: its type, the limits behind that, its name in files, and its default or ``...``."""

    annotation: Any
    metadata: tuple[object, ...]
    alias: str | None
    default: Any
    declaration: Declaration

    @classmethod
    def of(cls, kind: Any, declared: Any) -> Self:  # noqa: ANN401  (of any type)
        """Return the field of an annotation, and of what stands behind it in a class."""
        if not isinstance(declared, Declaration):
            declared = Field(declared)
        options = declared.options
        annotation, *limits = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        limits += [declared] * bool(options.keys() - NO_LIMITS)
        make = options.get("default_factory", lambda: options.get("default", ...))
        return cls(annotation, tuple(limits), options.get("alias"), make(), declared)


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record:
    """A frozen record; options of its class are further ones of pydantic's ConfigDict."""

    model_fields: ClassVar[Mapping[str, RecordField]] = {}
    config: ClassVar[Mapping[str, bool | str]] = {"frozen": True, "extra": "forbid"}
    _fills: ClassVar[tuple[str, ...]] = ()
    _model: ClassVar["type[BaseModel]"]
    _reads: ClassVar[Mapping[str, tuple[str, Read | None, object]]]

    def __init_subclass__(cls, **config: bool) -> None:
        """Note the fields that a class declares."""
        super().__init_subclass__()
        own = {
            name: RecordField.of(kind, vars(cls).get(name, ...))
            for name, kind in get_annotations(cls).items()
            if getattr(kind, "__origin__", None) is not ClassVar
        }
        for name in own.keys() & vars(cls).keys():
            delattr(cls, name)
        fills = (
            name
            for name, each in vars(cls).items()
            if getattr(each, "declaration", None) and each.declaration.options["mode"] == "before"
        )
        cls._fills = (*fills, *cls._fills)  # what is declared last is the first that runs
        cls.model_fields, cls.config = {**cls.model_fields, **own}, {**cls.config, **config}

    def __init__(self, **values: Any) -> None:  # noqa: ANN401  (each of its field's type)
        """Check *values*; raises pydantic's ValidationError."""
        vars(self).update(self.model_validate(values))

    @classmethod
    def model_validate(cls, data: object, *, context: object = None) -> Self:
        """Return the record that *data* is; raises pydantic's ValidationError if it is none."""
        if isinstance(data, cls):
            return data
        return cls._of(vars(cls.checked_model().model_validate(data, context=context)))

    @classmethod
    def trusted(cls, data: Mapping[str, object]) -> Self:
        """Return the record that a file of this package describes, unchecked."""
        if "_reads" not in vars(cls):
            cls._reads = {
                name: (field.alias or name, _read(field.annotation, *field.metadata), field.default)
                for name, field in cls.model_fields.items()
            }
        for fill in cls._fills:
            data = getattr(cls, fill)(data)
        return cls._of(
            {
                name: (data[key] if read is None else read(data[key])) if key in data else default
                for name, (key, read, default) in cls._reads.items()
            }
        )

    @classmethod
    def _of(cls, values: Mapping[str, object]) -> Self:
        record = object.__new__(cls)
        vars(record).update(values)
        return record

    def model_copy(self, *, update: Mapping[str, object]) -> Self:
        """Return the same record with other values, unchecked."""
        return self._of({**vars(self), **update})

    def model_dump(self, **options: Any) -> dict[str, Any]:  # noqa: ANN401  (pydantic's own)
        """Return its values as pydantic writes them."""
        return self.checked_model().model_construct(**vars(self)).model_dump(**options)

    @classmethod
    def checked_model(cls) -> "type[BaseModel]":
        """Return the pydantic model of the same fields and methods, of which values are made."""
        if "_model" not in vars(cls):
            cls._model = _model(cls)
        return cls._model

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: object, handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        """Return how pydantic reads and writes it where it is part of something else."""
        from pydantic_core import core_schema

        model = cls.checked_model()

        def read(value: object, check: Callable[[object], object]) -> object:
            return value if isinstance(value, cls) else cls._of(vars(check(value)))

        def write(record: Record, written: Callable[[object], object]) -> object:
            return written(model.model_construct(**vars(record)))

        schema = handler(model)
        writing = core_schema.wrap_serializer_function_ser_schema(write, schema=schema)
        return core_schema.no_info_wrap_validator_function(read, schema, serialization=writing)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse to change."""
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __eq__(self, other: object) -> bool:
        """Return whether *other* is of the same type with the same values."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        """Return a number of all values."""
        return hash(tuple(vars(self).values()))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Return names with values, of which ``dict`` makes a table."""
        return iter(vars(self).items())

    def __repr__(self) -> str:
        """Return its type and values."""
        values = ", ".join(f"{name}={value!r}" for name, value in self)
        return f"{type(self).__name__}({values})"


def _model(record: type[Record]) -> "type[BaseModel]":
    from pydantic import BaseModel, ConfigDict

    kinds: dict[str, object] = {}
    members: dict[str, Any] = {}
    for base in record.__mro__[record.__mro__.index(Record) - 1 :: -1]:
        kinds |= get_annotations(base)
        members |= {name: each for name, each in vars(base).items() if not name.startswith("__")}
    members = {name: each for name, each in members.items() if name not in vars(Record)}
    for name, member in members.items():
        if isinstance(declared := getattr(member, "declaration", None), Declaration):
            members[name] = declared.made()(member)
    members |= {name: field.declaration.made() for name, field in record.model_fields.items()}
    members |= {"__module__": record.__module__, "__annotations__": kinds}
    members["model_config"] = ConfigDict(**record.config, defer_build=True)  # type: ignore[typeddict-item]
    metaclass: Any = type(BaseModel)
    made: type[BaseModel] = metaclass(record.__name__, (BaseModel,), members)
    return made


def _read(kind: Any, *limits: object) -> Read | None:  # noqa: ANN401, PLR0911  (of any type)
    """Return what makes a value of a type of what TOML has for it; None where that is one."""
    origin, parts = get_origin(kind), get_args(kind)
    parse = next(
        (each.parse for each in limits if isinstance(each, Declaration) and each.parse), None
    )
    if parse is not None:
        return parse
    if origin is Annotated:
        return _read(*parts)
    if origin in (Union, UnionType):
        others = [part for part in parts if part is not NoneType]
        return _read(others[0]) if len(others) == 1 else None
    if origin is Literal:
        return type(parts[0]) if isinstance(parts[0], StrEnum) else None
    if origin is tuple:
        return partial(_items, _read(parts[0]) or _same)
    if origin is dict:
        key, value = (_read(part) or _same for part in parts)
        return partial(_table, key, value)
    if isinstance(kind, type) and issubclass(kind, Record):
        return partial(_record, kind)
    return kind if kind is float or isinstance(kind, EnumType) else None


def _same(value: object) -> object:
    return value


def _items(read: Read, values: list[object]) -> tuple[object, ...]:
    return tuple(map(read, values))


def _table(key: Read, read: Read, table: dict[str, object]) -> dict[object, object]:
    return {key(word): read(value) for word, value in table.items()}


def _record(kind: type[Record], data: Any) -> Record:  # noqa: ANN401  (a table, or the record)
    return data if isinstance(data, Record) else kind.trusted(data)
